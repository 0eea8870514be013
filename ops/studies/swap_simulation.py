"""A discrete-event simulation of models that share a machine: exact, seeded, without real time.

Agents ask, wait, are served, think, and ask again. A policy, ours or a control, sees the same
`SwapState` as in the server and returns the same `SwapPlan`; a move that is not allowed raises.
"""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec

from runtime.supervisor.placement import LoadCapacity, Need
from runtime.supervisor.swap_policy import Resident, Returns, SwapPlan, SwapState, Waiting
from runtime.types import Priority

Policy = Callable[[SwapState], SwapPlan]
Action = Callable[[], None]
Span = tuple[float, float]


class IllegalMove(Exception):
    """A policy did what no policy may do."""


class Model(NamedTuple):
    """`leave_s` and `load_s` are one swap; `batch` requests are served at a time."""

    name: str
    num_bytes: int = 1
    leave_s: float = 1.0
    load_s: float = 7.0
    batch: int = 4
    is_pinned: bool = False

    @property
    def need(self) -> Need:
        return Need(num_bytes=self.num_bytes, swap_s=self.leave_s + self.load_s)


class Agent(NamedTuple):
    """Asks `num_turns` times (None: for ever), `service_s` each, with tool calls in between.

    Most gaps are `tool_s`; a share of `pause_share` is `pause_s`. A turn that was not handed over
    after `patience_s` is given up. Every other turn asks `other`, if there is one. Spans are
    uniform, in seconds.
    """

    name: str
    model: str
    priority: Priority = "default"
    start_s: float = 0.0
    num_turns: int | None = None
    service_s: Span = (3.0, 15.0)
    tool_s: Span = (1.0, 3.0)
    pause_s: Span = (10.0, 40.0)
    pause_share: float = 0.15
    patience_s: float | None = None
    other: str | None = None

    def asks(self, number: int) -> str:
        """The model that a turn asks."""
        return self.model if self.other is None or number % 2 else self.other


class Workload(NamedTuple):
    """Agents, the models they ask for, and the room there is for those."""

    models: tuple[Model, ...]
    agents: tuple[Agent, ...]
    room: LoadCapacity


class Turn(msgspec.Struct):
    """One request. Times are None for what has not happened."""

    id: str
    agent: Agent
    model: str
    since_s: float
    service_s: float
    granted_s: float | None = None
    started_s: float | None = None
    finished_s: float | None = None
    is_given_up: bool = False


class Outcome(NamedTuple):
    """Everything that happened up to `end_s`.

    `num_betrayed` counts requests that saw their model become ready and leave without them.
    """

    turns: tuple[Turn, ...]
    num_loads: int
    num_betrayed: int
    loading_s: float
    end_s: float


