"""How fast answers were lately: a bounded ring of samples, one for each few seconds. No text."""

from __future__ import annotations

from collections import deque
from statistics import median

from runtime.types import Struct

SAMPLE_S = 3.0
MAX_SAMPLES = 1200
_MAX_FIRST = 1024


class Sample(Struct, frozen=True):
    """One interval that ended at wall time `at_s`; None where nothing was measured in it.

    `first_token_ms` is the median over answers, `tokens_per_s` the decode rate of one answer.
    """

    at_s: float
    first_token_ms: float | None
    tokens_per_s: float | None
    num_running: int
    num_waiting: int


class Trend:
    """Belongs to the event loop."""

    def __init__(self) -> None:
        self._first_s: deque[float] = deque(maxlen=_MAX_FIRST)
        self._num_steps = 0
        self._steps_s = 0.0
        self._samples: deque[Sample] = deque(maxlen=MAX_SAMPLES)

    @property
    def samples(self) -> list[Sample]:
        """The oldest first."""
        return list(self._samples)

    def first_token(self, seconds: float) -> None:
        """An answer began, so long after it was submitted."""
        self._first_s.append(seconds)

    def step(self, seconds: float) -> None:
        """An answer went on, so long after its last piece."""
        self._num_steps += 1
        self._steps_s += seconds

    def sample(self, at_s: float, *, num_running: int, num_waiting: int) -> Sample:
        """Close the interval and begin the next one."""
        first_ms = median(self._first_s) * 1000 if self._first_s else None
        rate = self._num_steps / self._steps_s if self._steps_s > 0 else None
        sample = Sample(
            at_s=at_s,
            first_token_ms=first_ms,
            tokens_per_s=rate,
            num_running=num_running,
            num_waiting=num_waiting,
        )
        self._samples.append(sample)
        self._first_s.clear()
        self._num_steps, self._steps_s = 0, 0.0
        return sample
