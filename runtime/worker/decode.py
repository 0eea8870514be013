"""Decode: sequences with finished KV join a batch and leave it; one step gives each one token.

Knows mlx-lm's BatchGenerator and what of its caches must be evaluated after a step. Rows of a
batch are padded to the longest, so sequences live in generators by length bucket, stepped in turn.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from __future__ import annotations

import importlib
import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, cast

import mlx.core as mx

from runtime.kv.layers import handed_over, merged, shorten, take_back
from runtime.types import SamplingParams
from runtime.worker.draft import DraftRows, Said
from runtime.worker.model import LoadedModel, compiles_kernels
from runtime.worker.proposals import Proposer, num_accepted
from runtime.worker.row_memory import bucket_of
from runtime.worker.sampler import (
    LogitsProcessor,
    Sampler,
    SeededSampler,
    guided,
    make_logits_processors,
    make_sampler,
)
from runtime.worker.sequence import Sequence, SequenceGroup
from runtime.worker.speculation import WIDTHS, Speculation, StepCosts, best_step

# The package re-exports a function under the module's name.
_upstream: Any = importlib.import_module("mlx_lm.generate")

_METADATA_STEPS = 64
_WARM_ROWS = (8, 32)
_WARM_WIDE_ROWS = (1, 2, 4, 8, 16, 32)
_METADATA = frozenset({"left_padding", "lengths", "offset", "_lengths"})


@dataclass(frozen=True, slots=True)
class DecodedToken:
    """One sequence's next token. `logprobs` [vocab] are of the distribution it was drawn from
    before temperature and filters; `is_last` says that the sequence has left its batch, and `kv`
    then holds its layer caches, not evaluated: the prompt and all its output. It `was_proposed`
    when speculation had guessed it.
    """

    sequence: Sequence
    token_id: int
    logprobs: mx.array
    is_last: bool
    kv: list[Any] | None = None
    was_proposed: bool = False


class DecodeFailed(Exception):
    """A step failed; its batch is gone, `sequences` must be computed again."""

    def __init__(self, cause: Exception, sequences: list[Sequence]) -> None:
        super().__init__(str(cause))
        self.sequences = sequences


OnKvStart = Callable[[Sequence, list[Any], int], None]
"""Told of a sequence whose caches hold so many tokens and are about to be quantised."""


class Decoder:
    """All sequences that decode. Belongs to the mlx thread.

    A batch gives the device its next step before it reads the tokens of the last one. Unless it
    `overlaps`, it then waits until the device has done that step, too. With `costs` it speculates
    where the model's caches allow it, and keeps in them what its steps take; a `draft` model then
    proposes where nothing is copied.
    Quantised caches cannot be merged: where they begin at some length, a row leaves its batch then.
    """

    def __init__(
        self,
        model: LoadedModel,
        max_batch: int,
        costs: StepCosts | None = None,
        *,
        draft: LoadedModel | None = None,
        overlaps: bool = True,
    ) -> None:
        self._model = model
        self._draft = draft
        self._costs = costs if model.has_plain_rows else None
        self._max_batch = max_batch
        self._overlaps = overlaps
        self.on_kv_start: OnKvStart | None = None
        self._batches: dict[tuple[str, int], _Batch | _Solo] = {}
        self._num_solo = 0
        self.sequences: list[Sequence] = []
        """Who decodes; another list each time that somebody comes or goes."""
        self.request_ids: tuple[str, ...] = ()
        """Whose they are."""
        self.most_said = 1
        """Tokens that one of them said with the last step, at most."""

    @property
    def speculates(self) -> bool:
        """Its rows may propose what they say next."""
        return self._costs is not None

    @property
    def num_running(self) -> int:
        return len(self.sequences)

    def insert(self, group: SequenceGroup, sequences: Iterable[Sequence], *, takes: bool) -> None:
        """Start decoding sequences of a group whose KV lacks only the last of `token_ids`.

        The last of them take the group's KV; before, it stays as it is for those that follow.
        """
        kv = group.kv
        assert kv is not None
        if self._model.is_at_start(kv):
            self._model.quantise(kv)
        if takes:
            group.kv = None
        for sequence in sequences:
            batch = self._batch_for(sequence)
            batch.insert(_Waiting(sequence, group.token_ids, kv, is_shared=not takes))
        self._note_change()

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence, if it is here."""
        self.take(sequence)

    def take(self, sequence: Sequence) -> list[Any] | None:
        """Forget a sequence, if it is here; its layer caches, not evaluated, if it has decoded."""
        for batch in self._batches.values():
            if sequence in batch.sequences:
                kv = batch.take(sequence)
                self._note_change()
                return kv
        return None

    def step(self) -> Iterator[DecodedToken]:
        """One decode step of every batch.

        Raises:
            DecodeFailed: a batch broke; the others are whole and go on with the next step.
        """
        self.most_said = 1
        for key, batch in list(self._batches.items()):
            if key not in self._batches:  # emptied by what another batch's token ended
                continue
            num_before = len(batch.sequences)
            try:
                tokens = batch.step()
                if not self._overlaps:
                    mx.synchronize(self._model.stream)
            except (RuntimeError, ValueError, IndexError, TypeError) as error:
                del self._batches[key]
                self._note_change()
                raise DecodeFailed(error, batch.sequences) from error
            if isinstance(batch, _Batch):
                for sequence in batch.at_kv_start():
                    self._batches[self._next_solo()] = batch.part(sequence, self.on_kv_start)
            if len(batch.sequences) < num_before:
                self._note_change()
            if len(tokens) > num_before:
                self.most_said = max(self.most_said, len(tokens) - num_before + 1)
            yield from tokens

    def _batch_for(self, sequence: Sequence) -> _Batch | _Solo:
        # A sequence that failed before runs alone, so that it cannot fail others twice.
        num_tokens = len(sequence.group.token_ids)
        batched = self._model.is_batchable and not self._model.is_quantised(num_tokens)
        is_alone = not batched or sequence.num_failures
        key = self._next_solo() if is_alone else ("batch", bucket_of(num_tokens))
        if key not in self._batches:
            self._batches[key] = self._new_batch(is_batched=batched)
        return self._batches[key]

    def _new_batch(self, *, is_batched: bool) -> _Batch | _Solo:
        if self._costs is not None:
            return _SpeculatingBatch(self._model, self._max_batch, self._costs, self._draft)
        if is_batched:
            return _Batch(self._model, self._max_batch)
        return _Solo(self._model, self.on_kv_start)

    def _next_solo(self) -> tuple[str, int]:
        self._num_solo += 1
        return "solo", self._num_solo

    def _note_change(self) -> None:
        """Somebody came or went: close the batches in which nobody is, and list who is."""
        for key, batch in list(self._batches.items()):
            if not batch.sequences:
                batch.close()
                del self._batches[key]
        self.sequences = [one for batch in self._batches.values() for one in batch.sequences]
        ids = (one.group.request.request_id for one in self.sequences)
        self.request_ids = tuple(dict.fromkeys(ids))


