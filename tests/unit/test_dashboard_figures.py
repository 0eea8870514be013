"""What the dashboard counts: what was saved, and how fast answers were."""

from __future__ import annotations

from api.observe.savings import Savings
from api.observe.trend import MAX_SAMPLES, Trend
from runtime.types import CacheUse, Usage


def usage(prompt: int, cached: int, *, prefill_ms: float, restore_ms: float = 0.0) -> Usage:
    cache = CacheUse(tier="hot", num_tokens=cached, restore_ms=restore_ms)
    return Usage(num_prompt_tokens=prompt, prefill_ms=prefill_ms, cache=cache)


def test_reused_tokens_save_what_the_model_took_to_compute_as_many_less_the_restore():
    savings = Savings()
    savings.observe("m", usage(1000, 0, prefill_ms=500.0))  # 0.5 ms a token
    savings.observe("m", usage(1001, 1000, prefill_ms=9.0, restore_ms=100.0))
    assert savings.waiting() == {
        "prompt_tokens": 2001,
        "saved_tokens": 1000,
        "saved_prefill_s": 0.4,
    }


def test_a_restore_slower_than_prefill_saves_no_time_and_costs_none():
    savings = Savings()
    savings.observe("m", usage(100, 0, prefill_ms=100.0))
    savings.observe("m", usage(100, 99, prefill_ms=1.0, restore_ms=5000.0))
    assert savings.waiting()["saved_prefill_s"] == 0.0


def test_no_time_is_claimed_for_a_model_of_which_no_prefill_was_measured():
    savings = Savings()
    savings.observe("other", usage(1000, 0, prefill_ms=500.0))
    savings.observe("m", usage(1000, 999, prefill_ms=3.0))
    assert savings.waiting()["saved_prefill_s"] == 0.0
    assert savings.waiting()["saved_tokens"] == 999


def test_what_the_store_did_not_take_is_offered_again_with_what_came_meanwhile():
    savings = Savings()
    savings.observe("m", usage(100, 0, prefill_ms=100.0))
    savings.observe("m", usage(100, 80, prefill_ms=20.0))  # 120 ms for 120 tokens
    taken = savings.take()
    assert savings.take() == {}
    savings.observe("m", usage(100, 40, prefill_ms=60.0))
    savings.put_back(taken)
    assert savings.waiting()["saved_tokens"] == 120
    assert savings.waiting()["saved_prefill_s"] == 0.12


def test_a_sample_has_the_median_first_token_and_the_rate_of_an_answer():
    trend = Trend()
    for seconds in (0.1, 0.9, 0.2):
        trend.first_token(seconds)
    for seconds in (0.02, 0.03):
        trend.step(seconds)
    sample = trend.sample(7.0, num_running=2, num_waiting=1)
    assert (sample.first_token_ms, sample.tokens_per_s) == (200.0, 40.0)
    assert (sample.at_s, sample.num_running, sample.num_waiting) == (7.0, 2, 1)


def test_an_interval_without_answers_has_no_speed_and_old_samples_leave():
    trend = Trend()
    trend.first_token(0.5)
    for at_s in range(MAX_SAMPLES + 1):
        trend.sample(float(at_s), num_running=0, num_waiting=0)
    assert len(trend.samples) == MAX_SAMPLES
    assert trend.samples[0].at_s == 1.0
    assert trend.samples[-1].first_token_ms is None
    assert trend.samples[-1].tokens_per_s is None
