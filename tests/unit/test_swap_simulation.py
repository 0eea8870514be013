"""The swap policy at work for hours of simulated time: nobody starves, nothing thrashes."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ops.studies.swap_policies import (
    TWO_MODELS,
    Case,
    Row,
    agents,
    always_lingers,
    bursts,
    classes,
    common_start,
    drain,
    floor_of_20_s,
    hand_over,
    helper,
    max_wait,
    models,
    num_done,
    ours,
    ping_pong,
    row,
    three_in_turn,
    urgent,
    waits,
)
from ops.studies.swap_simulation import Agent, IllegalMove, Model, Workload, quantile, simulate
from runtime.supervisor.placement import LoadCapacity
from runtime.supervisor.swap_policy import SwapPlan, SwapState
from tests.examples import usual

HOUR_S = 3600.0
FLOOR = "a floor of 20 s"
IN_TURN = {"drain": 13.4, "floor": 42.8, "ours": 10.8}
"""Seconds that a turn waits at the most where three models take turns, by policy."""
OURS = "cohort + quantum + linger"
SEEDS = (0, 1)
PING_PONG = Case("ping-pong", 8.0, ping_pong())
HELPER = Case("helper", 8.0, helper())


@pytest.fixture(scope="module")
def helped() -> Row:
    return row(HELPER, OURS, SEEDS)


def test_three_busy_agents_and_a_helper_share_without_starving_or_thrashing(helped: Row):
    starving = row(HELPER, "starve", SEEDS)
    assert starving.waits["B"].p50_s == 2 * HOUR_S
    assert helped.waits["B"].p95_s <= 100.0
    assert helped.done_per_h >= starving.done_per_h * 2 / 3


def test_two_agents_that_take_turns_get_a_fifth_more_done_than_by_draining():
    drained, shared = (row(PING_PONG, policy, SEEDS) for policy in ("drain", OURS))
    assert shared.done_per_h >= 1.2 * drained.done_per_h
    assert shared.loads_per_h <= 0.5 * drained.loads_per_h


@pytest.mark.parametrize("swap_s", [0.2, 8.0, 25.0])
def test_an_agent_that_asks_two_models_in_turn_waits_for_a_swap_and_not_for_itself(swap_s: float):
    """Once it is seen that nobody comes back before the other model was asked."""
    turns = simulate(hand_over(swap_s), ours, HOUR_S).turns
    longest_s = swap_s + min(swap_s / 2, 0.3) * (swap_s >= 0.3)
    assert all(turn.started_s is not None for turn in turns[:-1])
    for turn in turns[4:-1]:
        assert (turn.started_s or 0.0) - turn.since_s <= longest_s + 1e-6
    before = simulate(hand_over(swap_s), always_lingers, HOUR_S)
    assert num_done(before) < sum(turn.finished_s is not None for turn in turns) or swap_s < 1.0


def test_models_that_swap_within_half_a_second_keep_nobody_waiting_for_a_floor():
    drained, fixed, follows = (
        simulate(three_in_turn(), policy, 600.0) for policy in (drain, floor_of_20_s, ours)
    )
    longest = {
        name: waits(one.turns, 600.0).max_s
        for name, one in zip(IN_TURN, (drained, fixed, follows), strict=True)
    }
    assert longest == IN_TURN
    strict, shared = (
        sum(num_done(simulate(three_in_turn(), policy, 600.0, seed)) for seed in SEEDS)
        for policy in (drain, ours)
    )
    assert shared >= 1.3 * strict
    assert follows.loading_s <= 0.2 * 600.0


def test_an_interactive_request_waits_for_a_swap_and_what_runs_not_for_a_stay():
    case = Case("urgent", 8.0, urgent())
    fixed, early = (row(case, one, SEEDS) for one in (FLOOR, OURS))
    assert early.waits["B"].p95_s <= 0.6 * fixed.waits["B"].p95_s
    assert early.done_per_h >= 0.9 * fixed.done_per_h
    # What runs when it closes, 15 s at most, ends first; then it is a swap.
    assert early.waits["B"].max_s <= 8.0 + 15.0 + 8.0


def test_agents_that_start_together_cost_one_swap_for_each_model_that_is_not_there():
    starts = {
        turn.agent.name: turn.started_s for turn in simulate(common_start(), ours, 2 * HOUR_S).turns
    }
    assert starts["A-late"] == pytest.approx(100.2)
    # A's requests have come late before, so it does not linger; nothing is known of B.
    assert starts["B-late"] == pytest.approx(100.2 + 1.5 + 0.5)
    assert starts["C-late"] == pytest.approx(100.2 + 1.5 + 0.5 + 1.5 + 0.25 + 0.5)
    assert simulate(common_start(), ours, 2 * HOUR_S).num_loads == 3
    assert simulate(common_start(), floor_of_20_s, 2 * HOUR_S).num_loads == 4


def test_the_naive_rule_livelocks_where_ours_does_not(helped: Row):
    naive = row(HELPER, "max wait 20 s", SEEDS)
    assert naive.done_per_h < helped.done_per_h / 3
    assert naive.loading_share > 0.8
    dear = Case("ping-pong", 25.0, ping_pong(25.0))
    assert row(dear, "max wait 20 s", SEEDS).done_per_h == 0.0
    assert row(dear, OURS, SEEDS).done_per_h > 150.0


def test_models_that_fit_together_are_loaded_once_and_nobody_waits():
    case = Case("both fit", 8.0, helper(room=TWO_MODELS))
    result = simulate(case.workload, ours, 2 * HOUR_S)
    assert result.num_loads == 2
    late = [turn for turn in result.turns if turn.since_s > 20.0]
    assert all(turn.started_s == turn.since_s for turn in late)


def test_a_burst_is_served_in_one_residency():
    result = simulate(bursts(), ours, 2 * HOUR_S)
    crowds = [turn for turn in result.turns if turn.model == "B"]
    assert len(crowds) == 12 * 12
    assert all(turn.finished_s is not None for turn in crowds)
    assert result.num_loads <= 2 * 12 + 1
    assert quantile([turn.started_s - turn.since_s for turn in crowds if turn.started_s], 1) < 120


def test_classes_order_who_waits_and_none_of_them_starves():
    shares = row(Case("classes", 8.0, classes()), OURS, SEEDS).waits
    assert shares["B"].p95_s < shares["A"].p95_s < shares["C"].p95_s
    assert shares["C"].max_s < 300.0


def test_a_flood_of_urgent_work_for_others_does_not_starve_a_patient_one():
    crowd = (*agents("A", 6, priority="interactive"), *agents("C", 6, priority="interactive"))
    workload = Workload(models(8.0, "ABC"), (*crowd, *agents("B", 1)), LoadCapacity(num_bytes=1))
    result = simulate(workload, ours, 2 * HOUR_S)
    patient = [turn for turn in result.turns if turn.model == "B"]
    assert sum(turn.finished_s is not None for turn in patient) > 20
    waited = [(turn.started_s or result.end_s) - turn.since_s for turn in patient]
    assert max(waited) < 300.0


def test_no_request_sees_its_model_come_and_go_but_under_the_naive_rule():
    assert simulate(helper(), ours, 2 * HOUR_S).num_betrayed == 0
    assert simulate(helper(25.0), max_wait(20.0), 2 * HOUR_S).num_betrayed > 100


def test_a_run_is_repeatable():
    first, second = (simulate(helper(), ours, HOUR_S, seed=3).turns for _ in range(2))
    assert first == second
    assert first != simulate(helper(), ours, HOUR_S, seed=4).turns


def hasty(swap_state: SwapState) -> SwapPlan:
    """Unload whatever is there as soon as anything waits."""
    ready = [one.model for one in swap_state.residents if one.state == "ready"]
    plan = ours(swap_state)
    return SwapPlan(unloads=tuple(ready)) if swap_state.waiting and ready else plan


def early(swap_state: SwapState) -> SwapPlan:
    """Grant what waits before its model is there."""
    return SwapPlan(grants=tuple(one.request_id for one in swap_state.waiting))


@pytest.mark.parametrize("policy", [hasty, early])
def test_the_simulation_finds_a_policy_that_breaks_the_rules(policy):
    with pytest.raises(IllegalMove):
        simulate(helper(), policy, HOUR_S)


names = st.sampled_from("ABCD")
spans = st.tuples(st.floats(0.1, 10.0), st.floats(10.0, 40.0))
people = st.builds(
    Agent,
    name=st.just(""),
    model=names,
    priority=st.sampled_from(["interactive", "default", "background"]),
    start_s=st.floats(0.0, 200.0),
    num_turns=st.integers(1, 6),
    service_s=spans,
    tool_s=spans,
    pause_s=spans,
    pause_share=st.just(0.2),
    patience_s=st.none() | st.floats(0.5, 100.0),
    other=st.none() | names,
)
kinds = st.tuples(st.integers(1, 5), st.floats(0.5, 30.0), st.integers(1, 4))
workloads = st.builds(
    lambda crowd, shapes, extra, limit, has_pin: Workload(
        tuple(
            Model(name, size, load_s=load_s, batch=batch, is_pinned=has_pin and name == "A")
            for name, (size, load_s, batch) in zip("ABCD", shapes, strict=True)
        ),
        tuple(agent._replace(name=f"{agent.model}{i}") for i, agent in enumerate(crowd)),
        LoadCapacity(
            num_bytes=max(size for size, _, _ in shapes) + has_pin * shapes[0][0] + extra,
            num_models=None if limit is None else limit + has_pin,
        ),
    ),
    crowd=st.lists(people, min_size=1, max_size=10),
    shapes=st.tuples(kinds, kinds, kinds, kinds),
    extra=st.integers(0, 6),
    limit=st.none() | st.integers(1, 3),
    has_pin=st.booleans(),
)


@settings(deadline=None, max_examples=usual(150))
@given(workload=workloads, seed=st.integers(0, 3))
def test_every_turn_of_finitely_many_is_served_or_given_up(workload: Workload, seed: int):
    """Whatever the agents do; a move against the rules would raise."""
    result = simulate(workload, ours, math.inf, seed)
    assert result.num_betrayed == 0
    assert len(result.turns) == sum(agent.num_turns or 0 for agent in workload.agents)
    for turn in result.turns:
        assert turn.is_given_up or turn.finished_s is not None
        assert not (turn.is_given_up and turn.granted_s is not None)