class _Waiting(NamedTuple):
    """A sequence that joins its batch with the next step, and what it was inserted with: KV that
    others are to begin with as well if it `is_shared`.
    """

    sequence: Sequence
    token_ids: list[int]
    kv: list[Any]
    is_shared: bool

    @property
    def group(self) -> SequenceGroup:
        return self.sequence.group


class _Row(NamedTuple):
    """How a sequence goes on: the tokens before the next one, who draws it, and what was drawn,
    with its log probabilities.
    """

    tokens: list[int]
    sampler: Sampler
    processors: list[LogitsProcessor]
    drawn: tuple[mx.array, mx.array] | None = None


class _Batch:
    """Sequences of similar length in one BatchGenerator.

    They join its decoding rows at once: its own way in, made for prompts, copies KV four times.
    """

    def __init__(self, model: LoadedModel, max_batch: int) -> None:
        self._model = model
        self._stream = model.stream
        self._eos = [[token_id] for token_id in sorted(model.eos_token_ids)]
        self._generator = _upstream.BatchGenerator(
            model.model,
            stop_tokens=self._eos,
            completion_batch_size=max_batch,
            prefill_batch_size=max_batch,
            stream=model.stream,
        )
        self._max_batch = max_batch
        self._waiting: list[_Waiting] = []
        self._by_uid: dict[int, Sequence] = {}
        self.sequences: list[Sequence] = []
        """Those of `_by_uid`, then those that wait."""
        self._num_joined = 0
        self._num_steps = 0

    def insert(self, one: _Waiting) -> None:
        self._waiting.append(one)
        self.sequences.append(one.sequence)

    def _join(self) -> None:
        """Have those who wait decode with the others, as far as there is room."""
        room = self._max_batch - len(self._by_uid)
        joining, later = self._waiting[:room], self._waiting[room:]
        if not joining:
            return
        uids = [self._num_joined + number for number in range(len(joining))]
        one = joining[0]
        is_own = len(joining) == 1 and not one.is_shared
        is_own = is_own and all(other.kv is not one.kv for other in later)
        processors = [tuple(_processors(one.sequence)) for one in joining]
        pairs = [*zip(joining, processors, strict=True)]
        with mx.stream(self._stream):
            rows = [
                self._model.to_decode(one.kv, one.group.image_batch, len(one.token_ids))
                for one in joining
            ]
            batch = _upstream.GenerationBatch(
                self._model.model,
                uids,
                mx.array([one.token_ids[-1] for one in joining]),
                self._as_batch(rows, is_own=is_own),
                # Upstream makes an array of them, which only processors look at.
                [list(one.token_ids[:-1] if own else ()) for one, own in pairs],
                [_sampler(one.sequence, self._model) for one in joining],
                self._generator.sampler,
                processors,
                [_upstream.StopSequences(self._stop(one.sequence)) for one in joining],
                [one.group.max_tokens - one.sequence.num_output_tokens for one in joining],
            )
            for tokens, (one, own) in zip(batch.tokens, pairs, strict=True):
                tokens[:0] = () if own else one.token_ids[:-1]
            self._rows.extend(batch)
        self._num_joined += len(joining)
        self._by_uid |= dict(zip(uids, (one.sequence for one in joining), strict=True))
        self._waiting = later

    def _as_batch(self, rows: list[list[Any]], *, is_own: bool) -> list[Any]:
        keeps_shapes = self._model.keeps_shapes
        if is_own:
            return handed_over(rows[0], keeps_shapes=keeps_shapes)
        return merged(rows, keeps_shapes=keeps_shapes)

    def _stop(self, sequence: Sequence) -> list[list[int]] | None:
        return self._eos if sequence.ends_at_eos else None

    def take(self, sequence: Sequence) -> list[Any] | None:
        self.sequences.remove(sequence)
        for number, one in enumerate(self._waiting):
            if one.sequence is sequence:
                # It lacks the KV of the last token, and what it has was kept after prefill.
                del self._waiting[number]
                return None
        uid = next(uid for uid, other in self._by_uid.items() if other is sequence)
        del self._by_uid[uid]
        with mx.stream(self._stream):
            kv, _ = self._generator.remove([uid], return_prompt_caches=True)[uid]
        return self._model.from_decode(kv)

    def step(self) -> list[DecodedToken]:
        if self._waiting:
            self._join()
        _, responses = self._generator.next()
        self._num_steps += 1
        if self._num_steps % _METADATA_STEPS == 0:
            self._evaluate_cache_metadata()
        tokens: list[DecodedToken] = []
        for response in responses:
            sequence, kv = self._by_uid[response.uid], None
            is_last = response.finish_reason is not None
            if is_last:
                del self._by_uid[response.uid]
                self.sequences.remove(sequence)
                kv = self._model.from_decode(response.prompt_cache)
            tokens.append(DecodedToken(sequence, response.token, response.logprobs, is_last, kv))
        return tokens

    @property
    def _rows(self) -> Any:
        """Upstream's decoding rows."""
        return self._generator._generation_batch  # noqa: SLF001

    def at_kv_start(self) -> list[Sequence]:
        """Those whose next token is to see quantised KV."""
        if not self._model.kv_start:
            return []
        return [
            self._by_uid[uid]
            for uid, tokens in zip(self._rows.uids, self._rows.tokens, strict=True)
            if self._model.is_quantised(len(tokens))
        ]

    def part(self, sequence: Sequence, on_kv_start: OnKvStart | None) -> _Solo:
        """Have a sequence that has decoded go on alone, with the token that was drawn for it."""
        rows = self._rows
        number = next(i for i, uid in enumerate(rows.uids) if self._by_uid[uid] is sequence)
        with mx.stream(self._stream):
            drawn = rows._next_tokens[number : number + 1]  # noqa: SLF001
        row = _Row(
            tokens=list(rows.tokens[number]),
            sampler=rows.samplers[number],
            processors=list(rows.logits_processors[number]),
            drawn=(drawn, rows._next_logprobs[number]),  # noqa: SLF001
        )
        kv = self.take(sequence)
        assert kv is not None
        solo = _Solo(self._model, on_kv_start)
        solo.go_on(sequence, kv, row)
        return solo

    def close(self) -> None:
        self._generator.close()

    def _evaluate_cache_metadata(self) -> None:
        # Recurrent caches update these lazily for ever otherwise: one buffer per layer per token
        # (https://github.com/ml-explore/mlx-lm/issues/1845).
        arrays: list[mx.array] = []
        for cache in self._rows.prompt_cache:
            _collect_metadata(cache, arrays)
        if arrays:
            mx.async_eval(arrays)


