"""The order in which an agent's generates are let in."""

from __future__ import annotations

from api.agents.lanes import Lanes
from runtime.errors import AgentChanged, HearthError


class Passenger:
    """Notes how it was ended."""

    def __init__(self) -> None:
        self.error: HearthError | None = None

    def end(self, error: HearthError) -> None:
        self.error = error


def test_the_first_goes_at_once_and_the_next_when_it_leaves():
    lanes = Lanes(10)
    first, second, third = (lanes.join("a", Passenger()) for _ in range(3))
    assert [one.is_first.is_set() for one in (first, second, third)] == [True, False, False]
    assert [lanes.num_before("a", one) for one in (first, second, third)] == [0, 1, 2]
    lanes.leave("a", second)
    assert not third.is_first.is_set()
    lanes.leave("a", first)
    assert third.is_first.is_set()


def test_agents_do_not_wait_for_one_another():
    lanes = Lanes(10)
    lanes.join("a", Passenger())
    assert lanes.join("b", Passenger()).is_first.is_set()


def test_a_lane_is_full_at_its_limit_and_gone_when_it_is_empty():
    lanes = Lanes(2)
    places = [lanes.join("a", Passenger()) for _ in range(2)]
    assert lanes.is_full("a")
    assert not lanes.is_full("b")
    for place in places:
        lanes.leave("a", place)
        lanes.leave("a", place)
    assert lanes.num_places("a") == 0
    assert lanes.join("a", Passenger()).is_first.is_set()


def test_all_of_a_lane_end_together():
    lanes = Lanes(10)
    passengers = [Passenger() for _ in range(3)]
    for passenger in passengers:
        lanes.join("a", passenger)
    other = Passenger()
    lanes.join("b", other)
    error = AgentChanged("reset")
    lanes.end_all("a", error)
    assert [one.error for one in passengers] == [error] * 3
    assert other.error is None
