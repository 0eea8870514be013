"""How much of what is listed goes into one page."""

from __future__ import annotations

from collections.abc import Iterable

PAGE_BYTES = 16 << 20
"""Whatever is listed, so many bytes are on one page at most, but one entry at least."""


def fitting(sizes: Iterable[tuple[int, int]], most_bytes: int | None) -> list[int]:
    """The first of these numbers, each with its bytes, that fit together; one at least."""
    found: list[int] = []
    total = 0
    for number, size in sizes:
        total += size
        if found and most_bytes is not None and total > most_bytes:
            break
        found.append(number)
    return found
