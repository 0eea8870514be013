"""The server's end of a worker: how its process is spoken to, and what its end means."""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import Callable
from typing import cast

from typing_extensions import override

from runtime.errors import (
    ContextTooLong,
    InvalidRequest,
    MemoryTaken,
    NeedsTooMuchMemory,
    RequestRejected,
)
from runtime.settings import Settings
from runtime.wire import (
    Command,
    Event,
    FrameReader,
    Rejected,
    WorkerOptions,
    pack,
    unpack_event,
)


class Link(asyncio.Protocol):
    """The server's end of the socket. `closed` is set when nothing more will arrive."""

    def __init__(self, on_event: Callable[[Event], None], on_end: Callable[[], None]) -> None:
        self.closed = asyncio.Event()
        self._on_event = on_event
        self._on_end = on_end
        self._reader = FrameReader()
        self._transport: asyncio.Transport | None = None

    def send(self, command: Command) -> None:
        """Queue a command; nothing happens when the worker is gone."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(pack(command))

    def ignore(self) -> None:
        """Listen no more, without the worker's noticing yet."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.pause_reading()

    def close(self) -> None:
        """Neither send nor listen any more."""
        if self._transport is not None:
            self._transport.close()

    @override
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are of no class that asyncio knows.
        self._transport = cast("asyncio.Transport", transport)

    @override
    def data_received(self, data: bytes) -> None:
        for payload in self._reader.feed(data):
            self._on_event(unpack_event(payload))

    @override
    def connection_lost(self, exc: Exception | None) -> None:
        self.closed.set()
        self._on_end()


async def connect(
    sock: socket.socket, on_event: Callable[[Event], None], on_end: Callable[[], None]
) -> Link:
    """Speak to a worker at the other end of that socket, which belongs to the link from now on."""
    loop = asyncio.get_running_loop()
    _, link = await loop.create_connection(lambda: Link(on_event, on_end), sock=sock)
    return link


def worker_options(settings: Settings, model: str) -> WorkerOptions:
    """What the worker of this model needs of the settings."""
    own = settings.model(model)
    return WorkerOptions(
        wired=settings.wired,
        max_batch=settings.max_batch,
        prefill_slice=settings.prefill_slice,
        prefill_block_ms=settings.prefill_block_ms,
        heartbeat_s=min(1.0, settings.heartbeat_timeout_s / 4, settings.wedge_timeout_s / 4),
        ranks=own.together,
    )


def cause_of_death(returncode: int | None) -> str:
    """How a process ended, as the rest of a sentence about it."""
    if returncode is None:
        return "closed its connection"
    if returncode < 0:
        return f"was killed by {signal.Signals(-returncode).name}"
    return f"ended with exit status {returncode}"


def rejection(event: Rejected) -> RequestRejected:
    """The error that a worker's refusal stands for."""
    if event.code == ContextTooLong.code:
        return ContextTooLong(event.num_tokens, event.context, event.param, is_least=event.is_least)
    for kind in (NeedsTooMuchMemory, MemoryTaken):
        if event.code == kind.code:
            return kind(event.num_bytes, event.limit_bytes, event.param or "prompt")
    return InvalidRequest(event.message, event.param)
