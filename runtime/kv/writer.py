"""Writing: blocks become slots and turns become heads behind the requests, the newest turns first.

Its threads make no mlx call: they get evaluated host bytes. Publishing a staged head is the
server's part.
"""

from __future__ import annotations

import threading
import time
from array import array
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple
from uuid import uuid4

from msgspec import structs

from runtime.kv.deletions import Recognised
from runtime.kv.others import ALONE, OtherRanks
from runtime.kv.pack import PackedKv
from runtime.kv_messages import Allow, Allowance, Ended, Trouble
from runtime.wire import KvOptions
from store.block_names import num_common
from store.disk import file_bytes
from store.errors import OverCap, StoreError
from store.head_file import Head, head_bytes, write_head
from store.kv_file import Tensor
from store.slots import BlockKey, SlotAbout, Slots, slot_bytes
from store.temp_names import temp_name
from store.turns import NOTHING_SAID, Said, packed

PAUSE_AFTER_ERROR_S = 60.0
REST_S = 3.0
"""After so long without a request what is behind the last whole blocks is written as well."""

NUM_THREADS = 2
"""That write at once while nothing else runs."""

_REST_SHARE = 3.0
"""While requests run a writer rests so much longer than it works, with an empty queue."""

_REMOVAL_PATIENCE_S = 1.0
"""So long a deletion waits for a file that is being written to be removed again."""

_OPENING_TOKENS = 16
"""At most so many tokens a template writes between a question and its answer."""

_CALM_SHARE = 1 / 16
"""With so much of the queue full it does not rest: what waits there is in memory until then."""


@dataclass(frozen=True, slots=True)
class BlockJob:
    """A block to be written, or the states at its end."""

    key: BlockKey
    token_ids: array[int]
    packed: PackedKv
    recompute_ms: float = 0.0
    is_state: bool = False
    cut_s: float = field(default_factory=time.monotonic)
    """When it was computed, by the monotonic clock."""
    is_pinned: bool = False


@dataclass(frozen=True, slots=True)
class HeadJob:
    """A head to be staged once the blocks `names` are written, and later again with its end."""

    head: Head
    token_ids: array[int]
    names: tuple[bytes, ...]
    end_name: bytes
    told: Ended
    """As it is told, but for where it is staged."""
    num_prompt: int
    """So many of its first tokens were its prompt."""
    said: Said = NOTHING_SAID
    """What its file keeps of its conversation."""
    end: PackedKv | None = None
    """What is behind the last whole block; it is written when the model rests."""
    with_end: bool = False
    ended_s: float = field(default_factory=time.monotonic)
    """When its turn ended, by the monotonic clock."""

    @property
    def recognised(self) -> Recognised:
        """Whose it is, for deletions."""
        return Recognised(self.told.asker, self.told.received, self.token_ids)

    @property
    def tensors(self) -> Sequence[Tensor]:
        return self.end.tensors if self.end is not None and self.with_end else ()

    @property
    def written(self) -> tuple[bytes, ...]:
        """What of it is on disk once it is published."""
        return (*self.names, self.end_name) if self.with_end else self.names

    def again(self, *, with_end: bool, is_answered: bool = True) -> HeadJob:
        """The same head to be staged once more, with the pins that were not taken back. As long as
        the first one is not answered it has another id, so that the answers can be told apart.
        """
        head_id = self.head.id if is_answered else uuid4().hex
        head = structs.replace(self.head, id=head_id, continues=self.end_name, pins=())
        return replace(self, head=head, with_end=with_end)


class Written(NamedTuple):
    """Blocks that need their bytes in memory no longer, as they are slots; or with a `reason` as
    they could not be written.
    """

    names: tuple[bytes, ...]
    reason: str | None = None


