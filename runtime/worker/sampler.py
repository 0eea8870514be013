"""Sampling parameters to what BatchGenerator takes: a sampler and logits processors per row.

Knows mlx-lm's `apply_top_k`. Order: logit bias, penalties, the guide's mask, temperature, top-k,
top-p, min-p, draw.
A row's result never depends on the other rows.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from functools import lru_cache
from hashlib import blake2b
from typing import Any, cast

import mlx.core as mx
from mlx_lm.sample_utils import apply_top_k

from runtime.types import SamplingParams
from runtime.worker.output.guide import Guide

Sampler = Callable[[mx.array], mx.array]
LogitsProcessor = Callable[[mx.array, mx.array], mx.array]

_MIN_TEMPERATURE = 1e-5


def make_sampler(
    sampling: SamplingParams, *, vocab_size: int, choice: int, num_drawn: int = 0
) -> Sampler:
    """The sampler of one row: log probabilities [rows, vocab] to token ids [rows].

    Rows with equal parameters and no seed share one object, which lets the batch draw at once.
    With a seed, draw number n depends on (seed, choice, n) alone; `num_drawn` resumes at n.
    """
    temperature = 1.0 if sampling.temperature is None else sampling.temperature
    if temperature < _MIN_TEMPERATURE:
        return _greedy
    top_k = sampling.top_k or 0
    filters = (
        temperature,
        top_k if 0 < top_k < vocab_size else 0,
        1.0 if sampling.top_p is None else sampling.top_p,
        sampling.min_p or 0.0,
    )
    if sampling.seed is None:
        return _shared_sampler(*filters)
    return SeededSampler(filters, sampling.seed, choice, num_drawn)


def draw_key(seed: int, choice: int, number: int) -> int:
    """64 bits for one draw, which no other (seed, choice, number) has but by the odds of a hash.

    `seed` has 64 bits and a sign; `choice` and `number` count from 0.
    """
    drawn = struct.pack("<qQQ", seed, choice, number)
    return int.from_bytes(blake2b(drawn, digest_size=8).digest(), "little")


def make_logits_processors(
    sampling: SamplingParams, *, num_prompt_tokens: int
) -> list[LogitsProcessor]:
    """The changes to one row's logits [1, vocab] before it is drawn, given all its tokens."""
    processors: list[LogitsProcessor] = []
    if sampling.logit_bias:
        processors.append(_bias(sampling.logit_bias))
    if sampling.repetition_penalty not in (None, 1.0):
        context = sampling.repetition_context_size or 0
        processors.append(_repetition(sampling.repetition_penalty, context))
    presence, frequency = sampling.presence_penalty or 0.0, sampling.frequency_penalty or 0.0
    if presence or frequency:
        processors.append(_occurrence(presence, frequency, num_prompt_tokens))
    return processors


def guided(guide: Guide, *, num_prompt_tokens: int) -> LogitsProcessor:
    """Leaves of one row's logits [1, vocab] what the guide allows; it must come last.

    The guide needs the last token, so the host waits for it here: while it works out the mask the
    device computes the row's next logits.
    """
    num_seen = num_prompt_tokens
    shifts = mx.arange(32, dtype=mx.uint32)

    def process(tokens: mx.array, logits: mx.array) -> mx.array:
        nonlocal num_seen
        mx.async_eval(logits)
        guide.advance(cast("list[int]", tokens[num_seen:].tolist()))
        num_seen = tokens.size
        mask = guide.mask()
        return logits if mask is None else _masked(logits, mask, shifts)

    return process


def _masked(logits: mx.array, mask: bytearray, shifts: mx.array) -> mx.array:
    words = mx.array(cast("Any", memoryview(mask).cast("I")))
    bits = ((words[:, None] >> shifts) & 1).reshape(-1)[: logits.shape[-1]]
    # A bias may have sunk all that is allowed to minus infinity.
    floor = mx.finfo(logits.dtype).min
    return mx.where(bits.astype(mx.bool_), mx.maximum(logits, floor), -mx.inf)


def _greedy(logprobs: mx.array) -> mx.array:
    return mx.argmax(logprobs, axis=-1)


def _filtered(
    logprobs: mx.array, temperature: float, top_k: int, top_p: float, min_p: float
) -> mx.array:
    scaled = logprobs * (1.0 / temperature)
    if top_k:
        scaled = apply_top_k(scaled, top_k)
    if 0.0 < top_p < 1.0 or min_p:
        scaled = scaled - mx.logsumexp(scaled, axis=-1, keepdims=True)
    if 0.0 < top_p < 1.0:
        scaled = _top_p(scaled, top_p)
    if min_p:
        floor = mx.max(scaled, axis=-1, keepdims=True) + math.log(min_p)
        scaled = mx.where(scaled < floor, -mx.inf, scaled)
    return scaled


def _top_p(logprobs: mx.array, top_p: float) -> mx.array:
    # mlx-lm compiles its own for every value anew, which holds up the whole batch for a second.
    ordered = mx.sort(logprobs, axis=-1)
    probs = mx.exp(ordered.astype(mx.float32))
    mass_above = mx.cumsum(probs, axis=-1, reverse=True, inclusive=False)
    num_dropped = (mass_above >= top_p).sum(axis=-1, keepdims=True)
    threshold = mx.take_along_axis(ordered, num_dropped, axis=-1)
    return mx.where(logprobs < threshold, -mx.inf, logprobs)


@lru_cache(maxsize=256)
def _shared_sampler(temperature: float, top_k: int, top_p: float, min_p: float) -> Sampler:
    def sample(logprobs: mx.array) -> mx.array:
        return mx.random.categorical(_filtered(logprobs, temperature, top_k, top_p, min_p))

    return sample


class SeededSampler:
    """Draws of one choice of a request with a seed: each call is the next one."""

    def __init__(
        self, filters: tuple[float, int, float, float], seed: int, choice: int, num_drawn: int
    ) -> None:
        self._filters = filters
        self._seed = seed
        self._choice = choice
        self._num_drawn = num_drawn

    def __call__(self, logprobs: mx.array) -> mx.array:
        key = mx.random.key(draw_key(self._seed, self._choice, self._num_drawn))
        self._num_drawn += 1
        return mx.random.categorical(_filtered(logprobs, *self._filters), key=key)


def _bias(pairs: tuple[tuple[int, float], ...]) -> LogitsProcessor:
    token_ids = mx.array([token_id for token_id, _ in pairs])
    values = mx.array([value for _, value in pairs])

    def process(_: mx.array, logits: mx.array) -> mx.array:
        return logits.at[:, token_ids].add(values.astype(logits.dtype))

    return process


def _repetition(penalty: float, context: int) -> LogitsProcessor:
    def process(tokens: mx.array, logits: mx.array) -> mx.array:
        last = tokens[-context:] if context else tokens
        seen = logits[:, last]
        logits[:, last] = mx.where(seen < 0, seen * penalty, seen / penalty)
        return logits

    return process


def _occurrence(presence: float, frequency: float, num_prompt_tokens: int) -> LogitsProcessor:
    def process(tokens: mx.array, logits: mx.array) -> mx.array:
        generated = tokens[num_prompt_tokens:]
        if generated.size == 0:
            return logits
        counts = mx.zeros_like(logits[0]).at[generated].add(1.0)
        return logits - frequency * counts - presence * (counts > 0)

    return process
