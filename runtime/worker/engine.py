"""The engine: one step after another for ever, on the only thread that calls mlx."""

from __future__ import annotations

import contextlib
import queue
import time
from collections.abc import Generator, Iterable
from functools import partial
from typing import Any, cast

from runtime.errors import RequestRejected
from runtime.kv.tiers import Tiers
from runtime.kv_messages import HotBudget, Opened
from runtime.types import (
    Chunk,
    Failed,
    Finished,
    FinishReason,
    PrefillProgress,
    PromptLogprobs,
    TextWasReasoning,
)
from runtime.wire import Accepted, Chunks, Heartbeat, SaidToken, WorkerPhase
from runtime.worker.admission import rejected
from runtime.worker.arrivals import AbortRequest, Arrival, EngineChannel, Quit
from runtime.worker.auxiliary import ERRANDS, AuxiliaryRequests
from runtime.worker.decode import DecodedToken, DecodeFailed, Decoder
from runtime.worker.input.template import Template
from runtime.worker.logprobs import token_logprobs
from runtime.worker.model import LoadedModel
from runtime.worker.rows import RowExecutor
from runtime.worker.running_time import running_s
from runtime.worker.scheduler import PrefillSlice, Scheduler
from runtime.worker.sequence import Sequence, SequenceGroup
from runtime.worker.slice_learner import SliceLearner
from runtime.worker.taint import raise_if_tainted
from store.turns import Turn, pack_row

_MAX_FAILURES = 2
_ANSWERS_S = 1.0
"""So long it is waited at the end for what the server says of the last heads, where it matters."""

_RESTORE_POLL_S = 0.05


DEADLINE_EXCEEDED = "deadline_exceeded"
"""The answer was cut by `request_deadline_s`, not by its own limit of tokens."""


