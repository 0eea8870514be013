"""How much memory a model is given, whether it can fit, and what the hot tiers get."""

import msgspec
import pytest

from runtime.config.settings import ModelSettings
from runtime.kv_sizes import MIN_HOT_BYTES
from runtime.supervisor.placement import (
    START_S,
    LoadCapacity,
    Profile,
    Unreturned,
    hot_budgets,
    memory_budget,
    need,
    reservation,
    room_left,
    start_s,
    still_missing,
)
from runtime.types import ModelSpec
from store.types import ModelRow

GB = 1_000_000_000
FIXED = (256 << 20) + MIN_HOT_BYTES
LARGE = Profile(weights_bytes=40 * GB, context=100_000, kv_bytes_per_token=100_000)


def test_what_the_device_recommends_counts_before_the_machines_memory():
    assert memory_budget(64 * GB) == pytest.approx(64 * GB * 0.65, abs=1)
    assert memory_budget(64 * GB, 48 * GB) == pytest.approx(48 * GB * 0.85, abs=1)


def test_an_unmeasured_model_needs_weights_kv_and_a_guess_of_its_prefill():
    kv_bytes = 25_000 * 100_000
    assert reservation(LARGE) == 40 * GB + kv_bytes + 4 * GB + FIXED


@pytest.mark.parametrize(
    ("weights_bytes", "prefill_bytes"),
    [(10 * GB, 2 << 30), (2 * GB, GB), (10, 5), (30 * GB, 3 * GB)],
)
def test_the_guess_is_a_tenth_or_two_gib_but_never_more_than_half(
    weights_bytes: int, prefill_bytes: int
):
    profile = Profile(weights_bytes=weights_bytes, context=4096)
    assert reservation(profile) == weights_bytes + prefill_bytes + FIXED


def test_a_measured_peak_takes_the_place_of_the_guess_but_not_of_the_expected_kv():
    high = msgspec.structs.replace(LARGE, peak_bytes=45 * GB)
    assert reservation(high) == 45 * GB + FIXED
    low = msgspec.structs.replace(LARGE, peak_bytes=41 * GB)
    assert reservation(low) == 40 * GB + 2_500_000_000 + FIXED


def test_a_draft_model_is_reserved_with_its_target():
    draft = ModelSpec(
        id="d", path="d", context=9, model_type="m", nbytes=GB, created_s=1, kv_bytes_per_token=10
    )
    alone = ModelSpec(
        id="t",
        path="t",
        context=100_000,
        model_type="m",
        nbytes=40 * GB,
        created_s=1,
        kv_bytes_per_token=100_000,
    )
    assert Profile.of(alone, None) == LARGE
    both = Profile.of(msgspec.structs.replace(alone, draft=draft), None)
    assert (both.weights_bytes, both.kv_bytes_per_token) == (41 * GB, 100_010)
    assert reservation(both) == 41 * GB + 25_000 * 100_010 + 4_100_000_000 + FIXED


def test_ranks_hold_a_part_each_and_only_those_on_this_machine_count():
    whole = reservation(LARGE) - FIXED
    here = msgspec.structs.replace(LARGE, num_ranks=4, num_ranks_here=4)
    assert reservation(here) == whole + 4 * (256 << 20) + MIN_HOT_BYTES
    spread = msgspec.structs.replace(LARGE, num_ranks=4, num_ranks_here=1)
    assert reservation(spread) == whole // 4 + FIXED
    measured = msgspec.structs.replace(spread, peak_bytes=12 * GB)
    assert reservation(measured) == 12 * GB + FIXED


def test_rank_0_is_always_here():
    assert ModelSettings(ranks=3).num_ranks_here == 3
    assert ModelSettings(ranks=2, hosts=("10.0.0.1", "10.0.0.2")).num_ranks_here == 1
    assert ModelSettings(ranks=2, hosts=("127.0.0.1", "127.0.0.1")).num_ranks_here == 2


def test_a_small_hot_tier_is_reserved_as_it_is():
    assert reservation(LARGE) - reservation(LARGE, min_hot_bytes=5) == MIN_HOT_BYTES - 5


def test_a_swap_costs_what_it_cost_before_or_what_reading_the_weights_will():
    assert need(LARGE).swap_s == pytest.approx(43.0)
    assert need(msgspec.structs.replace(LARGE, load_ms=8000.0)).swap_s == 8.0
    assert need(msgspec.structs.replace(LARGE, start_s=0.25)).swap_s == 40.25


def test_a_start_takes_what_the_quickest_of_other_models_took_beside_its_weights():
    none, small, large = (
        ModelRow(hash=b"", label="m", weights_bytes=weights_bytes, load_ms=load_ms)
        for weights_bytes, load_ms in ((1_000, None), (500_000_000, 900.0), (4_000_000_000, 9e3))
    )
    assert start_s([]) == start_s([none]) == START_S
    assert start_s([none, small, large]) == pytest.approx(0.4)
    read_faster = ModelRow(hash=b"", label="m", weights_bytes=4_000_000_000, load_ms=2000.0)
    assert start_s([small, read_faster]) == 0.0
    assert need(LARGE).num_bytes == reservation(LARGE)


def test_a_room_holds_bytes_and_a_number_of_models():
    room = LoadCapacity(num_bytes=10, num_models=2)
    assert room.holds(10)
    assert not room.holds(11)
    assert room.without([4]) == LoadCapacity(num_bytes=6, num_models=1)
    assert not room.without([1, 1]).holds(1)
    assert room.without([1, 12]).with_back([12]) == room.without([1])
    assert LoadCapacity(num_bytes=10).without([1] * 9).holds(1)


def test_what_did_not_come_back_is_no_room_unless_it_is_there_after_all():
    room = LoadCapacity(num_bytes=40, num_models=2)
    lost = Unreturned(model="m", num_bytes=20, free_bytes=10)
    assert room_left(room, [], 5) == room
    assert room_left(room, [lost], 10) == LoadCapacity(num_bytes=20, num_models=2)
    assert room_left(room, [lost], 30) == LoadCapacity(num_bytes=30, num_models=2)
    assert room_left(room, [lost], 90) == room


def test_seven_tenths_of_it_is_back():
    lost = Unreturned(model="m", num_bytes=20, free_bytes=10)
    assert still_missing([lost], 23) == (lost,)
    assert still_missing([lost], 24) == ()


def test_what_is_left_over_is_lent_to_the_hot_tiers_in_proportion():
    wishes = {"a": MIN_HOT_BYTES + 300, "b": MIN_HOT_BYTES + 100}
    assert hot_budgets(wishes, 1000) == wishes
    assert hot_budgets(wishes, 40) == {"a": MIN_HOT_BYTES + 30, "b": MIN_HOT_BYTES + 10}
    assert hot_budgets(wishes, -5) == dict.fromkeys("ab", MIN_HOT_BYTES)
    assert hot_budgets({"a": 7}, 100) == {"a": 7}
    assert hot_budgets({}, 100) == {}
