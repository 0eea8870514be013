"""Decode: sequences with finished KV join a batch and leave it; one step gives each one token.

Knows mlx-lm's BatchGenerator and what of its caches must be evaluated after a step. Rows of a
batch are padded to the longest, so sequences live in generators by length bucket, stepped in turn.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import mlx.core as mx

from runtime.kv.layers import handed_over, merged
from runtime.types import SamplingParams
from runtime.worker.model import LoadedModel, compiles_kernels
from runtime.worker.row_memory import bucket_of
from runtime.worker.sampler import (
    LogitsProcessor,
    Sampler,
    guided,
    make_logits_processors,
    make_sampler,
)
from runtime.worker.sequence import Sequence, SequenceGroup

# The package re-exports a function under the module's name.
_upstream: Any = importlib.import_module("mlx_lm.generate")

_METADATA_STEPS = 64
_WARM_ROWS = (8, 32)
_METADATA = frozenset({"left_padding", "lengths", "offset", "_lengths"})


@dataclass(frozen=True, slots=True)
class DecodedToken:
    """One sequence's next token. `logprobs` [vocab] are of the distribution it was drawn from
    before temperature and filters; `is_last` says that the sequence has left its batch, and `kv`
    then holds its layer caches, not evaluated: the prompt and all its output.
    """

    sequence: Sequence
    token_id: int
    logprobs: mx.array
    is_last: bool
    kv: list[Any] | None = None


class DecodeFailed(Exception):
    """A step failed; its batch is gone, `sequences` must be computed again."""

    def __init__(self, cause: Exception, sequences: list[Sequence]) -> None:
        super().__init__(str(cause))
        self.sequences = sequences


class Decoder:
    """All sequences that decode. Belongs to the mlx thread.

    A batch gives the device its next step before it reads the tokens of the last one. Unless it
    `overlaps`, it then waits until the device has done that step, too.
    """

    def __init__(self, model: LoadedModel, max_batch: int, *, overlaps: bool = True) -> None:
        self._model = model
        self._max_batch = max_batch
        self._overlaps = overlaps
        self._batches: dict[tuple[str, int], _Batch | _Solo] = {}
        self._num_solo = 0
        self.sequences: list[Sequence] = []
        """Who decodes; another list each time that somebody comes or goes."""
        self.request_ids: tuple[str, ...] = ()
        """Whose they are."""

    @property
    def num_running(self) -> int:
        return len(self.sequences)

    def insert(self, group: SequenceGroup, sequences: Iterable[Sequence], *, takes: bool) -> None:
        """Start decoding sequences of a group whose KV lacks only the last of `token_ids`.

        The last of them take the group's KV; before, it stays as it is for those that follow.
        """
        kv = group.kv
        assert kv is not None
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
            if len(batch.sequences) < num_before:
                self._note_change()
            yield from tokens

    def _batch_for(self, sequence: Sequence) -> _Batch | _Solo:
        # A sequence that failed before runs alone, so that it cannot fail others twice.
        if not self._model.is_batchable or sequence.num_failures:
            self._num_solo += 1
            key = ("solo", self._num_solo)
        else:
            key = ("batch", bucket_of(len(sequence.group.token_ids)))
        if key not in self._batches:
            batched = self._model.is_batchable
            self._batches[key] = (
                _Batch(self._model, self._max_batch) if batched else _Solo(self._model)
            )
        return self._batches[key]

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
        with mx.stream(self._stream):
            rows = [
                self._model.to_decode(one.kv, one.group.image_batch, len(one.token_ids))
                for one in joining
            ]
            batch = _upstream.GenerationBatch(
                self._model.model,
                uids,
                mx.array([one.token_ids[-1] for one in joining]),
                handed_over(rows[0]) if is_own else merged(rows),
                [list(one.token_ids[:-1]) for one in joining],
                [_sampler(one.sequence, self._model) for one in joining],
                self._generator.sampler,
                [tuple(_processors(one.sequence)) for one in joining],
                [_upstream.StopSequences(self._stop(one.sequence)) for one in joining],
                [one.group.max_tokens - one.sequence.num_output_tokens for one in joining],
            )
            self._generator._generation_batch.extend(batch)  # noqa: SLF001
        self._num_joined += len(joining)
        self._by_uid |= dict(zip(uids, (one.sequence for one in joining), strict=True))
        self._waiting = later

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

    def close(self) -> None:
        self._generator.close()

    def _evaluate_cache_metadata(self) -> None:
        # Recurrent caches update these lazily for ever otherwise: one buffer per layer per token
        # (https://github.com/ml-explore/mlx-lm/issues/1845).
        arrays: list[mx.array] = []
        for cache in self._generator._generation_batch.prompt_cache:  # noqa: SLF001
            _collect_metadata(cache, arrays)
        if arrays:
            mx.async_eval(arrays)


class _Solo:
    """One sequence whose caches cannot be merged, one step ahead like the batch."""

    def __init__(self, model: LoadedModel) -> None:
        self._model = model
        self.sequences: list[Sequence] = []
        """None or one."""
        self._tokens: list[int] = []
        self._kv: list[Any] = []
        self._next: tuple[mx.array, mx.array] | None = None

    def insert(self, one: _Waiting) -> None:
        sequence, token_ids, kv, is_shared = one
        others = [s for s in sequence.group.sequences if s is not sequence and not s.is_finished]
        self.sequences = [sequence]
        self._tokens = list(token_ids)
        kv = self._model.copy_kv(kv) if others or is_shared else kv
        self._kv = self._model.to_decode(kv, sequence.group.image_batch, len(token_ids))
        self._sampler = _sampler(sequence, self._model)
        self._processors = _processors(sequence)
        self._stop: frozenset[int] = (
            self._model.eos_token_ids if sequence.ends_at_eos else frozenset()
        )
        self._next = self._forward(mx.array([token_ids[-1]]))

    def take(self, sequence: Sequence) -> list[Any]:  # noqa: ARG002
        self.sequences, self._next = [], None
        return self._model.from_decode(self._kv)

    def step(self) -> list[DecodedToken]:
        assert self._next is not None
        token, logprobs = self._next
        if self._processors:
            self._tokens.append(_int(token))
        self._next = self._forward(token)
        token_id = _int(token)
        sequence = self.sequences[0]
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
) -> None:
    """A few decode steps over KV that lacks only the last of `token_ids`: alone and in batches,
    greedy and with every sampling filter, so that no kernel is compiled under a request. Where
    there are none to compile the last batch shows that the model runs.

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
    batches = [[None, filtered]]
    if compiles_kernels():
        batches = [[None], [filtered], [None, filtered, filtered]]
        # Matrices of other heights have kernels of their own.
        batches += [[None] * rows for rows in _WARM_ROWS]
    for samplers in batches:
        rows = len(samplers)
        generator.insert(
            [[token_ids[-1]]] * rows, max_tokens=[2] * rows, caches=[kv] * rows, samplers=samplers
        )
        while any(generator.next()):
            pass
        on_progress()
    generator.close()