class _Rest(NamedTuple):
    """Of a row that has lost by its guesses, in plain steps since its batch began."""

    speculation: Speculation
    began_at: int
    ends_at: int


class _SpeculatingBatch(_Batch):
    """A batch whose rows propose what they say next, when that should pay.

    A step is one transaction: propose, compute all in one forward, draw each token as without a
    proposal, and give back what was computed behind the first that differs. So each row says what
    it would have said. A plain step is computed while the host still works on the last one, and
    nobody knows its token yet: whoever wants to propose has to wait for that first.
    """

    def __init__(
        self,
        model: LoadedModel,
        max_batch: int,
        costs: StepCosts,
        draft: LoadedModel | None = None,
    ) -> None:
        super().__init__(model, max_batch)
        self._costs = costs
        self._draft: DraftRows | None = None
        if draft is not None:
            costs.drafts = costs.drafts or StepCosts()
            self._draft = DraftRows(draft, model.vocab_size, costs.drafts)
        self._speculations: dict[Sequence, Speculation] = {}
        self._known: list[int] | None = None
        """The rows' next tokens, where the host has them already."""
        self._is_steady = False
        """The last step was a plain one of the same rows."""
        self._held_up: list[Speculation] = []
        """For whom the next step could not begin in advance."""
        self._resting: dict[Sequence, _Rest] = {}
        """Those who have lost: nothing is done for them until their rest is over."""
        self._rest_ends_at: float = math.inf
        """The first rest to end, in plain steps since the batch began."""

    def _join(self) -> None:
        asking = {one.sequence: one for one in self._waiting}
        num_rows = len(self._by_uid)
        super()._join()
        if len(self._by_uid) > num_rows:
            self._known, self._is_steady = None, False
        for sequence in self._by_uid.values():
            one = asking.get(sequence)
            if one is not None and _may_speculate(sequence):
                self._speculations[sequence] = Speculation(
                    Proposer(one.token_ids, one.group.prediction)
                )

    def take(self, sequence: Sequence) -> list[Any] | None:
        self._forget(sequence)
        kv = super().take(sequence)
        if kv is not None:
            # What stopped it may stand in the middle of what it said with this step.
            shorten(kv, sequence.group.num_prompt_tokens + sequence.num_output_tokens)
        return kv

    def _forget(self, sequence: Sequence) -> None:
        self._speculations.pop(sequence, None)
        self._resting.pop(sequence, None)
        if self._draft is not None:
            self._draft.forget(sequence)
        self._known, self._is_steady = None, False

    def _have_rest(self) -> None:
        """Leave out who tried and lost."""
        for sequence, one in list(self._speculations.items()):
            if one in self._held_up and not one.controller.may_try:
                del self._speculations[sequence]
                if self._draft is not None:
                    self._draft.forget(sequence)
                ends_at = self._num_steps + one.controller.num_rest_steps
                self._resting[sequence] = _Rest(one, self._num_steps, ends_at)
                self._rest_ends_at = min(self._rest_ends_at, ends_at)

    def _wake(self) -> None:
        """Take in again whose rest is over."""
        for number, uid in enumerate(self._rows.uids):
            sequence = self._by_uid[uid]
            rest = self._resting.get(sequence)
            if rest is not None and rest.ends_at <= self._num_steps:
                del self._resting[sequence]
                next_id = self._known[number] if self._known is not None else None
                num_steps = self._num_steps - rest.began_at
                rest.speculation.wake(self._rows.tokens[number], next_id, num_steps)
                self._speculations[sequence] = rest.speculation
        self._rest_ends_at = min((one.ends_at for one in self._resting.values()), default=math.inf)

    def step(self) -> list[DecodedToken]:
        if self._waiting:
            self._join()
        if self._num_steps >= self._rest_ends_at:
            self._wake()
        rows = [self._speculations.get(self._by_uid[uid]) for uid in self._rows.uids]
        trying = [one for one in rows if one is not None and one.controller.may_try]
        self._prepare_drafts()
        if self._known is None and self._width(trying)[0] > 1:
            self._known = cast("list[int]", self._rows._next_tokens.tolist())  # noqa: SLF001
            self._held_up = trying
            for one, token_id in zip(rows, self._known, strict=True):
                if one is not None:
                    one.note_next(token_id)
        width, drafts = self._width(trying) if self._known is not None else (1, False)
        begun_s = time.perf_counter()
        drafted = self._drafted(trying, width) if drafts else {}
        start = time.perf_counter()
        if width == 1:
            tokens = self._step_plainly(rows)
        else:
            tokens = self._verify(rows, trying, width, drafted)
        self._settle(rows, width, time.perf_counter() - start, start - begun_s)
        for token in tokens:
            if token.is_last:
                self._forget(token.sequence)
        return tokens

    def _width(self, trying: list[Speculation]) -> tuple[int, bool]:
        """The best width of the next step, and whether the draft model is to propose for it."""
        num_rows, costs = len(self._rows.uids), self._costs
        found = {one: chance for one in trying if (chance := one.chance) is not None}
        best, most = best_step(num_rows, [*found.values()], lambda width: costs.of(num_rows, width))
        if self._draft is None or not trying:
            return best, False
        drafts = {
            one: one.draft_chance
            for sequence, one in self._speculations.items()
            if one in trying and one not in found and self._draft.is_ready(sequence)
        }
        if not drafts:
            return best, False
        each = costs.of_draft(num_rows)

        def cost(width: int) -> float | None:
            verified = costs.of(num_rows, width)
            return None if verified is None else verified + each * (width - 1)

        width, speed = best_step(num_rows, [*(found | drafts).values()], cost)
        return (width, True) if width > 1 and speed > most else (best, False)

    def _prepare_drafts(self) -> None:
        """Have the draft model read some more of a row that it does not know yet."""
        if self._draft is not None and self._speculations:
            rows = zip(
                map(self._by_uid.__getitem__, self._rows.uids), self._rows.tokens, strict=True
            )
            asking = ((one, token_ids) for one, token_ids in rows if one in self._speculations)
            if any(self._draft.prepare(*row) for row in asking):
                self._is_steady = False

    def _drafted(self, trying: list[Speculation], width: int) -> dict[Speculation, list[int]]:
        """What the draft model proposes for those who have nothing to copy."""
        assert self._draft is not None and self._known is not None  # noqa: PT018
        asked: dict[Sequence, Said] = {}
        for number, uid in enumerate(self._rows.uids):
            sequence = self._by_uid[uid]
            one = self._speculations.get(sequence)
            if one in trying and one.chance is None and self._draft.is_ready(sequence):
                asked[sequence] = Said(self._rows.tokens[number], self._known[number])
        found = self._draft.propose(asked, width - 1)
        return {self._speculations[sequence]: ids for sequence, ids in found.items()}

    def _step_plainly(self, rows: list[Speculation | None]) -> list[DecodedToken]:
        tokens = super().step()
        for one, token in zip(rows, tokens, strict=True):
            if one is not None:
                one.note_said(token.token_id)
        self._known = None
        return tokens

    def _settle(
        self, rows: list[Speculation | None], width: int, seconds: float, drafted_s: float
    ) -> None:
        """Learn what the step took, and what it brought those for whom it was wider, or held up."""
        num_rows = len(rows)
        is_held_up = bool(self._held_up)
        if width > 1 or (self._is_steady and not is_held_up):
            self._costs.saw(num_rows, width, seconds)
        plain_s = self._costs.plain_s(num_rows)
        if is_held_up and plain_s:
            lost = self._costs.of(num_rows, width) or 1.0
            lost = lost - 1.0 if width > 1 else seconds / plain_s
            lost += drafted_s / plain_s
            for one in self._held_up:
                one.controller.settle(one.num_gained, lost * num_rows / len(self._held_up))
            self._have_rest()
        for one in rows:
            if one is not None:
                one.num_gained = 0
                if width == 1:
                    one.controller.saw_plain()
        self._is_steady = width == 1
        if width == 1:
            self._held_up = []

    def _verify(
        self,
        rows: list[Speculation | None],
        trying: list[Speculation],
        width: int,
        drafted: dict[Speculation, list[int]],
    ) -> list[DecodedToken]:
        """Compute what is proposed behind the rows' next tokens, and say what of it is right."""
        assert self._known is not None
        self._held_up = trying
        spans = [
            [next_id, *self._cut(number, _proposal(one, trying, drafted), next_id)[: width - 1]]
            for number, (one, next_id) in enumerate(zip(rows, self._known, strict=True))
        ]
        with mx.stream(self._stream):
            inputs = mx.array([[*span, *[0] * (width - len(span))] for span in spans])
            logits = self._model.model(inputs, cache=self._rows.prompt_cache)
            drawn = self._draw(spans, logits)
            said = [
                1 + num_accepted(span[1:], one.token_ids)
                for span, one in zip(spans, drawn, strict=True)
            ]
            take_back(self._rows.prompt_cache, [width - num for num in said])
            tokens = self._say(spans, drawn, said)
        self._known = []
        for one, span, draws, num in zip(rows, spans, drawn, said, strict=True):
            next_id = draws.token_ids[num - 1]
            if one is not None:
                if one in drafted:
                    one.controller.saw_drafted(num - 1, len(span) - 1)
                one.note([*span[1:num], next_id])
                one.num_gained = num - 1
            self._known.append(next_id)
        return tokens

    def _cut(self, number: int, proposal: list[int], next_id: int) -> list[int]:
        """Of what a row proposes behind its next token no more than it may say."""
        sequence = self._by_uid[self._rows.uids[number]]
        ends = self._model.eos_token_ids if sequence.ends_at_eos else frozenset[int]()
        if not proposal or next_id in ends:
            return []
        left = self._rows.max_tokens[number] - self._rows._num_tokens[number] - 1  # noqa: SLF001
        proposal = proposal[:left]
        end = next((at for at, token_id in enumerate(proposal, 1) if token_id in ends), left)
        return proposal[:end]

    def _draw(self, spans: list[list[int]], logits: mx.array) -> list[_Drawn]:
        """What each row says after each token of its span, `logits` are `[rows, width, vocab]`.

        Rows whose draws depend on what they said, or count, are drawn token by token, and no
        further than they are right.
        """
        alike: defaultdict[Sampler, list[int]] = defaultdict(list)
        drawn: dict[int, _Drawn] = {}
        for number, sampler in enumerate(self._rows.samplers):
            if self._rows.logits_processors[number] or isinstance(sampler, SeededSampler):
                span = spans[number]
                drawn[number] = _drawn_in_turn(self._rows, number, span, logits[number])
            else:
                alike[sampler].append(number)
        for sampler, numbers in alike.items():
            lengths = [len(spans[number]) for number in numbers]
            logprobs = _normalised(
                mx.concatenate([logits[n, :size] for n, size in zip(numbers, lengths, strict=True)])
            )
            token_ids = cast("list[int]", sampler(logprobs).tolist())
            start = 0
            for number, size in zip(numbers, lengths, strict=True):
                end = start + size
                drawn[number] = _Drawn(token_ids[start:end], logprobs[start:end])
                start = end
        return [drawn[number] for number in range(len(spans))]

    def _say(
        self, spans: list[list[int]], drawn: list[_Drawn], said: list[int]
    ) -> list[DecodedToken]:
        """Have upstream's rows go on behind the first `said` tokens of their spans."""
        rows, tokens = self._rows, list[DecodedToken]()
        before, kept = rows._next_logprobs, list[int]()  # noqa: SLF001
        rows._next_tokens = mx.array(  # noqa: SLF001
            [one.token_ids[num - 1] for one, num in zip(drawn, said, strict=True)], mx.uint32
        )
        rows._next_logprobs = [  # noqa: SLF001
            one.logprobs[num - 1] for one, num in zip(drawn, said, strict=True)
        ]
        for number, (span, one, num) in enumerate(zip(spans, drawn, said, strict=True)):
            sequence = self._by_uid[rows.uids[number]]
            sequence.num_proposed_tokens += len(span) - 1
            rows.tokens[number].extend(span[:num])
            rows._num_tokens[number] += num  # noqa: SLF001
            is_full = rows._num_tokens[number] >= rows.max_tokens[number]  # noqa: SLF001
            is_end = sequence.ends_at_eos and span[num - 1] in self._model.eos_token_ids
            is_last = is_full or is_end
            kv = self._model.from_decode(rows.extract_cache(number)) if is_last else None
            logprobs = [before[number], *one.logprobs[: num - 1]]
            tokens += [
                DecodedToken(sequence, token_id, logprobs[at], False, None, at > 0)
                for at, token_id in enumerate(span[:num])
            ]
            tokens[-1] = replace(tokens[-1], is_last=is_last, kv=kv)
            if is_last:
                del self._by_uid[rows.uids[number]]
                self.sequences.remove(sequence)
            else:
                kept.append(number)
        if len(kept) < len(spans):
            rows.filter(kept)
        return tokens


