"""The scheduler decides, purely, what the next engine step does: a prefill slice, a decode step.

Decode and prefill share the one mlx thread. While sequences decode, a slice is kept short enough
not to be felt, and decode gets more time than slices take, so running streams should keep half of
their rate however long the prompt is (ops/bench measures it). Where a step takes longer than a
slice, several slices follow it: many short prompts do not wait for a step each.
A request of a better class overtakes between two slices, and one slice in nine goes to whom it
keeps waiting; what warms the cache beforehand is computed while nothing else is to be done,
decoding included. Only what goes on from an answer that is being written is computed beside that
answer, while nobody else is here; it shares the time with it as any other prompt does.

Within a class tenants take turns, by the tokens that are computed for them: who asks for little
waits for one slice of each other tenant at most. Of a tenant's prompts the one that lacks least is
computed first, so that a short one never waits for a long one; of those that lack about as much it
is the one whose conversation had least. Of the tokens computed past the oldest prompt it gets one
for every three. So longer prompts take a quarter of the time of a shorter one at most, and no
prompt takes more than four times as long as alone once it is the oldest, whoever of its tenant
arrives behind it. A prompt that was passed keeps what was computed of it.

A request begins as soon as one of its choices has a row and the memory for it; the other choices
follow row by row, after requests that have none yet. Here too tenants take turns, and the
conversations of each. Nobody is passed for ever: every ninth row goes to whom others passed, and
what needs much memory is passed by eight requests at most.

Tiny prompts that wait together are computed in one forward, which takes little longer than that of
a single one, and while nobody decodes they also begin together.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from runtime.fair_share import FairShare
from runtime.types import GenerateRequest, Priority
from runtime.worker.row_memory import RowMemory, RowUse, reserved_tokens, steps_to_growth
from runtime.worker.sequence import Sequence as Choice
from runtime.worker.sequence import SequenceGroup

SLICE_GRID = 32
"""Slices end on multiples of this absolute position, so that equal prompts are cut equally."""

_TINY = 2 * SLICE_GRID
"""Tokens that a prompt lacks at most for which computed ones wait a little, and beside which others
like it are computed in the same forward."""
_SHORT = 8 * _TINY
"""Tokens of such prompts at most, as a common forward copies what is known of them."""
_JOINT_TOKENS = 8 * _TINY
_JOINT_S = 0.05
"""So long a forward of several prompts takes at most: who arrives meanwhile waits for it, and where
a prompt alone takes longer, little is gained by computing more with it."""
_TOGETHER = 8
"""So many prompts begin together at most: with more of them a step takes longer, and so does
everything else that is done for them at once."""
_STEPS_WAITED = 2
"""So many decode steps' time they wait, which is what two rows that join others save."""
_SMOOTHING = 0.2
_FIRST_SLICE = 256
_LONGEST_SLICE_S = 10.0
"""A slice that takes longer than `wedge_timeout_s` would be taken for one that hangs."""
_RANKS: dict[Priority, int] = {"interactive": 0, "default": 1, "background": 2}
_WARMING = 3
_MAX_PASSES = 8
_TOKENS_PASSED = 3
"""So many tokens are computed for others for each one of the oldest prompt that they pass."""
_DECODE_SHARE = 1.25
"""Decode time per slice time: above 1, because what lies between two steps costs both."""


