"""What happens to a model, purely: its states, the one table of transitions, and the timeouts.

A resting state may last for ever; every other one has a timeout, which leads out of it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal, NamedTuple, get_args

from runtime.types import Struct
from runtime.wire import WorkerPhase

ModelState = Literal[
    "cold",
    "waiting_for_memory",
    "spawning",
    "loading",
    "warming",
    "ready",
    "busy",
    "draining",
    "flushing",
    "stopping",
    "wedged",
    "crashed",
    "backing_off",
    "failed",
]
ModelEvent = Literal[
    "wanted",  # a request or the operator wants the model
    "unwanted",  # nobody does any more
    "admitted",  # there is room, and it is reserved
    "hello",  # the process is up
    "read",  # the weights are in memory
    "up",  # it can be asked
    "taken",  # the first request is at work
    "idle",  # the last request has ended
    "closed",  # another model needs its room: no new requests beyond its cohort
    "opened",  # no longer
    "leave",  # it is to make room, was idle for long, or the operator says so
    "drained",  # the last request of a model that leaves has ended
    "flushed",  # what was worth keeping is on disk
    "lost",  # the process ended, or cannot load, and nobody asked for that
    "stuck",  # the process is there and gets nowhere
    "gone",  # the process has ended for good
    "held",  # after a crash: not again before some time has passed
    "given_up",  # after too many crashes, or a load that cannot succeed
    "over",  # the time to hold back has passed, or the operator says so
    "overdue",  # the state's timeout
]
MemoryEvent = Literal["unreturned", "returned"]
"""What an ended process held is missing, or no longer: news of a model that stays in its state."""
Stage = Literal["away", "loading", "ready", "leaving"]
"""What a state comes down to for who wants the model: it has no process, or one that comes up, can
be handed requests, or cannot any more.
"""


class StateRow(NamedTuple):
    """What there is to know of a state. An event that it does not list changes nothing in it.

    `rests` says that it may last for ever, `phase` what the process says of itself meanwhile.
    """

    stage: Stage
    events: Mapping[ModelEvent, ModelState]
    rests: bool = False
    has_failed: bool = False
    phase: WorkerPhase | None = None


_FAILURES: Mapping[ModelEvent, ModelState] = {"lost": "crashed", "stuck": "wedged"}
_STARTING: Mapping[ModelEvent, ModelState] = {
    **_FAILURES,
    "up": "ready",
    "leave": "stopping",
    "overdue": "wedged",
}

MODEL_STATES: Mapping[ModelState, StateRow] = {
    "cold": StateRow("away", {"wanted": "waiting_for_memory"}, rests=True),
    "waiting_for_memory": StateRow(
        "away", {"admitted": "spawning", "unwanted": "cold", "leave": "cold", "overdue": "cold"}
    ),
    "spawning": StateRow("loading", {**_STARTING, "hello": "loading"}, phase="starting"),
    "loading": StateRow("loading", {**_STARTING, "read": "warming"}, phase="loading"),
    "warming": StateRow("loading", _STARTING, phase="warming"),
    "ready": StateRow("ready", {**_FAILURES, "taken": "busy", "leave": "flushing"}, rests=True),
    "busy": StateRow(
        "ready",
        {**_FAILURES, "idle": "ready", "closed": "draining", "leave": "draining"},
        rests=True,
    ),
    # It takes its cohort, and may be opened again unless it was told to leave.
    "draining": StateRow(
        "ready",
        {
            **_FAILURES,
            "idle": "ready",
            "opened": "busy",
            "leave": "draining",
            "drained": "flushing",
            "overdue": "flushing",
        },
    ),
    "flushing": StateRow(
        "leaving",
        {"flushed": "stopping", "gone": "cold", "overdue": "stopping"},
        phase="flushing",
    ),
    "stopping": StateRow("leaving", {"gone": "cold", "overdue": "wedged"}, phase="stopping"),
    "wedged": StateRow("leaving", {"gone": "crashed", "overdue": "crashed"}, has_failed=True),
    "crashed": StateRow(
        "leaving",
        {"held": "backing_off", "given_up": "failed", "overdue": "failed"},
        has_failed=True,
    ),
    "backing_off": StateRow("away", {"over": "cold", "overdue": "cold"}, has_failed=True),
    "failed": StateRow("away", {"over": "cold", "overdue": "cold"}, has_failed=True),
}
"""The one table of what a model can be in: its process, the swap policy, requests that wait and
what the operator is shown all go by it. A process walks it as well, but for what follows from
requests (`busy`, `draining`) and from crashes.
"""

STATES: tuple[ModelState, ...] = get_args(ModelState)
EVENTS: tuple[ModelEvent, ...] = get_args(ModelEvent)
RESTING: frozenset[ModelState] = frozenset(one for one, row in MODEL_STATES.items() if row.rests)
FAILED: frozenset[ModelState] = frozenset(
    one for one, row in MODEL_STATES.items() if row.has_failed
)
HAS_PROCESS: frozenset[ModelState] = frozenset(
    one for one, row in MODEL_STATES.items() if row.stage != "away"
)
"""Their memory stays reserved: a process that is not known to be gone may hold it."""

HELD_BACK: frozenset[ModelState] = FAILED - HAS_PROCESS
"""After a crash: not tried again before some time has passed."""

LOADED: frozenset[ModelState] = frozenset({"ready", "busy"})
"""A request need not wait for the model to be loaded, nor another one for it to leave."""


class Transition(Struct, frozen=True):
    """One step of one model. `at_s` is wall-clock time; `reason` is for people."""

    model: str
    before: ModelState
    event: ModelEvent | MemoryEvent
    after: ModelState
    at_s: float = 0.0
    reason: str = ""


class Lifecycle:
    """One model's state and when it is overdue; times are seconds of one monotonic clock.

    `limits_s` has the timeout of every state that is not resting.
    """

    def __init__(self, limits_s: Mapping[ModelState, float]) -> None:
        missing = set(STATES) - RESTING - limits_s.keys()
        if missing:
            raise ValueError(f"no timeout for {', '.join(sorted(missing))}")
        self._limits_s = limits_s
        self.state: ModelState = "cold"
        self.since_s = 0.0
        self.due_s = math.inf

    @property
    def stage(self) -> Stage:
        """What its state comes down to."""
        return MODEL_STATES[self.state].stage

    def apply(
        self, event: ModelEvent, now_s: float, limit_s: float | None = None
    ) -> ModelState | None:
        """The state that it led out of; None when the event changes nothing here.

        `limit_s` replaces the timeout of the state that it leads to.
        """
        after = MODEL_STATES[self.state].events.get(event)
        if after is None:
            return None
        before, self.state, self.since_s = self.state, after, now_s
        if after in RESTING:
            self.due_s = math.inf
        else:
            self.due_s = now_s + (self._limits_s[after] if limit_s is None else limit_s)
        return before

    def is_overdue(self, now_s: float) -> bool:
        """Whether the state has lasted for too long."""
        return now_s >= self.due_s
