"""What a model's logits say of the tokens that did follow."""

# pyright: reportUnknownMemberType=false

from __future__ import annotations

from math import inf
from typing import NamedTuple, cast

import mlx.core as mx


class TokenScore(NamedTuple):
    """Log probabilities (natural) of one token and, best first, of the likeliest possible ones."""

    logprob: float
    top: list[tuple[int, float]]


class Scores(NamedTuple):
    """The same of several tokens, on the device: `[tokens]`, and `[tokens, alternatives]`."""

    logprobs: mx.array
    top_ids: mx.array
    top: mx.array

    def told(self) -> list[TokenScore]:
        """Token by token, on the host."""
        logprobs = cast("list[float]", self.logprobs.tolist())
        top_ids = cast("list[list[int]]", self.top_ids.tolist())
        top = cast("list[list[float]]", self.top.tolist())
        return [
            TokenScore(one, [pair for pair in zip(ids, values, strict=True) if pair[1] > -inf])
            for one, ids, values in zip(logprobs, top_ids, top, strict=True)
        ]


def scores_of(logits: mx.array, token_ids: list[int], num_top: int) -> Scores:
    """How likely each of these tokens was, not evaluated; `logits` are `[tokens, vocab]`."""
    logits = logits.astype(mx.float32)
    logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    chosen = mx.take_along_axis(logprobs, mx.array(token_ids)[:, None], axis=-1)[:, 0]
    top_ids = [mx.zeros((len(token_ids), 0), dtype=mx.uint32)]
    top = [mx.zeros((len(token_ids), 0))]
    # A pass for each of a few is cheaper than to sort the whole vocabulary.
    for _ in range(num_top):
        best = mx.argmax(logprobs, axis=-1, keepdims=True)
        top_ids.append(best)
        top.append(mx.take_along_axis(logprobs, best, axis=-1))
        logprobs = mx.put_along_axis(logprobs, best, mx.array(-inf), axis=-1)
    return Scores(chosen, mx.concatenate(top_ids, axis=-1), mx.concatenate(top, axis=-1))
