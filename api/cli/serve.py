"""`hearth serve`: first of all the socket and the worker's process, then what takes long to import.

A worker's imports take about as long as the server's, and so they are made beside each other.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import socket
import sys
from typing import TYPE_CHECKING

import uvloop

from api.address import listen, why_not
from runtime.config.settings import Settings
from runtime.errors import HearthError, SettingsError
from runtime.machine_limits import raise_limits
from runtime.supervisor.spawned import WorkerSource, why_no_mlx

if TYPE_CHECKING:
    from api.app import HearthServer
    from api.preflight import Preflight


_SWITCH_S = 0.0005
"""So long the event loop waits for the interpreter where another thread computes: once for each
file that it looks at and each thread that it begins. Python's own 5 ms add up to a tenth of a
second there.
"""


def serve(settings: Settings, _: argparse.Namespace) -> int:
    """Serve until a signal says stop; the exit code."""
    if (trouble := why_no_mlx()) is not None:
        sys.stderr.write(f"hearth: {trouble}\n")
        return 1
    raise_limits()
    try:
        listener = listen(settings.host, settings.port)
    except OSError as error:
        sys.stderr.write(f"hearth: {why_not(settings, error)}\n")
        return 1
    sys.setswitchinterval(_SWITCH_S)
    gc.disable()  # what is imported stays: looking for garbage in it takes a tenth of the start
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        failure = runner.run(_serve(settings, listener))
    if failure is not None:
        sys.stderr.write(f"hearth: {failure.message}\n")
        return 2 if isinstance(failure, SettingsError) else 1
    return 0


async def _serve(settings: Settings, listener: socket.socket) -> HearthError | None:
    workers = WorkerSource(settings.cpu_blas)
    if settings.preload != () or settings.spare_worker:
        with contextlib.suppress(OSError):  # the supervisor says so, when it wants one
            await workers.begin()
    from api.bootstrap import BootstrapApp  # noqa: PLC0415
    from api.serve import serve as serve_house  # noqa: PLC0415 - a quarter of a second

    try:
        bootstrap = BootstrapApp(
            lambda: _look(settings), lambda found: _build(settings, found, workers)
        )
        return await serve_house(settings, listener, bootstrap)
    finally:
        workers.forget_first()


def _look(settings: Settings) -> Preflight:
    """Imported in a thread, while liveness is already answered."""
    # structlog would import it, which takes as long as all else before the ready line.
    sys.modules.setdefault("rich", None)  # pyright: ignore[reportArgumentType]
    from api.preflight import preflight  # noqa: PLC0415

    return preflight(settings)


def _build(settings: Settings, found: Preflight, workers: WorkerSource) -> HearthServer:
    """Imported in a thread, while requests wait for it already."""
    from api.app import build_server  # noqa: PLC0415

    house = build_server(settings, found, workers)
    gc.freeze()
    gc.enable()
    return house
