"""The swap policy, move by move: who is served, who loads, who leaves and when."""

import random

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.supervisor.placement import LoadCapacity, Need
from runtime.supervisor.swap_policy import (
    Resident,
    Returns,
    SwapPlan,
    SwapState,
    Terms,
    Waiting,
    plan,
)
from runtime.types import Priority
from tests.examples import usual

TERMS = Terms()
ONE = LoadCapacity(num_bytes=10)
QUANTUM_S = 32.0
LINGER_S = 4.0


def waits(request_id: str, since_s: float = 0.0, priority: str = "default") -> Waiting:
    """A request; its model is the first letter of its id."""
    one = Waiting(request_id=request_id, model=request_id[0], since_s=since_s)
    return msgspec.structs.replace(one, priority=priority)


def ready(model: str, num_bytes: int = 10, **known: object) -> Resident:
    one = Resident(model=model, state="ready", reserved_bytes=num_bytes, ready_since_s=0.0)
    return msgspec.structs.replace(one, **known)


def decide(
    waiting: list[Waiting],
    residents: list[Resident],
    now_s: float = 100.0,
    room: LoadCapacity = ONE,
    swap_s: float = 8.0,
    **sizes: int,
) -> SwapPlan:
    """A plan for models of 10 bytes, or their `sizes`, and swaps of 8 s unless told otherwise."""
    names = {one.model for one in waiting} | {one.model for one in residents}
    needs = {name: Need(num_bytes=sizes.get(name, 10), swap_s=swap_s) for name in names}
    swap_state = SwapState(
        waiting=tuple(waiting),
        residents=tuple(residents),
        needs=needs,
        room=room,
        now_s=now_s,
    )
    return plan(swap_state, TERMS)


def test_nothing_follows_from_nothing():
    assert decide([], []) == SwapPlan()
    assert decide([], [ready("a", last_finished_s=1.0)]) == SwapPlan()


def test_a_model_that_fits_is_loaded_and_what_waits_is_granted_once_it_is_ready():
    assert decide([waits("a1", 99.0)], []).loads == ("a",)
    loading = msgspec.structs.replace(ready("a"), state="loading", ready_since_s=None)
    assert decide([waits("a1", 99.0)], [loading]).grants == ()
    granted = decide([waits("a2", 98.0), waits("a1", 97.0)], [ready("a", num_running=5)])
    assert granted == SwapPlan(grants=("a1", "a2"))


def test_classes_go_first_and_inside_a_class_who_came_first():
    waiting = [waits("a1", 60, "background"), waits("a2", 61), waits("a3", 62, "interactive")]
    assert decide(waiting, [ready("a")], now_s=70.0).grants == ("a3", "a2", "a1")


def test_after_a_minute_of_waiting_a_class_is_gained():
    waiting = [waits("b1", 40.0), waits("c1", 41.0, "interactive")]
    assert decide(waiting, [], now_s=99.0).loads == ("c",)
    assert decide(waiting, [], now_s=99.0).wake_s == 100.0
    assert decide(waiting, [], now_s=100.0).loads == ("b",)
    assert decide([waits("b1", 0.0, "background"), waits("c1", 1)], [], 120.0).loads == ("b",)


def test_while_the_quantum_lasts_admission_stays_open_then_it_closes():
    busy = ready("a", num_running=1, ready_since_s=50.0)
    waiting = [waits("b1", 90.0), waits("a1", 95.0)]
    during = decide(waiting, [busy], now_s=90.0 + QUANTUM_S - 0.5)
    assert (during.grants, during.closed, during.wake_s) == (("a1",), frozenset(), 122.0)
    after = decide(waiting, [busy], now_s=90.0 + QUANTUM_S)
    assert (after.grants, after.closed, after.unloads) == ((), {"a"}, ())
    drained = decide(waiting, [ready("a", ready_since_s=50.0)], now_s=90.0 + QUANTUM_S)
    assert drained.unloads == ("a",)


def test_the_quantum_begins_no_earlier_than_the_model_was_ready():
    busy = ready("a", num_running=1, ready_since_s=95.0)
    waiting = [waits("b1", 50.0), waits("a1", 96.0)]
    assert decide(waiting, [busy], now_s=95.0 + QUANTUM_S - 1).grants == ("a1",)
    assert decide(waiting, [busy], now_s=95.0 + QUANTUM_S).closed == {"a"}


