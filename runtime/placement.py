"""Placement decides, purely, which loaded models must leave so that another one fits."""

from __future__ import annotations

from collections.abc import Iterable

from runtime.types import Struct


class Resident(Struct, frozen=True):
    """A model that has a process. `last_used_s` is on any one monotonic clock."""

    model: str
    is_busy: bool
    last_used_s: float


def victims(residents: Iterable[Resident], max_loaded: int) -> tuple[str, ...] | None:
    """The models to stop before one more may load, least recently used first.

    None when there is no legal choice now: too many of them are busy.
    """
    loaded = list(residents)
    num_excess = len(loaded) + 1 - max_loaded
    if num_excess <= 0:
        return ()
    idle = sorted(
        (resident for resident in loaded if not resident.is_busy),
        key=lambda resident: resident.last_used_s,
    )
    if len(idle) < num_excess:
        return None
    return tuple(resident.model for resident in idle[:num_excess])
