"""What computing and reading take, as measured: whether reading is worth it is decided by them."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from statistics import median

NUM_READERS = 2
"""How many slots are read at a time."""

_SMOOTHING = 0.3
_SMALL_BYTES = 1 << 20
"""Of smaller slots opening and checking take most of the time, of larger ones their bytes."""


MIN_READS = 3
"""Fewer say nothing: any device is slow once."""

_NUM_READS = 5
"""Of so many reads the one in the middle counts."""

PROBE_AFTER_S = 60.0
MAX_PROBE_AFTER_S = 3600.0
"""A device that was too slow is tried again after so long; after twice as long if it still is."""


def _recent() -> deque[float]:
    return deque(maxlen=_NUM_READS)


@dataclass(slots=True)
class Rates:
    """0 means not measured yet. Times of reads are those of one of the readers.

    What computing takes is smoothed, as it is measured all the time. Reads are measured only while
    they are thought to be worth it: their figures are medians of the last ones, and get old.
    """

    prefill_s_per_token: float = 0.0
    read_bytes_per_s: float = 0.0
    read_s_per_slot: float = 0.0
    _rates: deque[float] = field(default_factory=_recent)
    _times_s: deque[float] = field(default_factory=_recent)
    _probe_at_s: float | None = None
    _probe_after_s: float = PROBE_AFTER_S

    def on_prefill(self, num_tokens: int, seconds: float) -> None:
        """A slice was computed."""
        if num_tokens:
            self.prefill_s_per_token = _smooth(self.prefill_s_per_token, seconds / num_tokens)

    def on_read(self, num_bytes: int, seconds: float) -> None:
        """A slot was read."""
        if num_bytes < _SMALL_BYTES:
            self._times_s.append(seconds)
            if len(self._times_s) >= MIN_READS:
                self.read_s_per_slot = median(self._times_s)
            return
        self._rates.append(num_bytes / max(seconds - self.read_s_per_slot, 1e-6))
        if len(self._rates) >= MIN_READS:
            self.read_bytes_per_s = median(self._rates)

    def pays(self, read_s: float, at_most_s: float, now_s: float) -> bool:
        """Whether to read what takes `read_s` by these figures; also to see if they still hold."""
        if read_s < at_most_s:
            self._probe_at_s, self._probe_after_s = None, PROBE_AFTER_S
            return True
        if self._probe_at_s is None:
            self._probe_at_s = now_s + self._probe_after_s
        if now_s < self._probe_at_s:
            return False
        self._probe_after_s = min(2 * self._probe_after_s, MAX_PROBE_AFTER_S)
        self._probe_at_s = now_s + self._probe_after_s
        return True

    def prefill_s(self, num_tokens: int) -> float:
        """How long computing so many tokens takes."""
        return num_tokens * self.prefill_s_per_token

    def read_s(self, num_bytes: int, num_slots: int) -> float:
        """How long reading so much in so many slots takes; what is unknown costs nothing."""
        transfer_s = num_bytes / self.read_bytes_per_s if self.read_bytes_per_s else 0.0
        alone_s = transfer_s + num_slots * self.read_s_per_slot
        return alone_s / min(max(num_slots, 1), NUM_READERS)


def _smooth(average: float, value: float) -> float:
    return value if average == 0.0 else average + _SMOOTHING * (value - average)
