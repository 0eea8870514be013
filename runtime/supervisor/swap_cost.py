"""What it costs to take one model away and have another one there instead, part by part."""

from __future__ import annotations

from runtime.supervisor.lifecycle import Transition
from runtime.types import Struct


class LeaveCost(Struct, frozen=True):
    """Until a model's memory is free: its requests end, its KV is written, its process exits.

    Draining is the supervisor's; it says so.
    """

    drain_ms: float = 0.0
    flush_ms: float = 0.0
    exit_ms: float = 0.0


class StartCost(Struct, frozen=True):
    """Until a model can be asked: a process that is ready to load, weights, compiled kernels."""

    spawn_ms: float = 0.0
    load_ms: float = 0.0
    warm_ms: float = 0.0

    @property
    def total_ms(self) -> float:
        return self.spawn_ms + self.load_ms + self.warm_ms


class SwapCost(Struct, frozen=True):
    """Both, as one swap: what it took a model to leave and to be there again, lately."""

    drain_ms: float = 0.0
    flush_ms: float = 0.0
    exit_ms: float = 0.0
    spawn_ms: float = 0.0
    load_ms: float = 0.0
    warm_ms: float = 0.0

    @classmethod
    def of(cls, leave: LeaveCost, start: StartCost) -> SwapCost:
        """One model left, another one, or the same, started."""
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


class SwapCosts:
    """What starts and ends of models took lately."""

    def __init__(self) -> None:
        self._starts: dict[str, StartCost] = {}
        self._leaves: dict[str, LeaveCost] = {}
        self._draining_since_s: dict[str, float] = {}
        self._drains_ms: dict[str, float] = {}

    def observe(self, transition: Transition) -> None:
        """Draining is seen from outside of the process: it lasts while requests end."""
        model = transition.model
        if transition.after == "draining":
            self._draining_since_s[model] = transition.at_s
        elif transition.after == "flushing":
            since_s = self._draining_since_s.pop(model, transition.at_s)
            self._drains_ms[model] = max(0.0, transition.at_s - since_s) * 1000
        elif transition.before == "draining":
            self._draining_since_s.pop(model, None)

    def started(self, model: str, cost: StartCost) -> None:
        self._starts[model] = cost

    def left(self, model: str, cost: LeaveCost) -> None:
        """What the end of its process took, from the moment when it was asked."""
        drain_ms = self._drains_ms.pop(model, 0.0) + cost.drain_ms
        self._leaves[model] = LeaveCost(
            drain_ms=drain_ms, flush_ms=cost.flush_ms, exit_ms=cost.exit_ms
        )

    def of(self, model: str) -> SwapCost | None:
        """None before its first start; what did not happen yet is 0."""
        start = self._starts.get(model)
        if start is None:
            return None
        return SwapCost.of(self._leaves.get(model, LeaveCost()), start)
