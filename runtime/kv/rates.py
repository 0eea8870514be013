"""What computing and reading take, as measured: whether reading is worth it is decided by them."""

from __future__ import annotations

from dataclasses import dataclass

NUM_READERS = 2
"""How many slots are read at a time."""

_SMOOTHING = 0.3
_SMALL_BYTES = 1 << 20
"""Of smaller slots opening and checking take most of the time, of larger ones their bytes."""


@dataclass(slots=True)
class Rates:
    """Smoothed; 0 means not measured yet. Times of reads are those of one of the readers."""

    prefill_s_per_token: float = 0.0
    read_bytes_per_s: float = 0.0
    read_s_per_slot: float = 0.0

    def on_prefill(self, num_tokens: int, seconds: float) -> None:
        """A slice was computed."""
        if num_tokens:
            self.prefill_s_per_token = _smooth(self.prefill_s_per_token, seconds / num_tokens)

    def on_read(self, num_bytes: int, seconds: float) -> None:
        """A slot was read."""
        if num_bytes < _SMALL_BYTES:
            self.read_s_per_slot = _smooth(self.read_s_per_slot, seconds)
            return
        seconds = max(seconds - self.read_s_per_slot, 1e-6)
        self.read_bytes_per_s = _smooth(self.read_bytes_per_s, num_bytes / seconds)

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