@pytest.mark.parametrize(
    ("swap_s", "quantum_s"), [(0.4, 2.0), (1.0, 4.0), (10.0, 40.0), (60.0, 120.0)]
)
def test_the_quantum_follows_the_swaps_cost_within_bounds(swap_s: float, quantum_s: float):
    assert TERMS.quantum_s(swap_s) == quantum_s
    assert TERMS.urgent_quantum_s(swap_s) == swap_s
    assert TERMS.linger_s(swap_s) == min(swap_s / 2, 10.0)
    assert TERMS.grace_s(swap_s) == min(swap_s / 2, 0.3)


def test_an_idle_model_leaves_at_once_where_swaps_are_quick():
    assert [TERMS.grace_s(swap_s) for swap_s in (0.0, 0.1, 0.29, 0.3)] == [0.0, 0.0, 0.0, 0.15]
    idle = ready("a", last_finished_s=5.0)
    assert decide([waits("b1", 100.0)], [idle], now_s=100.0, swap_s=0.29).unloads == ("a",)
    assert decide([waits("b1", 100.0)], [idle], now_s=100.0, swap_s=0.3).wake_s == 100.15


def test_an_interactive_waiter_closes_a_stay_after_one_swap():
    busy = ready("a", num_running=1, ready_since_s=50.0)
    waiting = [waits("b1", 90.0, "interactive"), waits("a1", 95.0)]
    assert decide(waiting, [busy], now_s=97.5).grants == ("a1",)
    assert decide(waiting, [busy], now_s=97.5).wake_s == 98.0
    assert decide(waiting, [busy], now_s=98.0).closed == {"a"}
    late = ready("a", num_running=1, ready_since_s=95.0)
    assert decide(waiting, [late], now_s=98.0).wake_s == 103.0


def test_among_interactive_requests_a_stay_lasts_as_long_as_among_others():
    waiting = [waits("b1", 90.0, "interactive"), waits("a1", 95.0, "interactive")]
    busy = ready("a", num_running=1, ready_since_s=50.0)
    assert decide(waiting, [busy]).wake_s == 122.0
    serving = msgspec.structs.replace(busy, is_interactive=True)
    assert decide(waiting[:1], [serving]).wake_s == 122.0


def test_an_interactive_waiter_takes_nothing_from_a_cohort():
    closed = ready("a", ready_since_s=0.0, cohort=frozenset({"a1"}))
    waiting = [waits("b1", 0.0, "interactive"), waits("a1", 0.0), waits("a9", 90.0)]
    assert decide(waiting, [closed]).grants == ("a1",)


def test_a_model_that_was_idle_stays_for_an_instant_for_who_asks_together_with_others():
    idle = ready("a", last_finished_s=5.0)
    together = [waits("b1", 99.9), waits("c1", 99.95)]
    assert decide(together, [idle], now_s=100.0) == SwapPlan(follows="b", wake_s=99.9 + 0.3)
    assert decide([*together, waits("a1", 100.0)], [idle], now_s=100.0).grants == ("a1",)
    assert decide(together, [idle], now_s=100.2).unloads == ("a",)
    assert decide([waits("b1", 99.9, "background")], [idle], now_s=100.0).unloads == ("a",)


def test_the_cohort_is_served_whatever_the_clock_says():
    closed = ready("a", ready_since_s=0.0, cohort=frozenset({"a1", "a2"}))
    result = decide([waits("b1", 0.0), waits("a1", 0.0), waits("a9", 90.0)], [closed])
    assert (result.grants, result.unloads, result.closed) == (("a1",), (), {"a"})


def test_an_idle_model_lingers_for_the_next_turn_and_leaves_then():
    idle = ready("a", last_finished_s=99.0)
    lingering = decide([waits("b1", 98.0)], [idle])
    assert (lingering.unloads, lingering.wake_s) == ((), 99.0 + LINGER_S)
    assert decide([waits("b1", 98.0), waits("a1", 100.0)], [idle]).grants == ("a1",)
    assert decide([waits("b1", 98.0)], [idle], now_s=99.0 + LINGER_S).unloads == ("a",)


def test_an_idle_model_lingers_only_if_some_request_came_back_in_time_of_late():
    idle = ready("a", last_finished_s=99.0, returns_s=(30.0, LINGER_S, 5.0))
    assert decide([waits("b1", 98.0)], [idle]).wake_s == 99.0 + LINGER_S
    late = ready("a", last_finished_s=99.0, returns_s=(30.0, LINGER_S + 0.1, 5.0))
    assert decide([waits("b1", 98.0)], [late]).unloads == ("a",)


def test_a_return_is_counted_from_running_dry_and_the_last_three_are_known():
    returns = Returns()
    returns.asked(1.0)
    assert returns.last_s == ()
    for dry_s, asked_s in ((2.0, 3.0), (4.0, 6.0), (7.0, 10.0), (11.0, 15.0)):
        returns.ran_dry(dry_s)
        returns.asked(asked_s)
        returns.asked(asked_s + 0.5)  # beside the one before
    assert returns.last_s == (2.0, 3.0, 4.0)


