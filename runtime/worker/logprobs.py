"""Log probabilities of a drawn token and its most likely alternatives."""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx

from runtime.types import TokenLogprob, TokenLogprobs
from runtime.worker.decode import DecodedToken

TokenText = Callable[[int], tuple[str, bytes]]


def token_logprobs(token: DecodedToken, num_top: int, token_text: TokenText) -> TokenLogprobs:
    """The token's log probability and those of the `num_top` most likely ones, best first."""
    logprobs = token.logprobs.astype(mx.float32)
    chosen = _one(token.token_id, logprobs[token.token_id].item(), token_text)
    if num_top == 0:
        return TokenLogprobs(chosen=chosen)
    best = mx.argpartition(-logprobs, kth=num_top - 1)[:num_top]
    pairs = zip(best.tolist(), logprobs[best].tolist(), strict=True)
    ordered = sorted(pairs, key=lambda pair: (-pair[1], pair[0]))
    return TokenLogprobs(
        chosen=chosen, top=tuple(_one(*pair, token_text) for pair in ordered)
    )


def _one(token_id: int, logprob: float, token_text: TokenText) -> TokenLogprob:
    text, raw = token_text(token_id)
    # JSON has no infinity; OpenAI's own floor for impossible tokens is -9999.
    return TokenLogprob(token=text, token_bytes=raw, logprob=max(float(logprob), -9999.0))