class _Process:
    """A resident model: what the policy sees of it, and the turns inside."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self.seen = Resident(
            model=model.name,
            state="loading",
            reserved_bytes=model.num_bytes,
            is_pinned=model.is_pinned,
        )
        self.queue: list[Turn] = []
        self.running: list[Turn] = []
        self.num_serving = 0

    def change(self, **changes: object) -> None:
        self.seen = msgspec.structs.replace(self.seen, **changes)

    def note_running(self, **changes: object) -> None:
        """Who runs has changed."""
        is_interactive = any(turn.agent.priority == "interactive" for turn in self.running)
        self.change(num_running=len(self.running), is_interactive=is_interactive, **changes)


class _Machine:
    """One run of a workload under a policy."""

    def __init__(self, workload: Workload, policy: Policy, seed: int) -> None:
        self._models = {model.name: model for model in workload.models}
        self._needs = {model.name: model.need for model in workload.models}
        self._room = workload.room
        self._policy = policy
        self._dice = random.Random(seed)
        self._events: list[tuple[float, int, Action | None]] = []
        self._num_events = 0
        self._now_s = 0.0
        self._waiting: dict[str, Turn] = {}
        self._processes: dict[str, _Process] = {}
        self._returns = {model.name: Returns() for model in workload.models}
        self._turns: list[Turn] = []
        self._num_loads = 0
        self._num_betrayed = 0
        self._loading_s = 0.0
        for agent in workload.agents:
            self._at(agent.start_s, lambda agent=agent: self._ask(agent, 1))

    def run(self, until_s: float) -> Outcome:
        while self._events and self._events[0][0] <= until_s:
            self._now_s, _, action = heapq.heappop(self._events)
            if action is not None:
                action()
            if not self._events or self._events[0][0] > self._now_s:
                self._decide()
        return Outcome(
            tuple(self._turns), self._num_loads, self._num_betrayed, self._loading_s, self._now_s
        )

    def _at(self, time_s: float, action: Action | None) -> None:
        self._num_events += 1
        heapq.heappush(self._events, (time_s, self._num_events, action))

    def _ask(self, agent: Agent, number: int) -> None:
        turn = Turn(
            id=f"{agent.name}/{number}",
            agent=agent,
            model=agent.asks(number),
            since_s=self._now_s,
            service_s=self._dice.uniform(*agent.service_s),
        )
        self._turns.append(turn)
        self._waiting[turn.id] = turn
        self._returns[turn.model].asked(self._now_s)
        if agent.patience_s is not None:
            self._at(self._now_s + agent.patience_s, lambda: self._give_up(turn))

    def _give_up(self, turn: Turn) -> None:
        if self._waiting.pop(turn.id, None) is not None:
            turn.is_given_up = True
            self._think(turn)

    def _think(self, turn: Turn) -> None:
        agent, number = turn.agent, int(turn.id.rpartition("/")[2])
        if agent.num_turns is None or number < agent.num_turns:
            is_pause = self._dice.random() < agent.pause_share
            gap_s = self._dice.uniform(*(agent.pause_s if is_pause else agent.tool_s))
            self._at(self._now_s + gap_s, lambda: self._ask(agent, number + 1))

    def _decide(self) -> None:
        """Follow the policy until it has nothing more to say at this moment."""
        while True:
            plan = self._policy(self._scene())
            self._check(plan)
            for request_id in plan.grants:
                self._grant(self._waiting.pop(request_id))
            for model in plan.unloads:
                self._unload(self._processes[model])
            for model in plan.loads:
                self._load(self._models[model])
            if not (plan.grants or plan.unloads or plan.loads):
                break
        if plan.wake_s is not None:
            if plan.wake_s <= self._now_s:
                raise IllegalMove(f"asks to be woken at {plan.wake_s}, it is {self._now_s}")
            self._at(plan.wake_s, None)

    def _scene(self) -> SwapState:
        waiting = [
            Waiting(
                request_id=turn.id,
                model=turn.model,
                since_s=turn.since_s,
                priority=turn.agent.priority,
            )
            for turn in self._waiting.values()
        ]
        residents = [
            msgspec.structs.replace(process.seen, returns_s=self._returns[model].last_s)
            for model, process in self._processes.items()
        ]
        return SwapState(
            waiting=tuple(waiting),
            residents=tuple(residents),
            needs=self._needs,
            room=self._room,
            now_s=self._now_s,
        )

    def _check(self, plan: SwapPlan) -> None:
        if len(set(plan.grants)) < len(plan.grants):
            raise IllegalMove("grants a request twice")
        for request_id in plan.grants:
            process = self._processes.get(self._waiting[request_id].model)
            if process is None or process.seen.state != "ready":
                raise IllegalMove(f"grants {request_id}, whose model is not ready")
        granted = {self._waiting[one].model for one in plan.grants}
        for model in plan.unloads:
            self._check_unload(self._processes[model].seen, plan, granted)
        room = self._room.without(one.seen.reserved_bytes for one in self._processes.values())
        for model in plan.loads:
            need = self._needs[model]
            if model in self._processes or not room.holds(need.num_bytes):
                raise IllegalMove(f"loads {model}, for which there is no room")
            room = room.without([need.num_bytes])

    def _check_unload(self, seen: Resident, plan: SwapPlan, granted: set[str]) -> None:
        waiting = {turn.id for turn in self._waiting.values() if turn.model == seen.model}
        if seen.is_pinned or seen.num_running or seen.model in granted or seen.state == "leaving":
            raise IllegalMove(f"unloads {seen}")
        if seen.state == "loading" and waiting:
            raise IllegalMove(f"unloads {seen.model}, which loads and is awaited")
        self._num_betrayed += len(waiting & seen.cohort)
        if waiting and seen.model not in plan.closed:
            raise IllegalMove(f"unloads {seen.model}, which is awaited")

    def _load(self, model: Model) -> None:
        process = _Process(model)
        self._processes[model.name] = process
        self._num_loads += 1
        self._loading_s += model.load_s
        self._at(self._now_s + model.load_s, lambda: self._become_ready(process))

    def _become_ready(self, process: _Process) -> None:
        if process.seen.state == "loading":
            name = process.model.name
            cohort = {turn.id for turn in self._waiting.values() if turn.model == name}
            process.change(state="ready", ready_since_s=self._now_s, cohort=frozenset(cohort))

    def _unload(self, process: _Process) -> None:
        process.change(state="leaving")
        self._loading_s += process.model.leave_s
        name = process.model.name
        self._at(self._now_s + process.model.leave_s, lambda: self._forget(name))

    def _forget(self, name: str) -> None:
        del self._processes[name]

    def _grant(self, turn: Turn) -> None:
        process = self._processes[turn.model]
        turn.granted_s = self._now_s
        process.queue.append(turn)
        process.running.append(turn)
        process.note_running()
        self._serve(process)

    def _serve(self, process: _Process) -> None:
        while process.queue and process.num_serving < process.model.batch:
            turn = process.queue.pop(0)
            turn.started_s = self._now_s
            process.num_serving += 1
            self._at(self._now_s + turn.service_s, lambda turn=turn: self._finish(process, turn))

    def _finish(self, process: _Process, turn: Turn) -> None:
        turn.finished_s = self._now_s
        process.num_serving -= 1
        process.running.remove(turn)
        process.note_running(last_finished_s=self._now_s)
        awaited = {turn.model for turn in self._waiting.values()}
        if not process.running and turn.model not in awaited:
            self._returns[turn.model].ran_dry(self._now_s)
        self._serve(process)
        self._think(turn)


def simulate(workload: Workload, policy: Policy, until_s: float, seed: int = 0) -> Outcome:
    """Run a workload until nothing happens any more, or to that time.

    Raises:
        IllegalMove: the policy is broken.
    """
    return _Machine(workload, policy, seed).run(until_s)


def quantile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least that share does not exceed; 0 of nothing."""
    ordered = sorted(values)
    return ordered[max(math.ceil(len(ordered) * share) - 1, 0)] if ordered else 0.0
