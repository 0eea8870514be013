"""What reuse saved: tokens that were not computed again, and the prefill that they would have cost.

Seconds are an estimate: tokens reused, at the rate at which the same model prefilled here, less
what restoring them took.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass

from runtime.types import Usage

MIN_COMPUTED = 16
"""Fewer tokens say more of what a step costs than of how fast a prompt is computed."""

TOKENS, PROMPT_TOKENS, SECONDS = "saved_tokens", "prompt_tokens", "saved_prefill_s"
"""Names of counters in the store."""


@dataclass(slots=True)
class _PrefillPace:
    num_tokens: int = 0
    prefill_ms: float = 0.0


class Savings:
    """Belongs to the event loop. `pending` is what the store does not have yet."""

    def __init__(self) -> None:
        self.pending: Counter[str] = Counter()
        self._seconds = 0.0
        self._paces: defaultdict[str, _PrefillPace] = defaultdict(_PrefillPace)

    def observe(self, model: str, usage: Usage) -> None:
        """A prompt was answered; of several choices only the first is to be told of."""
        num_cached, pace = usage.num_cached_tokens, self._paces[model]
        num_computed = usage.num_prompt_tokens - num_cached
        if num_computed >= MIN_COMPUTED:
            pace.num_tokens += num_computed
            pace.prefill_ms += usage.prefill_ms
        self.pending[PROMPT_TOKENS] += usage.num_prompt_tokens
        self.pending[TOKENS] += num_cached
        if pace.num_tokens:
            cost_ms = num_cached * pace.prefill_ms / pace.num_tokens
            self._seconds += max(0.0, cost_ms - usage.cache.restore_ms) / 1000

    def waiting(self) -> dict[str, float]:
        """What the store does not have yet, by the name of its counter."""
        return {**self.pending, SECONDS: self._seconds}

    def take(self) -> dict[str, float]:
        """The same, to be given to the store; `put_back` when that fails."""
        taken = {name: value for name, value in self.waiting().items() if value}
        self.pending.clear()
        self._seconds = 0.0
        return taken

    def put_back(self, taken: dict[str, float]) -> None:
        """The store did not have it."""
        for name, value in taken.items():
            if name == SECONDS:
                self._seconds += value
            else:
                self.pending[name] += int(value)