class Engine:
    """Prefill in slices, decode in batches, chunks out. The link's `emit` must not block."""

    def __init__(
        self,
        model: LoadedModel,
        template: Template,
        scheduler: Scheduler,
        tiers: Tiers,
        link: EngineChannel,
        decoder: Decoder | None = None,
    ) -> None:
        self._model = model
        self._template = template
        self._scheduler = scheduler
        self._tiers = tiers
        self._emit, self._inbox, self._work_on = link.emit, link.inbox, link.work_on
        self._decoder = decoder or Decoder(model, scheduler.max_running)
        self._decoder.on_kv_start = partial(_keep_at_start, tiers)
        self._rows = RowExecutor(scheduler, self._decoder, tiers)
        self._auxiliary = AuxiliaryRequests(model, template)
        self.slices: SliceLearner | None = None
        self._groups: dict[str, SequenceGroup] = {}
        self._items: list[tuple[str, Chunk]] = []
        self._said: list[SaidToken] = []
        self._is_running = True
        self.num_steps = 0
        self.phase: WorkerPhase = "idle"

    def heartbeat(self) -> Heartbeat:
        """What it does, and that it is busy unless it waits and nothing came; from any thread."""
        phase, average_s = self.phase, self._scheduler.decode_step_s
        busy = phase != "idle" or not self._inbox.empty()
        kv = self._tiers.wire_counts(self._model.num_encoded_images)
        return Heartbeat(
            step=self.num_steps, is_busy=busy, phase=phase, decode_step_s=average_s, kv=kv
        )

    @property
    def is_busy(self) -> bool:
        """There are requests to work for."""
        return bool(self._groups or self._auxiliary.waiting)

    def run(self) -> None:
        """Step until told to quit.

        Raises:
            EngineTainted: the device failed; the process must end.
        """
        while self._is_running:
            if not self._decoder.sequences:
                self._await_work()
            self.step()

    def await_answers(self) -> None:
        """Once it has ended: what was computed is still here, and some of it may have to be written
        again.
        """
        over_s = time.monotonic() + _ANSWERS_S
        while self._tiers.awaits_answers and time.monotonic() < over_s:
            with contextlib.suppress(queue.Empty):
                arrival = self._inbox.get(timeout=_RESTORE_POLL_S)
                if not isinstance(arrival, SequenceGroup | AbortRequest | Quit):
                    self._receive(arrival)

    def _await_work(self) -> None:
        """Wait until there is something to do besides decoding, or until a read may be overdue."""
        if not self.is_busy:
            self.phase = "upkeep"
            self._work_on(())
            self._rows.share_memory()
            self._tiers.set_idle(is_idle=True)
            self.phase = "idle"
            arrival = self.slices.wait(self._inbox) if self.slices else self._inbox.get()
            self.phase = "upkeep"
            self._receive(arrival)
        elif not (self._scheduler.has_work or self._auxiliary.waiting):
            self.phase = "restore"
            with contextlib.suppress(queue.Empty):
                self._receive(self._inbox.get(timeout=_RESTORE_POLL_S))

    def step(self) -> None:
        """Take what arrived, compute one prefill slice and/or one decode step, send the chunks."""
        if not self._inbox.empty():
            self._drain()
        self._expire(running_s())
        plan = self._rows.plan()
        if restored := [group for group in plan.prefills if self._restore(group)]:
            next_slice = self._scheduler.next_slice
            self._prefill([next_slice(group, plan.num_running) for group in restored])
        if self._decoder.sequences:
            self._decode()
        if self._auxiliary.waiting:
            self.phase = "errand"
            self._work_on(self._auxiliary.next_ids)
            self._items += self._auxiliary.run_next()
        self.num_steps += 1
        if self._items or self._said:
            self._emit(Chunks(items=tuple(self._items), said=tuple(self._said)))
            self._items.clear()
            self._said.clear()

    # Arrivals

    def _drain(self) -> None:
        for arrival in _in_order([self._inbox.get() for _ in range(self._inbox.qsize())]):
            self._receive(arrival)

    def _receive(self, arrival: Arrival) -> None:
        match arrival:
            case AbortRequest(request_id=request_id):
                if request_id in self._groups:
                    self._cut_off(self._groups[request_id])
                self._auxiliary.drop(request_id)
            case SequenceGroup() if arrival.request.work in ERRANDS:
                self._emit(_accepted(arrival))
                self._auxiliary.add(arrival)
            case SequenceGroup() if (refusal := self._rows.refusal_of(arrival)) is not None:
                self._emit(rejected(arrival.request.request_id, refusal))
            case SequenceGroup():
                self._tiers.set_idle(is_idle=False)
                self._groups[arrival.request.request_id] = arrival
                self._rows.begin(arrival)
                self._emit(_accepted(arrival))
            case Quit():
                self._is_running = False
            case HotBudget():
                self._tiers.hear(arrival)
                for group, error in self._rows.deal(arrival):
                    self._fail(group, error)
            case Opened() if self.slices is not None:
                self.slices.heed(arrival, is_idle=not self.is_busy)
                self._tiers.hear(arrival)
            case _:
                self._tiers.hear(arrival)

    def _expire(self, now: float) -> None:
        for group in list(self._groups.values()):
            if group.deadline_s <= now:
                for sequence in group.sequences:
                    sequence.output.remark((DEADLINE_EXCEEDED,))
                self._cut_off(group)
        for group in self._scheduler.waiting:
            if self._tiers.is_overdue(group.cursor):
                self._tiers.give_up(group.cursor)

    # Prefill

    def _restore(self, group: SequenceGroup) -> bool:
        """Take up what is known of a prompt before its first slice; False when that failed."""
        self._work_on((group.request.request_id,))
        if _is_to_go_on(self._tiers, group, self._scheduler.waiting):
            return True
        self.phase = "restore"
        try:
            group.kv, group.num_computed_tokens = self._tiers.restore(
                group.cursor, num_had=group.num_computed_tokens
            )
        except (RuntimeError, ValueError) as error:
            raise_if_tainted(error)
            self._fail(group, error)
            return False
        return True

    def _prefill(self, slices: list[PrefillSlice]) -> None:
        self.phase = "prefill"
        self._work_on(tuple(one.group.request.request_id for one in slices))
        if len(slices) > 1 and (seconds := _compute_together(self._model, slices)):
            num_tokens = sum(one.num_tokens for one in slices)
            for one in slices:
                one.group.prefill_s += seconds
                self._on_computed(one, seconds * one.num_tokens / num_tokens)
            return
        for one in slices:
            self._work_on((one.group.request.request_id,))
            self._prefill_alone(one)

    def _prefill_alone(self, plan: PrefillSlice) -> None:
        group = plan.group
        start = time.perf_counter()
        try:
            is_done, told = _compute(self._model, plan, self._scheduler.block_s)
        except (RuntimeError, ValueError) as error:
            raise_if_tainted(error)
            self._fail(group, error)
            return
        seconds = time.perf_counter() - start
        group.prefill_s += seconds
        if not is_done:
            group.looked_s += seconds
            self._scheduler.on_looked(seconds, self._decoder.num_running)
            return
        self._items += [(group.request.request_id, chunk) for chunk in told]
        self._on_computed(plan, seconds)

    def _on_computed(self, plan: PrefillSlice, seconds: float) -> None:
        """A slice was computed, and `seconds` are its part of the time that it took."""
        group, start = plan.group, time.perf_counter()
        _keep_prefill(self._tiers, plan, seconds + group.looked_s)
        group.looked_s = 0.0
        taken_s = seconds + time.perf_counter() - start
        self._scheduler.on_prefill(plan, taken_s, self._decoder.num_running)
        if group.num_remaining_tokens:
            progress = PrefillProgress(
                num_done=group.num_computed_tokens, num_total=group.num_prefill_tokens
            )
            self._items.append((group.request.request_id, progress))
            return
        if group.request.work == "prefill" or not group.max_tokens:
            self._scheduler.remove(group)
            _pin(self._tiers, group)
            for sequence in group.sequences:
                self._finish(sequence, "length" if group.request.work == "generate" else "stop")
            return
        self._scheduler.on_computed(group)

    def _decode(self) -> None:
        self.phase = "decode"
        self._work_on(self._decoder.request_ids)
        start = time.perf_counter()
        try:
            for token in self._decoder.step():
                self._on_token(token)
        except DecodeFailed as error:
            raise_if_tainted(error)
            self._recompute(error)
        self._scheduler.on_decode(time.perf_counter() - start)

    def _on_token(self, token: DecodedToken) -> None:
        sequence = token.sequence
        if sequence.is_finished:
            return
        sequence.num_accepted_tokens += token.was_proposed
        request, gave_up = sequence.group.request, sequence.gave_up
        if token.token_id in self._model.eos_token_ids and (sequence.ends_at_eos or gave_up):
            sequence.output_token_ids.append(token.token_id)
            sequence.output.remark(gave_up)
            kv = token.kv or self._decoder.take(sequence)
            self._finish(sequence, "length" if gave_up else "stop", kv)
            return
        num_top, of_token = request.top_logprobs, self._template.token_text
        logprobs = None if num_top is None else token_logprobs(token, num_top, of_token)
        said = SaidToken(request.request_id, sequence.index, token.token_id, logprobs)
        self._said.append(said)
        self._say(sequence, sequence.hear(token.token_id, logprobs))
        if sequence.output.is_stopped:
            self._finish(sequence, "stop", token.kv or self._decoder.take(sequence))
        elif token.is_last:
            self._finish(sequence, "length", token.kv)

    def _finish(
        self, sequence: Sequence, reason: FinishReason, kv: list[Any] | None = None
    ) -> None:
        """Say the rest of a sequence, keep its KV, forget it."""
        if sequence.is_finished:
            return
        sequence.is_finished = True
        group = sequence.group
        self._rows.remove(sequence)
        request_id = group.request.request_id
        output, turn = sequence.output, None
        self._say(sequence, output.finish(sequence.detokenizer.finish(), is_cut=reason != "stop"))
        if sequence.answer is not None:
            is_whole = reason == "stop" or not output.is_broken_off
            turn = sequence.answer.end(sequence.output_token_ids, output.cut, is_whole=is_whole)
        if kv is not None:
            _keep_answer(self._tiers, sequence, kv, turn)
        self._tiers.note_durable(group.cursor)
        finished = Finished(
            index=sequence.index,
            reason=output.reason(reason),
            usage=sequence.usage,
            stop=output.stopped_by,
            notes=output.notes,
        )
        self._items.append((request_id, finished))
        owner = self._groups.get(request_id)
        if owner is not None and owner.is_finished:
            self._drop(owner)

    def _say(self, sequence: Sequence, chunks: list[Chunk]) -> None:
        request_id = sequence.group.request.request_id
        for chunk in chunks:
            if isinstance(chunk, TextWasReasoning):
                sequence.num_reasoning_tokens = len(sequence.output_token_ids)
            self._items.append((request_id, chunk))
            if sequence.answer is not None:
                sequence.answer.spoken.add(chunk)

    # Leaving

    def _cut_off(self, group: SequenceGroup) -> None:
        """A request ends here, and what was computed for it is kept: it may be asked to go on."""
        for one in {group, *(sequence.group for sequence in group.sequences)}:
            _keep_begun(self._tiers, one)
        for sequence in group.sequences:
            self._finish(sequence, "length", self._decoder.take(sequence))

    def _drop(self, group: SequenceGroup) -> None:
        """Forget a group in whatever phase it is, and give its memory back."""
        for sequence in group.sequences:
            sequence.is_finished = True
            self._decoder.remove(sequence)
            if sequence.group is not group:
                self._scheduler.remove(sequence.group)
                self._tiers.release(sequence.group.cursor)
        self._scheduler.remove(group)
        self._tiers.release(group.cursor)
        group.kv = None
        self._groups.pop(group.request.request_id, None)

    def _fail(self, group: SequenceGroup, error: Exception) -> None:
        request_id = group.request.request_id
        self._items.append((request_id, _failed(error)))
        self._drop(self._groups.get(request_id, group))

    def _recompute(self, failure: DecodeFailed) -> None:
        """A batch broke: its sequences go back to prefill with what they have said so far."""
        for sequence in failure.sequences:
            sequence.num_failures += 1
            if sequence.num_failures >= _MAX_FAILURES:
                self._fail(sequence.group, failure)
        self._rows.put_back([one for one in failure.sequences if not one.is_finished])


