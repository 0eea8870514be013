"""The clocks of the store, and what to believe when the wall clock jumps."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import NamedTuple

from store.temp_names import boot_id
from store.types import Instant

Clock = Callable[[], Instant]

MAX_DRIFT_S = 300.0
"""Wall time may run this far from the monotonic clock between two looks; more is a jump."""

MAX_POWERED_OFF_S = 30 * 86_400.0
"""Wall time may pass this far from one boot to the next; more is a wrong clock."""


def now() -> Instant:
    """This moment; the monotonic clock counts on while the machine sleeps.

    `time.monotonic` does not; and on macOS CLOCK_MONOTONIC may be adjusted.
    """
    clock = time.CLOCK_BOOTTIME if sys.platform == "linux" else time.CLOCK_MONOTONIC_RAW
    return Instant(time.time(), time.clock_gettime(clock), boot_id())


class Jump(NamedTuple):
    """`is_jump` says not to trust ages now; `seconds` is how far the wall clock moved by itself."""

    is_jump: bool
    seconds: float


def jump_between(last: Instant, this: Instant) -> Jump:
    """How far the wall clock jumped from one look to the next.

    After a boot nothing can be compared: that look is not trusted either, but time that the
    machine may have been off counts as passed.
    """
    passed_s = this.wall_s - last.wall_s
    if last.boot_id != this.boot_id:
        is_wrong = not 0.0 <= passed_s <= MAX_POWERED_OFF_S
        return Jump(True, passed_s if is_wrong else 0.0)
    drift_s = passed_s - (this.monotonic_s - last.monotonic_s)
    return Jump(True, drift_s) if abs(drift_s) > MAX_DRIFT_S else Jump(False, 0.0)
