"""The time in which this process ran, of which the supervisor's limits count.

While it is stopped (a debugger, a terminal's ^Z, a machine that sleeps), or its loop stands still,
no time passes: nothing could be heard then, and nobody is to be blamed for it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager

TICK_S = 0.5
STALL_S = 2.0
"""A loop that runs looks at the clock far more often; so long a gap counts for nothing."""


class RunningTime:
    """Seconds like those of `clock`, without the gaps in which nobody looked at it.

    It belongs to the event loop, and looks by itself for as long as that runs.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._seen_s = self._now_s = clock()
        self._loop: asyncio.AbstractEventLoop | None = None

    def now_s(self) -> float:
        """The time now."""
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:  # nobody looks then, and a gap means nothing
            return self._look(stall_s=float("inf"))
        if loop is self._loop:
            return self._look(stall_s=STALL_S)
        self._loop = loop
        self._tick(loop)
        return self._now_s

    def _tick(self, loop: asyncio.AbstractEventLoop) -> None:
        if loop is self._loop:
            self._look(stall_s=STALL_S)
            loop.call_later(TICK_S, self._tick, loop)

    def _look(self, stall_s: float) -> float:
        seen_s = self._clock()
        gap_s, self._seen_s = seen_s - self._seen_s, seen_s
        self._now_s += gap_s if gap_s < stall_s else 0.0
        return self._now_s


running_s = RunningTime().now_s
"""What this process goes by, as with `time.monotonic`."""


@asynccontextmanager
async def running_timeout(limit_s: float | None) -> AsyncGenerator[None]:
    """As `asyncio.timeout`, of the time in which this process ran."""
    if limit_s is None:
        yield
        return
    loop = asyncio.get_running_loop()
    due_s = running_s() + limit_s
    handle: asyncio.TimerHandle | None = None
    async with asyncio.timeout(None) as limit:

        def look() -> None:
            nonlocal handle
            left_s = due_s - running_s()
            if left_s > 0:
                handle = loop.call_later(min(left_s, TICK_S), look)
            else:
                handle = None
                limit.reschedule(loop.time())

        look()
        try:
            yield
        finally:
            if handle is not None:
                handle.cancel()
