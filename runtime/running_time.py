"""The time in which this process ran, of which its limits count.

While it is stopped (a debugger, a terminal's ^Z, a machine that sleeps) no time passes: nothing
could be done then, and nobody is to be blamed for it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

STALL_S = 2.0
"""Who runs looks at the clock far more often; so long a gap counts for nothing."""


class RunningTime:
    """Seconds like those of `clock`, without the gaps in which nobody looked at it.

    Somebody has to look regularly. From any thread.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._seen_s = self._now_s = clock()
        self._lock = threading.Lock()

    def look(self, stall_s: float = STALL_S) -> float:
        """The time now."""
        with self._lock:
            seen_s = self._clock()
            gap_s, self._seen_s = seen_s - self._seen_s, seen_s
            self._now_s += gap_s if gap_s < stall_s else 0.0
            return self._now_s
