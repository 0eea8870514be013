"""Whether reading pays is decided by what computing and reading took so far."""

import pytest

from runtime.kv.rates import Rates

MIB = 1 << 20


def test_what_was_never_measured_costs_nothing():
    assert Rates().read_s(100 * MIB, 3) == 0.0
    assert Rates().prefill_s(1000) == 0.0


def test_a_small_slot_says_what_a_slot_costs_and_a_large_one_what_its_bytes_do():
    rates = Rates()
    rates.on_read(20_000, 0.002)
    assert (rates.read_s_per_slot, rates.read_bytes_per_s) == (0.002, 0.0)
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
