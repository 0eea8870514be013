"""Whether reading pays is decided by what computing and reading took so far."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.kv.rates import MIN_READS, Rates

MIB = 1 << 20


def test_what_was_never_measured_costs_nothing():
    assert Rates().read_s(100 * MIB, 3) == 0.0
    assert Rates().prefill_s(1000) == 0.0


def test_a_small_slot_says_what_a_slot_costs_and_a_large_one_what_its_bytes_do():
    rates = Rates()
    for _ in range(MIN_READS):
        rates.on_read(20_000, 0.002)
    assert (rates.read_s_per_slot, rates.read_bytes_per_s) == (0.002, 0.0)
    for _ in range(MIN_READS):
        rates.on_read(100 * MIB, 0.102)
    assert rates.read_bytes_per_s == pytest.approx(1000 * MIB)
    assert rates.read_s(50 * MIB, 1) == pytest.approx(0.052)


def test_many_small_slots_do_not_pay_for_their_opening_twice():
    rates = Rates()
    for _ in range(56):
        rates.on_read(21_000, 0.002)
    assert rates.read_s(56 * 21_000, 56) == pytest.approx(56 * 0.002 / 2)


def test_several_slots_are_read_at_a_time():
    rates = Rates(read_bytes_per_s=100.0)
    assert rates.read_s(100, 1) == 1.0
    assert rates.read_s(100, 2) == 0.5
    assert rates.read_s(100, 9) == 0.5


def test_figures_follow_what_is_measured_smoothly():
    rates = Rates()
    rates.on_prefill(0, 1.0)
    assert rates.prefill_s_per_token == 0.0
    rates.on_prefill(100, 1.0)
    rates.on_prefill(100, 2.0)
    assert rates.prefill_s(1000) == pytest.approx(13.0)


def test_a_device_that_is_slow_once_is_read_from_all_the_same():
    rates = Rates()
    rates.on_read(100 * MIB, 30.0)
    assert rates.read_s(100 * MIB, 1) == 0.0
    for _ in range(3):
        rates.on_read(100 * MIB, 0.1)
    for _ in range(2):
        rates.on_read(100 * MIB, 30.0)
        assert rates.read_bytes_per_s == pytest.approx(1000 * MIB)
    rates.on_read(100 * MIB, 30.0)
    assert rates.read_bytes_per_s == pytest.approx(100 * MIB / 30)


def test_a_device_that_was_too_slow_is_tried_again_and_then_less_often():
    rates = Rates()
    tries = [now_s for now_s in range(10_000) if rates.pays(2.0, 1.0, float(now_s))]
    assert tries == [60, 180, 420, 900, 1860, 3780, 7380]


def test_once_a_device_is_fast_again_it_is_read_from_and_a_later_doubt_begins_anew():
    rates = Rates()
    assert not rates.pays(2.0, 1.0, 0.0)
    assert rates.pays(2.0, 1.0, 60.0)
    assert rates.pays(0.5, 1.0, 61.0)
    assert not rates.pays(2.0, 1.0, 62.0)
    assert rates.pays(2.0, 1.0, 122.0)


@given(
    slow=st.lists(st.floats(1.0, 1e4), max_size=2),
    before=st.lists(st.floats(0.05, 0.2), min_size=3, max_size=8),
    after=st.lists(st.floats(0.05, 0.2), max_size=8),
)
def test_two_slow_reads_among_others_never_make_a_device_slow(
    slow: list[float], before: list[float], after: list[float]
):
    rates = Rates()
    for seconds in [*before, *slow, *after]:
        rates.on_read(100 * MIB, seconds)
    assert rates.read_s(100 * MIB, 1) <= 0.2 * 1.0001
