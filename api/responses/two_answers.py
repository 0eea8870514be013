"""An answer whose conversation is summed up first: two answers that are told as one."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import ExitStack

from api.http.answer import Answer
from api.http.draft import settled
from api.observe.record import Tally
from runtime.types import CacheUse, Chunk, TextDelta


class TwoAnswers:
    """The chunks of `first`, a summary, and then those of what `follow` makes of its text.

    What is told of it (phase, counts, what it reuses) is that of the one that is being given.
    """

    def __init__(self, first: Answer, follow: Callable[[str], Awaitable[Answer]]) -> None:
        self._current = first
        self._follow = follow
        self._told: list[Chunk] = []
        self._switching: asyncio.Task[Answer] | None = None
        self._is_second = False
        self._is_held = False

    @property
    def tally(self) -> Tally:
        return self._current.tally

    @property
    def phase(self) -> str:
        return self._current.phase

    @property
    def planned_cache(self) -> CacheUse:
        return self._current.planned_cache

    async def accepted(self) -> None:
        await self._current.accepted()

    async def next_chunks(self, timeout_s: float | None = None) -> list[Chunk] | None:
        """As `Answer.next_chunks`; between the two answers nothing is told.

        Raises:
            HearthError: the second one was refused.
        """
        if self._switching is None:
            chunks = await self._current.next_chunks(timeout_s)
            if self._is_second:
                return chunks
            self._told += chunks or ()
            if chunks != []:
                return chunks
            self._switching = asyncio.create_task(self._begun())
        done, _ = await asyncio.wait((self._switching,), timeout=timeout_s)
        if not done:
            return None
        self._current, self._switching = self._switching.result(), None
        self._is_second = True
        return await self.next_chunks(timeout_s)

    async def _begun(self) -> Answer:
        texts = [one.text for one in settled(self._told) if isinstance(one, TextDelta)]
        answer = await self._follow("".join(texts).strip())
        if self._is_held:
            answer.hold()
        with ExitStack() as unless_accepted:
            unless_accepted.callback(answer.close)
            await answer.accepted()
            unless_accepted.pop_all()
        return answer

    def hold(self) -> None:
        self._is_held = True
        self._current.hold()

    def close(self) -> None:
        self._current.close()
        if self._switching is not None and not self._switching.cancel():
            self._switching.add_done_callback(_closed)


def _closed(task: asyncio.Task[Answer]) -> None:
    """Nobody takes the second answer any more."""
    if not task.cancelled() and task.exception() is None:
        task.result().close()
