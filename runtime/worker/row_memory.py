"""What the KV of running requests takes, purely: who may begin beside whom, and who never can.

A row is one choice of a request while it decodes. Rows of similar length share a batch, where each
takes as much as the longest of them, and each has a copy of its prompt. What a request of several
choices computes of its prompt is there once more until its last row has begun.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

ANSWER_RESERVE_TOKENS = 1024
"""Of an answer so much is counted before it is said, or less where less is asked for."""

GROWTH_TOKENS = 256
"""Layer caches grow by so many tokens at a time."""

_BUCKET_TOKENS = (4096, 16384, 65536)


def bucket_of(num_tokens: int) -> int:
    """Which batch a row whose prompt has so many tokens is in."""
    return sum(num_tokens > bound for bound in _BUCKET_TOKENS)


class RowFootprint(NamedTuple):
    """Bytes of the KV of one row: for each token, for each of the last tokens in windows of some
    length, and whatever its length. From `kv_start` tokens on each token takes another number.
    """

    per_token: int = 0
    windows: tuple[tuple[int, int], ...] = ()
    fixed: int = 0
    kv_start: int | None = None
    late_per_token: int = 0

    def of(self, num_tokens: int) -> int:
        """The most of a row while it grows to so many tokens."""
        num_tokens = _grown(num_tokens)
        windowed = sum(each * min(num_tokens, window) for each, window in self.windows)
        num_bytes = self.per_token * num_tokens
        if self.kv_start is not None and num_tokens >= self.kv_start:
            before_bytes = self.per_token * _grown(self.kv_start)
            num_bytes = max(before_bytes, self.late_per_token * num_tokens)
        return num_bytes + windowed + self.fixed


def _grown(num_tokens: int) -> int:
    return num_tokens + -num_tokens % GROWTH_TOKENS


class RowUse(NamedTuple):
    """One row and the tokens it is counted with; None as its batch is one of its own."""

    batch: int | None
    num_tokens: int


@dataclass(slots=True)
class RowMemory:
    """How many bytes rows may take. None is without a limit.

    `pool_bytes` are for rows and the hot tier together, which has what rows leave of it.
    `most_bytes` is what the pool would be if no other model were loaded.
    """

    footprint: RowFootprint = field(default_factory=RowFootprint)
    is_batched: bool = True
    """Rows share batches, until they have as many tokens as the footprint's `kv_start`."""
    pool_bytes: int | None = None
    most_bytes: int | None = None

    def batch_of(self, num_prompt_tokens: int, num_tokens: int) -> int | None:
        """Which batch a row is in that began with so many tokens and has so many by now."""
        kv_start = self.footprint.kv_start
        is_late = kv_start is not None and num_tokens >= kv_start
        return bucket_of(num_prompt_tokens) if self.is_batched and not is_late else None

    def held(self, rows: Iterable[RowUse]) -> int:
        """What these rows take together."""
        batches: defaultdict[int, list[int]] = defaultdict(list)
        num_bytes = 0
        for row in rows:
            if row.batch is None:
                num_bytes += self.footprint.of(row.num_tokens)
            else:
                batches[row.batch].append(row.num_tokens)
        return num_bytes + sum(len(one) * self.footprint.of(max(one)) for one in batches.values())

    def fits(self, rows: Iterable[RowUse], new: Iterable[RowUse]) -> bool:
        """Whether these may begin beside those. Alone everything may that was admitted."""
        rows = [*rows]
        is_free = self.pool_bytes is None or not rows
        return is_free or self.held([*rows, *new]) <= (self.pool_bytes or 0)

    def has_beside(self, hot_bytes: int, num_tokens: int) -> bool:
        """Caches of so many tokens have room beside a hot tier of that size and no rows."""
        needed_bytes = hot_bytes + self.footprint.of(num_tokens)
        return self.pool_bytes is None or needed_bytes <= self.pool_bytes

    def is_over(self, rows: Iterable[RowUse]) -> bool:
        """Whether they have grown to more than there is."""
        return self.pool_bytes is not None and self.held(rows) > self.pool_bytes

    def left(self, rows: Iterable[RowUse]) -> int | None:
        """What these rows leave to the hot tier."""
        return None if self.pool_bytes is None else max(self.pool_bytes - self.held(rows), 0)


def reserved_tokens(num_tokens: int, num_said: int, max_said: int) -> int:
    """What a row is counted with that has said some of the most that it may say.

    `num_tokens` are those before its answer.
    """
    expected = min(max_said, ANSWER_RESERVE_TOKENS)
    return num_tokens + max(expected, min(num_said + GROWTH_TOKENS, max_said))


def steps_to_growth(num_tokens: int, num_said: int, max_said: int) -> int:
    """After so many more tokens such a row still takes what it takes now."""
    expected = min(max_said, ANSWER_RESERVE_TOKENS)
    counted = reserved_tokens(num_tokens, num_said, max_said)
    return max(expected - GROWTH_TOKENS - num_said, 0) + -counted % GROWTH_TOKENS
