"""Rows are given to choices and taken back, as the scheduler plans it, with the memory for them."""

from __future__ import annotations

import time
from collections.abc import Iterable

from runtime.errors import MemoryTaken, NeedsTooMuchMemory, RequestRejected
from runtime.kv.tiers import Tiers
from runtime.kv_messages import HotBudget
from runtime.types import ChatPrompt
from runtime.worker.decode import Decoder
from runtime.worker.scheduler import Scheduler, StepPlan
from runtime.worker.sequence import Sequence, SequenceGroup


class RowExecutor:
    """Carries out what the scheduler decides about rows. Belongs to the mlx thread."""

    def __init__(self, scheduler: Scheduler, decoder: Decoder, tiers: Tiers) -> None:
        self._scheduler = scheduler
        self._decoder = decoder
        self._tiers = tiers
        self._planned: list[Sequence] = []
        self._num_calm_steps = 0
        """For how many more steps of the rows in `_planned` there is nothing to plan."""
        self._num_changes_seen = 0
        """What is in memory had changed so often when prompts were looked up last."""

    def plan(self) -> StepPlan:
        """What to do now; who leaves or joins has done so, and the hot tier has made room."""
        running = self._decoder.sequences
        self._num_calm_steps -= self._decoder.most_said
        if self._num_calm_steps >= 0 and running is self._planned and not self._scheduler.waiting:
            return StepPlan(None, len(running))
        self._look_again()
        plan = self._scheduler.plan(len(running), running)
        for sequence in plan.leaving:
            self._decoder.remove(sequence)
        self.put_back(plan.leaving)
        for group in dict.fromkeys(one.group for one in plan.joining):
            group.decode_started_s = group.decode_started_s or time.perf_counter()
            joining = [one for one in plan.joining if one.group is group]
            self._decoder.insert(group, joining, takes=not self._scheduler.has_more(group))
        self.share_memory(plan.prefills)
        self._planned = self._decoder.sequences
        self._num_calm_steps = self._scheduler.num_calm_steps(self._planned)
        return plan

    def begin(self, group: SequenceGroup) -> None:
        """Have it computed in its turn; an answer that goes on here before all others."""
        self._tiers.begin(group.cursor)
        if group.request.said is None:
            self._scheduler.add(group)
        else:
            self._tiers.release(group.cursor)
            self.put_back([one for one in group.sequences if not one.is_finished])

    def _look_again(self) -> None:
        """Have those that wait know what others have computed of their prompts meanwhile.

        Who lacks less than is worth taking up has nothing to gain: of small ones there may be many.
        """
        if self._num_changes_seen == self._tiers.num_changes:
            return
        self._num_changes_seen = self._tiers.num_changes
        for group in self._scheduler.waiting:
            if not group.is_waiting and group.num_lacking_tokens >= self._tiers.least_worth:
                group.num_at_hand = self._tiers.num_at_hand(group.cursor)

    def put_back(self, sequences: Iterable[Sequence]) -> None:
        """Have them computed again, first of all, with what they have said so far."""
        again = [one.regrouped(self._tiers.lengthened) for one in sequences]
        for group in again:
            self._tiers.begin(group.cursor)
        self._scheduler.add_first(again)

    def remove(self, sequence: Sequence) -> None:
        """It says nothing more."""
        if self._scheduler.give_up(sequence):
            sequence.group.kv = None
        self._decoder.remove(sequence)

    def share_memory(self, following: tuple[SequenceGroup, ...] = ()) -> None:
        """The hot tier has what rows leave of the memory for both. `following` come next."""
        left_bytes = self._scheduler.left_bytes(self._decoder.sequences, following)
        new = [one.cursor for one in following if one.kv is None]
        self._tiers.leave_beside_rows(left_bytes, new)

    def refusal_of(self, group: SequenceGroup) -> RequestRejected | None:
        """Why there will not be memory for a request, if there will not."""
        memory, num_bytes = self._scheduler.memory, self._scheduler.needs_bytes(group)
        field = "messages" if isinstance(group.request.prompt, ChatPrompt) else "prompt"
        if memory.most_bytes is not None and num_bytes > memory.most_bytes:
            return NeedsTooMuchMemory(num_bytes, memory.most_bytes, field)
        if memory.pool_bytes is not None and num_bytes > memory.pool_bytes:
            return MemoryTaken(num_bytes, memory.pool_bytes, field)
        return None

    def deal(self, news: HotBudget) -> list[tuple[SequenceGroup, RequestRejected]]:
        """There is more memory for rows from now on, or less; what waits in vain, and why."""
        memory = self._scheduler.memory
        memory.pool_bytes, memory.most_bytes = news.pool_bytes, news.most_bytes
        self._num_calm_steps = 0
        self.share_memory()
        # Of whom something was said already the answer goes on, alone if need be.
        fresh = [
            group
            for group in self._scheduler.waiting
            if group.kv is None and not any(one.num_output_tokens for one in group.sequences)
        ]
        refused = [(group, self.refusal_of(group)) for group in fresh]
        return [(group, error) for group, error in refused if error is not None]