def _in_order(arrivals: list[Arrival]) -> list[Arrival]:
    """News before requests, without those that are aborted among these."""
    arrivals.sort(key=lambda arrival: isinstance(arrival, SequenceGroup))
    late = {one.request_id for one in arrivals if isinstance(one, AbortRequest)}
    return [
        one
        for one in arrivals
        if not (isinstance(one, SequenceGroup) and one.request.request_id in late)
    ]


def _failed(error: Exception) -> Failed:
    if isinstance(error, RequestRejected):
        return Failed(code=error.code, message=error.message)
    return Failed(code="model_error", message=f"The model failed on this request: {error}")


@contextlib.contextmanager
def _keeping() -> Generator[None]:
    """What cannot be kept is computed again one day. Raises EngineTainted as the device failed."""
    try:
        yield
    except (RuntimeError, ValueError) as error:
        raise_if_tainted(error)


def _accepted(group: SequenceGroup) -> Accepted:
    return Accepted(
        request_id=group.request.request_id,
        num_prompt_tokens=group.num_prompt_tokens,
        cache=group.cursor.told_use,
        prompt_digest=group.prompt_digest,
        turns=pack_row(group.cursor.said.turns),
    )


def _compute(
    model: LoadedModel, plan: PrefillSlice, budget_s: float
) -> tuple[bool, list[PromptLogprobs]]:
    """Compute a slice, or first a part of what its pictures take; whether the slice is done, and
    what of the prompt is told then.
    """
    group, start, end, token_ids = plan.group, plan.start, plan.end, plan.token_ids
    assert group.kv is not None
    if group.echo is not None:
        following = group.token_ids[start + 1 : end + 1]
        num_top = group.echo.num_top
        scores = model.score(token_ids, group.kv, following, num_top) if token_ids else []
        group.num_computed_tokens = end
        return True, [group.echo.next_slice(scores)]
    if token_ids:
        if not model.look(group.image_batch, start, end, budget_s):
            return False, []
        model.prefill(token_ids, group.kv, group.image_batch, start)
        group.num_computed_tokens = end
    return True, []


