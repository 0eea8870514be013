"""Log probabilities of a drawn token and its most likely alternatives."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from __future__ import annotations

from typing import cast

import mlx.core as mx

from runtime.types import TokenLogprobs
from runtime.worker.decode import DecodedToken
from runtime.worker.prompt_logprobs import TokenText, with_text


def token_logprobs(token: DecodedToken, num_top: int, token_text: TokenText) -> TokenLogprobs:
    """The token's log probability and those of the `num_top` most likely ones, best first."""
    logprobs = token.logprobs.astype(mx.float32)
    chosen = with_text(token.token_id, cast("float", logprobs[token.token_id].item()), token_text)
    if num_top == 0:
        return TokenLogprobs(chosen=chosen)
    best = mx.argpartition(-logprobs, kth=num_top - 1)[:num_top]
    token_ids = cast("list[int]", best.tolist())
    values = cast("list[float]", logprobs[best].tolist())
    ordered = sorted((-value, token_id) for token_id, value in zip(token_ids, values, strict=True))
    top = tuple(with_text(token_id, -value, token_text) for value, token_id in ordered)
    return TokenLogprobs(chosen=chosen, top=top)
