"""What happens to a model, purely: its states, the one table of transitions, and the timeouts.

A resting state may last for ever; every other one has a timeout, which leads out of it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal, get_args

from runtime.types import Struct

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
STATES: tuple[ModelState, ...] = get_args(ModelState)
EVENTS: tuple[ModelEvent, ...] = get_args(ModelEvent)
RESTING: frozenset[ModelState] = frozenset({"cold", "ready", "busy"})
HAS_PROCESS: frozenset[ModelState] = frozenset(STATES) - {
    "cold",
    "waiting_for_memory",
    "backing_off",
    "failed",
}
"""Their memory stays reserved: a process that is not known to be gone may hold it."""

COMING_UP: frozenset[ModelState] = frozenset({"spawning", "loading", "warming"})
SERVING: frozenset[ModelState] = frozenset({"ready", "busy"})
LEAVING: frozenset[ModelState] = frozenset({"draining", "flushing", "stopping"})

_FAILURES: Mapping[ModelEvent, ModelState] = {"lost": "crashed", "stuck": "wedged"}
_STARTING: Mapping[ModelEvent, ModelState] = {
    **_FAILURES,
    "up": "ready",
    "leave": "stopping",
    "overdue": "wedged",
}

TRANSITIONS: Mapping[ModelState, Mapping[ModelEvent, ModelState]] = {
    "cold": {"wanted": "waiting_for_memory"},
    "waiting_for_memory": {
        "admitted": "spawning",
        "unwanted": "cold",
        "leave": "cold",
        "overdue": "cold",
    },
    "spawning": {**_STARTING, "hello": "loading"},
    "loading": {**_STARTING, "read": "warming"},
    "warming": {**_STARTING},
    "ready": {**_FAILURES, "taken": "busy", "leave": "flushing"},
    "busy": {**_FAILURES, "idle": "ready", "closed": "draining", "leave": "draining"},
    "draining": {
        **_FAILURES,
        "idle": "ready",
        "opened": "busy",
        "leave": "draining",
        "drained": "flushing",
        "overdue": "flushing",
    },
    "flushing": {"flushed": "stopping", "gone": "cold", "overdue": "stopping"},
    "stopping": {"gone": "cold", "overdue": "wedged"},
    "wedged": {"gone": "crashed", "overdue": "crashed"},
    "crashed": {"held": "backing_off", "given_up": "failed", "overdue": "failed"},
    "backing_off": {"over": "cold", "overdue": "cold"},
    "failed": {"over": "cold", "overdue": "cold"},
}
"""An event that a state does not list changes nothing in it."""


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

    def apply(
        self, event: ModelEvent, now_s: float, limit_s: float | None = None
    ) -> ModelState | None:
        """The state that it led out of; None when the event changes nothing here.

        `limit_s` replaces the timeout of the state that it leads to.
        """
        after = TRANSITIONS[self.state].get(event)
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
