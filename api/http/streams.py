"""Streams that outlive the connection of their client, which may come back and read on.

A client asks for that with `Hearth-Resume: true`; the answer's headers tell the stream's id.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable
from typing import cast

import structlog
from litestar.types import Scope

from api.http.body import HttpRequest
from api.http.event_log import EventLog
from api.http.refusal import refuse
from runtime.errors import UnknownStream
from runtime.keys import owned, owner, plain

RESUME_HEADER = "hearth-resume"
STREAM_HEADER = "hearth-stream"
KEEP_S = 60.0
"""So long a stream waits for its client, whether or not it has ended by then."""
MAX_BYTES = 4 << 20
"""Of the latest events of one stream."""
MAX_STREAMS = 64
"""Of all tenants together, each of whom has an equal part of them."""

_log = structlog.stdlib.get_logger("hearth.streams")


class KeptStream:
    """One of them: whoever reads it `joined`, and `left`; nobody for `keep_s`, and it is over."""

    def __init__(
        self, key: str, close: Callable[[], None], forget: Callable[[], None], keep_s: float
    ) -> None:
        self.name = plain(key)
        self.tenant = owner(key)
        self.log = EventLog(has_ids=True, max_bytes=MAX_BYTES)
        self._close = close
        self._forget = forget
        self._keep_s = keep_s
        self._num_readers = 0
        self._timer: asyncio.TimerHandle | None = None

    def joined(self) -> None:
        """Somebody reads it."""
        self._num_readers += 1
        self._rest()

    @property
    def is_idle(self) -> bool:
        """All has been said, and nobody reads it."""
        return self.log.is_complete and not self._num_readers

    async def fill(self, events: AsyncIterator[bytes]) -> None:
        """Take all events, whoever reads them."""
        try:
            async for event in events:
                self.log.add(event)
        finally:
            self._close()
            self.log.complete()

    def end(self) -> None:
        """Nobody wants it any more."""
        self._rest()
        self._close()
        self._forget()

    def left(self) -> None:
        """Whoever read it does so no more: nothing ends at once."""
        self._num_readers -= 1
        if not self._num_readers:
            self._rest()
            self._timer = asyncio.get_running_loop().call_later(self._keep_s, self.end)

    def _rest(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class KeptStreams:
    """All of them, each its tenant's own. There is one for the whole server."""

    def __init__(self, keep_s: float = KEEP_S, num_tenants: int = 1) -> None:
        self._keep_s = keep_s
        self._share = max(1, MAX_STREAMS // num_tenants)
        self._streams: dict[str, KeptStream] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def keep(
        self, events: AsyncIterator[bytes], close: Callable[[], None], tenant: str
    ) -> KeptStream | None:
        """Have the events made whoever reads them; None where there are too many already.

        The oldest that has ended and that nobody reads makes room, of the tenant's own if it has
        its share. `close` gives up what makes them; it may be called any number of times.
        """
        mine = [one for one in self._streams.values() if one.tenant == tenant]
        has_share = len(mine) >= self._share
        if has_share or len(self._streams) >= MAX_STREAMS:
            others = mine if has_share else self._streams.values()
            idle = next((one for one in others if one.is_idle), None)
            if idle is None:
                return None
            idle.end()
        key = owned(tenant, f"stream_{secrets.token_hex(16)}")
        kept = KeptStream(key, close, lambda: self._forget(key), self._keep_s)
        self._streams[key] = kept
        task = asyncio.create_task(kept.fill(events))
        self._tasks.add(task)
        task.add_done_callback(self._filled)
        return kept

    def find(self, name: str, tenant: str) -> KeptStream:
        """The stream of that id. Raises UnknownStream, also where it is another tenant's."""
        kept = self._streams.get(owned(tenant, name))
        if kept is None:
            raise UnknownStream(name)
        return kept

    async def close(self) -> None:
        """Wait for what is still being made, which has been ended by now."""
        for kept in list(self._streams.values()):
            kept.end()
        if self._tasks:
            await asyncio.wait(self._tasks)

    def _forget(self, key: str) -> None:
        self._streams.pop(key, None)

    def _filled(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("stream broke off", error=type(error).__name__)


def streams_of(scope: Scope) -> KeptStreams:
    """Those of the server that a request was sent to."""
    return cast("KeptStreams", scope["litestar_app"].state["streams"])


def asks_to_stay(request: HttpRequest) -> bool:
    """The client may lose its connection and come back. Raises InvalidRequest."""
    asked = request.headers.get(RESUME_HEADER, "false").strip().lower()
    if asked not in ("true", "false"):
        refuse(RESUME_HEADER, 'must be "true" or "false": set that header to one of them.')
    return asked == "true"
