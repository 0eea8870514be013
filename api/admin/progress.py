"""Long work that somebody waits for: with events while it goes, or one answer at its end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import suppress
from typing import Any, NamedTuple

import msgspec
from litestar import Response

from api.http.body import HttpRequest
from api.http.errors import envelope_of
from api.http.sse import EVENTS, EventStream, unless_left
from runtime.errors import HearthError
from runtime.progress import Progress, Watch

_KEEP_ALIVE_S = 10.0


class Wanted(NamedTuple):
    """What the work is given, both to be called from any thread."""

    watch: Watch
    should_stop: Callable[[], bool]


Work = Callable[[Wanted], Coroutine[Any, Any, object]]


class Left(HearthError):
    """Whoever waited for the work has left."""


def until_left(wanted: Wanted) -> Watch:
    """As `wanted.watch`, for work that has no other way to stop: raises Left."""

    def watch(progress: Progress) -> None:
        if wanted.should_stop():
            raise Left(f"Nobody waited for it any more at {progress.step!r}.")
        wanted.watch(progress)

    return watch


async def told(request: HttpRequest, work: Work) -> Response[Any]:
    """The answer to `work`. Once its client has left, `should_stop` is true.

    Raises:
        HearthError: it failed, and the client takes no events, which would say so.
    """
    latest = _Latest()
    wanted = Wanted(latest.threadsafe(), lambda: latest.is_unwanted)
    if EVENTS not in request.headers.get("accept", ""):
        try:
            return Response(await unless_left(request.receive, work(wanted)))
        finally:
            latest.leave()
    return EventStream(_events(latest, asyncio.create_task(_done(work(wanted)))), latest.leave, {})


class _Latest:
    """The last thing said, for one reader; what it did not see in time it need not see."""

    def __init__(self) -> None:
        self.is_unwanted = False
        self._said: Progress | None = None
        self._news = asyncio.Event()

    def threadsafe(self) -> Watch:
        loop = asyncio.get_running_loop()

        def watch(progress: Progress) -> None:
            loop.call_soon_threadsafe(self.wake, progress)

        return watch

    def wake(self, progress: Progress | None = None) -> None:
        self._said = progress or self._said
        self._news.set()

    def leave(self) -> None:
        self.is_unwanted = True

    async def next(self) -> Progress | None:
        """What was said since; nothing when that takes too long, or after a wake-up."""
        with suppress(TimeoutError):
            async with asyncio.timeout(_KEEP_ALIVE_S):
                await self._news.wait()
        self._news.clear()
        said, self._said = self._said, None
        return said


async def _done(work: Coroutine[Any, Any, object]) -> tuple[str, object]:
    """The last event: its name and what it holds."""
    try:
        return "done", await work
    except HearthError as error:
        return "error", envelope_of(error)


async def _events(latest: _Latest, task: asyncio.Task[tuple[str, object]]) -> AsyncIterator[bytes]:
    task.add_done_callback(lambda _: latest.wake())
    while not task.done():
        said = await latest.next()
        if said is not None:
            yield _event("progress", said)
        elif not task.done():
            yield b": still here\n\n"
    yield _event(*await task)


def _event(name: str, data: object) -> bytes:
    return b"event: %s\ndata: %s\n\n" % (name.encode(), msgspec.json.encode(data))