def _proposal(
    one: Speculation | None, trying: list[Speculation], drafted: dict[Speculation, list[int]]
) -> list[int]:
    """What a row proposes: nothing unless it tries."""
    if one is None or one not in trying:
        return []
    return drafted.get(one) or one.proposer.proposal()


def _may_speculate(sequence: Sequence) -> bool:
    """Unless it is told not to. The end of a guide that gave up must be told from an end that is
    ignored, so that such a row says one token with each step.
    """
    is_clear = sequence.plan is None or sequence.ends_at_eos
    return sequence.group.request.speculates and is_clear


class _Drawn(NamedTuple):
    """The tokens drawn after those of a span, and their log probabilities `[tokens, vocab]`."""

    token_ids: list[int]
    logprobs: mx.array


def _drawn_in_turn(rows: Any, number: int, span: list[int], logits: mx.array) -> _Drawn:
    """The same of one of upstream's rows, token by token, no further than they are right.

    `logits` [width, vocab] may go beyond the span.
    """
    token_ids, logprobs = list[int](), list[mx.array]()
    for at, token_id in enumerate(span):
        if token_ids and token_ids[-1] != token_id:
            break
        one = logits[at : at + 1]
        if rows.logits_processors[number]:
            said = rows._token_context[number].update_and_fetch(mx.array([token_id]))  # noqa: SLF001
            for process in rows.logits_processors[number]:
                one = process(said, one)
        logprobs.append(_normalised(one))
        token_ids.append(_int(rows.samplers[number](logprobs[-1])))
    return _Drawn(token_ids, mx.concatenate(logprobs))


