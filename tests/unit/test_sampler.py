"""Sampling by exact values: what stays possible after every filter, and who is drawn."""

import time
from itertools import pairwise
from math import inf, log
from typing import cast

import mlx.core as mx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx_lm.sample_utils import make_repetition_penalty

from runtime.types import SamplingParams
from runtime.worker.sampler import draw_key, make_logits_processors, make_sampler

PROBS = (0.4, 0.3, 0.2, 0.06, 0.04)
NUM_DRAWS = 400


def logprobs_of(*probs: float, rows: int = 1) -> mx.array:
    return mx.log(mx.array([probs] * rows))


def ids_of(drawn: mx.array) -> list[int]:
    return cast("list[int]", drawn.tolist())


def drawn(sampling: SamplingParams, probs: tuple[float, ...] = PROBS) -> set[int]:
    """The token ids that come up in many draws."""
    sampler = make_sampler(sampling, vocab_size=len(probs), choice=0)
    mx.random.seed(0)
    return set(ids_of(sampler(logprobs_of(*probs, rows=NUM_DRAWS))))


def processed(
    sampling: SamplingParams, logits: list[float], token_ids: list[int], num_prompt_tokens: int
) -> list[float]:
    array = mx.array([logits])
    for process in make_logits_processors(sampling, num_prompt_tokens=num_prompt_tokens):
        array = process(mx.array(token_ids), array)
    return cast("list[list[float]]", array.tolist())[0]


@pytest.mark.parametrize(
    ("sampling", "possible"),
    [
        (SamplingParams(), {0, 1, 2, 3, 4}),
        (SamplingParams(temperature=0.0), {0}),
        (SamplingParams(temperature=1e-30), {0}),
        (SamplingParams(temperature=0.01), {0}),
        (SamplingParams(top_k=1), {0}),
        (SamplingParams(top_k=3), {0, 1, 2}),
        (SamplingParams(top_k=0), {0, 1, 2, 3, 4}),
        (SamplingParams(top_k=-1), {0, 1, 2, 3, 4}),
        (SamplingParams(top_k=5), {0, 1, 2, 3, 4}),
        (SamplingParams(top_k=99), {0, 1, 2, 3, 4}),
        (SamplingParams(top_p=0.39), {0}),
        (SamplingParams(top_p=0.41), {0, 1}),
        (SamplingParams(top_p=0.69), {0, 1}),
        (SamplingParams(top_p=0.71), {0, 1, 2}),
        (SamplingParams(top_p=1.0), {0, 1, 2, 3, 4}),
        (SamplingParams(top_p=1e-9), {0}),
        (SamplingParams(min_p=0.14), {0, 1, 2, 3}),
        (SamplingParams(min_p=0.51), {0, 1}),
        (SamplingParams(min_p=1.0), {0}),
    ],
)
def test_a_filter_leaves_exactly_these_tokens_possible(
    sampling: SamplingParams, possible: set[int]
):
    assert drawn(sampling) == possible


def test_temperature_comes_before_top_p():
    # At temperature 0.5 the first token alone has 0.16 / 0.2952 = 0.54 of the mass.
    assert drawn(SamplingParams(top_p=0.5)) == {0, 1}
    assert drawn(SamplingParams(top_p=0.5, temperature=0.5)) == {0}


def test_top_k_comes_before_top_p():
    # Of the best two, the first has 0.4 / 0.7 = 0.57.
    assert drawn(SamplingParams(top_p=0.5, top_k=2)) == {0}


def test_temperature_comes_before_min_p():
    # At temperature 2 the third has the square root of 0.5 of the first's probability.
    assert drawn(SamplingParams(min_p=0.6)) == {0, 1}
    assert drawn(SamplingParams(min_p=0.6, temperature=2.0)) == {0, 1, 2}


def test_draws_follow_the_probabilities():
    sampler = make_sampler(SamplingParams(seed=3), vocab_size=5, choice=0)
    counts = [0] * 5
    for _ in range(2000):
        counts[ids_of(sampler(logprobs_of(*PROBS)))[0]] += 1
    for count, prob in zip(counts, PROBS, strict=True):
        assert count / 2000 == pytest.approx(prob, abs=0.04)


def test_equal_filters_share_one_sampler_unless_seeded():
    def sampler(**fields: float) -> object:
        return make_sampler(SamplingParams(**fields), vocab_size=5, choice=0)  # pyright: ignore[reportArgumentType]

    assert sampler(temperature=0.7) is sampler(temperature=0.7)
    assert sampler(temperature=0.7) is not sampler(temperature=0.8)
    assert sampler(temperature=0.7, seed=1) is not sampler(temperature=0.7, seed=1)
    assert sampler(temperature=0.0, seed=1) is sampler(temperature=0.0, seed=2)


