"""What is done when memory runs short, step by step."""

import pytest

from runtime.supervisor.pressure import MemoryPressure, PressureRelief, floor_bytes, relieve

FLOOR = 100


def step(
    strain: MemoryPressure, available: int, *, lent: int = 0, idle: tuple[str, ...] = ()
) -> PressureRelief:
    return relieve(strain, available_bytes=available, floor_bytes=FLOOR, lent_bytes=lent, idle=idle)


def test_with_enough_memory_nothing_happens():
    assert step(MemoryPressure(), 100, lent=50, idle=("a",)) == PressureRelief(
        strain=MemoryPressure()
    )


def test_hot_tiers_give_back_exactly_what_is_missing():
    assert step(MemoryPressure(), 70, lent=50) == PressureRelief(
        strain=MemoryPressure(lendable_bytes=20)
    )


def test_and_all_they_have_when_that_is_less():
    assert step(MemoryPressure(), 10, lent=50) == PressureRelief(
        strain=MemoryPressure(lendable_bytes=0)
    )


def test_what_they_may_hold_is_lowered_further_while_they_still_shrink():
    lower = step(MemoryPressure(lendable_bytes=20), 90, lent=50, idle=("a",))
    assert lower == PressureRelief(strain=MemoryPressure(lendable_bytes=10))


def test_then_the_first_idle_model_leaves_and_no_second_at_once():
    relief = step(MemoryPressure(lendable_bytes=0), 10, lent=0, idle=("a", "b"))
    assert relief == PressureRelief(strain=MemoryPressure(lendable_bytes=0), leaves="a")


def test_at_last_requests_are_refused():
    assert step(MemoryPressure(lendable_bytes=0), 10).strain == MemoryPressure(
        lendable_bytes=0, refuses=True
    )


def test_they_are_taken_again_as_soon_as_the_floor_is_there():
    assert step(MemoryPressure(lendable_bytes=0, refuses=True), 100).strain == MemoryPressure(
        lendable_bytes=0
    )


@pytest.mark.parametrize(("available", "lendable"), [(149, 7), (150, 7), (152, 8), (250, 57)])
def test_more_is_lent_again_by_halves_of_what_is_beyond_enough(available: int, lendable: int):
    assert step(MemoryPressure(lendable_bytes=7), available).strain == MemoryPressure(
        lendable_bytes=lendable
    )


def test_the_floor_is_a_twentieth_and_never_more_than_a_gigabyte():
    assert floor_bytes(1000) == 50
    assert floor_bytes(64 << 30) == 1 << 30