def _normalised(logits: mx.array) -> mx.array:
    return logits - mx.logsumexp(logits, axis=-1, keepdims=True)


class _Solo:
    """One sequence whose caches cannot be merged, one step ahead like the batch."""

    def __init__(self, model: LoadedModel, on_kv_start: OnKvStart | None = None) -> None:
        self._model = model
        self._on_kv_start = on_kv_start
        self.sequences: list[Sequence] = []
        """None or one."""
        self._tokens: list[int] = []
        self._kv: list[Any] = []
        self._next: tuple[mx.array, mx.array] | None = None

    def insert(self, one: _Waiting) -> None:
        sequence, token_ids, kv, is_shared = one
        others = [s for s in sequence.group.sequences if s is not sequence and not s.is_finished]
        kv = self._model.copy_kv(kv) if others or is_shared else kv
        kv = self._model.to_decode(kv, sequence.group.image_batch, len(token_ids))
        sampler, processors = _sampler(sequence, self._model), _processors(sequence)
        self.go_on(sequence, kv, _Row(list(token_ids), sampler, processors))
        self._next = self._forward(mx.array([token_ids[-1]]))

    def go_on(self, sequence: Sequence, kv: list[Any], row: _Row) -> None:
        """Take a sequence over as it is, with the token that was drawn for it if there is one."""
        self.sequences, self._kv = [sequence], kv
        self._tokens, self._sampler, self._processors, self._next = row
        self._stop: frozenset[int] = (
            self._model.eos_token_ids if sequence.ends_at_eos else frozenset()
        )

    def take(self, sequence: Sequence) -> list[Any]:  # noqa: ARG002
        self.sequences, self._next = [], None
        return self._model.from_decode(self._kv)

    def step(self) -> list[DecodedToken]:
        assert self._next is not None
        token, logprobs = self._next
        sequence = self.sequences[0]
        if self._model.is_at_start(self._kv):
            if self._on_kv_start is not None:
                self._on_kv_start(sequence, self._kv, self._model.kv_start)
            self._model.quantise(self._kv)
        if self._processors:
            self._tokens.append(_int(token))
        self._next = self._forward(token)
        token_id = _int(token)
        is_last = (
            token_id in self._stop or sequence.num_output_tokens + 1 >= sequence.group.max_tokens
        )
        kv = self.take(sequence) if is_last else None
        return [DecodedToken(sequence, token_id, logprobs, is_last, kv)]

    def close(self) -> None:
        self._kv = []

    def _forward(self, token: mx.array) -> tuple[mx.array, mx.array]:
        with mx.stream(self._model.stream):
            logits = self._model.model(token[None], cache=self._kv)[:, -1, :]
            for process in self._processors:
                logits = process(mx.array(self._tokens), logits)
            logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
            token = self._sampler(logprobs)
            mx.async_eval(token, logprobs)
        return token, logprobs[0]