def seeded_draws(seed: int, *, choice: int = 0, skip: int = 0, num: int = 30) -> list[int]:
    sampling = SamplingParams(seed=seed)
    sampler = make_sampler(sampling, vocab_size=5, choice=choice, num_drawn=skip)
    return [ids_of(sampler(logprobs_of(*PROBS)))[0] for _ in range(num)]


def test_no_two_draws_of_any_seeds_and_choices_are_one():
    seeds = [*range(-3, 12), 2**63 - 1, -(2**63), 0x9E3779B97F4A7C15 - 2**64]
    asked = [(seed, choice, n) for seed in seeds for choice in range(16) for n in range(200)]
    assert len({draw_key(*one) for one in asked}) == len(asked)
    answers = {tuple(seeded_draws(seed, choice=i)) for seed in (1, 2, 3) for i in range(4)}
    assert len(answers) == 12


def test_seeded_draws_depend_on_seed_choice_and_number_alone():
    expected = seeded_draws(7)
    mx.random.seed(1)
    mx.eval(mx.random.uniform(shape=(100,)))
    assert seeded_draws(7) == expected
    assert seeded_draws(7, skip=10, num=20) == expected[10:]
    assert seeded_draws(8) != expected
    assert seeded_draws(7, choice=1) != expected
    assert seeded_draws(-(2**63), num=1)
    assert seeded_draws(2**63 - 1, num=1)


def test_new_values_of_a_filter_cost_no_compilation():
    starts_s = [time.monotonic()]
    for number in range(10):
        new = starts_s[0] % 0.1 + number / 100
        drawn(SamplingParams(top_p=0.5 + new, min_p=new + 0.001))
        starts_s.append(time.monotonic())
    # Compiled, each takes about half a second; a machine that is busy does not hold up all.
    assert min(end - start for start, end in pairwise(starts_s)) < 0.1


def test_a_bias_is_added():
    sampling = SamplingParams(logit_bias=((2, 5.0), (0, -1.5)))
    assert processed(sampling, [1.0, 2.0, 3.0], [0], 1) == [-0.5, 2.0, 8.0]


def test_the_repetition_penalty_looks_at_prompt_and_answer_once_per_token():
    sampling = SamplingParams(repetition_penalty=2.0)
    assert processed(sampling, [4.0, -4.0, 4.0, -4.0], [0, 1, 0, 0], 2) == [2.0, -8.0, 4.0, -4.0]
    assert make_logits_processors(SamplingParams(repetition_penalty=1.0), num_prompt_tokens=1) == []


@given(
    token_ids=st.lists(st.integers(0, 7), min_size=1, max_size=30),
    context=st.integers(0, 40),
    logits=st.lists(st.integers(-8, 8), min_size=8, max_size=8),
)
def test_the_repetition_penalty_looks_at_as_many_of_the_last_tokens_as_mlx_lm(
    token_ids: list[int], context: int, logits: list[int]
):
    sampling = SamplingParams(repetition_penalty=2.0, repetition_context_size=context)
    seen = set(token_ids[-context:] if context else token_ids)
    wanted = [
        (logit * 2 if logit < 0 else logit / 2) if token_id in seen else logit
        for token_id, logit in enumerate(logits)
    ]
    row = [float(logit) for logit in logits]
    assert processed(sampling, row, token_ids, len(token_ids) // 2) == wanted
    theirs = make_repetition_penalty(2.0, context)(mx.array(token_ids), mx.array([row]))
    assert theirs.tolist() == [wanted]


def test_without_a_context_the_repetition_penalty_looks_at_all_tokens():
    token_ids = [0, *[1] * 40]
    for context in (None, 0):
        sampling = SamplingParams(repetition_penalty=2.0, repetition_context_size=context)
        assert processed(sampling, [4.0, 4.0, 4.0], token_ids, 41) == [2.0, 2.0, 4.0]


def test_presence_and_frequency_look_at_the_answer_only():
    sampling = SamplingParams(presence_penalty=0.5, frequency_penalty=0.25)
    token_ids = [0, 0, 1, 2, 2, 2]
    assert processed(sampling, [1.0] * 4, token_ids, 3) == [1.0, 1.0, 1.0 - 0.5 - 0.75, 1.0]
    assert processed(sampling, [1.0] * 4, token_ids, 6) == [1.0] * 4
    negative = SamplingParams(presence_penalty=-0.5)
    assert processed(negative, [1.0, 1.0], [0, 1], 1) == [1.0, 1.5]


def test_bias_comes_before_penalties():
    sampling = SamplingParams(logit_bias=((0, 4.0),), repetition_penalty=2.0)
    assert processed(sampling, [-2.0, 0.0], [0], 1) == [1.0, 0.0]


def test_an_impossible_token_stays_impossible():
    sampler = make_sampler(SamplingParams(top_p=0.9, min_p=0.01), vocab_size=3, choice=0)
    row = mx.array([[log(0.5), log(0.5), -inf]] * NUM_DRAWS)
    assert set(ids_of(sampler(row))) == {0, 1}
