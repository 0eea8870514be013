"""Answers as they are made: server-sent events, and what happens when their reader leaves."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import ExitStack
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol, TypeVar

from litestar import Litestar, Request, Response
from litestar.response.base import ASGIResponse
from litestar.types import Receive, Scope, Send
from typing_extensions import override

from api.http.body import HttpRequest
from api.http.cache_header import planned_cache_header
from api.http.caller import tenant_of
from api.http.draft import settled
from api.http.errors import ClientLeft, GenerationFailed
from api.http.streams import STREAM_HEADER, KeptStream, asks_to_stay, streams_of
from api.observe.record import RequestRecord, record_of
from runtime.errors import HearthError
from runtime.types import CacheUse, Chunk, Failed

T = TypeVar("T")

EVENTS = "text/event-stream"
NDJSON = "application/x-ndjson"
NO_HEADERS: Mapping[str, str] = MappingProxyType({})


_LINE_ENDS = tuple((end.encode(), b"\\u%04x" % ord(end)) for end in "\x85\u2028\u2029")


def on_its_lines(events: bytes) -> bytes:
    """The same with all line ends escaped that JSON leaves as they are in strings.

    Many clients end a line at each of them, as `str.splitlines` does, and would cut JSON in two.
    """
    if events.isascii():
        return events
    for end, escaped in _LINE_ENDS:
        events = events.replace(end, escaped)
    return events


class StreamRenderer(Protocol):
    """How a protocol writes an answer as events, ready to be sent."""

    def opening(self) -> bytes:
        """What comes first, as soon as the request was accepted."""
        ...

    def chunks(self, chunks: Sequence[Chunk]) -> bytes:
        """These chunks, none of which is `Failed`; nothing when none of them shows."""
        ...

    def sign_of_life(self, phase: str) -> bytes:
        """Something that keeps the connection open and means nothing."""
        ...

    def failure(self, error: HearthError) -> bytes:
        """The error that ends the stream."""
        ...

    def closing(self) -> bytes:
        """What comes last when everything went well."""
        ...


class Streamed(Protocol):
    """What can be sent as it is made; `Answer` is one, and says what each of these does."""

    @property
    def phase(self) -> str: ...

    @property
    def planned_cache(self) -> CacheUse: ...

    async def accepted(self) -> None: ...

    async def next_chunks(self, timeout_s: float | None = None) -> list[Chunk] | None: ...

    def hold(self) -> None: ...

    def close(self) -> None: ...


class Pace(NamedTuple):
    """How long a client waits for the headers, and then between two signs of life, in seconds."""

    patience_s: float
    keep_alive_s: float


async def _nothing() -> None:
    """There is nothing to settle."""


async def open_stream(
    request: HttpRequest,
    answer: Streamed,
    renderer: StreamRenderer,
    pace: float | Pace,
    settle: Callable[[], Awaitable[object]] = _nothing,
    media_type: str = EVENTS,
) -> EventStream:
    """A response that streams the answer, once it was accepted or the client has waited enough.

    Until then a refusal is raised, so that it has a proper HTTP status. `settle` is awaited after
    the last chunk and before the client is told that the answer is complete; a pace given as one
    number is both. Where the client asked for it the answer outlives its connection.

    Raises:
        HearthError: the request was refused, its worker failed, or the client left.
    """
    patience_s, keep_alive_s = pace if isinstance(pace, Pace) else (pace, pace)
    with ExitStack() as unless_opened:
        unless_opened.callback(answer.close)
        stays = asks_to_stay(request)
        is_accepted = await unless_left(request.receive, _is_accepted(answer, patience_s))
        unless_opened.pop_all()
    events = _events(answer, renderer, keep_alive_s, settle, record_of(request.scope))
    headers = planned_cache_header(answer.planned_cache) if is_accepted else {}
    if media_type == EVENTS and stays:
        tenant = tenant_of(request.scope)
        if (kept := streams_of(request.scope).keep(events, answer.close, tenant)) is not None:
            return read_on(kept, -1, headers)
    return EventStream(events, answer.close, headers, media_type)


def read_on(kept: KeptStream, after: int, headers: Mapping[str, str] = NO_HEADERS) -> EventStream:
    """A response with the events behind number `after` of a stream; leaving it ends nothing."""
    kept.joined()
    return EventStream(kept.log.follow(after), kept.left, {STREAM_HEADER: kept.name, **headers})


async def whole(request: HttpRequest, answer: Streamed, take: Callable[[Chunk], object]) -> None:
    """Give every chunk of the answer to `take` when all are there; returns after the last one.

    Raises:
        HearthError: the request was refused, it failed, or the client left.
    """
    try:
        answer.hold()
        await unless_left(request.receive, take_all(answer, take))
    finally:
        answer.close()


async def unless_left(receive: Receive, awaitable: Awaitable[T]) -> T:
    """Wait for something that is worth nothing once the client has left.

    Raises:
        ClientLeft: it left first; what was waited for is cancelled.
    """
    work = asyncio.ensure_future(awaitable)
    departure = asyncio.ensure_future(_departure(receive))
    try:
        await asyncio.wait((work, departure), return_when=asyncio.FIRST_COMPLETED)
        if work.done():
            return work.result()
        raise ClientLeft
    finally:
        for task in (work, departure):
            task.cancel()
            task.add_done_callback(unheard)


def unheard(task: asyncio.Future[Any]) -> None:
    """Of a task that may be left: how it went nobody asks, which is no "never retrieved"."""
    if not task.cancelled():
        task.exception()


async def _departure(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _is_accepted(answer: Streamed, timeout_s: float) -> bool:
    try:
        async with asyncio.timeout(timeout_s):
            await answer.accepted()
    except TimeoutError:
        return False
    return True


async def take_all(answer: Streamed, take: Callable[[Chunk], object]) -> None:
    """Give every chunk of the answer to `take` once all are there."""
    await answer.accepted()
    told: list[Chunk] = []
    while chunks := await answer.next_chunks():
        for chunk in chunks:
            if isinstance(chunk, Failed):
                raise GenerationFailed(chunk)
        told += chunks
    for chunk in settled(told):
        take(chunk)


async def _events(
    answer: Streamed,
    renderer: StreamRenderer,
    keep_alive_s: float,
    settle: Callable[[], Awaitable[object]],
    record: RequestRecord,
) -> AsyncIterator[bytes]:
    """All that is sent, ended by the error that ended it."""
    try:
        async for events in told(answer, renderer, keep_alive_s):
            yield events
        await settle()
        yield renderer.closing()
    except HearthError as error:
        record.error_code = error.code
        yield renderer.failure(error)


async def told(
    answer: Streamed, renderer: StreamRenderer, keep_alive_s: float
) -> AsyncIterator[bytes]:
    """All that is told before the end, with a sign of life whenever nothing was for so long.

    Raises:
        HearthError: the request was refused, or it failed.
    """
    patience_s = 0.0
    while not await _is_accepted(answer, patience_s):
        yield renderer.sign_of_life(answer.phase)
        patience_s = keep_alive_s
    if opening := renderer.opening():
        yield opening
    now_s = asyncio.get_running_loop().time
    due_s = now_s() + keep_alive_s
    while (chunks := await answer.next_chunks(max(0.0, due_s - now_s()))) != []:
        for chunk in chunks or ():
            if type(chunk) is Failed:
                raise GenerationFailed(chunk)
        events = renderer.chunks(chunks or ())
        if not events and now_s() >= due_s:
            events = renderer.sign_of_life(answer.phase)
        if events:
            yield events
            due_s = now_s() + keep_alive_s


class EventStream(Response[None]):
    """A stream of events; `on_close` is called when it ends, however it ends.

    Litestar does not close a generator whose `send` is blocked when the client leaves, so the
    call must not depend on the generator; and it must not await, as it may run while cancelled.
    """

    def __init__(
        self,
        events: AsyncIterator[bytes],
        on_close: Callable[[], None],
        headers: dict[str, str],
        media_type: str = EVENTS,
    ) -> None:
        super().__init__(
            content=None,
            media_type=media_type,
            headers={"cache-control": "no-cache", "x-accel-buffering": "no", **headers},
        )
        self._events = events
        self._on_close = on_close

    @override
    def to_asgi_response(
        self, app: Litestar | None, request: Request[Any, Any, Any], **kwargs: Any
    ) -> ASGIResponse:
        media_type = str(self.media_type)
        return _EventResponse(self._events, self._on_close, self.headers, media_type)


class _EventResponse(ASGIResponse):
    _should_set_content_length = False

    def __init__(
        self,
        events: AsyncIterator[bytes],
        on_close: Callable[[], None],
        headers: dict[str, str],
        media_type: str,
    ) -> None:
        super().__init__(media_type=media_type, headers=headers)
        self._events = events
        self._on_close = on_close

    @override
    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        except ClientLeft as error:
            record_of(scope).error_code = error.code
        finally:
            self._on_close()

    @override
    async def send_body(self, send: Send, receive: Receive) -> None:
        await unless_left(receive, self._send_events(send))

    async def _send_events(self, send: Send) -> None:
        async for event in self._events:
            body = on_its_lines(event)
            await send({"type": "http.response.body", "body": body, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