def test_lingering_ends_with_the_quantum():
    idle = ready("a", last_finished_s=99.0)
    assert decide([waits("b1", 100.5 - QUANTUM_S)], [idle]).wake_s == 100.5
    assert decide([waits("b1", 100.0 - QUANTUM_S)], [idle]).unloads == ("a",)


def test_a_model_that_served_nobody_yet_does_not_linger():
    assert decide([waits("b1", 99.0)], [ready("a", ready_since_s=99.5)]).unloads == ("a",)


def test_two_that_fit_together_stay_together():
    room = LoadCapacity(num_bytes=20)
    result = decide([waits("b1", 10.0), waits("a1", 99.0)], [ready("a")], room=room)
    assert result == SwapPlan(grants=("a1",), loads=("b",))


def test_the_number_of_models_is_a_limit_of_its_own():
    room = LoadCapacity(num_bytes=1000, num_models=1)
    assert decide([waits("b1", 10.0)], [ready("a", last_finished_s=50.0)], room=room) == SwapPlan(
        unloads=("a",), closed=frozenset({"a"}), follows="b", wake_s=None
    )


def test_what_is_leaving_still_takes_its_room():
    leaving = msgspec.structs.replace(ready("a"), state="leaving")
    assert decide([waits("b1", 99.0)], [leaving]).loads == ()
    assert decide([waits("a1", 99.0)], [leaving]) == SwapPlan(follows="a", wake_s=159.0)
    assert decide([waits("b1", 99.0)], [leaving], room=LoadCapacity(num_bytes=20)).loads == ("b",)


def test_the_pinned_never_leave_and_who_cannot_fit_beside_them_is_told():
    pinned = ready("a", is_pinned=True)
    result = decide([waits("b1", 0.0)], [pinned], now_s=1000.0)
    assert (result.unloads, result.blocked) == ((), {"b"})
    beside = [pinned, ready("c", last_finished_s=0.0)]
    assert decide([waits("b1", 0.0)], beside, room=LoadCapacity(num_bytes=20)).unloads == ("c",)


def test_what_nobody_can_load_holds_nobody_else_back():
    waiting = [waits("b1", 0.0), waits("c1", 90.0)]
    pinned = ready("a", is_pinned=True)
    result = decide(waiting, [pinned], room=LoadCapacity(num_bytes=15), c=5)
    assert (result.loads, result.blocked) == (("c",), {"b"})


def test_the_cheapest_set_leaves():
    residents = [ready(name, size, last_finished_s=0.0) for name, size in [("a", 4), ("c", 6)]]
    assert decide([waits("b1", 99.0)], residents, b=4).unloads == ("a",)
    assert decide([waits("b1", 99.0)], residents, b=6).unloads == ("c",)
    assert decide([waits("b1", 99.0)], residents, b=10).unloads == ("a", "c")


def test_who_was_used_longest_ago_leaves_and_the_idle_before_the_busy():
    room = LoadCapacity(num_bytes=20)
    pair = [ready("a", last_finished_s=50.0), ready("c", last_finished_s=40.0)]
    assert decide([waits("b1", 99.0)], pair, room=room).unloads == ("c",)
    pair = [ready("a", last_finished_s=50.0), ready("c", last_finished_s=40.0, num_running=1)]
    assert decide([waits("b1", 0.0)], pair, room=room).unloads == ("a",)


def test_a_set_leaves_together_or_not_yet():
    residents = [ready("a", 5, last_finished_s=0.0), ready("c", 5, num_running=1)]
    result = decide([waits("b1", 90.0)], residents)
    assert (result.unloads, result.closed, result.wake_s) == ((), frozenset(), 122.0)
    result = decide([waits("b1", 90.0)], residents, now_s=122.0)
    assert (result.unloads, result.closed) == ((), {"a", "c"})


def test_a_load_that_nobody_awaits_is_given_up_for_one_that_is():
    loading = Resident(model="a", state="loading", reserved_bytes=10)
    assert decide([waits("b1", 99.0)], [loading]).unloads == ("a",)
    assert decide([waits("b1", 99.0), waits("a1", 99.5)], [loading]).unloads == ()
    assert decide([waits("b1", 99.0, "background")], [loading]).unloads == ()
    pinned = msgspec.structs.replace(loading, is_pinned=True)
    assert decide([waits("b1", 99.0)], [pinned]).unloads == ()


