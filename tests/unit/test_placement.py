"""How much memory a model is given, whether it can fit, and what the hot tiers get."""

import msgspec
import pytest

from runtime.errors import ModelTooLarge
from runtime.kv_sizes import MIN_HOT_BYTES
from runtime.placement import (
    Need,
    Profile,
    Resident,
    Room,
    check_fits,
    hot_budgets,
    memory_budget,
    need,
    reservation,
    victims,
)

GB = 1_000_000_000
FIXED = (256 << 20) + MIN_HOT_BYTES
LARGE = Profile(weights_bytes=40 * GB, context=100_000, kv_bytes_per_token=100_000)


def resident(model: str, last_used_s: float = 0.0, *, is_busy: bool = False) -> Resident:
    return Resident(model=model, is_busy=is_busy, last_used_s=last_used_s)


def test_nobody_leaves_while_there_is_room():
    assert victims([], 1) == ()
    assert victims([resident("a")], 2) == ()
    assert victims([resident("a", is_busy=True)], 2) == ()


def test_the_least_recently_used_leaves_first():
    residents = [resident("a", 3.0), resident("b", 1.0), resident("c", 2.0)]
    assert victims(residents, 3) == ("b",)
    assert victims(residents, 2) == ("b", "c")
    assert victims(residents, 1) == ("b", "c", "a")


def test_the_busy_stay_even_when_they_were_used_longest_ago():
    residents = [resident("a", 1.0, is_busy=True), resident("b", 2.0)]
    assert victims(residents, 2) == ("b",)


def test_no_choice_is_none_and_stops_nobody_in_vain():
    assert victims([resident("a", is_busy=True)], 1) is None
    assert victims([resident("a", is_busy=True), resident("b")], 1) is None


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_equal_times_keep_the_order_of_the_residents(order: tuple[int, int]):
    pair = [resident("a"), resident("b")]
    residents = [pair[i] for i in order]
    assert victims(residents, 2) == (residents[0].model,)


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


def test_a_small_hot_tier_is_reserved_as_it_is():
    assert reservation(LARGE) - reservation(LARGE, min_hot_bytes=5) == MIN_HOT_BYTES - 5


def test_a_swap_costs_what_it_cost_before_or_what_reading_the_weights_will():
    assert need(LARGE).swap_s == pytest.approx(43.0)
    assert need(msgspec.structs.replace(LARGE, load_ms=8000.0)).swap_s == 8.0
    assert need(LARGE).num_bytes == reservation(LARGE)


def test_a_room_holds_bytes_and_a_number_of_models():
    room = Room(num_bytes=10, num_models=2)
    assert room.holds(10)
    assert not room.holds(11)
    assert room.without([4]) == Room(num_bytes=6, num_models=1)
    assert not room.without([1, 1]).holds(1)
    assert room.without([1, 12]).with_back([12]) == room.without([1])
    assert Room(num_bytes=10).without([1] * 9).holds(1)


def test_a_model_that_can_never_fit_is_refused_with_both_numbers():
    check_fits("m", Need(num_bytes=10, swap_s=1.0), Room(num_bytes=10, num_models=1))
    with pytest.raises(ModelTooLarge) as caught:
        check_fits("m", Need(num_bytes=30 * GB, swap_s=1.0), Room(num_bytes=20 * GB))
    assert (caught.value.num_bytes, caught.value.limit_bytes) == (30 * GB, 20 * GB)
    assert "30.00 GB" in caught.value.message
    assert "20.00 GB" in caught.value.message
    assert caught.value.code == "model_too_large"


def test_what_is_left_over_is_lent_to_the_hot_tiers_in_proportion():
    wishes = {"a": MIN_HOT_BYTES + 300, "b": MIN_HOT_BYTES + 100}
    assert hot_budgets(wishes, 1000) == wishes
    assert hot_budgets(wishes, 40) == {"a": MIN_HOT_BYTES + 30, "b": MIN_HOT_BYTES + 10}
    assert hot_budgets(wishes, -5) == dict.fromkeys("ab", MIN_HOT_BYTES)
    assert hot_budgets({"a": 7}, 100) == {"a": 7}
    assert hot_budgets({}, 100) == {}
