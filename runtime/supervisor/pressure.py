"""What is done when the machine runs short of memory, purely: hot tiers shrink, models leave.

The rest of the machine takes what it needs without asking. What hot tiers were lent comes back
first, then models leave that nobody uses, and what is left is to take no new request for a while.
"""

from __future__ import annotations

from collections.abc import Sequence

from runtime.types import Struct

ENOUGH = 1.5
"""So many times the floor is to be available before more is lent again: it must not swing."""

_GIVEN_BACK = 2
_MAX_FLOOR_BYTES = 1 << 30
_FLOOR_SHARE = 0.05


class MemoryPressure(Struct, frozen=True):
    """How things stand: what may be lent to hot tiers at most (None: all), whether to refuse."""

    lendable_bytes: int | None = None
    refuses: bool = False


class PressureRelief(Struct, frozen=True):
    """How things stand from now on, and the model that has to leave for it."""

    strain: MemoryPressure
    leaves: str | None = None


def floor_bytes(memory_bytes: int) -> int:
    """What has to be available at least, where nobody said."""
    return min(int(memory_bytes * _FLOOR_SHARE), _MAX_FLOOR_BYTES)


def relieve(
    strain: MemoryPressure,
    *,
    available_bytes: int,
    floor_bytes: int,
    lent_bytes: int,
    idle: Sequence[str],
) -> PressureRelief:
    """The next step. Hot tiers hold `lent_bytes` beyond their least; `idle` may leave, in order."""
    missing = floor_bytes - available_bytes
    if missing <= 0:
        return PressureRelief(
            strain=_recovered(strain, available_bytes - int(ENOUGH * floor_bytes))
        )
    lendable = lent_bytes
    if strain.lendable_bytes is not None:
        lendable = min(lendable, strain.lendable_bytes)
    if lendable > 0:
        return PressureRelief(strain=MemoryPressure(lendable_bytes=max(lendable - missing, 0)))
    if idle:
        return PressureRelief(strain=MemoryPressure(lendable_bytes=0), leaves=idle[0])
    return PressureRelief(strain=MemoryPressure(lendable_bytes=0, refuses=True))


def _recovered(strain: MemoryPressure, beyond_enough: int) -> MemoryPressure:
    """Lend again by and by, half of what is there each time."""
    if strain.lendable_bytes is None or beyond_enough <= 0:
        return MemoryPressure(lendable_bytes=strain.lendable_bytes)
    return MemoryPressure(lendable_bytes=strain.lendable_bytes + beyond_enough // _GIVEN_BACK)
