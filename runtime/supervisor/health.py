"""The health of a worker: decides, purely, from what it sends whether it still gets anywhere."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from runtime.config.settings import Settings
from runtime.supervisor.lifecycle import MODEL_STATES
from runtime.types import Struct
from runtime.wire import Heartbeat, WorkerPhase

LOADING = frozenset(row.phase for row in MODEL_STATES.values() if row.stage == "loading")
LOAD_STALL_S = 60.0
_COMPUTED_S = 1.0
"""A load whose process has computed for so long has moved."""
_MAX_STOPS = 3
_STOPS_S = 60.0
"""Who stops a worker so often in a minute holds it."""
_DECODE_S = 15.0
_MAX_AVERAGE_STEPS = 50.0
"""A decode step may take `_DECODE_S`, or as long as so many steps do on average."""


class HealthLimits(Struct, frozen=True):
    """How long a worker may be silent, and be in one step, in seconds.

    While a model loads neither silence nor a heartbeat counts, only progress: reading holds the
    interpreter. On a busy machine that may take long without a word, so what the process computes
    is progress as well; `load_timeout_s` bounds the whole.
    """

    silent_s: float
    step_s: float
    load_s: float
    warm_s: float

    @classmethod
    def of(cls, settings: Settings) -> HealthLimits:
        """A load that does not move for a fifth of its time is not going to end in time.

        Nor is one that reads nothing for a minute. Compiling kernels tells no progress and may take
        that fifth.
        """
        share_s = settings.load_timeout_s / 5
        return cls(
            silent_s=settings.heartbeat_timeout_s,
            step_s=settings.wedge_timeout_s,
            load_s=min(share_s, LOAD_STALL_S),
            warm_s=share_s,
        )


class HealthProblem(NamedTuple):
    """What is wrong, as the rest of a sentence about the model.

    A worker that is silent will not hear either.
    """

    text: str
    is_silent: bool


class Watchdog:
    """Times are seconds of one clock, of the time in which the server ran (`running_s`).

    A worker is in trouble when it has sent nothing for too long, or was busy all the time and
    did not finish a step.
    """

    def __init__(self, limits: HealthLimits, now_s: float) -> None:
        self._limits = limits
        self._heard_s = now_s
        self._moved_s = now_s
        self._stops_s: deque[float] = deque(maxlen=_MAX_STOPS)
        self._cpu_s = 0.0
        self.phase: WorkerPhase = "starting"
        """What it does, as last heard."""
        self.last: Heartbeat | None = None

    def beat(self, heartbeat: Heartbeat, now_s: float) -> None:
        """A heartbeat arrived."""
        last, self.last = self.last, heartbeat
        self._heard_s = now_s
        if {self.phase, heartbeat.phase} <= LOADING:
            return
        has_stepped = last is not None and heartbeat.step != last.step
        was_busy = last is not None and last.is_busy and heartbeat.is_busy
        is_at_rest = not was_busy and heartbeat.phase not in LOADING
        if has_stepped or is_at_rest or heartbeat.phase != self.phase:
            self._moved_s = now_s
        self.phase = heartbeat.phase

    def moved(self, phase: WorkerPhase, now_s: float) -> None:
        """Something else than a heartbeat shows progress: that of a load."""
        self.phase = phase
        self._heard_s = self._moved_s = now_s

    def computed(self, cpu_s: float, now_s: float) -> None:
        """Its process has computed for `cpu_s` seconds in all."""
        if self.phase in LOADING and cpu_s - self._cpu_s >= _COMPUTED_S:
            self._cpu_s, self._moved_s = cpu_s, now_s

    def may_go_on(self, now_s: float) -> bool:
        """Nobody stops it again and again."""
        return sum(now_s - at_s < _STOPS_S for at_s in self._stops_s) < _MAX_STOPS

    def was_stopped(self, now_s: float) -> None:
        """Its process did not run until now, so it has all of its time again."""
        self._stops_s.append(now_s)
        self._heard_s = self._moved_s = now_s

    def complaint(self, now_s: float) -> HealthProblem | None:
        """What is wrong; None when nothing is."""
        stuck_s = now_s - self._moved_s
        if self.phase in LOADING:
            limits = {"starting": LOAD_STALL_S, "warming": self._limits.warm_s}
            if stuck_s <= limits.get(self.phase, self._limits.load_s):
                return None
            return HealthProblem(f"made no progress in {self.phase} for {stuck_s:.1f} s", False)
        silent_s = now_s - self._heard_s
        if silent_s > self._limits.silent_s:
            return HealthProblem(f"gave no sign of life for {silent_s:.1f} s", True)
        is_busy = self.last is not None and self.last.is_busy
        if is_busy and stuck_s > self.limit_s(self.phase):
            return HealthProblem(f"made no progress in {self.phase} for {stuck_s:.1f} s", False)
        return None

    def limit_s(self, phase: str) -> float:
        """How long one step of this phase may take now; those of decode are short."""
        if phase != "decode" or self.last is None:
            return self._limits.step_s
        usual_s = _MAX_AVERAGE_STEPS * self.last.decode_step_s
        return min(self._limits.step_s, max(_DECODE_S, usual_s))
