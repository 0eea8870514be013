"""`python -m ops.studies.swap_policies`: our swap policy against the usual ones, in simulation.

Every policy serves the same agents on the same simulated machine for two hours, with five seeds;
the figures are means over the seeds, waits are taken over all of them. Writes
`swap_policies.json` and prints a table.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from ops.studies.swap_simulation import (
    Agent,
    Model,
    Outcome,
    Policy,
    Turn,
    Workload,
    quantile,
    simulate,
)
from runtime.supervisor import swap_policy
from runtime.supervisor.placement import LoadCapacity
from runtime.supervisor.swap_policy import SwapPlan, SwapState, Terms, Waiting

_FILE = Path(__file__).with_suffix(".json")
_HOURS = 2
_SEEDS = range(5)

ONE_MODEL = LoadCapacity(num_bytes=1)
TWO_MODELS = LoadCapacity(num_bytes=2)

Admission = Callable[[Waiting, Waiting, float], bool]
"""Whether the first, of the resident model, is admitted while the second waits, at that time."""


def ours(swap_state: SwapState) -> SwapPlan:
    """The server's policy with the server's terms."""
    return swap_policy.plan(swap_state, Terms())


def always_lingers(swap_state: SwapState) -> SwapPlan:
    """The same, whether or not requests come back while it lingers."""
    return ours(_unwatched(swap_state))


def floor_of_20_s(swap_state: SwapState) -> SwapPlan:
    """The same as it was: a stay of 20 s however cheap the swap, nothing early, no grace."""
    terms = Terms(min_quantum_s=20.0, urgent_factor=math.inf, max_grace_s=0.0)
    return swap_policy.plan(_unwatched(swap_state), terms)


def _unwatched(swap_state: SwapState) -> SwapState:
    """Nothing is known of when requests come back."""
    residents = tuple(msgspec.structs.replace(one, returns_s=()) for one in swap_state.residents)
    return msgspec.structs.replace(swap_state, residents=residents)


def drain(swap_state: SwapState) -> SwapPlan:
    """Strictly in order of arrival: behind a request for another model nobody passes."""
    return _one_at_a_time(swap_state, lambda own, foreign, _: own.since_s <= foreign.since_s)


def resident_first(swap_state: SwapState) -> SwapPlan:
    """The resident model is always served; others wait until it is idle."""
    return _one_at_a_time(swap_state, lambda _, __, ___: True)


def starve(swap_state: SwapState) -> SwapPlan:
    """The model that came first stays for ever: what a machine without swaps would do."""
    return msgspec.structs.replace(resident_first(swap_state), unloads=(), closed=frozenset())


def max_wait(limit_s: float) -> Policy:
    """The naive remedy: the resident model closes when the oldest other waited that long."""

    def policy(swap_state: SwapState) -> SwapPlan:
        plan = _one_at_a_time(
            swap_state, lambda _, foreign, now_s: now_s < foreign.since_s + limit_s
        )
        ends = [one.since_s + limit_s for one in swap_state.waiting]
        wake_s = min((end for end in ends if end > swap_state.now_s), default=None)
        return msgspec.structs.replace(plan, wake_s=wake_s)

    return policy


def _one_at_a_time(swap_state: SwapState, admits: Admission) -> SwapPlan:
    """A machine for one model, which leaves when it is idle and another one waits."""
    waiting = sorted(swap_state.waiting, key=lambda one: (one.since_s, one.request_id))
    if not swap_state.residents:
        return SwapPlan(loads=(waiting[0].model,)) if waiting else SwapPlan()
    resident = swap_state.residents[0]
    if resident.state != "ready":
        return SwapPlan()
    own = [one for one in waiting if one.model == resident.model]
    foreign = next((one for one in waiting if one.model != resident.model), None)
    if foreign is not None:
        own = [one for one in own if admits(one, foreign, swap_state.now_s)]
    if own:
        return SwapPlan(grants=tuple(one.request_id for one in own))
    if foreign is not None and resident.num_running == 0:
        return SwapPlan(unloads=(resident.model,), closed=frozenset({resident.model}))
    return SwapPlan()


def agents(model: str, number: int, **how: object) -> tuple[Agent, ...]:
    """So many of them, alike."""
    plain = [Agent(f"{model}{index}", model) for index in range(number)]
    return tuple(agent._replace(**how) for agent in plain)


def models(swap_s: float, names: str = "AB") -> tuple[Model, ...]:
    """Models that take `swap_s` to come in another's place, each as large as the smallest room."""
    return tuple(Model(name, leave_s=swap_s / 8, load_s=swap_s * 7 / 8) for name in names)


def ping_pong(swap_s: float = 8.0, room: LoadCapacity = ONE_MODEL) -> Workload:
    """One agent on each of two models."""
    return Workload(models(swap_s), (*agents("A", 1), *agents("B", 1)), room)


def helper(swap_s: float = 8.0, room: LoadCapacity = ONE_MODEL) -> Workload:
    """Three busy agents on one model, one helper on another."""
    return Workload(models(swap_s), (*agents("A", 3), *agents("B", 1)), room)


def bursts(swap_s: float = 8.0) -> Workload:
    """One agent on A; on B every ten minutes twelve requests at once."""
    crowds = [
        agent._replace(name=f"B{number}.{index}", start_s=number * 600.0 + 60.0, num_turns=1)
        for number in range(_HOURS * 6)
        for index, agent in enumerate(agents("B", 12))
    ]
    return Workload(models(swap_s), (*agents("A", 1), *crowds), ONE_MODEL)


def classes(swap_s: float = 8.0) -> Workload:
    """A default agent on A, an interactive one on B, a background one on C."""
    crowd = (
        *agents("A", 1),
        *agents("B", 1, priority="interactive"),
        *agents("C", 1, priority="background"),
    )
    return Workload(models(swap_s, "ABC"), crowd, ONE_MODEL)


