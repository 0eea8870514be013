"""`Generation`: the server's side of one request, from submission to the last chunk."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import NamedTuple, Protocol

import msgspec
from typing_extensions import override

from runtime.cache.deletion_log import Receipt
from runtime.errors import Aborted, HearthError, WorkerError
from runtime.supervisor.running_time import running_s
from runtime.types import (
    CacheUse,
    Chunk,
    Failed,
    Finished,
    GenerateRequest,
    PrefillProgress,
    ReasoningDelta,
    SaidAnswer,
    SaidChoice,
    TextDelta,
    TokenLogprobs,
    ToolCallDelta,
    Usage,
)
from runtime.wire import SaidToken

WORKER_LOST = "worker_lost"
"""A worker ended while it had the request; another one took it up."""


class Owner(Protocol):
    """Who is told what becomes of a generation; none of it may await."""

    def aborted(self, generation: Generation) -> None:
        """Nobody wants it any more; wherever it is, it is to be taken out."""
        ...

    def lost(self, generation: Generation, error: WorkerError) -> bool:
        """Its worker is gone; whether it waits for another one, instead of failing."""
        ...

    def spoke(self, generation: Generation) -> None:
        """The first chunk of an answer arrived."""
        ...

    def ended(self, generation: Generation) -> None:
        """No further chunk will arrive, however it ended."""
        ...


class Queued(NamedTuple):
    """A request waits for its model to take it, behind `position - 1` others."""

    position: int | None = None

    @override
    def __str__(self) -> str:
        return "queued" if self.position is None else f"queued {self.position}"


class Loading(NamedTuple):
    """A request waits for its model to be loaded, of whose weights so much is in memory."""

    fraction: float

    @override
    def __str__(self) -> str:
        return f"loading {self.fraction * 100:.0f} %"


class Prefilling(NamedTuple):
    """The worker has a request, and computed so many tokens of those that it has to."""

    num_done: int = 0
    num_total: int = 0

    @override
    def __str__(self) -> str:
        return f"prefill {self.num_done}/{self.num_total}" if self.num_total else "prefill"


class Decoding(NamedTuple):
    """The worker writes the answer; what it wrote so far may be hidden from the client."""

    @override
    def __str__(self) -> str:
        return "decoding"


class _Saying:
    """A choice as far as it was said."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprobs] = []
        self.call_ids: list[str] = []
        self.is_finished = False

    def told(self) -> SaidChoice:
        """What a worker needs to go on with it."""
        if self.is_finished:
            return SaidChoice(is_finished=True)
        return SaidChoice(
            token_ids=tuple(self.token_ids),
            logprobs=tuple(self.logprobs),
            call_ids=tuple(self.call_ids),
        )


