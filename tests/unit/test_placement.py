"""Which models leave so that another one fits."""

import pytest

from runtime.placement import Resident, victims


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