def three_in_turn(swap_s: float = 0.5) -> Workload:
    """Three models that are loaded within half a second, none of which is ever idle for long: three
    agents on each, with short turns and quick tools.
    """
    quick = {"service_s": (1.0, 2.0), "tool_s": (0.1, 0.5)}
    crowd = [agents(name, 3, **quick) for name in "ABC"]
    return Workload(
        models(swap_s, "ABC"), tuple(one for three in crowd for one in three), ONE_MODEL
    )


def urgent(swap_s: float = 8.0) -> Workload:
    """Two default agents on A, an interactive one on B that asks now and then."""
    rare = agents("B", 1, priority="interactive", tool_s=(30.0, 90.0), service_s=(1.0, 3.0))
    return Workload(models(swap_s), (*agents("A", 2), *rare), ONE_MODEL)


def common_start(swap_s: float = 0.5) -> Workload:
    """An idle model is loaded when agents of three models ask within 200 ms, its own the last."""
    earlier = agents("A", 1, num_turns=1, service_s=(1.0, 1.0))
    once = [
        Agent(f"{name}-late", name, start_s=100.0 + after_s, num_turns=1, service_s=(1.5, 1.5))
        for name, after_s in (("B", 0.0), ("C", 0.1), ("A", 0.2))
    ]
    return Workload(models(swap_s, "ABC"), (*earlier, *once), ONE_MODEL)


def hand_over(swap_s: float = 8.0) -> Workload:
    """An agent that asks one model what to do and has the other one do it, turn by turn."""
    one = agents("A", 1, other="B", tool_s=(0.1, 1.0))
    return Workload(models(swap_s), one, ONE_MODEL)


class Case(NamedTuple):
    """What is simulated."""

    name: str
    swap_s: float
    workload: Workload


CASES = (
    Case("1 + 1 ping-pong", 8.0, ping_pong()),
    Case("1 + 1 ping-pong", 25.0, ping_pong(25.0)),
    Case("3 busy + 1 helper", 8.0, helper()),
    Case("3 busy + 1 helper", 25.0, helper(25.0)),
    Case("bursts of 12", 8.0, bursts()),
    Case("three classes", 8.0, classes()),
    Case("3 models in turn", 0.5, three_in_turn()),
    Case("2 + 1 interactive", 8.0, urgent()),
    Case("2 + 1 interactive", 0.5, urgent(0.5)),
    Case("common start", 0.5, common_start()),
    Case("one agent, two models", 8.0, hand_over()),
    Case("one agent, two models", 25.0, hand_over(25.0)),
    Case("one agent, two models", 0.2, hand_over(0.2)),
)
POLICIES: dict[str, Policy] = {
    "cohort + quantum + linger": ours,
    "the same, always lingers": always_lingers,
    "a floor of 20 s": floor_of_20_s,
    "drain": drain,
    "resident first": resident_first,
    "starve": starve,
    "max wait 20 s": max_wait(20.0),
    "max wait 60 s": max_wait(60.0),
}


class Waits(msgspec.Struct):
    """Seconds from asking until a model is at work on it; `num_turns` were asked."""

    num_turns: int
    p50_s: float
    p95_s: float
    max_s: float


class Row(msgspec.Struct):
    """One policy in one case. `loading_share` is the share of the time that went into swaps."""

    case: str
    swap_s: float
    policy: str
    done_per_h: float
    loads_per_h: float
    loading_share: float
    waits: dict[str, Waits]


def waits(turns: Sequence[Turn], end_s: float) -> Waits:
    """Turns that still wait at the end count with what they have waited by then."""
    seconds = [
        (turn.started_s if turn.started_s is not None else end_s) - turn.since_s
        for turn in turns
        if not turn.is_given_up
    ]
    rounded = [round(quantile(seconds, share), 1) for share in (0.5, 0.95, 1.0)]
    return Waits(len(seconds), *rounded)


def row(case: Case, policy: str, seeds: Sequence[int] = _SEEDS) -> Row:
    """Simulate one case under one policy."""
    until_s = _HOURS * 3600.0
    outcomes = [simulate(case.workload, POLICIES[policy], until_s, seed) for seed in seeds]
    turns = [turn for outcome in outcomes for turn in outcome.turns]
    return Row(
        case=case.name,
        swap_s=case.swap_s,
        policy=policy,
        done_per_h=round(statistics.mean(num_done(one) for one in outcomes) / _HOURS, 1),
        loads_per_h=round(statistics.mean(one.num_loads for one in outcomes) / _HOURS, 1),
        loading_share=round(statistics.mean(one.loading_s for one in outcomes) / until_s, 3),
        waits={
            model.name: waits([t for t in turns if t.model == model.name], until_s)
            for model in case.workload.models
        },
    )


def num_done(outcome: Outcome) -> int:
    """How many turns were finished."""
    return sum(turn.finished_s is not None for turn in outcome.turns)


def main() -> None:
    """Simulate everything, print and write."""
    rows = [row(case, policy) for case in CASES for policy in POLICIES]
    for one in rows:
        figures = f"{one.done_per_h:6.0f} done/h {one.loads_per_h:5.0f} loads/h"
        spans = "  ".join(
            f"{model} {w.p50_s:.0f}/{w.p95_s:.0f}/{w.max_s:.0f}" for model, w in one.waits.items()
        )
        print(f"{one.case:18} {one.swap_s:3.0f} s  {one.policy:26} {figures}", end="")
        print(f"  loading {one.loading_share:4.0%}  wait p50/p95/max s: {spans}")
    _FILE.write_bytes(msgspec.json.format(msgspec.json.encode(rows)) + b"\n")


if __name__ == "__main__":
    main()
