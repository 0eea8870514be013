"""Scores by exact values."""

from math import exp, inf, log

import mlx.core as mx
import pytest

from runtime.worker.scores import scores_of


def test_each_token_is_scored_after_the_one_before_it():
    logits = mx.log(mx.array([[0.5, 0.25, 0.25], [0.125, 0.125, 0.75]])) + 7.0
    first, second = scores_of(logits, [1, 0], 2).told()
    assert first.logprob == pytest.approx(log(0.25))
    assert second.logprob == pytest.approx(log(0.125))
    assert [token_id for token_id, _ in first.top] == [0, 1]  # of equals the lower id
    assert [token_id for token_id, _ in second.top] == [2, 0]
    assert [exp(value) for _, value in second.top] == pytest.approx([0.75, 0.125])


def test_no_alternatives_are_asked_for_with_zero():
    (one,) = scores_of(mx.zeros((1, 4)), [3], 0).told()
    assert one == (pytest.approx(log(0.25)), [])


def test_half_precision_is_scored_in_full():
    logits = mx.random.normal((3, 1000), key=mx.random.key(1)).astype(mx.bfloat16)
    exact = logits.astype(mx.float32) - mx.logsumexp(logits.astype(mx.float32), -1, keepdims=True)
    for row, one in enumerate(scores_of(logits, [5, 6, 7], 1).told()):
        assert one.logprob == exact[row, 5 + row].item()
        assert one.top[0][1] == exact[row].max().item()


def test_what_is_impossible_is_no_alternative():
    (one,) = scores_of(mx.array([[0.0, -inf]]), [1], 2).told()
    assert one == (-inf, [(0, 0.0)])
