"""Placement decides, purely, which loaded models must leave so that another one fits."""

from __future__ import annotations

from collections.abc import Iterable

from runtime.types import Struct


class Need(Struct, frozen=True):
    """What a model takes: bytes of memory when loaded, and the seconds of one swap to it."""

    num_bytes: int
    swap_s: float


class Room(Struct, frozen=True):
    """How much may be loaded at a time; `num_models` is None without a limit of their number.

    Either may be negative: then nothing fits before that much has left.
    """

    num_bytes: int
    num_models: int | None = None

    def without(self, reservations: Iterable[int]) -> Room:
        """What is left beside these models, by their bytes."""
        taken = list(reservations)
        left = None if self.num_models is None else self.num_models - len(taken)
        return Room(num_bytes=self.num_bytes - sum(taken), num_models=left)

    def with_back(self, reservations: Iterable[int]) -> Room:
        """What there is once these models have left."""
        given = list(reservations)
        left = None if self.num_models is None else self.num_models + len(given)
        return Room(num_bytes=self.num_bytes + sum(given), num_models=left)

    def holds(self, num_bytes: int) -> bool:
        """One more model of that size fits."""
        return num_bytes <= self.num_bytes and (self.num_models is None or self.num_models >= 1)


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