def _sampler(sequence: Sequence, model: LoadedModel) -> Sampler:
    sampler = make_sampler(
        sequence.group.request.sampling,
        vocab_size=model.vocab_size,
        choice=sequence.index,
        num_drawn=sequence.num_output_tokens,
    )
    return model.agree(sampler) if model.agree is not None else sampler


def _processors(sequence: Sequence) -> list[LogitsProcessor]:
    """The changes to a row's logits; its guide begins anew and catches up with what was said."""
    group = sequence.group
    num_prompt_tokens = group.num_prompt_tokens
    processors = make_logits_processors(group.request.sampling, num_prompt_tokens=num_prompt_tokens)
    if sequence.plan is not None:
        sequence.guide = sequence.plan.start()
        processors.append(guided(sequence.guide, num_prompt_tokens=num_prompt_tokens))
    return processors


def _int(token: mx.array) -> int:
    return cast("int", token.item())


def _collect_metadata(cache: Any, arrays: list[mx.array]) -> None:
    for child in getattr(cache, "caches", ()):
        _collect_metadata(child, arrays)
    arrays.extend(
        value
        for name, value in vars(cache).items()
        if name in _METADATA and isinstance(value, mx.array)
    )


def warm_decode(
    model: LoadedModel,
    token_ids: list[int],
    kv: list[Any],
    on_progress: Callable[[], None] = lambda: None,
    *,
    compiles: bool,
) -> None:
    """A few decode steps over KV that lacks only the last of `token_ids`: alone and in batches,
    greedy and with every sampling filter, so that no kernel is compiled under a request. Where
    none is to be compiled a greedy batch shows that the model runs.

    `on_progress` is called after each batch: one kernel can take half a minute to compile.
    """
    if not model.is_batchable:
        model.prefill(token_ids[-1:], kv)
        return
    filtered = make_sampler(
        SamplingParams(temperature=0.7, top_k=20, top_p=0.9, min_p=0.05),
        vocab_size=model.vocab_size,
        choice=0,
    )
    generator = _upstream.BatchGenerator(
        model.model, stream=model.stream, completion_batch_size=max(_WARM_ROWS)
    )
    greedy: list[Sampler | None] = [None]
    batches = [greedy * 2]
    if compiles:
        batches = [greedy, [filtered], [None, filtered, filtered]]
        # Matrices of other heights have kernels of their own.
        batches += [greedy * rows for rows in _WARM_ROWS]
    for samplers in batches:
        rows = len(samplers)
        generator.insert(
            [[token_ids[-1]]] * rows, max_tokens=[2] * rows, caches=[kv] * rows, samplers=samplers
        )
        while any(generator.next()):
            pass
        on_progress()
    generator.close()


