"""`ResettableTimer`: one timer that is set again and again."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from runtime.supervisor.running_time import running_s

_LATE_S = 0.001
"""Rung a little late it finds what was due; rung a little early it would ring twice."""


class ResettableTimer:
    """It belongs to the event loop and rings at the time that it was set to last."""

    def __init__(self, ring: Callable[[], None]) -> None:
        self._ring = ring
        self._timer: asyncio.TimerHandle | None = None

    def set(self, due_s: float | None) -> None:
        """Ring at that time, of `running_s`; None or infinity is never."""
        self.cancel()
        if due_s is not None and due_s < float("inf"):
            delay_s = max(due_s - running_s(), 0.0) + _LATE_S
            self._timer = asyncio.get_running_loop().call_later(delay_s, self._ring)

    def cancel(self) -> None:
        """Do not ring."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
