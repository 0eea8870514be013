"""How much was written today: a disk wears out by writing."""

from __future__ import annotations

_DAY_S = 86_400.0


class WriteBudget:
    """Bytes written to the fast disk in one day, in UTC. Times are wall-clock seconds."""

    def __init__(self) -> None:
        self._day = 0
        self._num_bytes = 0.0

    def add(self, num_bytes: float, now_s: float) -> None:
        """So much was written now."""
        day = int(now_s // _DAY_S)
        if day != self._day:
            self._day, self._num_bytes = day, 0.0
        self._num_bytes += num_bytes

    def rest_s(self, max_bytes: int, now_s: float) -> float:
        """How long nothing more may be written: until the day is over, or 0."""
        is_over = int(now_s // _DAY_S) == self._day and self._num_bytes >= max_bytes
        return _DAY_S - now_s % _DAY_S if is_over else 0.0