def _compute_together(model: LoadedModel, slices: list[PrefillSlice]) -> float:
    """Compute several slices in one forward; the seconds that it took, or none if it failed: then
    nothing was computed, and each is tried alone, so that nobody pays for another one.
    """
    start = time.perf_counter()
    kvs = [cast("list[Any]", one.group.kv) for one in slices]
    try:
        kvs = model.prefill_together([one.token_ids for one in slices], kvs)
    except (RuntimeError, ValueError) as error:
        raise_if_tainted(error)
        return 0.0
    for one, kv in zip(slices, kvs, strict=True):
        one.group.kv, one.group.num_computed_tokens = kv, one.end
    return time.perf_counter() - start


def _keep_begun(tiers: Tiers, group: SequenceGroup) -> None:
    """Keep what was computed of a prompt so far: others may want it, if not its sender."""
    if group.kv is not None and group.num_remaining_tokens:
        with _keeping():
            tiers.on_interrupted(group.cursor, group.kv, group.num_computed_tokens)


def _keep_at_start(tiers: Tiers, sequence: Sequence, kv: list[Any], num_tokens: int) -> None:
    """Keep the first tokens of a sequence, which are all that the caches hold, as they are now."""
    group = sequence.group
    prompt = group.cursor.token_ids[: group.num_prompt_tokens]
    with _keeping():
        tiers.on_kv_start(group.cursor, [*prompt, *sequence.output_token_ids][:num_tokens], kv)


