"""The server's end of a worker: how its process is spoken to, and what its end means."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import cast

from typing_extensions import override

from runtime.config.settings import Settings
from runtime.errors import (
    ContextTooLong,
    InvalidRequest,
    MemoryTaken,
    NeedsTooMuchMemory,
    RequestRejected,
    SummaryWanted,
)
from runtime.supervisor.running_time import running_s
from runtime.types import ChatPrompt, Message, TextPrompt, TokenPrompt
from runtime.wire import (
    Command,
    Event,
    FrameReader,
    Hello,
    Rejected,
    Submit,
    WorkerOptions,
    pack,
    unpack_event,
)

_LONG = 1 << 13
"""Characters of one text, or tokens."""
_MANY = 64
"""A prompt of fewer parts none of which is long is packed in less time than a thread takes."""


def _ignore(_: Event) -> None:
    """Nobody listens yet."""


class WorkerConnection(asyncio.Protocol):
    """The server's end of the socket. `closed` is set when nothing more will arrive.

    Until `listen()` it keeps its `Hello` for whoever takes it. `heard_s` is when it said something
    last, of `running_s`. What takes long to pack is packed in a thread, and what is sent after
    it waits for its turn.
    """

    def __init__(self) -> None:
        self.closed = asyncio.Event()
        self.hello: Hello | None = None
        self.heard_s = running_s()
        self._on_event: Callable[[Event], object] = _ignore
        self._on_end: Callable[[], object] | None = None
        self._reader = FrameReader()
        self._transport: asyncio.Transport | None = None
        self._waiting: deque[Command] = deque()
        self._packing: asyncio.Task[None] | None = None

    def listen(self, on_event: Callable[[Event], object], on_end: Callable[[], object]) -> None:
        """From now on events go there, a `Hello` of earlier first."""
        self._on_event, self._on_end = on_event, on_end
        if self.hello is not None:
            on_event(self.hello)
        if self.closed.is_set():
            on_end()

    def send(self, command: Command) -> None:
        """Queue a command; nothing happens when the worker is gone."""
        if self._packing is not None:
            self._waiting.append(command)
        elif is_long(command):
            self._waiting.append(command)
            self._packing = asyncio.get_running_loop().create_task(self._pack_waiting())
        else:
            self._write(pack(command))

    async def _pack_waiting(self) -> None:
        try:
            while self._waiting:
                command = self._waiting.popleft()
                is_apart = is_long(command)
                self._write(await asyncio.to_thread(pack, command) if is_apart else pack(command))
        finally:
            self._packing = None

    def _write(self, frame: bytearray) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(frame)

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
        self.heard_s = running_s()
        for payload in self._reader.feed(data):
            event = unpack_event(payload)
            if isinstance(event, Hello):
                self.hello = event
            self._on_event(event)

    @override
    def connection_lost(self, exc: Exception | None) -> None:
        self.closed.set()
        if self._on_end is not None:
            self._on_end()


def is_long(command: Command) -> bool:
    """Whether to pack it takes as long as a prompt is; not all of the prompt is looked at."""
    if not isinstance(command, Submit):
        return False
    match command.request.prompt:
        case TextPrompt(text=text, suffix=suffix):
            return len(text) + len(suffix) > _LONG
        case TokenPrompt(token_ids=token_ids):
            return len(token_ids) > _LONG
        case ChatPrompt(messages=messages, tools=tools):
            if len(messages) > _MANY or len(tools) > _MANY:
                return True
            return any(map(_is_long_message, messages)) or any(
                _has_long((tool.description or "", tool.parameters)) for tool in tools
            )


def _is_long_message(message: Message) -> bool:
    calls = message.tool_calls
    if message.images or len(calls) > _MANY:
        return True
    return _has_long((message.text, message.reasoning or "", *(one.arguments for one in calls)))


def _has_long(texts: Sequence[str]) -> bool:
    return any(len(text) > _LONG for text in texts)


def worker_options(settings: Settings, model: str) -> WorkerOptions:
    """What the worker of this model needs of the settings."""
    own = settings.model(model)
    return WorkerOptions(
        wired=settings.wired,
        max_batch=settings.max_batch,
        prefill_slice=settings.prefill_slice,
        learn_slice_after_s=settings.learn_slice_after_s,
        prefill_block_ms=settings.prefill_block_ms,
        decode_overlap=settings.decode_overlap,
        heartbeat_s=min(1.0, settings.heartbeat_timeout_s / 4, settings.wedge_timeout_s / 4),
        speculates=own.speculates,
        ranks=own.together,
    )


def rejection(event: Rejected) -> RequestRejected:
    """The error that a worker's refusal stands for."""
    if event.code == ContextTooLong.code:
        return ContextTooLong(
            event.num_tokens,
            event.context,
            event.param,
            is_least=event.is_least,
            is_rest=event.is_rest,
        )
    if event.code == SummaryWanted.code:
        return SummaryWanted(event.first)
    for kind in (NeedsTooMuchMemory, MemoryTaken):
        if event.code == kind.code:
            return kind(event.num_bytes, event.limit_bytes, event.param or "prompt")
    return InvalidRequest(event.message, event.param)
