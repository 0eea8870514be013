"""`Generation`: the server's side of one request, from submission to the last chunk."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from runtime.errors import Aborted, HearthError
from runtime.types import CacheUse, Chunk, Failed, Finished, GenerateRequest, PrefillProgress


class Generation:
    """One request in flight. It belongs to the event loop; only the supervisor feeds it.

    Wait for `accepted()` first: until then the request can still be refused. Then take chunks with
    `next_chunks()` until it returns an empty list. `abort()` is right in every phase, any number
    of times, and from code that must not await.
    """

    def __init__(self, request: GenerateRequest, on_abort: Callable[[Generation], None]) -> None:
        self.request = request
        self.phase = "queued"
        """What it waits for, in words for people: `queued`, `loading 40 %`, `prefill 512/4096`."""
        self.cache = CacheUse()
        """What is going to be reused, as far as it is known when the worker takes the request."""
        self._on_abort = on_abort
        self._deadline_s = time.monotonic() + request.deadline_s
        self._accepted: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._chunks: list[Chunk] = []
        self._arrived = asyncio.Event()
        self._num_open_choices = request.num_choices

    @property
    def remaining_s(self) -> float:
        """Seconds until its deadline, which counts from the submission."""
        return max(0.0, self._deadline_s - time.monotonic())

    @property
    def is_finished(self) -> bool:
        """No further chunk will arrive."""
        return self._num_open_choices == 0

    async def accepted(self) -> int:
        """Wait until the worker took the request; the number of prompt tokens.

        Raises:
            HearthError: the request was refused, cancelled, or its worker failed.
        """
        return await asyncio.shield(self._accepted)

    async def next_chunks(self, timeout_s: float | None = None) -> list[Chunk] | None:
        """All chunks that have arrived, at least one; [] after the last one.

        None when nothing arrived within `timeout_s` seconds: time for a sign of life.
        """
        if not self._chunks and not self.is_finished:
            try:
                async with asyncio.timeout(timeout_s):
                    await self._arrived.wait()
            except TimeoutError:
                return None
        chunks, self._chunks = self._chunks, []
        self._arrived.clear()
        return chunks

    def abort(self) -> None:
        """Give up the request: it is cancelled wherever it is and no further chunk arrives."""
        if self.is_finished:
            return
        self._on_abort(self)
        self.fail(Aborted("The request was cancelled."))

    # What follows is the supervisor's side.

    def accept(self, num_prompt_tokens: int, cache: CacheUse) -> None:
        """The worker took the request."""
        self.cache = cache
        if not self._accepted.done():
            self._accepted.set_result(num_prompt_tokens)

    def push(self, chunk: Chunk) -> None:
        """Deliver a chunk from the worker."""
        match chunk:
            case _ if self.is_finished:
                return
            case PrefillProgress(num_done=done, num_total=total):
                self.phase = f"prefill {done}/{total}"
            case Finished():
                self._num_open_choices -= 1
            case Failed():
                self._num_open_choices = 0
            case _:
                pass
        self._chunks.append(chunk)
        self._arrived.set()

    def fail(self, error: HearthError) -> None:
        """End the request with an error: raised by `accepted()`, or the last chunk after it."""
        if self._accepted.done():
            self.push(Failed(code=error.code, message=error.message))
            return
        self._num_open_choices = 0
        self._accepted.set_exception(error)
        self._accepted.exception()  # a client that left never asks; that is no "never retrieved"
        self._arrived.set()