class Generation:
    """One request in flight. It belongs to the event loop; only the supervisor feeds it.

    Wait for `accepted()` first: until then the request can still be refused. Then take chunks with
    `next_chunks()` until it returns an empty list. `abort()` is right in every phase, any number
    of times, and from code that must not await.
    """

    def __init__(self, request: GenerateRequest, owner: Owner) -> None:
        self.request = request
        self.waits_for: Queued | Loading | Prefilling | Decoding = Queued()
        self.cache = CacheUse()
        """What is going to be reused, as far as it is known when the worker takes the request."""
        self.worker_pid: int | None = None
        """The process that it was handed to last."""
        self.submitted_ns = time.time_ns()
        self.sent_ns: int | None = None
        self.accepted_ns: int | None = None
        self.finished_ns: int | None = None
        """Wall time: when it came, was handed to a worker, was taken by it, and ended."""
        self.loading_ns: int | None = None
        """When it was first seen to wait for its model to be loaded."""
        self.usage: Usage | None = None
        """Of the choice that ended last."""
        self.num_prompt_tokens = 0
        """Known once the worker took the request."""
        self._num_output_tokens = [0] * request.num_choices
        self._num_prefilled = 0
        self.has_spoken = False
        """A part of the answer arrived from the worker that it was handed to last."""
        self._has_lost_worker = False
        self._choices = [_Saying() for _ in range(request.num_choices)]
        self._prompt_digest = self._prompt_turns = b""
        self._is_resumable = request.work == "generate" and not request.scores_prompt
        self._hear: Callable[[Chunk], None] | None = None
        self._owner = owner
        self.received: Receipt | None = None
        """Held while it is in flight: of what is deleted meanwhile it keeps nothing."""
        self._deadline_s = running_s() + request.deadline_s
        self._accepted: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._chunks: list[Chunk] = []
        self._arrived = asyncio.Event()
        self._num_open_choices = request.num_choices

    @property
    def phase(self) -> str:
        """What it waits for, in words: `queued`, `loading 40 %`, `prefill 512/4096`, `decoding`."""
        return str(self.waits_for)

    @property
    def remaining_s(self) -> float:
        """Seconds until its deadline, which counts from the submission the time in which this
        process ran.
        """
        return max(0.0, self._deadline_s - running_s())

    @property
    def is_finished(self) -> bool:
        """No further chunk will arrive."""
        return self._num_open_choices == 0

    @property
    def is_waiting(self) -> bool:
        """Nothing of it was computed yet."""
        has_begun = self._num_prefilled or self.has_spoken
        return not has_begun and not self.is_finished

    @property
    def num_output_tokens(self) -> int:
        """Of all choices; the end of one that did not end is not among them."""
        return sum(self._num_output_tokens)

    @property
    def num_computed_tokens(self) -> int:
        """Tokens of the prompt that were computed so far; those reused are not among them."""
        if self.num_output_tokens:
            return self.num_prompt_tokens - self.cache.num_tokens
        return self._num_prefilled

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
        if not self.is_finished and (self._hear is not None or not self._chunks):
            try:
                async with asyncio.timeout(timeout_s):
                    await self._arrived.wait()
            except TimeoutError:
                return None
        chunks, self._chunks = self._chunks, []
        self._arrived.clear()
        return chunks

    def hold(self, hear: Callable[[Chunk], None]) -> None:
        """Deliver nothing before everything is there, so that it can begin again until then.

        `hear` is called with each chunk when it arrives, those of a beginning in vain as well.
        """
        self._hear = hear

    def abort(self) -> None:
        """Give up the request: it is cancelled wherever it is and no further chunk arrives."""
        if self.is_finished:
            return
        self._owner.aborted(self)
        self.fail(Aborted("The request was cancelled."))

    # What follows is the supervisor's side.

    def loading(self, fraction: float) -> None:
        """Its model is being loaded, so far."""
        self.waits_for = Loading(fraction)
        self.loading_ns = self.loading_ns or time.time_ns()

    def sent(self, pid: int | None) -> GenerateRequest:
        """It is handed to this process, as the request that is returned."""
        self.worker_pid, self.sent_ns = pid, time.time_ns()
        return msgspec.structs.replace(self.request, deadline_s=self.remaining_s, said=self.said)

    @property
    def said(self) -> SaidAnswer | None:
        """Where a worker is to go on; None where it is to begin."""
        if not any(one.token_ids or one.is_finished for one in self._choices):
            return None
        told = tuple(one.told() for one in self._choices)
        return SaidAnswer(prompt_digest=self._prompt_digest, turns=self._prompt_turns, choices=told)

    def go_on(self) -> bool:
        """Have another worker go on from where it is, or begin again where that cannot be and
        nobody was told of anything; False when what was delivered must stand alone.
        """
        if not self._is_resumable:
            if self.has_spoken and self._hear is None:
                return False
            self._begin_again()
        self._has_lost_worker |= self._accepted.done()
        self.has_spoken = False
        return True

    def differs(self) -> None:
        """Its prompt is not read as it was: no worker can go on with what was said."""
        self.has_spoken, self._is_resumable = True, False

    def _begin_again(self) -> None:
        self.usage = None
        self._num_open_choices = self.request.num_choices
        self._num_output_tokens = [0] * self.request.num_choices
        self._choices = [_Saying() for _ in range(self.request.num_choices)]
        if self._hear is not None:
            self._chunks = []

    def accept(
        self,
        num_prompt_tokens: int,
        cache: CacheUse,
        prompt_digest: bytes = b"",
        turns: bytes = b"",
    ) -> None:
        """The worker took the request, with what `prompt_digest` stands for, behind `turns`."""
        self.accepted_ns = time.time_ns()
        self.waits_for = Prefilling()
        if not (self._num_prefilled or self.said):  # else it finds what was computed for itself
            self.cache = cache
        self.num_prompt_tokens = num_prompt_tokens
        self._prompt_digest, self._prompt_turns = prompt_digest, turns
        if not self._accepted.done():
            self._accepted.set_result(num_prompt_tokens)

    def note(self, said: SaidToken) -> None:
        """The worker has said a token; what it completes is told by chunks."""
        self._num_output_tokens[said.index] += 1
        self.waits_for = Decoding()
        if self._is_resumable:
            choice = self._choices[said.index]
            choice.token_ids.append(said.token_id)
            if said.logprobs is not None:
                choice.logprobs.append(said.logprobs)
        self._speak()

    def push(self, chunk: Chunk) -> None:
        """Deliver a chunk from the worker."""
        if self.is_finished:
            return
        match chunk:
            case PrefillProgress(num_done=done, num_total=total):
                self.waits_for = Prefilling(done, total)
                self._num_prefilled = done
            case Finished():
                chunk = self._as_begun(chunk) if self._has_lost_worker else chunk
                index, usage = chunk.index, chunk.usage
                self._num_open_choices -= 1
                self._num_output_tokens[index] = usage.num_output_tokens
                self.usage, self.finished_ns = usage, time.time_ns()
                self._choices[index].is_finished = True
            case Failed():
                self._num_open_choices = 0
            case ToolCallDelta(index=index, id=str(call_id)):
                self._choices[index].call_ids.append(call_id)
                self.waits_for = Decoding()
            case TextDelta() | ReasoningDelta() | ToolCallDelta():
                self.waits_for = Decoding()
            case _:
                pass
        self._chunks.append(chunk)
        if self._hear is not None:
            self._hear(chunk)
        if self._hear is None or self.is_finished:
            self._arrived.set()
        if not isinstance(chunk, PrefillProgress):
            self._speak()
        if self.is_finished:
            self._owner.ended(self)

    def _as_begun(self, end: Finished) -> Finished:
        """The end of a choice that lost a worker, with what was reused when the answer began."""
        found, begun = end.usage.cache, self.cache
        cache = msgspec.structs.replace(
            found, tier=begun.tier, num_tokens=begun.num_tokens, reason=begun.reason, at=begun.at
        )
        usage = msgspec.structs.replace(end.usage, cache=cache)
        return msgspec.structs.replace(end, usage=usage, notes=(*end.notes, WORKER_LOST))

    def _speak(self) -> None:
        if not self.has_spoken:
            self.has_spoken = True
            self._owner.spoke(self)

    def fail(self, error: HearthError) -> None:
        """End the request with an error: raised by `accepted()`, or the last chunk after it.

        When it is its worker that failed, the owner may have it wait for another one instead.
        """
        if self.is_finished or (isinstance(error, WorkerError) and self._owner.lost(self, error)):
            return
        if self._accepted.done():
            self.push(Failed(code=error.code, message=error.message))
            return
        self._num_open_choices = 0
        self._accepted.set_exception(error)
        self._accepted.exception()  # a client that left never asks; that is no "never retrieved"
        self._arrived.set()
        self._owner.ended(self)