def _keep_answer(tiers: Tiers, sequence: Sequence, kv: list[Any], turn: Turn | None) -> None:
    group = sequence.group
    cursor = group.cursor if len(group.sequences) == 1 else group.cursor.fork()
    already = len(group.token_ids) - group.num_prompt_tokens
    with _keeping():
        tiers.on_finished(cursor, sequence.output_token_ids[already:], kv, turn)


def _is_to_go_on(tiers: Tiers, group: SequenceGroup, waiting: Iterable[SequenceGroup]) -> bool:
    """Whether a prompt goes on with the KV it has: nobody else has computed more of it.

    What others have computed on the same way is kept first, so that it can be taken up.
    """
    position = group.num_computed_tokens
    for other in waiting:
        is_new = group.kv is None
        if other is not group and (is_new or tiers.is_ahead(other.cursor, group.cursor, position)):
            _keep_begun(tiers, other)
    return group.kv is not None and not tiers.knows_more(group.cursor, position)


def _keep_prefill(tiers: Tiers, plan: PrefillSlice, seconds: float) -> None:
    group, span = plan.group, (plan.start, plan.end)
    assert group.kv is not None
    with _keeping():
        tiers.on_prefill(group.cursor, group.kv, span, seconds)


def _pin(tiers: Tiers, group: SequenceGroup) -> None:
    source = group.request.cache.pin
    if source is not None and group.kv is not None:
        with _keeping():
            tiers.pin(group.cursor, group.kv, source)
