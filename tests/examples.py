"""How many examples a property is tried with where a hundred are too few or too many."""

from __future__ import annotations

from hypothesis import settings


def usual(num_examples: int) -> int:
    """So many where the profile has a hundred, as many fewer as it has less."""
    return max(1, num_examples * settings().max_examples // 100)
