"""The pulse of a worker: decides, purely, from its heartbeats whether it still gets anywhere."""

from __future__ import annotations

from runtime.wire import Heartbeat


class Pulse:
    """Times are seconds of one monotonic clock.

    A worker is in trouble when it has sent nothing for `silent_s`, or was busy all the time and
    did not finish a step for `stuck_s`.
    """

    def __init__(self, *, silent_s: float, stuck_s: float, now_s: float) -> None:
        self._silent_s = silent_s
        self._stuck_s = stuck_s
        self._heard_s = now_s
        self._moved_s = now_s
        self._step = -1
        self.last: Heartbeat | None = None

    def beat(self, heartbeat: Heartbeat, now_s: float) -> None:
        """A heartbeat arrived."""
        self._heard_s = now_s
        if heartbeat.step != self._step or not heartbeat.is_busy:
            self._moved_s = now_s
        self._step = heartbeat.step
        self.last = heartbeat

    def complaint(self, now_s: float) -> str | None:
        """What is wrong, as the rest of a sentence about the model; None when nothing is."""
        silent_s = now_s - self._heard_s
        if silent_s > self._silent_s:
            return f"gave no sign of life for {silent_s:.1f} s"
        stuck_s = now_s - self._moved_s
        if stuck_s > self._stuck_s and self.last is not None:
            return f"made no progress in {self.last.phase} for {stuck_s:.1f} s"
        return None
