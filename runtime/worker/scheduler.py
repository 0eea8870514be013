"""The scheduler decides, purely, what the next engine step does: a prefill slice, a decode step.

Decode and prefill share the one mlx thread. While sequences decode, a slice is kept short enough
not to be felt, and after each slice decode gets more time than the slice took, so
running streams should keep half of their rate however long the prompt is (ops/bench measures it).
A request of a better class overtakes between two slices, and one slice in nine goes to whom it
keeps waiting; what warms the cache beforehand is computed while nothing else is to be done,
decoding included.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from runtime.types import Priority
from runtime.worker.sequence import SequenceGroup

SLICE_GRID = 32
"""Slices end on multiples of this absolute position, so that equal prompts are cut equally."""

_SMOOTHING = 0.2
_FIRST_SLICE = 256
_RANKS: dict[Priority, int] = {"interactive": 0, "default": 1, "background": 2}
_WARMING = 3
_MAX_PASSES = 8
_DECODE_SHARE = 1.25
"""Decode time per slice time: above 1, because what lies between two steps costs both."""


@dataclass(frozen=True, slots=True)
class PrefillSlice:
    """Compute `group.token_ids[start:end]`."""

    group: SequenceGroup
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class StepPlan:
    prefill: PrefillSlice | None
    decode: bool


class Scheduler:
    """Groups waiting for prefill, and the balance between prefill and decode. Times in seconds."""

    def __init__(self, *, max_batch: int, max_slice: int, block_s: float) -> None:
        self._max_batch = max_batch
        self._max_slice = max(SLICE_GRID, max_slice // SLICE_GRID * SLICE_GRID)
        self.block_s = block_s
        """For how long decode may wait."""
        self._waiting: list[SequenceGroup] = []
        self._decode_step_s = 0.0
        self._prefill_rate = 0.0
        self._decode_credit_s = 0.0
        self._overtaken = False
        self._num_passes = 0

    @property
    def waiting(self) -> tuple[SequenceGroup, ...]:
        """Groups not yet decoding, oldest first."""
        return tuple(self._waiting)

    @property
    def has_work(self) -> bool:
        """Some group can be prefilled now."""
        return any(not group.is_waiting for group in self._waiting)

    @property
    def max_running(self) -> int:
        """Sequences that may decode at the same time."""
        return self._max_batch

    def add(self, group: SequenceGroup) -> None:
        self._waiting.append(group)

    def add_first(self, groups: Iterable[SequenceGroup]) -> None:
        """Put back groups that lost their KV, before everybody else."""
        self._waiting[:0] = groups

    def remove(self, group: SequenceGroup) -> None:
        """Forget a group: its prefill is complete, or nobody wants it any more."""
        if group in self._waiting:
            self._waiting.remove(group)

    def plan(self, num_running: int) -> StepPlan:
        """What to do now, with `num_running` sequences decoding."""
        decode = num_running > 0
        if decode and self._decode_credit_s > 0.0:
            return StepPlan(None, decode)
        group = self._next_group(num_running)
        if group is None:
            return StepPlan(None, decode)
        return StepPlan(self.next_slice(group, num_running), decode)

    def next_slice(self, group: SequenceGroup, num_running: int) -> PrefillSlice:
        """What of this group to compute next."""
        end = self._slice_end(group, num_running)
        return PrefillSlice(group, group.num_computed_tokens, end)

    def on_prefill(self, num_tokens: int, seconds: float, num_running: int) -> None:
        """A slice of `num_tokens` took `seconds` while `num_running` sequences waited for it."""
        if num_running:
            self._decode_credit_s = seconds * _DECODE_SHARE
        if num_tokens >= SLICE_GRID and seconds > 0.0:
            self._prefill_rate = _smooth(self._prefill_rate, num_tokens / seconds)

    def on_decode(self, seconds: float) -> None:
        """A decode step of all running sequences took `seconds`."""
        self._decode_step_s = _smooth(self._decode_step_s, seconds)
        self._decode_credit_s -= seconds

    def _next_group(self, num_running: int) -> SequenceGroup | None:
        room = self._max_batch - num_running
        able = [g for g in self._waiting if not g.is_waiting]
        if num_running:
            able = [g for g in able if _rank(g) != _WARMING]
        if not able:
            return None
        able = self._whose_turn(able)
        fitting = [g for g in able if not num_running or len(g.sequences) <= room]
        # The head is never passed by groups that fit only because it is too wide.
        if not fitting or (fitting[0] is not able[0] and num_running):
            return None
        oldest = fitting[0]
        if not self._overtaken and oldest.num_remaining_tokens > self._max_slice:
            short = [g for g in fitting if g.num_remaining_tokens <= self._max_slice]
            if short:
                self._overtaken = True
                return short[0]
        self._overtaken = False
        return oldest

    def _whose_turn(self, able: list[SequenceGroup]) -> list[SequenceGroup]:
        """Those of the best class, or, when they went first for long, of the oldest other's."""
        best = min(map(_rank, able))
        others = [rank for group in able if best < (rank := _rank(group)) < _WARMING]
        self._num_passes = self._num_passes + 1 if others else 0
        if self._num_passes > _MAX_PASSES:
            self._num_passes, best = 0, others[0]
        return [g for g in able if _rank(g) == best]

    def _slice_end(self, group: SequenceGroup, num_running: int) -> int:
        start, last = group.num_computed_tokens, group.num_prefill_tokens
        size = self._max_slice
        if group.echo is not None:
            size = min(size, group.echo.max_slice)
        if num_running:
            allowed = self.block_s + 2 * self._decode_step_s
            rate = self._prefill_rate
            size = min(size, int(rate * allowed) if rate else _FIRST_SLICE)
        grid = self._max_slice if size >= self._max_slice else SLICE_GRID
        end = min((start + max(size, SLICE_GRID)) // grid * grid, last)
        end = min((b for b in group.trail.boundaries if start < b < end), default=end)
        return group.album.whole_around(start, end)


def _rank(group: SequenceGroup) -> int:
    """Whose turn it is before others': what only warms the cache comes last."""
    rank = _RANKS[group.request.priority or "default"]
    is_warming = rank == _RANKS["background"] and group.request.work == "prefill"
    return _WARMING if is_warming else rank


def _smooth(average: float, value: float) -> float:
    return value if average == 0.0 else average + _SMOOTHING * (value - average)