def test_background_work_displaces_nobody_who_is_in_use_and_may_take_an_idle_ones_place():
    waiting = [waits("b1", 0.0, "background")]
    assert decide(waiting, [ready("a", num_running=1)], now_s=1000.0) == SwapPlan()
    idle = ready("a", last_finished_s=50.0)
    assert decide(waiting, [idle]).unloads == ("a",)
    assert decide([*waiting, waits("a1", 99.0)], [idle]).grants == ("a1",)


def test_background_work_of_a_model_that_is_to_leave_waits_unless_it_is_its_cohort():
    waiting = [waits("b1", 99.0), waits("a1", 98.0, "background")]
    busy = ready("a", num_running=1)
    assert decide(waiting, [busy]).grants == ()
    assert decide(waiting[1:], [busy]).grants == ("a1",)
    assert decide(waiting, [ready("a", num_running=1, cohort=frozenset({"a1"}))]).grants == ("a1",)
    assert decide(waiting, [ready("a")]).unloads == ("a",)


def test_nobody_takes_the_room_that_another_one_waits_for():
    residents = [ready("a", 8, num_running=1)]
    waiting = [waits("b1", 50.0), waits("c1", 60.0)]
    assert decide(waiting, residents, b=8, c=2).loads == ("c",)
    assert decide(waiting, residents, b=10, c=2).loads == ()


times = st.floats(0.0, 300.0)
classes: st.SearchStrategy[Priority] = st.sampled_from(["interactive", "default", "background"])
requests = st.lists(st.tuples(st.sampled_from("abcde"), times, classes), max_size=8).map(
    lambda drawn: [waits(f"{m}{i}", since_s, p) for i, (m, since_s, p) in enumerate(drawn)]
)
processes = st.lists(
    st.builds(
        Resident,
        model=st.sampled_from("abcde"),
        state=st.sampled_from(["loading", "ready", "leaving"]),
        reserved_bytes=st.integers(1, 10),
        ready_since_s=times,
        num_running=st.integers(0, 2),
        last_finished_s=st.none() | times,
        returns_s=st.lists(times, max_size=3).map(tuple),
        is_pinned=st.booleans(),
        cohort=st.frozensets(st.sampled_from([f"{m}{i}" for m in "abc" for i in range(4)])),
    ),
    max_size=4,
    unique_by=lambda one: one.model,
)
rooms = st.builds(
    LoadCapacity, num_bytes=st.integers(5, 30), num_models=st.none() | st.integers(1, 4)
)


@settings(deadline=None, max_examples=usual(300))
@given(waiting=requests, residents=processes, room=rooms, dice=st.randoms())
def test_whatever_the_scene_no_move_is_against_the_rules(
    waiting: list[Waiting], residents: list[Resident], room: LoadCapacity, dice: random.Random
):
    result = decide(waiting, residents, now_s=300.0, room=room)
    by_model = {one.model: one for one in residents}
    model_of = {one.request_id: one.model for one in waiting}
    assert len(set(result.grants)) == len(result.grants)
    assert all(by_model[model_of[one]].state == "ready" for one in result.grants)
    for model in result.unloads:
        one, awaited = by_model[model], {r for r, m in model_of.items() if m == model}
        assert one.state != "leaving"
        assert not one.is_pinned
        assert not (one.state == "ready" and one.num_running)
        assert not (one.state == "loading" and awaited)
        assert not (one.state == "ready" and awaited & one.cohort)
        assert not awaited or model in result.closed
        assert not awaited & set(result.grants)
    left = room.without(one.reserved_bytes for one in residents)
    for model in result.loads:
        assert model not in by_model
        assert left.holds(10)
        left = left.without([10])
    assert result.wake_s is None or result.wake_s > 300.0

    dice.shuffle(waiting)
    dice.shuffle(residents)
    assert decide(waiting, residents, now_s=300.0, room=room) == result


def test_what_follows_is_the_first_that_waits_for_somebody_to_leave():
    waiting = [waits("b1", 60.0), waits("c1", 50.0), waits("d1", 90.0, "background")]
    busy = ready("a", num_running=1)
    assert decide(waiting, [busy]).follows == "c"
    assert decide(waiting[:1], [busy]).follows == "b"
    assert decide(waiting, []).loads == ("c",)
    assert decide(waiting, []).follows == "b"
    assert decide([waits("a1", 60.0)], [busy]).follows is None
    assert decide(waiting[2:], [busy]).follows is None, "it displaces nobody"
    pinned = msgspec.structs.replace(busy, is_pinned=True)
    assert decide(waiting, [pinned]).follows is None, "it is not going to leave"
