"""Log probabilities by exact values."""

from math import inf, log
from typing import cast

import mlx.core as mx

from runtime.types import TokenLogprob
from runtime.worker.decode import DecodedToken
from runtime.worker.logprobs import token_logprobs
from runtime.worker.sequence import Sequence


def token(token_id: int, logprobs: list[float], dtype: mx.Dtype = mx.float32) -> DecodedToken:
    nobody = cast("Sequence", None)  # whose token it is does not matter here
    return DecodedToken(nobody, token_id, mx.array(logprobs, dtype), is_last=False)


def text_of(token_id: int) -> tuple[str, bytes]:
    return f"t{token_id}", bytes([token_id])


def logprob(token_id: int, value: float) -> TokenLogprob:
    return TokenLogprob(token=f"t{token_id}", token_bytes=bytes([token_id]), logprob=value)


def test_the_chosen_token_comes_with_the_best_ones_in_order():
    said = token_logprobs(token(3, [-3.0, -0.5, -1.0, -2.0]), 2, text_of)
    assert said.chosen == logprob(3, -2.0)
    assert said.top == (logprob(1, -0.5), logprob(2, -1.0))


def test_no_alternatives_are_asked_for_with_zero():
    assert token_logprobs(token(0, [-1.0, -2.0]), 0, text_of).top == ()


def test_all_of_the_vocabulary_can_be_asked_for():
    said = token_logprobs(token(0, [-1.0, -2.0]), 2, text_of)
    assert said.top == (logprob(0, -1.0), logprob(1, -2.0))


def test_equals_are_ordered_by_their_ids():
    said = token_logprobs(token(0, [-1.0, -1.0, -1.0, -9.0]), 3, text_of)
    assert [one.token for one in said.top] == ["t0", "t1", "t2"]


def test_an_impossible_token_has_a_number():
    said = token_logprobs(token(1, [0.0, -inf]), 2, text_of)
    assert said.chosen == logprob(1, -9999.0)
    assert said.top[1] == logprob(1, -9999.0)


def test_half_precision_is_told_in_full():
    said = token_logprobs(token(0, [log(0.5), log(0.5)], mx.bfloat16), 1, text_of)
    assert abs(said.chosen.logprob - log(0.5)) < 0.01
