"""How large the tiers may be, where nobody said: pure rules, all in bytes."""

from __future__ import annotations

MIN_HOT_BYTES = 256 << 20
MAX_QUEUE_BYTES = 2 << 30
MIN_QUEUE_BYTES = 64 << 20
MAX_CACHE_BYTES = 100_000_000_000


def hot_budget(memory_bytes: int, weights_bytes: int) -> int:
    """What one model keeps in memory: a quarter of what its weights leave."""
    return max((memory_bytes - weights_bytes) // 4, MIN_HOT_BYTES)


def queue_budget(memory_bytes: int) -> int:
    """What may wait to be written: a twentieth of the memory, within sane bounds."""
    return min(max(memory_bytes // 20, MIN_QUEUE_BYTES), MAX_QUEUE_BYTES)


def cache_budget(free_bytes: int, held_bytes: int) -> int:
    """What may lie on the disk: a quarter of what would be free without it."""
    return min((free_bytes + held_bytes) // 4, MAX_CACHE_BYTES)
