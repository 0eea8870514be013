"""Figures of the KV hierarchy: counted by the workers, counted in the store."""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from runtime.wire import KvCounts
from store.types import Tier

GAUGES = {"hot_bytes": 0, "num_pieces": 0, "num_queued_bytes": 0}
"""What is no longer there once a worker has left."""


class TierFigure(NamedTuple):
    """What one model holds in one tier of the store."""

    model: str
    tier: Tier
    num_slots: int
    num_tokens: int
    disk_bytes: int


class DiskFigures(NamedTuple):
    """What is on disk by tier, how much of the fast one may be taken, and what its filesystem has
    left of what it must have, in bytes.
    """

    tiers: tuple[TierFigure, ...] = ()
    free_bytes: int | None = None
    floor_bytes: int = 0
    cap_bytes: int | None = None


class KvFigures(NamedTuple):
    """Everything that is counted: by model, since the server started, and by tier, as it is."""

    models: dict[str, KvCounts]
    store: dict[str, int]
    disk: DiskFigures
    is_cold_away: bool = False
    is_up: bool | None = None
    """Whether conversations are kept on disk; None where nobody wants that."""


class WrittenGroup(NamedTuple):
    """A group of slots that was written and published, in ns of wall time."""

    num_slots: int
    num_bytes: int
    start_ns: int
    end_ns: int


def added(one: KvCounts, other: KvCounts) -> KvCounts:
    """The sum, counter by counter."""
    ours, theirs = msgspec.structs.astuple(one), msgspec.structs.astuple(other)
    sums = [a + b for a, b in zip(ours, theirs, strict=True)]
    return KvCounts(**dict(zip(KvCounts.__struct_fields__, sums, strict=True)))
