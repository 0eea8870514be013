"""Prewarm: while nobody asks for anything, the conversations used last come back into memory."""

from __future__ import annotations

import heapq
from itertools import accumulate

from runtime.kv.cursor import CacheCursor
from runtime.kv.prefix_tree import Run, path_to
from runtime.kv.restore import Restorer
from runtime.kv.state import TierState

_MAX_CONVERSATIONS = 64


class Prewarmer:
    """Brings back one conversation after the other, up to `budget_bytes` of KV in memory."""

    def __init__(self, tier_state: TierState, restorer: Restorer, budget_bytes: int) -> None:
        self._hot = tier_state.hot
        self._restorer = restorer
        self._budget_bytes = budget_bytes
        self._leaves: list[Run] = []
        self._wanted: list[Run] = []
        self._has_news = False
        self._cursor: CacheCursor | None = None

    @property
    def is_reading(self) -> bool:
        """It holds runs until they are here."""
        return self._cursor is not None

    def on_learned(self) -> None:
        """There is news of what is on disk."""
        self._has_news = self._budget_bytes > 0

    def bring(self, leaf: Run) -> None:
        """Somebody is going to ask for what ends there: it comes first, also out of the cold."""
        self._wanted.append(leaf)

    def _choose(self) -> None:
        self._has_news = False
        leaves = (run for run in self._hot.tree if not (run.children or run.is_loose))
        self._leaves = heapq.nlargest(
            _MAX_CONVERSATIONS, leaves, key=lambda run: self._hot[run].last_used_s
        )
        self._leaves.reverse()

    def step(self) -> None:
        """Nobody asks for anything: begin with the next conversation when the last one is here."""
        if self._cursor is not None:
            if self._cursor.is_waiting:
                return
            self._restorer.release(self._cursor)
            self._cursor = None
        while self._wanted and self._cursor is None:
            self._begin(self._wanted.pop(0), self._hot.budget_bytes, is_cold_near=True)
        if self._has_news:
            self._choose()
        while self._leaves and self._cursor is None:
            self._begin(self._leaves.pop(), min(self._budget_bytes, self._hot.budget_bytes))

    def _begin(self, leaf: Run, budget_bytes: int, *, is_cold_near: bool = False) -> None:
        if leaf not in self._hot:
            return
        held = [(run, self._hot[run]) for run, _ in path_to(leaf, leaf.end)]
        missing = [(run, one) for run, one in held if one.kv is None]
        if not is_cold_near and any(one.tier == "cold" for _, one in missing):
            return
        # Of one that is larger than the budget its beginning comes, and the rest is read for whom
        # it is asked.
        sizes = accumulate((one.disk_bytes for _, one in missing), initial=self._hot.num_bytes)
        fitting = [
            run for (run, _), end in zip(missing, [*sizes][1:], strict=True) if end <= budget_bytes
        ]
        if fitting:
            self._cursor = self._restorer.bring(fitting)