@dataclass(frozen=True, slots=True)
class PrefillSlice:
    """Compute `group.token_ids[start:end]`."""

    group: SequenceGroup
    start: int
    end: int

    @property
    def token_ids(self) -> list[int]:
        """What is to be computed."""
        return self.group.token_ids[self.start : self.end]

    @property
    def num_tokens(self) -> int:
        """How many these are."""
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What to do, in this order: `leaving` give their rows back and are computed again later,
    `joining` are given rows, then a slice of `prefill`, then a decode step of all rows, which are
    `num_running` by then.

    The slice is cut when what is known of the group's prompt is taken up: `Scheduler.next_slice`.
    """

    prefill: SequenceGroup | None
    num_running: int
    joining: tuple[Choice, ...] = ()
    leaving: tuple[Choice, ...] = ()
    beside: tuple[SequenceGroup, ...] = ()
    """Tiny prompts that are computed in the same forward as that of `prefill`."""

    @property
    def prefills(self) -> tuple[SequenceGroup, ...]:
        """All of whom something is computed."""
        return () if self.prefill is None else (self.prefill, *self.beside)


class Scheduler:
    """Groups waiting for prefill, and the balance between prefill and decode. Times in seconds.

    Where it `joins_prompts`, tiny ones are computed in one forward.
    """

    def __init__(
        self,
        *,
        max_batch: int,
        max_slice: int,
        block_s: float,
        memory: RowMemory | None = None,
        joins_prompts: bool = False,
    ) -> None:
        self.memory = memory or RowMemory()
        self._max_batch = max_batch
        self.joins_prompts = joins_prompts
        self.cut_into(max_slice)
        self.block_s = block_s
        """For how long decode may wait."""
        self.waiting: tuple[SequenceGroup, ...] = ()
        """Groups not yet decoding, oldest first."""
        self._joining: dict[SequenceGroup, list[Choice]] = {}
        """The choices without a row yet of groups whose prompt is computed."""
        self._begun: set[SequenceGroup] = set()
        """Those of them that have a row."""
        self._num_rows_passed = 0
        self._num_groups_passed = 0
        self._awaited: SequenceGroup | None = None
        """Others have passed it often enough: the memory for it is kept free until it begins."""
        self.decode_step_s = 0.0
        """What decode steps take on average, as of late."""
        self.prefill_rate = 0.0
        """Tokens per second, as of late."""
        self._decode_credit_s = 0.0
        self._gathered_s = 0.0
        """For how long prompts were computed while others, that are computed, waited for them."""
        self._num_passes = 0
        self._oldest: SequenceGroup | None = None
        """Of those that the last plan chose from."""
        self._num_tokens_owed: Counter[tuple[int, str]] = Counter()
        """For each class and tenant what was computed past its oldest prompt since the last slice
        of that."""
        self._slice_share: FairShare[SequenceGroup] = FairShare(_request_of)
        self._row_share: FairShare[SequenceGroup] = FairShare(_request_of)

    def cut_into(self, max_slice: int) -> None:
        """How many tokens slices have at the most from now on: not while some prompt is begun."""
        self._max_slice = max(SLICE_GRID, max_slice // SLICE_GRID * SLICE_GRID)

    @property
    def max_slice(self) -> int:
        """How many tokens a slice has at the most."""
        return self._max_slice

    @property
    def has_work(self) -> bool:
        """Some group can be prefilled now, or decode."""
        return bool(self._joining) or any(not group.is_waiting for group in self.waiting)

    @property
    def max_running(self) -> int:
        """Sequences that may decode at the same time."""
        return self._max_batch

    def add(self, group: SequenceGroup) -> None:
        self.waiting = (*self.waiting, group)

    def add_first(self, groups: Iterable[SequenceGroup]) -> None:
        """Put back groups that lost their KV, before everybody else."""
        self.waiting = (*groups, *self.waiting)

    def remove(self, group: SequenceGroup) -> None:
        """Forget a group: nobody wants it any more, or nothing is to be said after its prompt."""
        self.waiting = tuple(one for one in self.waiting if one is not group)
        self._joining.pop(group, None)
        self._begun.discard(group)

    def on_computed(self, group: SequenceGroup) -> None:
        """The prompt of a group is computed: its choices are to decode."""
        self.remove(group)
        self._joining[group] = list(group.sequences)

    def has_more(self, group: SequenceGroup) -> bool:
        """Whether choices of it are still to be given rows, which need the KV of its prompt."""
        return group in self._joining

    def plan(self, num_running: int, running: Collection[Choice] = ()) -> StepPlan:
        """What to do now, with `num_running` rows decoding; those are `running`."""
        rows = [self.row_of(one) for one in running]
        if len(rows) > 1 and self.memory.is_over(rows):
            # Who said most goes on: it ends first, and so everybody gets there.
            least = min(reversed([*running]), key=lambda one: one.num_output_tokens)
            return StepPlan(None, num_running - 1, leaving=(least,))
        if self._is_gathering(num_running):
            group = self._next_group(0, self._claimed(), ())
            if group is not None and self._is_waited_for(group):
                return StepPlan(group, 0, beside=self._beside_tiny(group, 0, self._claimed()))
        joining = self._give_rows(self._max_batch - num_running, rows)
        num_running += len(joining)
        if num_running and self._decode_credit_s > 0.0:
            return StepPlan(None, num_running, joining)
        held = [*rows, *self._claimed()]
        group = self._next_group(num_running, held, (*running, *joining))
        beside = self._beside_tiny(group, num_running, held) if group is not None else ()
        return StepPlan(group, num_running, joining, beside=beside)

    def _beside_tiny(
        self, first: SequenceGroup, num_running: int, held: list[RowUse]
    ) -> tuple[SequenceGroup, ...]:
        """Whose prompts are computed in the same forward as that of `first`, which is a tiny one:
        others of its class, whoever had least first, as far as there are rows and memory for them.
        """
        if not (self.joins_prompts and _is_tiny(first)) or _rank(first) == _WARMING:
            return ()
        if self._num_groups_passed:  # somebody waits for memory, whom few may pass
            return ()
        others = [one for one in self.waiting if one is not first and _is_tiny(one)]
        alike = [one for one in others if _rank(one) == _rank(first)]
        num_rows = min(self._max_batch - num_running, _TOGETHER) - len(self._joining) - 1
        num_tokens = min(self._slice_size(num_running), self._joint_tokens)
        num_tokens -= first.num_lacking_tokens
        held = [*held, *([] if _is_started(first) else self._claims(first))]
        beside: list[SequenceGroup] = []
        for group in sorted(alike, key=self._slice_share.start):
            claims = [] if _is_started(group) else self._claims(group)
            num_tokens -= group.num_lacking_tokens
            if len(beside) >= num_rows or num_tokens < 0 or not self.memory.fits(held, claims):
                break
            held += claims
            beside.append(group)
        return tuple(beside)

    def _is_gathering(self, num_running: int) -> bool:
        """Whether prompts that are computed may wait for tiny ones, to begin together with them."""
        is_room = len(self._joining) < min(self._max_batch, _TOGETHER)
        is_worth_it = self._gathered_s < _STEPS_WAITED * self.decode_step_s
        if num_running or not (self._joining and is_room and is_worth_it):
            return False
        return any(self._is_waited_for(one) for one in self.waiting if not one.is_waiting)

    def _is_waited_for(self, group: SequenceGroup) -> bool:
        """It takes little, and those that wait for it are of its class and tenant."""
        is_alike = all(_class_of(one) == _class_of(group) for one in self._joining)
        return is_alike and group.num_lacking_tokens <= _TINY

    def num_calm_steps(self, running: Iterable[Choice]) -> int:
        """So many more decode steps of these rows change nothing of what is to do and of what is
        left to the hot tier, unless somebody comes or goes.
        """
        if self.waiting or self._joining or self._decode_credit_s > 0.0:
            return 0
        steps = (
            steps_to_growth(
                one.group.num_prompt_tokens, one.num_output_tokens, one.group.max_tokens
            )
            for one in running
        )
        return min(steps, default=0)

    def give_up(self, choice: Choice) -> bool:
        """A choice needs no row any more; whether it was the last that its group waited for."""
        pending = self._joining.get(choice.group, [])
        if choice not in pending:
            return False
        pending.remove(choice)
        if not pending:
            self.remove(choice.group)
        return not pending

    def left_bytes(
        self, running: Iterable[Choice], following: Iterable[SequenceGroup] = ()
    ) -> int | None:
        """What is left to the hot tier beside these rows and those about to decode, and groups
        that are about to be computed; None: all.
        """
        begin = (one for one in following if not _is_started(one))
        new = [row for group in begin for row in self._claims(group)]
        return self.memory.left([*map(self.row_of, running), *self._claimed(), *new])

    def needs_bytes(self, group: SequenceGroup) -> int:
        """What a group takes at the least: with one of its choices at a time."""
        return self.memory.held(self._claims(group))

    def next_slice(self, group: SequenceGroup, num_running: int) -> PrefillSlice:
        """What of this group to compute next."""
        end = self._slice_end(group, num_running)
        return PrefillSlice(group, group.num_computed_tokens, end)

    def on_looked(self, seconds: float, num_running: int) -> None:
        """What precedes a slice took `seconds` while `num_running` sequences waited for it."""
        owed_s = seconds * _DECODE_SHARE
        self._decode_credit_s = self._decode_credit_s + owed_s if num_running else 0.0

    def on_prefill(self, done: PrefillSlice, seconds: float, num_running: int) -> None:
        """A slice took `seconds` while `num_running` sequences waited for it."""
        self.on_looked(seconds, num_running)
        num_tokens = done.end - done.start
        if num_tokens >= SLICE_GRID and seconds > 0.0:
            self.prefill_rate = _smooth(self.prefill_rate, num_tokens / seconds)
        if self._joining:
            self._gathered_s += seconds
        self._slice_share.charge(done.group, num_tokens)
        whose = _class_of(done.group)
        owed = num_tokens if done.group is not self._oldest else -_TOKENS_PASSED * num_tokens
        owed += self._num_tokens_owed[whose]
        self._num_tokens_owed[whose] = max(0, min(owed, _TOKENS_PASSED * self._max_slice))

    def on_decode(self, seconds: float) -> None:
        """A decode step of all running sequences took `seconds`."""
        self.decode_step_s = _smooth(self.decode_step_s, seconds)
        # A step that took longer than it had to is made up for by the slices that follow.
        self._decode_credit_s = max(self._decode_credit_s - seconds, -seconds)

    def row_of(self, choice: Choice) -> RowUse:
        """What a row takes once it decodes."""
        group = choice.group
        num_tokens = group.num_prompt_tokens + choice.num_output_tokens
        batch = self.memory.batch_of(len(group.token_ids), num_tokens)
        batch = None if choice.num_failures > 0 else batch
        return RowUse(batch, _num_tokens(group, choice.num_output_tokens))

    def _claims(self, group: SequenceGroup) -> list[RowUse]:
        """What a group takes before any of its choices decodes: a row, and where others are to
        follow, its prompt for them.
        """
        first = RowUse(None, _num_tokens(group, len(group.token_ids) - group.num_prompt_tokens))
        return [first, *self._shared(group)]

    def _shared(self, group: SequenceGroup) -> list[RowUse]:
        return [RowUse(None, len(group.token_ids))] if len(group.sequences) > 1 else []

    def _claimed(self) -> list[RowUse]:
        """What is promised to groups that have begun to be computed, or wait for rows."""
        claimed = [
            row for group in self.waiting if _is_started(group) for row in self._claims(group)
        ]
        for group in self._joining:
            claimed += self._shared(group) if group in self._begun else self._claims(group)
        return claimed

    def _give_rows(self, room: int, rows: list[RowUse]) -> tuple[Choice, ...]:
        """Who begins to decode now; their rows are added to `rows`."""
        given: list[Choice] = []
        while room > len(given) and (group := self._next_to_join(room - len(given), rows)):
            choice = self._joining[group].pop(0)
            given.append(choice)
            rows.append(self.row_of(choice))
            self._gathered_s = 0.0
            self._row_share.charge(group)
            self._begun.add(group)
            if not self._joining[group]:
                self.remove(group)
        return tuple(given)

    def _next_to_join(self, room: int, rows: list[RowUse]) -> SequenceGroup | None:
        """Whose next choice gets one of so many rows: of a group without any, or of one that has
        some; these leave a row to who is computed next, unless they were passed often.
        """
        new = [group for group in self._joining if group not in self._begun]
        first = self._row_share.next(new) if new else None
        further = self._further()
        is_owed = self._num_rows_passed >= _MAX_PASSES
        if further is not None and (is_owed or room > self._is_wanted(rows)):
            order = [further, first] if is_owed else [first, further]
        else:
            order = [first]
        for group in order:
            if group is not None and self._has_memory(group, rows):
                is_passed = further is not None and group is not further
                self._num_rows_passed = self._num_rows_passed + 1 if is_passed else 0
                return group
        if rows or not (further in order or self._num_groups_passed >= _MAX_PASSES):
            return None
        # Whoever began last had memory for a row beside the prompts that others hold.
        latest = reversed(list(self._joining))
        return next((group for group in latest if self._has_memory(group, rows)), None)

    def _further(self) -> SequenceGroup | None:
        """The oldest group that decodes, and has choices that do not yet."""
        return next((g for g in self._joining if g in self._begun), None)

    def _has_memory(self, group: SequenceGroup, rows: list[RowUse]) -> bool:
        """The next choice of a group may decode beside these rows: its first one was promised."""
        held = [*rows, *self._claimed()]
        own = self._shared(group) if group in self._begun else self._claims(group)
        for one in own:
            held.remove(one)
        return self.memory.fits(held, [self.row_of(self._joining[group][0]), *self._shared(group)])

    def _is_wanted(self, rows: list[RowUse]) -> bool:
        """Some group is about to be computed, and then needs a row."""
        held = [*rows, *self._claimed()]
        able = (g for g in self.waiting if not g.is_waiting and _rank(g) != _WARMING)
        return any(_is_started(g) or self.memory.fits(held, self._claims(g)) for g in able)

    def _next_group(
        self, num_running: int, held: list[RowUse], running: Collection[Choice]
    ) -> SequenceGroup | None:
        able = [g for g in self.waiting if not g.is_waiting]
        if num_running:
            others = (*self.waiting, *self._joining)
            able = _beside(able, others, running, has_row=num_running < self._max_batch)
        able, passing = self._with_memory(able, held)
        if not able:
            return None
        alike = self._slice_share.of_next_tenant(self._whose_turn(able))
        chosen = self._least_or_oldest(alike, num_running)
        self._num_groups_passed += chosen in passing
        return chosen

    def _least_or_oldest(self, alike: list[SequenceGroup], num_running: int) -> SequenceGroup:
        """Of one class and tenant that which lacks least, or the oldest once a slice of it is due.
        Those that lack about as much take turns by conversation.
        """
        self._oldest = oldest = alike[0]
        num_tokens = self._slice_end(oldest, num_running) - oldest.num_computed_tokens
        num_due = max(1, min(num_tokens, self._max_slice))
        if self._num_tokens_owed[_class_of(oldest)] >= _TOKENS_PASSED * num_due:
            return oldest

        def order(group: SequenceGroup) -> tuple[int, float, int]:
            num_lacking = group.num_lacking_tokens
            return num_lacking.bit_length(), self._slice_share.start(group), num_lacking

        return min(alike, key=order)

    def _with_memory(
        self, able: list[SequenceGroup], held: list[RowUse]
    ) -> tuple[list[SequenceGroup], list[SequenceGroup]]:
        """Those that may begin, or have begun, and which of them pass somebody for whom there is
        not memory enough: after so many it is kept for the oldest of these.
        """
        fitting = [g for g in able if _is_started(g) or self.memory.fits(held, self._claims(g))]
        further = self._further()
        passed = [g for g in able if g not in fitting]
        if further is not None and not self.memory.fits(held, self._claims(further)[:1]):
            passed.insert(0, further)
        before = able.index(passed[0]) if passed and passed[0] in able else 0
        older = [g for g in fitting if _is_started(g) or g in able[:before]]
        if self._awaited in fitting and not _is_started(self._awaited):
            return [self._awaited], []
        self._awaited = None
        if not passed:
            self._num_groups_passed = 0
            return fitting, []
        if self._num_groups_passed >= _MAX_PASSES:
            self._awaited = passed[0]
            return older, []
        return fitting, [g for g in fitting if g not in older]

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
        size = self._slice_size(num_running)
        size = size if group.echo is None else min(size, group.echo.max_slice)
        grid = self._max_slice if size >= self._max_slice else SLICE_GRID
        end = min((start + max(size, SLICE_GRID)) // grid * grid, last)
        end = min((b for b in group.cursor.boundaries if start < b < end), default=end)
        return group.image_batch.whole_around(start, end)

    @property
    def _joint_tokens(self) -> int:
        """How many tokens of several prompts one forward has."""
        return min(_JOINT_TOKENS, int(self.prefill_rate * _JOINT_S))

    def _slice_size(self, num_running: int) -> int:
        """How many tokens may be computed at a time while so many rows wait for it."""
        rate, allowed_s = self.prefill_rate, _LONGEST_SLICE_S
        if num_running:
            allowed_s = self.block_s + 2 * self.decode_step_s
        if rate or num_running:
            return min(self._max_slice, int(rate * allowed_s) if rate else _FIRST_SLICE)
        return self._max_slice


def _is_tiny(group: SequenceGroup) -> bool:
    """It may be computed beside others: little of it is lacking, and it is nothing but text."""
    is_text = group.echo is None and not group.image_batch.spans
    is_short = 0 < group.num_lacking_tokens <= _TINY and group.num_prefill_tokens <= _SHORT
    return is_text and is_short and not group.is_waiting


def _is_started(group: SequenceGroup) -> bool:
    """Some of its prompt is in memory."""
    return group.kv is not None or group.num_computed_tokens > 0


def _beside(
    able: list[SequenceGroup],
    others: Collection[SequenceGroup],
    running: Collection[Choice],
    *,
    has_row: bool,
) -> list[SequenceGroup]:
    """Those that may be computed while others decode: requests, if there is a row for one, and what
    goes on from the only request that is here.
    """
    present = {one.group.request.request_id for one in running}
    present |= {group.request.request_id for group in others if _rank(group) != _WARMING}
    return [
        group
        for group in able
        if (has_row and _rank(group) != _WARMING) or present == {group.request.written_by}
    ]


def _num_tokens(group: SequenceGroup, num_said: int) -> int:
    return reserved_tokens(group.num_prompt_tokens, num_said, group.max_tokens)


def _rank(group: SequenceGroup) -> int:
    """Whose turn it is before others': what only warms the cache comes last."""
    rank = _RANKS[group.request.priority or "default"]
    is_warming = rank == _RANKS["background"] and group.request.work == "prefill"
    return _WARMING if is_warming else rank


def _class_of(group: SequenceGroup) -> tuple[int, str]:
    """Among which others it waits."""
    return _rank(group), _request_of(group).cache.tenant


def _request_of(group: SequenceGroup) -> GenerateRequest:
    return group.request


def _smooth(average: float, value: float) -> float:
    return value if average == 0.0 else average + _SMOOTHING * (value - average)
