"""What it costs to take one model away and have another one there instead, part by part."""

from __future__ import annotations

from runtime.types import Struct


class LeaveCost(Struct, frozen=True):
    """Until a model's memory is free: its requests end, its KV is written, its process exits.

    Draining is the supervisor's; it says so.
    """

    drain_ms: float = 0.0
    flush_ms: float = 0.0
    exit_ms: float = 0.0


class StartCost(Struct, frozen=True):
    """Until a model can be asked: a process that is ready to load, weights, compiled kernels.

    `was_spare`: a process had been waiting.
    """

    spawn_ms: float = 0.0
    load_ms: float = 0.0
    warm_ms: float = 0.0
    was_spare: bool = False

    @property
    def total_ms(self) -> float:
        return self.spawn_ms + self.load_ms + self.warm_ms


class SwapCost(Struct, frozen=True):
    """Both, as one swap."""

    drain_ms: float = 0.0
    flush_ms: float = 0.0
    exit_ms: float = 0.0
    spawn_ms: float = 0.0
    load_ms: float = 0.0
    warm_ms: float = 0.0

    @classmethod
    def of(cls, leave: LeaveCost, start: StartCost) -> SwapCost:
        """One model left, another one started."""
        return cls(
            drain_ms=leave.drain_ms,
            flush_ms=leave.flush_ms,
            exit_ms=leave.exit_ms,
            spawn_ms=start.spawn_ms,
            load_ms=start.load_ms,
            warm_ms=start.warm_ms,
        )

    @property
    def total_ms(self) -> float:
        """The sum of the parts."""
        leaving_ms = self.drain_ms + self.flush_ms + self.exit_ms
        return leaving_ms + self.spawn_ms + self.load_ms + self.warm_ms
