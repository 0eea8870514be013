"""How large the tiers may be, where nobody said: pure rules, all in bytes."""

from __future__ import annotations

MIN_HOT_BYTES = 256 << 20
MAX_QUEUE_BYTES = 2 << 30
MIN_QUEUE_BYTES = 64 << 20
MAX_CACHE_BYTES = 100_000_000_000
MAX_ADVANCE_BYTES = 64 << 20


def hot_budget(memory_bytes: int, weights_bytes: int) -> int:
    """What one model keeps in memory: a quarter of what its weights leave."""
    return max((memory_bytes - weights_bytes) // 4, MIN_HOT_BYTES)


def queue_budget(memory_bytes: int) -> int:
    """What may wait to be written: a twentieth of the memory, within sane bounds."""
    return min(max(memory_bytes // 20, MIN_QUEUE_BYTES), MAX_QUEUE_BYTES)


def cache_budget(free_bytes: int, held_bytes: int) -> int:
    """What may lie on the disk: a quarter of what would be free without it."""
    return min((free_bytes + held_bytes) // 4, MAX_CACHE_BYTES)


def advance_budget(cap_bytes: int | None) -> int:
    """What a worker may write before it asks again: little of a small disk, where others leave for
    it and nobody else has room meanwhile.
    """
    return MAX_ADVANCE_BYTES if cap_bytes is None else min(cap_bytes // 64, MAX_ADVANCE_BYTES)