def warm_wide(
    model: LoadedModel,
    token_ids: list[int],
    kv: list[Any],
    max_batch: int,
    on_progress: Callable[[], None] = lambda: None,
) -> None:
    """Steps of every width that speculation takes, over KV as `warm_decode` has it: of rows that
    end together and of rows that end apart, so that none of their kernels is compiled under a
    request. Where there are none to compile, or the model does not speculate, nothing is done.
    """
    if not (compiles_kernels() and model.has_plain_rows):
        return
    for num_rows in (rows for rows in _WARM_WIDE_ROWS if rows <= max_batch):
        with mx.stream(model.stream):
            one, keeps_shapes = model.copy_kv(kv), model.keeps_shapes
            if num_rows > 1:
                caches = merged([one] * num_rows, keeps_shapes=keeps_shapes)
            else:
                caches = handed_over(one, keeps_shapes=keeps_shapes)
            for _ in range(min(num_rows, 2)):
                for width in WIDTHS:
                    inputs = mx.array([[token_ids[-1]] * width] * num_rows)
                    logits = model.model(inputs, cache=caches)
                    logprobs = _normalised(logits.reshape(-1, logits.shape[-1]))
                    mx.eval(mx.argmax(logprobs, axis=-1))
                    take_back(caches, [width] * num_rows)
                take_back(caches, [row % 2 for row in range(num_rows)])
        on_progress()
