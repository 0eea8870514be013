"""The table of a model's states: complete, and no way to be stuck in it."""

import math
from collections.abc import Iterator

import pytest

from runtime.supervisor.lifecycle import (
    EVENTS,
    HAS_PROCESS,
    MODEL_STATES,
    RESTING,
    STATES,
    Lifecycle,
    ModelEvent,
    ModelState,
)

LIMITS: dict[ModelState, float] = {state: 5.0 for state in STATES if state not in RESTING}


def path(*events: ModelEvent) -> Lifecycle:
    life = Lifecycle(LIMITS)
    for event in events:
        assert life.apply(event, 0.0) is not None, (life.state, event)
    return life


def test_every_state_is_in_the_table_and_can_be_reached():
    assert set(MODEL_STATES) == set(STATES)
    reached: set[ModelState] = {"cold"}
    fresh: list[ModelState] = ["cold"]
    while fresh:
        found: list[ModelState] = [to for one in fresh for to in MODEL_STATES[one].events.values()]
        fresh = [one for one in found if one not in reached]
        reached.update(fresh)
    assert reached == set(STATES)


def test_every_event_means_something_somewhere():
    assert {event for row in MODEL_STATES.values() for event in row.events} == set(EVENTS)


def test_every_state_that_does_not_rest_is_left_by_its_timeout():
    assert {state for state in STATES if "overdue" not in MODEL_STATES[state].events} == RESTING


def test_timeouts_alone_lead_from_every_state_to_rest():
    for state in STATES:
        walked: list[ModelState] = [state]
        while walked[-1] not in RESTING:
            walked.append(MODEL_STATES[walked[-1]].events["overdue"])
            assert len(walked) == len(set(walked)), walked


def paths_without_process() -> Iterator[tuple[ModelState, ModelEvent, ModelState]]:
    for before, row in MODEL_STATES.items():
        for event, after in row.events.items():
            if before in HAS_PROCESS and after not in HAS_PROCESS:
                yield before, event, after


def test_memory_is_given_back_only_when_the_process_is_gone_or_given_up():
    assert set(paths_without_process()) == {
        ("flushing", "gone", "cold"),
        ("stopping", "gone", "cold"),
        ("crashed", "held", "backing_off"),
        ("crashed", "given_up", "failed"),
        ("crashed", "overdue", "failed"),
    }


@pytest.mark.parametrize("state", ["backing_off", "failed"])
def test_who_holds_back_does_so_until_its_time_or_somebody_forgives(state: ModelState):
    assert MODEL_STATES[state].events == {"over": "cold", "overdue": "cold"}


def test_the_way_up_and_down():
    life = path("wanted", "admitted", "hello", "read", "up", "taken", "idle", "leave", "flushed")
    assert life.state == "stopping"
    assert life.apply("gone", 7.0) == "stopping"
    assert (life.state, life.since_s, life.due_s) == ("cold", 7.0, math.inf)


@pytest.mark.parametrize("state", STATES)
def test_an_event_that_means_nothing_changes_nothing(state: ModelState):
    for event in EVENTS:
        life = Lifecycle(LIMITS)
        life.state = state
        before = (life.state, life.since_s, life.due_s)
        if event in MODEL_STATES[state].events:
            assert life.apply(event, 3.0) == state
            assert life.state == MODEL_STATES[state].events[event]
        else:
            assert life.apply(event, 3.0) is None
            assert (life.state, life.since_s, life.due_s) == before


def test_a_limit_can_be_given_for_one_stay():
    life = path("wanted", "admitted", "lost")
    life.apply("held", 10.0, limit_s=1.5)
    assert not life.is_overdue(11.4)
    assert life.is_overdue(11.5)


def test_a_lifecycle_without_all_timeouts_is_refused():
    with pytest.raises(ValueError, match="no timeout for crashed"):
        Lifecycle({state: 1.0 for state in LIMITS if state != "crashed"})
