"""The order in which an agent's generates are let in."""

from __future__ import annotations

from api.agents.locks import AgentLocks
from runtime.errors import AgentChanged, HearthError
from runtime.keys import owned


class Waiter:
    """Notes how it was ended."""

    def __init__(self) -> None:
        self.error: HearthError | None = None

    def end(self, error: HearthError) -> None:
        self.error = error


def test_the_first_goes_at_once_and_the_next_when_it_leaves():
    locks = AgentLocks(10)
    first, second, third = (locks.join("a", Waiter()) for _ in range(3))
    assert [one.is_first.is_set() for one in (first, second, third)] == [True, False, False]
    assert [locks.num_before("a", one) for one in (first, second, third)] == [0, 1, 2]
    locks.leave("a", second)
    assert not third.is_first.is_set()
    locks.leave("a", first)
    assert third.is_first.is_set()


def test_agents_do_not_wait_for_one_another():
    locks = AgentLocks(10)
    locks.join("a", Waiter())
    assert locks.join("b", Waiter()).is_first.is_set()


def test_a_lane_is_full_at_its_limit_and_gone_when_it_is_empty():
    locks = AgentLocks(2)
    places = [locks.join("a", Waiter()) for _ in range(2)]
    assert locks.is_full("a")
    assert not locks.is_full("b")
    for place in places:
        locks.leave("a", place)
        locks.leave("a", place)
    assert locks.num_places("a") == 0
    assert locks.join("a", Waiter()).is_first.is_set()


def test_all_of_a_lane_end_together():
    locks = AgentLocks(10)
    passengers = [Waiter() for _ in range(3)]
    for lock_waiter in passengers:
        locks.join("a", lock_waiter)
    other = Waiter()
    locks.join("b", other)
    error = AgentChanged("reset")
    locks.end_all("a", error)
    assert [one.error for one in passengers] == [error] * 3
    assert other.error is None


def test_what_goes_on_is_counted_for_a_tenant_and_for_all():
    locks = AgentLocks(10)
    for agent in (owned("alice", "a"), owned("alice", "a"), owned("bob", "a"), "a"):
        locks.join(agent, Waiter())
    assert locks.activity("alice") == (1, 1)
    assert locks.activity("bob") == (1, 0)
    assert locks.activity("carol") == (0, 0)
    assert locks.activity() == (3, 1)
