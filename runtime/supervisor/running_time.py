"""The time in which the event loop of this process ran, of which the supervisor's limits count.

While it stands still no time passes either: nothing could be heard then.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

from runtime.running_time import RunningTime

TICK_S = 0.5


class LoopTime:
    """A `RunningTime` of the event loop, which looks by itself for as long as that runs."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._time = RunningTime(clock)
        self._loop: asyncio.AbstractEventLoop | None = None

    def now_s(self) -> float:
        """The time now."""
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:  # nobody looks then, and a gap means nothing
            return self._time.look(stall_s=math.inf)
        if loop is not self._loop:
            self._loop = loop
            self._tick(loop)
        return self._time.look()

    def _tick(self, loop: asyncio.AbstractEventLoop) -> None:
        if loop is self._loop:
            self._time.look()
            loop.call_later(TICK_S, self._tick, loop)


running_s = LoopTime().now_s
"""What this process goes by, as with `time.monotonic`."""


class RunningTimeout:
    """As `asyncio.timeout`, of the time in which this process ran."""

    def __init__(self, limit_s: float | None) -> None:
        self._limit_s = math.inf if limit_s is None else limit_s
        self._due_s = math.inf
        self._timeout = asyncio.timeout(None)
        self._timer: asyncio.TimerHandle | None = None
        self.expired = self._timeout.expired

    async def __aenter__(self) -> Self:
        await self._timeout.__aenter__()
        self._due_s = running_s() + self._limit_s
        self._look()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool | None:
        self.lift()
        return await self._timeout.__aexit__(kind, error, traceback)

    def lift(self) -> None:
        """From now on it may take as long as it likes."""
        if self._timer is not None:
            self._timer.cancel()

    def _look(self) -> None:
        loop, left_s = asyncio.get_running_loop(), self._due_s - running_s()
        if left_s <= 0:
            self._timeout.reschedule(loop.time())
        elif left_s < math.inf:
            self._timer = loop.call_later(min(left_s, TICK_S), self._look)
