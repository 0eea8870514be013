"""Which slice a model is prefilled in: what is timed, and what the times say."""

from collections.abc import Callable, Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.worker.slices import (
    MAX_SLICE_S,
    NUM_ROUNDS,
    SIZES,
    SliceTrial,
    choose_slice,
    sizes_to_time,
)

SECONDS = st.floats(0.01, 100, allow_nan=False)
TIMES = st.dictionaries(st.sampled_from(SIZES), st.lists(SECONDS, min_size=1, max_size=3))


@pytest.mark.parametrize(
    ("default", "tokens_per_s", "sizes"),
    [
        (256, 100_000, (256, 512)),
        (2048, 100_000, (256, 512, 1024, 2048, 4096)),
        (2048, 4096, (256, 512, 1024, 2048, 4096)),
        (2048, 4095, (256, 512, 1024, 2048)),
        (2048, 2047, ()),
        (256, 511, ()),
        (256, 0, ()),
        (300, 100_000, ()),
    ],
)
def test_what_would_hold_others_up_for_long_is_not_timed(
    default: int, tokens_per_s: float, sizes: tuple[int, ...]
):
    assert sizes_to_time(default, tokens_per_s) == sizes


@given(default=st.sampled_from(SIZES), tokens_per_s=st.floats(0, 1e6))
def test_nothing_timed_takes_longer_than_it_may_or_much_more_memory(
    default: int, tokens_per_s: float
):
    for size in sizes_to_time(default, tokens_per_s):
        assert size <= tokens_per_s * MAX_SLICE_S
        assert size <= 2 * default


@pytest.mark.parametrize(
    ("times_s", "default", "chosen"),
    [
        ({256: [1.0], 512: [0.96]}, 256, 256),
        ({256: [1.0], 512: [0.95]}, 256, 512),
        ({256: [1.2], 512: [1.0]}, 512, 512),
        ({1024: [1.01], 2048: [1.2], 4096: [1.0]}, 2048, 1024),
        ({1024: [1.03], 2048: [1.2], 4096: [1.0]}, 2048, 4096),
        ({256: [1.0, 2.0, 1.0], 512: [0.9, 1.9, 0.9]}, 256, 512),
        ({256: [3.0, 1.0, 1.0], 512: [0.9, 0.9, 0.96]}, 256, 256),
        ({256: [1.0, 1.0], 512: [0.5]}, 256, 256),
        ({256: [], 512: []}, 256, 256),
        ({256: [1.0], 512: []}, 256, 256),
    ],
)
def test_another_size_than_the_devices_must_gain_a_twentieth_in_every_round(
    times_s: Mapping[int, list[float]], default: int, chosen: int
):
    assert choose_slice(times_s, default) == chosen


@given(times_s=TIMES, data=st.data())
def test_no_choice_is_slower_than_the_default_was(
    times_s: dict[int, list[float]], data: st.DataObject
):
    times_s = {size: each[:1] for size, each in times_s.items()}
    if not times_s:
        return
    default = data.draw(st.sampled_from(sorted(times_s)))
    chosen = choose_slice(times_s, default)
    assert times_s[chosen] <= times_s[default]
    if chosen != default:
        assert times_s[default][0] >= 1.02 * times_s[chosen][0]


def played(
    trial: SliceTrial, seconds: Callable[[int, int], float]
) -> list[tuple[int, list[tuple[int, int]]]]:
    """The passes of a trial: for each its size, and the slices."""
    passes: list[tuple[int, list[tuple[int, int]]]] = []
    while (size := trial.size) is not None:
        if trial.start == 0:
            passes.append((size, []))
        passes[-1][1].append((trial.start, trial.start + size))
        trial.on_slice(seconds(size, trial.start))
    return passes


def test_all_sizes_compute_the_same_tokens_forwards_and_backwards():
    trial = SliceTrial((256, 512, 4096), 512)
    passes = played(trial, lambda size, _: size / 1000)
    assert [size for size, _ in passes] == [256, 512, 4096, 4096, 512, 256, 256, 512, 4096]
    for size, slices in passes:
        assert slices == [(at, at + size) for at in range(0, 4096, size)]
    assert trial.chosen == 512


@given(default=st.sampled_from(SIZES), rates=st.lists(st.floats(100, 9999), min_size=5, max_size=5))
def test_steady_speeds_lead_to_the_fastest_or_what_is_within_a_twentieth(
    default: int, rates: list[float]
):
    speed: dict[int, float] = dict(zip(SIZES, rates, strict=True))
    trial = SliceTrial(SIZES, default)
    passes = played(trial, lambda size, _: size / speed[size])
    assert speed[trial.chosen] * 1.0501 >= max(rates)
    assert len(passes) <= NUM_ROUNDS * len(SIZES)


def test_what_is_far_slower_is_timed_once():
    trial = SliceTrial((256, 512), 512)
    passes = played(trial, lambda size, _: 3.0 if size == 256 else 1.0)
    assert [size for size, _ in passes] == [256, 512]
    assert trial.chosen == 512
