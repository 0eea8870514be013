"""`Answer`: the generations of one HTTP request, taken as one stream of chunks."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from api.observe.metrics import Meter
from api.observe.record import Tally
from runtime.supervisor.generation import Generation
from runtime.types import CacheUse, Chunk, Failed, Finished, PrefillProgress, PromptLogprobs

_NO_OUTPUT = (Finished, PrefillProgress, PromptLogprobs, Failed)


class AnswerSource(Protocol):
    """Where chunks come from; `Generation` is one. An empty list ends it, None is a timeout."""

    async def next_chunks(self, timeout_s: float | None = None) -> list[Chunk] | None: ...


class Answer:
    """Choices are numbered over all generations: those of the first prompt come first.

    Everything that passes is counted here and nowhere else. `close()` must be called whatever
    happens: it is what frees the engine when a client leaves.
    """

    def __init__(
        self,
        generations: Sequence[Generation],
        meter: Meter,
        on_closed: Callable[[], None] = lambda: None,
    ) -> None:
        self._on_closed = on_closed
        self._generations = generations
        self._source: AnswerSource = (
            generations[0] if len(generations) == 1 else _Merged(generations)
        )
        self._meter = meter
        self.model = generations[0].request.model
        self.since_s = time.monotonic()
        self.num_pieces = 0
        """Of output, as they arrived: about as many as tokens, which are counted at the end."""
        self.tally = Tally(num_choices=generations[0].request.num_choices)
        self.listener: Callable[[Chunk], None] | None = None
        """Is told each chunk as it arrives, also of a held answer, where some may be in vain."""
        self._is_held = False
        self._measuring: asyncio.Handle | None = None
        self.num_prompt_tokens = 0
        """Of all prompts together, once they were accepted."""

    def hold(self) -> None:
        """Deliver it only when all of it is there; until then a worker that dies costs nothing.

        What is measured is measured as it arrives, and what is counted is counted once.
        """
        self._is_held = True
        for generation in self._generations:
            generation.hold(self._hear)

    @property
    def num_choices(self) -> int:
        return len(self._generations) * self.tally.num_choices

    @property
    def num_open(self) -> int:
        """Prompts that are not answered yet."""
        return sum(not one.is_finished for one in self._generations)

    @property
    def is_waiting(self) -> bool:
        """Nothing of a prompt was computed yet."""
        return any(one.is_waiting for one in self._generations)

    @property
    def phase(self) -> str:
        """What the first unfinished generation waits for, in words for people."""
        waiting = (one for one in self._generations if not one.is_finished)
        return next(waiting, self._generations[0]).phase

    @property
    def planned_cache(self) -> CacheUse:
        """What the first prompt is about to reuse, once it was accepted."""
        return self._generations[0].cache

    async def accepted(self) -> None:
        """Wait until all generations were taken by the worker.

        Raises:
            HearthError: one of them was refused, cancelled, or its worker failed.
        """
        counts = [await generation.accepted() for generation in self._generations]
        self.num_prompt_tokens = sum(counts)

    async def next_chunks(self, timeout_s: float | None = None) -> list[Chunk] | None:
        """All chunks that have arrived, at least one; [] after the last one, None on timeout."""
        chunks = await self._source.next_chunks(timeout_s)
        has_output = False
        for chunk in chunks or ():
            if self.listener is not None and not self._is_held:
                self.listener(chunk)
            match chunk:
                case Finished():
                    self.tally.add(chunk)
                    self._meter.finished(chunk.usage)
                    if chunk.index % self.tally.num_choices == 0:
                        self._meter.reused(chunk.usage)
                case PrefillProgress() | PromptLogprobs() | Failed():
                    pass
                case _ if self._is_held:
                    pass
                case _:
                    has_output = True
                    self.num_pieces += 1
        if has_output:
            self.tally.first_token_s = self._meter.arrived()
        return chunks

    def close(self) -> None:
        """Give up whatever is not finished. It may be called at any time, any number of times."""
        for generation in self._generations:
            generation.abort()
        self._on_closed()

    def _hear(self, chunk: Chunk) -> None:
        """Output of a held answer arrived; what comes in one step counts as one."""
        if self.listener is not None:
            self.listener(chunk)
        if isinstance(chunk, _NO_OUTPUT):
            return
        self.num_pieces += 1
        if self._measuring is None:
            self._measuring = asyncio.get_running_loop().call_soon(self._measure)

    def _measure(self) -> None:
        self._measuring = None
        self.tally.first_token_s = self._meter.arrived()


class _Merged:
    """Several generations as one source. It has a task for each that still has something to say."""

    def __init__(self, generations: Sequence[Generation]) -> None:
        self._generations = generations
        self._tasks: dict[asyncio.Task[list[Chunk] | None], int] = {}
        self._is_started = False

    async def next_chunks(self, timeout_s: float | None = None) -> list[Chunk] | None:
        if not self._is_started:
            self._is_started = True
            for number in range(len(self._generations)):
                self._ask(number)
        if not self._tasks:
            return []
        done, _ = await asyncio.wait(
            self._tasks, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED
        )
        if not done:
            return None
        merged: list[Chunk] = []
        for number, task in sorted((self._tasks.pop(task), task) for task in done):
            if chunks := task.result():
                merged += self._renumbered(number, chunks)
                self._ask(number)
        return merged or await self.next_chunks(timeout_s)

    def _ask(self, number: int) -> None:
        self._tasks[asyncio.create_task(self._generations[number].next_chunks())] = number

    def _renumbered(self, number: int, chunks: list[Chunk]) -> list[Chunk]:
        offset = number * self._generations[number].request.num_choices
        return [
            chunk
            if isinstance(chunk, PrefillProgress | Failed)
            else msgspec.structs.replace(chunk, index=chunk.index + offset)
            for chunk in chunks
        ]