class AllowedBytes:
    """How much may be written: given in advance by the server, which is asked before it is used up.

    Every thread may call it.
    """

    def __init__(self, ask: Callable[[Allow], None]) -> None:
        self.advance_bytes = KvOptions().advance_bytes
        """So much is asked for at a time, before it is needed."""
        self._ask = ask
        self._changed = threading.Condition()
        self._num_left = 0
        self._asked: Allow | None = None
        self._refused: Allow | None = None
        self._is_closed = False

    def hear(self, allowance: Allowance) -> None:
        """The server allows so much more, or nothing."""
        with self._changed:
            self._num_left += allowance.num_bytes
            self._refused = None if allowance.num_bytes else self._asked
            self._asked = None
            self._changed.notify_all()

    def close(self) -> None:
        """Nobody answers any more."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def take(self, num_bytes: int, made_s: float, *, is_pinned: bool = False) -> None:
        """So much is written now, of what was computed at that time of the monotonic clock.

        Raises OverCap where that is not allowed.
        """
        asked_bytes = num_bytes if is_pinned else max(num_bytes, self.advance_bytes)
        mine = Allow(asked_bytes, made_s, is_pinned)
        with self._changed:
            while self._num_left < num_bytes and not self._is_closed and self._refused is not mine:
                self._ask_for(mine)
                self._changed.wait()
            if self._num_left < num_bytes:
                raise OverCap(num_bytes)
            self._num_left -= num_bytes
            if self._num_left < self.advance_bytes // 2:
                self._ask_for(Allow(self.advance_bytes, made_s))

    def _ask_for(self, allow: Allow) -> None:
        if self._asked is None:
            self._asked = allow
            self._ask(allow)


class Writer:
    """A bounded queue of blocks, and of heads behind them. `on_written` is called in its threads.

    While requests run one thread writes and rests in between, the less the more is queued. All
    write while nothing runs, and when too much is queued.
    """

    def __init__(
        self,
        slots: Slots,
        heads: Path,
        max_bytes: int,
        report: Callable[[Ended | Trouble], None],
        on_written: Callable[[Written], None],
        allowed: AllowedBytes,
    ) -> None:
        self.others: OtherRanks = ALONE
        """They write their parts of the same."""
        self._slots = slots
        self._folder = heads
        self._max_bytes = max_bytes
        self._report = report
        self._on_written = on_written
        self._allowed = allowed
        self._blocks: OrderedDict[tuple[bytes, bool], BlockJob] = OrderedDict()
        self._heads: list[HeadJob] = []
        self._resting: dict[str, HeadJob] = {}
        """Heads that were staged without their ends."""
        self._writing: set[tuple[bytes, bool]] = set()
        self._staging: dict[str, HeadJob] = {}
        self._told: dict[str, HeadJob] = {}
        """Heads that were told and not answered yet."""
        self._unwanted: set[tuple[bytes, bool]] = set()
        """What is being written and was deleted meanwhile."""
        self._used: Counter[bytes] = Counter()
        """What was used for blocks whose head is not told yet, by their names."""
        self._untold_bytes = 0
        """What was used for what is told with no head: the next one says it as well."""
        self._withdrawn: set[str] = set()
        """Those of them that are not to be told."""
        self._wake = threading.Condition()
        self._is_idle = False
        self._rests_at_s = 0.0
        self._is_closing = False
        self._paused_until_s = 0.0
        self.num_queued_bytes = 0
        self.num_dropped = 0

    def put(self, jobs: Sequence[BlockJob]) -> None:
        """Queue blocks; in a full queue the oldest make room for them."""
        dropped: list[bytes] = []
        with self._wake:
            is_paused = time.monotonic() < self._paused_until_s
            for job in jobs:
                if is_paused:
                    dropped.append(job.key.name)
                    continue
                if (job.key.name, job.is_state) in self._blocks:
                    self._take((job.key.name, job.is_state))
                self._blocks[job.key.name, job.is_state] = job
                self._unwanted.discard((job.key.name, job.is_state))
                self.num_queued_bytes += job.packed.nbytes
            while self.num_queued_bytes > self._max_bytes and len(self._blocks) > 1:
                dropped.append(self._take(next(iter(self._blocks))).key.name)
            self.num_dropped += len(dropped)
            self._wake.notify_all()
        if dropped:
            self._on_written(Written(tuple(dropped), "paused" if is_paused else "full"))

    def put_head(self, job: HeadJob, blocks: Sequence[BlockJob] = ()) -> None:
        """Have a head staged once its blocks are written, of which `blocks` are not queued yet; all
        of it before anything older.
        """
        with self._wake:
            self.put(blocks)
            for one in (*self._heads, *self._resting.values()):
                if _goes_on_from(job, one):
                    job = self._instead_of(one, job)
                elif _leaves_behind(job, one) and not one.with_end:
                    self._leave_end(one)
            self._heads.append(job)
            names = {*job.names}
            for key in [one for one in self._blocks if one[0] in names][::-1]:
                self._blocks.move_to_end(key, last=False)
            self._wake.notify_all()

    def _instead_of(self, before: HeadJob, job: HeadJob) -> HeadJob:
        """A conversation goes on before the head of its last turn was staged, or its end."""
        continues = before.end_name
        if self._resting.pop(before.head.id, None) is None:
            self._heads.remove(before)
            continues = before.head.continues
        ends = tuple(sorted({*before.told.ends, *job.told.ends}))  # these are in memory as well
        told = structs.replace(job.told, ends=ends)
        return replace(job, head=structs.replace(job.head, continues=continues), told=told)

    def _leave_end(self, job: HeadJob) -> None:
        """Nobody is likely to come back to the end of this one."""
        if self._resting.pop(job.head.id, None) is None:
            self._heads[self._heads.index(job)] = replace(job, end=None)

    def _is_past(self, job: HeadJob) -> bool:
        """Its conversation has gone on while it was staged, from its end or otherwise."""
        others = (*self._heads, *self._resting.values(), *self._staging.values())
        return any(_goes_on_from(one, job) or _leaves_behind(one, job) for one in others)

    @property
    def is_busy(self) -> bool:
        """Something is queued or being written, besides ends that wait until the model rests."""
        with self._wake:
            return bool(self._blocks or self._heads or self._writing or self._staging)

    @property
    def has_unanswered(self) -> bool:
        """Heads are to be staged, or are not answered yet, and the store works."""
        with self._wake:
            is_paused = time.monotonic() < self._paused_until_s
            return not is_paused and bool(self._heads or self._staging or self._told)

    def answered(self, head_id: str) -> HeadJob | None:
        """The server answered to a head that was told; which that was, once."""
        with self._wake:
            return self._told.pop(head_id, None)

    def set_idle(self, *, is_idle: bool) -> None:
        """Whether no request is running."""
        with self._wake:
            if is_idle and not self._is_idle:
                self._rests_at_s = time.monotonic() + REST_S
            self._is_idle = is_idle
            self._wake.notify_all()

    def resume(self) -> None:
        """The store works again, as far as anybody knows: try it."""
        self._paused_until_s = 0.0

    def drop(self, names: Collection[bytes]) -> None:
        """These were deleted: the heads that end in them are staged no more with their ends."""
        gone = {*names}
        with self._wake:
            for one in [*self._resting.values()]:
                if not gone.isdisjoint((*one.names, one.end_name)):
                    del self._resting[one.head.id]

    def drop_blocks(self, names: Collection[bytes]) -> list[bytes]:
        """Write these blocks no more; those that were queued. One that is being written is removed
        again, which is waited for a moment.
        """
        gone = {*names}
        with self._wake:
            queued = [self._take(key).key.name for key in [*self._blocks] if key[0] in gone]
            self._untold_bytes += sum(self._used.pop(name, 0) for name in gone)
            self._unwanted |= {key for key in self._writing if key[0] in gone}
            self._wake.wait_for(lambda: not self._unwanted, _REMOVAL_PATIENCE_S)
        return queued

    def open_names(self) -> set[bytes]:
        """The names of what heads go through that are to be staged, or are not answered yet."""
        with self._wake:
            jobs = (*self._heads, *self._staging.values(), *self._told.values())
            return {name for one in jobs for name in (*one.names, one.end_name)}

    def withdraw(self, is_meant: Callable[[Recognised], bool]) -> list[HeadJob]:
        """Stage these heads no more; those that were meant. From then on none of them is told."""
        with self._wake:
            jobs = (*self._heads, *self._resting.values(), *self._staging.values())
            meant = {one.head.id: one for one in jobs if is_meant(one.recognised)}
            self._heads = [one for one in self._heads if one.head.id not in meant]
            self._withdrawn |= meant.keys() & self._staging.keys()
            for head_id in meant:
                self._resting.pop(head_id, None)
            return [*meant.values()]

    def run(self) -> None:
        """Write until closed and empty."""
        helpers = [
            threading.Thread(target=self._work, args=(True,), name="writer helper", daemon=True)
            for _ in range(NUM_THREADS - 1)
        ]
        for helper in helpers:
            helper.start()
        self._work(False)
        for helper in helpers:
            helper.join()

    def close(self) -> None:
        """Write what is queued, and all ends, then end."""
        with self._wake:
            self._is_closing = True
            self._wake.notify_all()

    def _work(self, is_helper: bool) -> None:
        while (job := self._next(is_helper)) is not None:
            begun_s = time.monotonic()
            if isinstance(job, HeadJob):
                self._stage(job)
            else:
                self._write(job)
            rest_s = (time.monotonic() - begun_s) * self._rest_share()
            if rest_s:
                with self._wake:
                    self._wake.wait_for(lambda: self._is_idle or self._is_closing, rest_s)

    def _rest_share(self) -> float:
        if self._is_idle or self._is_closing:
            return 0.0
        share = self.num_queued_bytes / max(self._max_bytes * _CALM_SHARE, 1)
        return _REST_SHARE * max(1.0 - share, 0.0)

    def _next(self, is_helper: bool) -> BlockJob | HeadJob | None:
        """What comes next; None at the end."""
        with self._wake:
            while True:
                may_help = self._is_idle or self._is_closing or self._rest_share() == 0
                if not is_helper or may_help:
                    if (job := self._ready()) is not None:
                        return job
                    is_over = not (self._blocks or self._heads or self._resting or self._writing)
                    if self._is_closing and is_over and not self._staging:
                        self._wake.notify_all()
                        return None
                self._wake.wait(self._wait_s())

    def _wait_s(self) -> float | None:
        now_s = time.monotonic()
        if now_s < self._paused_until_s:
            return self._paused_until_s - now_s
        is_resting = self._is_idle and self._resting
        return max(self._rests_at_s - now_s, 0.01) if is_resting else None

    def _ready(self) -> BlockJob | HeadJob | None:
        if time.monotonic() < self._paused_until_s and not self._is_closing:
            return None
        open_names = {name for name, _ in (*self._blocks, *self._writing)}
        for number, job in enumerate(self._heads):
            if open_names.isdisjoint(job.names):
                self._staging[job.head.id] = job
                return self._heads.pop(number)
        # What is queued again while it is written has the same file: it is looked at afterwards.
        for key in self._blocks:
            if key not in self._writing:
                self._writing.add(key)
                return self._take(key)
        is_resting = self._is_idle and time.monotonic() >= self._rests_at_s
        # The older ones are to be told first: they make way for the end of the newest.
        is_first_over = not self._heads and all(one.with_end for one in self._staging.values())
        if self._resting and is_first_over and (is_resting or self._is_closing):
            job = max(self._resting.values(), key=lambda one: one.ended_s)
            del self._resting[job.head.id]
            job = job.again(with_end=True, is_answered=job.head.id not in self._told)
            self._staging[job.head.id] = job
            return job
        return None

    def _take(self, key: tuple[bytes, bool]) -> BlockJob:
        job = self._blocks.pop(key)
        self.num_queued_bytes -= job.packed.nbytes
        return job

    def _write(self, job: BlockJob) -> None:
        reason, is_new = None, False
        try:
            packed, token_ids = job.packed, None if job.is_state else job.token_ids
            about = SlotAbout(job.key.model, job.key.name, packed.layout, job.recompute_ms)
            if not self._has(job):  # else who keeps a head of it only sees that it is there
                num_bytes = file_bytes(slot_bytes(about, token_ids, packed.tensors))
                self._take_bytes(job, num_bytes * packed.num_parts)
                with self._wake:
                    self._used[job.key.name] += num_bytes * packed.num_parts
            if token_ids is None:
                is_new = self._slots.put_state(about, packed.tensors) is not None
            else:
                is_new = self._slots.put(about, token_ids, packed.tensors) is not None
            self.others.write(about, token_ids, packed.share)
        except OverCap as error:  # the next may have room again
            reason = error.reason
            self._report(Trouble(reason=reason))
        except StoreError as error:
            reason = self._pause(error)
        key = job.key.name, job.is_state
        with self._wake:
            if key in self._unwanted:
                with suppress(StoreError):  # then it goes with what no head goes through
                    if is_new:  # else it is of somebody else, or the server removes it
                        (self._slots.remove_state if job.is_state else self._slots.remove)(job.key)
                        self.others.remove(job.key.model, [job.key.name])
                self._unwanted.discard(key)
                self._untold_bytes += self._used.pop(job.key.name, 0)
            self._writing.discard(key)
            self._wake.notify_all()
        self._on_written(Written((job.key.name,), reason))

    def _has(self, job: BlockJob) -> bool:
        """All ranks have it already."""
        key = job.key
        if not (self._slots.has_state if job.is_state else self._slots.has)(key):
            return False
        (others,) = self.others.have(key.model, [key.name])
        return others.state if job.is_state else others.slot

    def _take_bytes(self, job: BlockJob, num_bytes: int) -> None:
        """Raises OverCap. Its head may be pinned and come while this is refused."""
        is_pinned = self._is_pinned(job)
        try:
            self._allowed.take(num_bytes, job.cut_s, is_pinned=is_pinned)
        except OverCap:
            if is_pinned or not self._is_pinned(job):
                raise
            self._allowed.take(num_bytes, job.cut_s, is_pinned=True)

    def _is_pinned(self, job: BlockJob) -> bool:
        with self._wake:
            pinned = {name for one in self._heads if one.head.pins for name in one.names}
        return job.is_pinned or job.key.name in pinned

    def _stage(self, job: HeadJob) -> None:
        path = self._folder / temp_name(job.head.id)
        head = job.head
        if job.end is not None and job.with_end:
            head = structs.replace(head, layout=job.end.layout)
        is_allowed = is_staged = is_refused = False
        said = packed(job.said, job.token_ids)
        num_bytes = file_bytes(head_bytes(head, job.token_ids, job.tensors, said))
        num_bytes *= job.end.num_parts if job.tensors and job.end else 1
        try:
            self._allowed.take(num_bytes, job.ended_s, is_pinned=bool(head.pins))
            is_allowed = True
            if job.end is not None and job.with_end:
                about = SlotAbout(head.model, job.end_name, job.end.layout)
                self.others.write(about, None, job.end.share)
            if job.names:
                self._slots.sync([head.model])
            self.others.sync(head.model)
            write_head(path, head, job.token_ids, job.tensors, said)
            is_staged = True
        except OverCap as error:  # its conversation may have room again when it goes on
            is_refused = True
            self._report(Trouble(reason=error.reason))
        except StoreError as error:
            self._pause(error)
        with self._wake:
            is_withdrawn = head.id in self._withdrawn
            if is_staged and not is_withdrawn:
                self._told[head.id] = job
                num_bytes += sum(self._used.pop(one, 0) for one in job.names) + self._untold_bytes
                self._untold_bytes = 0
                self._report(_ended(job, path, num_bytes))
            elif is_allowed:
                self._untold_bytes += num_bytes
            self._withdrawn.discard(head.id)
            del self._staging[head.id]
            if is_withdrawn or is_refused:
                pass
            elif not is_staged and not self._is_closing and not job.with_end:
                self._heads.insert(0, job)
            elif is_staged and job.end is not None and not job.with_end and not self._is_past(job):
                self._resting[head.id] = job
            self._wake.notify_all()
        if is_withdrawn:
            path.unlink(missing_ok=True)
            with suppress(StoreError):
                self._slots.remove_end(BlockKey(head.model, job.end_name))
                self.others.remove(head.model, [job.end_name])

    def _pause(self, error: StoreError) -> str:
        """The store fails: nothing is written for a while, which the server is told."""
        self._report(Trouble(reason=error.reason))
        self._paused_until_s = time.monotonic() + PAUSE_AFTER_ERROR_S
        return error.reason


def _goes_on_from(job: HeadJob, before: HeadJob) -> bool:
    """Whose it is goes on from all of it, and nobody else wants that to stay."""
    is_its = (job.head.model, job.head.owner) == (before.head.model, before.head.owner)
    if not is_its or not {*before.head.pins} <= {*job.head.pins}:
        return False
    is_within = job.names[: len(before.names)] == before.names
    return is_within and job.token_ids[: len(before.token_ids)] == before.token_ids


def _leaves_behind(job: HeadJob, before: HeadJob) -> bool:
    """Whose it is went on from the prompt of the other one, but not from its answer: most clients
    then never come back to that. The last tokens of a prompt may open the answer; without a session
    they may as well be another question. One that is asked again is asked with the same prompt.
    """
    is_its = (job.head.model, job.head.owner) == (before.head.model, before.head.owner)
    is_longer = job.ended_s > before.ended_s and job.num_prompt > before.num_prompt
    if not is_its or not is_longer or before.head.pins:
        return False
    least = max(before.num_prompt - (_OPENING_TOKENS if job.head.owner.session else 0), 1)
    shortest = min(len(job.token_ids), len(before.token_ids))
    return least <= num_common(job.token_ids, before.token_ids) < shortest


def _ended(job: HeadJob, path: Path, num_bytes: int) -> Ended:
    said = {"num_bytes": num_bytes, "ended_s": job.ended_s}
    return structs.replace(job.told, head_id=job.head.id, path=str(path), **said)
