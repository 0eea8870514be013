"""The clocks of the store: one that people read, and one by which what may be deleted ages.

Wall time may be set, by anybody and to anything, so nothing that deletes looks at it.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import NamedTuple

from sqlalchemy import Connection, text

from store.temp_names import boot_id
from store.types import Instant

Clock = Callable[[], Instant]

_LOAD = text("SELECT trusted_s, monotonic_s, boot_id FROM store_state")
_SAVE = text(
    "UPDATE store_state SET trusted_s = :trusted_s, monotonic_s = :monotonic_s, boot_id = :boot_id"
)
UNKNOWN_BOOT = "0"


def now() -> Instant:
    """This moment; the monotonic clock counts on while the machine sleeps.

    `time.monotonic` does not; and on macOS CLOCK_MONOTONIC may be adjusted.
    """
    clock = time.CLOCK_BOOTTIME if sys.platform == "linux" else time.CLOCK_MONOTONIC_RAW
    return Instant(time.time(), time.clock_gettime(clock), boot_id())


class Trusted(NamedTuple):
    """A trusted instant, and what the clock that nobody sets said then. 0 is before the first."""

    trusted_s: float = 0.0
    monotonic_s: float = 0.0
    boot_id: str = ""

    def passed_s(self, this: Instant) -> float:
        """Seconds that have passed for certain since: none that the machine may have been off."""
        if this.boot_id != self.boot_id or this.boot_id == UNKNOWN_BOOT:
            return 0.0
        return max(this.monotonic_s - self.monotonic_s, 0.0)


class TrustedClock:
    """Counts the seconds that have passed for certain, from a trusted instant on. For any thread.

    Its first second ever is that of the wall clock, and from then on they may part: only the
    difference of two of its times means anything, and that is never more than has really passed.
    """

    def __init__(self, last: Trusted, read: Clock = now) -> None:
        this = read()
        begun_s = last.trusted_s + last.passed_s(this) if last.trusted_s else this.wall_s
        self._begun = Trusted(begun_s, this.monotonic_s, this.boot_id)
        self._read = read

    def now_s(self) -> float:
        """The trusted time, in seconds."""
        return self.instant().trusted_s

    def instant(self) -> Trusted:
        """The same, as it can be gone on from."""
        this = self._read()
        # Within a process there is one boot, whatever the system says of it.
        begun = self._begun._replace(boot_id=this.boot_id)
        passed_s = max(this.monotonic_s - begun.monotonic_s, 0.0)
        return Trusted(begun.trusted_s + passed_s, this.monotonic_s, this.boot_id)

    def wall_s(self, trusted_s: float) -> float:
        """What the wall clock would have said then, had it always gone as it does now."""
        return self._read().wall_s - self.now_s() + trusted_s


def load(connection: Connection) -> Trusted:
    """The last trusted instant that a database keeps."""
    return Trusted(*connection.execute(_LOAD).one())


def save(connection: Connection, instant: Trusted) -> None:
    """Keep an instant in a database."""
    connection.execute(_SAVE, instant._asdict())
