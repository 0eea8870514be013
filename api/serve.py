"""Running the server: its signals, and the lines that say how far it is.

Only what the first liveness probe needs is imported here; `build` brings the rest.
"""

from __future__ import annotations

import asyncio
import json
import math
import shlex
import signal
import socket
import sys
from collections.abc import Sequence
from contextlib import suppress
from types import FrameType
from typing import TYPE_CHECKING

import uvicorn
from typing_extensions import override

from api.address import url_of
from api.bootstrap import BootstrapApp
from api.http.connection import SlowClientGuard
from api.http.http1 import Connections, http_connection, most_connections
from runtime.config.settings import Settings
from runtime.embedded import HEARTH_TINY
from runtime.errors import HearthError, UnknownModel

if TYPE_CHECKING:
    from runtime.models.catalog import Catalog

_LAST_WORDS_S = 5.0
_SHOWN_MODELS = 5
_KEEP_CONNECTION_S = 75


async def serve(
    settings: Settings, listener: socket.socket, bootstrap: BootstrapApp
) -> HearthError | None:
    """Serve until a signal says stop; why the house could not be built, if that is so.

    A second signal does not wait for workers.
    """
    connections = Connections(most_connections(settings.max_connections))
    config = uvicorn.Config(
        SlowClientGuard(bootstrap, settings.send_timeout_s),
        http=http_connection(connections, settings.send_timeout_s),
        ws="none",
        lifespan="on",
        interface="asgi3",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=_KEEP_CONNECTION_S,
        timeout_graceful_shutdown=math.ceil(settings.stop_timeout_s + _LAST_WORDS_S),
    )
    server = _Server(config, bootstrap, settings.stop_timeout_s)
    bootstrap.on_end = server.stop
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # as it is with nohup
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, server.hang_up)
    port = int(listener.getsockname()[1])
    announcement = asyncio.create_task(_announce(bootstrap, settings, port))
    counting = asyncio.create_task(_count(bootstrap, connections))
    try:
        await server.serve(sockets=[listener])
    finally:
        announcement.cancel()
        counting.cancel()
    return bootstrap.failure


class _Server(uvicorn.Server):
    """Uvicorn that leaves with its own exit code, and in a hurry when it is told twice.

    What waits for a model is refused at once. Answers that run may take `grace_s` seconds to
    finish; then they end with an error that says why.
    """

    def __init__(self, config: uvicorn.Config, bootstrap: BootstrapApp, grace_s: float) -> None:
        super().__init__(config)
        self._doorway = bootstrap
        self._grace_s = grace_s

    @override
    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.should_exit:
            self.force_exit = True
            self._doorway.hurry()
        self.should_exit = True

    def hang_up(self) -> None:
        """The terminal is gone: answers finish as with SIGTERM, which this is no hurry of."""
        if not self.should_exit:
            import structlog  # noqa: PLC0415 (it takes as long as all else before the ready line)

            structlog.get_logger("hearth.server").warning(
                "the terminal hung up (SIGHUP), so the server finishes and ends; start it "
                "with nohup or as a service (hearth service) to have it stay"
            )
        self.should_exit = True

    @override
    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._doorway.refuse()
        ending = asyncio.create_task(self._doorway.end_answers(self._grace_s))
        try:
            await super().shutdown(sockets)
            if self.force_exit:  # then uvicorn leaves the house open
                await self._close_house()
        finally:
            ending.cancel()

    async def _close_house(self) -> None:
        """Its workers were killed, so that this takes no time; unless the disk does."""
        with suppress(TimeoutError):
            async with asyncio.timeout(_LAST_WORDS_S):
                await self.lifespan.shutdown()

    def stop(self) -> None:
        """Begin to leave, if that has not begun yet."""
        self.should_exit = True


async def _count(bootstrap: BootstrapApp, connections: Connections) -> None:
    """Show them among the server's figures, once there are any."""
    house = await bootstrap.house()
    house.metrics.count(connections)


async def _announce(bootstrap: BootstrapApp, settings: Settings, port: int) -> None:
    """Say at once where the server is, and of each model of the start how that went."""
    found = await bootstrap.found()
    url = url_of(settings.host, port)
    found.home.listens_at(url)
    _say(ready_line(settings, found.catalog, url))
    house = await bootstrap.house()
    async for name, why_not in house.supervisor.boot_loads.outcomes():
        _say(f"{name} could not be loaded: {why_not}" if why_not else f"{name} is loaded")


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def ready_line(settings: Settings, catalog: Catalog, url: str) -> str:
    """One line: where the server is, what it serves, what of that is still being loaded, and a
    command to try it with.

    With keys the command takes one from the shell: the server knows their digests only.
    """
    from runtime.supervisor.boot import models_at_boot, names_at_boot  # noqa: PLC0415 - long

    try:
        default = catalog.default()
    except UnknownModel:  # it is not here yet
        default = catalog.resolve(HEARTH_TINY.name)
    names = [spec.id for spec in catalog.models()]
    names.sort(key=lambda name: name != default.id)
    loading = [spec.id for spec in models_at_boot(names_at_boot(settings, catalog), catalog)]
    trouble = ""
    if loading:
        trouble = f"; {_few(loading)} {'are' if len(loading) > 1 else 'is'} still being loaded"
        trouble += ", and requests wait for that"
    for name, why in catalog.unusable.items():
        how = "is not here yet" if catalog.may_come(name) else "cannot be used"
        trouble += f"; {name} {how}: {why}"
    key = '-H "x-api-key: $HEARTH_API_KEY" ' if settings.api_keys else ""
    body = {"model": default.id, "messages": [{"role": "user", "content": "Hello!"}]}
    return (
        f"Hearth is ready at {url} with {_few(names)}{trouble} - try: "
        f"curl -s {shlex.quote(url + '/v1/chat/completions')} {key}"
        "-H 'content-type: application/json' "
        f"-d {shlex.quote(json.dumps(body, separators=(',', ':')))}"
    )


def _few(names: Sequence[str]) -> str:
    """The first of them, and how many more there are."""
    more = len(names) - _SHOWN_MODELS
    return ", ".join(names[:_SHOWN_MODELS]) + (f" and {more} more" if more > 0 else "")
