"""Room on the fast disk: who may write how much, and what leaves so that he may.

Caps are over all models and count what files really take. A worker is given an allowance of bytes
before it writes, and says at each turn's end what it has written of it; what is there is counted
from the files then. So what is there and what is allowed together never exceed the cap, whatever
workers do within their allowances.
"""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import NamedTuple

import structlog

from store.cold_blocks import ColdBlocks
from store.disk import UNIT_BYTES, file_bytes
from store.errors import OverCap
from store.eviction import choose, densest
from store.head_file import KnownHead
from store.heads import BlockFile, EndFile, Heads
from store.slots import BlockKey, nothing
from store.tree import Sizes
from store.types import Candidate, TtlClass, class_of
from store.upkeep import DiskRoom

_log = structlog.stdlib.get_logger("hearth.store")

MAX_STATES = 8
"""States of layers that cannot be sliced, of one conversation, and as many of what others begin
with as well; those at pinned ends not counted.
"""

SPARE_SHARE = 0.02
"""Of the cap, so much more is freed at once, so that not every turn has to."""

_DAY_S = 86_400.0


class Limits(NamedTuple):
    """What the settings allow. `day_bytes` may be written in one day: a disk wears out by that."""

    warm_bytes: int
    cold_bytes: int = 0
    cold_ttl_s: float = 0.0
    day_bytes: int | None = None


class _Placed(NamedTuple):
    """A file and the one that it is behind, both by ids; `above` is the block that it is of or
    behind. Each block or head more that is right behind its block counts as a use beside `user`.
    """

    file: BlockFile | EndFile
    id: str
    parent: str | None
    num_bytes: int
    above: BlockKey | None
    user: KnownHead
    recompute_ms: float
    num_more: int = 0
    is_of_use: bool = True
    """What is before it is here or in the cold store."""

    @property
    def is_pinned(self) -> bool:
        return self.user.head.is_pinned


class Surroundings(NamedTuple):
    """The filesystem of a store, and what the store takes of it beside slots and heads: its index
    above all. `give_up` has what nobody reads any more leave before anything else has to.
    """

    disk: Callable[[], DiskRoom]
    other_bytes: Callable[[], int]
    give_up: Callable[[], None] = nothing


class Room:
    """Of the store of `heads`, with or without a cold store. For any thread but those of `cold`.

    `wall_s` is the wall clock, for which day it is.
    """

    def __init__(
        self,
        heads: Heads,
        limits: Limits,
        around: Surroundings,
        wall_s: Callable[[], float],
        cold: ColdBlocks | None = None,
    ) -> None:
        self._heads = heads
        self._limits = limits
        self._around = around
        self._wall_s = wall_s
        self._cold = cold
        self._day = 0
        self._day_bytes = 0
        self.allowed: Counter[str] = Counter()
        """Bytes that each worker may write and has not said that it wrote."""
        self.counts: Counter[str] = Counter()
        """What left, why, and what was refused, since this was opened."""

    @property
    def warm_bytes(self) -> int:
        """What the fast disk may have at most."""
        return self._limits.warm_bytes

    # Allowances

    def allow(
        self, worker: str, num_bytes: int, age_s: float = 0.0, *, is_pinned: bool = False
    ) -> int:
        """Let a worker write so many bytes more, or fewer; how many. What leaves for them was used
        before these were computed, `age_s` ago. What is pinned counts as written today, but is not
        kept from being written. Raises StoreError.
        """
        with self._heads.lock:
            num_bytes = num_bytes if is_pinned else min(num_bytes, self._left_today())
        if num_bytes <= 0:
            _log.warning("daily_writes_used_up", day_bytes=self._limits.day_bytes)
            return 0
        self._make(num_bytes, before_s=self._heads.now_s() - age_s)
        with self._heads.lock:
            given = max(min(num_bytes, self.spare_bytes()), 0)
            self.allowed[worker] += given
        self.counts["refused_cap"] += not given
        return given

    def settle(self, worker: str, num_bytes: int, known: KnownHead | None = None) -> None:
        """A worker has used so much of its allowance, for a head that was published or not."""
        with self._heads.lock:
            self._day_bytes = self._written_today() + num_bytes
            self.allowed[worker] = max(self.allowed[worker] - num_bytes, 0)
        if known is not None and known.path is not None:
            self._thin(known)

    def finish(self, worker: str) -> None:
        """Who was allowed to write writes no more: what it did not use comes back."""
        with self._heads.lock:
            self.allowed.pop(worker, None)

    def could_have(self, num_bytes: int) -> bool:
        """Whether there would be room for so much if all left that may."""
        with self._heads.lock:
            _, candidates = self._candidates(())
            return self.spare_bytes() + sum(one.size_bytes for one in candidates) >= num_bytes

    def leave(self, worker: str, model: bytes, before_s: float) -> list[BlockKey]:
        """A worker is gone: its allowance comes back, once what it left behind of a model is
        removed that was written before that time of the wall clock. The blocks that leave.
        """
        gone = self._heads.sweep(model, before_s)
        self.release(worker)
        return gone

    def reserve_spare(self, name: str, num_bytes: int) -> bool:
        """Take so much of what is to spare, until `release`; False where nothing would have to
        leave for it only.
        """
        with self._heads.lock:
            if self.spare_bytes() < num_bytes:
                return False
            self.allowed[name] += num_bytes
            return True

    def release(self, name: str) -> None:
        """Give back what was allowed or reserved by this name, or what is there is counted now."""
        self.allowed.pop(name, None)

    def used_bytes(self) -> int:
        """What is there."""
        heads = self._heads
        with heads.lock:
            head_bytes = sum(one.num_bytes for one in heads.known.values())
            return (
                heads.kept.warm_bytes
                + head_bytes
                + heads.unowned_bytes
                + self._around.other_bytes()
            )

    def bytes_of(self, head_ids: Collection[str]) -> int:
        """What these heads and all blocks that they go through take of the fast disk."""
        heads = self._heads
        with heads.lock:
            known = [heads.known[one] for one in head_ids if one in heads.known]
            blocks = {key for one in known if one.path for key in heads.kept.chain(one.last)}
            block_bytes = sum(heads.kept.blocks[key].sizes.warm for key in blocks)
            return block_bytes + sum(one.num_bytes for one in known)

    def spare_bytes(self) -> int:
        """What nobody takes and nobody may write yet, below the cap and above the disk's floor."""
        disk = self._around.disk()
        free = min(self._limits.warm_bytes - self.used_bytes(), disk.free_bytes - disk.floor_bytes)
        return free - self.allowed.total()

    def _written_today(self) -> int:
        day = int(self._wall_s() // _DAY_S)
        if day != self._day:
            self._day, self._day_bytes = day, 0
        return self._day_bytes

    def _left_today(self) -> int:
        """What may be allowed of this day's writes, besides what is allowed already."""
        if self._limits.day_bytes is None:
            return sys.maxsize
        return self._limits.day_bytes - self._written_today() - self.allowed.total()

    # Leaving

    def keep(self) -> list[BlockKey]:
        """Have the caps and lives hold again: the blocks that leave altogether.

        With a cold store what rests goes there first, and its own life and cap end it.
        """
        longer_s = self._limits.cold_ttl_s if self._cold else 0.0
        gone = self._heads.expire(longer_s)
        self.counts["evicted_expired"] += len(gone)
        if self._cold is not None:
            with self._heads.lock:
                idle = {one.head.id for one in self._heads.idle()}
                used = self._users(self._heads.known.keys() - idle)
                resting = self._chosen(sys.maxsize, used) if idle else []
            for file in resting:
                if isinstance(file, BlockFile) and not self._demote(self._cold, file):
                    break
            self._keep_cold(self._cold)
        self._make(0)
        return gone

    def bring(self, keys: Collection[BlockKey]) -> list[BlockKey]:
        """Have these blocks on the fast disk, as `ColdBlocks.bring`; others leave for them."""

        def reserve(num_bytes: int) -> None:
            wanted = file_bytes(num_bytes)
            self._make(wanted, keys)
            if self.spare_bytes() < wanted:
                raise OverCap(num_bytes)

        return self._cold.bring(keys, reserve) if self._cold else []

    def _make(
        self, num_bytes: int, needed: Collection[BlockKey] = (), before_s: float = math.inf
    ) -> None:
        """Have so much to spare, if that is to be had of what was used before that time last."""
        if num_bytes > self.spare_bytes():
            self._around.give_up()
        missing = num_bytes - self.spare_bytes()
        if missing > 0:
            num_bytes = missing + int(self._limits.warm_bytes * SPARE_SHARE)
            self._evict(self._chosen(num_bytes, needed, before_s))

    def _evict(self, files: Iterable[BlockFile | EndFile]) -> None:
        for file in files:
            if isinstance(file, EndFile):
                self._heads.remove_ends([file.head_id])
            elif self._cold is None or not self._demote(self._cold, file):
                self._heads.remove_files([file])
                self.counts["evicted_cap"] += file.is_slot

    def _demote(self, cold: ColdBlocks, file: BlockFile) -> bool:
        is_done = cold.demote(file)
        self.counts["demoted"] += is_done and file.is_slot
        return is_done

    def _keep_cold(self, cold: ColdBlocks) -> None:
        cold.finish()
        excess = self._heads.kept.cold_bytes - self._limits.cold_bytes
        for file in self._chosen(excess, (), is_cold=True):
            assert isinstance(file, BlockFile)
            self.counts["evicted_cold_cap"] += cold.remove(file.key)

    def _chosen(
        self,
        num_bytes: int,
        needed: Collection[BlockKey],
        before_s: float = math.inf,
        *,
        is_cold: bool = False,
    ) -> list[BlockFile | EndFile]:
        """What leaves the fast disk, or the cold store, for so many bytes, in this order: what is
        worth least first, later blocks before earlier ones.
        """
        if num_bytes <= 0:
            return []
        with self._heads.lock:
            files, candidates = self._candidates(needed, before_s, is_cold=is_cold)
            return [files[one] for one in choose(candidates, num_bytes, self._heads.now_s())]

    def _users(self, head_ids: Iterable[str]) -> dict[BlockKey, KnownHead]:
        """The blocks on disk that these heads go through, and the pinned head, or else the one used
        last, that goes through each.
        """
        known = [self._heads.known[one] for one in head_ids]
        known.sort(key=lambda one: (one.head.is_pinned, one.last_used_s), reverse=True)
        users: dict[BlockKey, KnownHead] = {}
        for one in known:
            for key in self._heads.kept.chain(one.last) if one.path else ():
                if key in users:
                    break
                users[key] = one
        return users

    def _candidates(
        self, needed: Collection[BlockKey], before_s: float = math.inf, *, is_cold: bool = False
    ) -> tuple[dict[str, BlockFile | EndFile], list[Candidate]]:
        """What may leave the fast disk, or the cold store. States are behind the slot that they
        belong to, ends of heads behind the last block, and slots behind the last one before them
        that is there.
        """
        files = [*self._files(is_cold=is_cold)]
        children = Counter(one.parent for one in files)
        may_leave = [
            one
            for one in files
            if one.above not in needed and not one.is_pinned and one.user.last_used_s <= before_s
        ]
        chosen_from = [_candidate(one, children[one.id]) for one in may_leave]
        return {one.id: one.file for one in may_leave}, chosen_from

    def _files(self, *, is_cold: bool) -> Iterator[_Placed]:
        blocks = self._heads.kept.blocks

        def slot_before(above: BlockKey | None) -> str | None:
            while above is not None and not _slot(blocks[above].sizes, is_cold=is_cold):
                above = blocks[above].above
            return above.name.hex() if above else None

        for key, user in self._users(self._heads.known).items():
            sizes, block_id, parent = blocks[key].sizes, key.name.hex(), slot_before(key)
            of = (key, user, blocks[key].recompute_ms, blocks[key].num_behind - 1)
            if num_bytes := _slot(sizes, is_cold=is_cold):
                parent = slot_before(blocks[key].above)
                yield _Placed(BlockFile(key), block_id, parent, num_bytes, *of)
                parent = block_id
            if sizes.state and not is_cold:
                file = BlockFile(key, is_slot=False)
                yield _Placed(file, f"{block_id} state", parent, sizes.state, *of)
        for one in () if is_cold else self._heads.known.values():
            if one.end_bytes >= UNIT_BYTES:
                is_of_use = one.last is None or blocks[one.last].sizes.tier != "missing"
                file, parent = EndFile(one.head.id), slot_before(one.last)
                block_ms = blocks[one.last].recompute_ms if one.last else one.head.block_ms
                of = (one.end_bytes, one.last, one, block_ms)
                yield _Placed(file, one.head.id, parent, *of, is_of_use=is_of_use)

    def _thin(self, known: KnownHead) -> None:
        """Remove the states of a conversation that are missed least, until it has few enough."""
        heads = self._heads
        with heads.lock:
            if known.head.id not in heads.known:
                return
            pinned = {one.last for one in heads.known.values() if one.head.is_pinned}
            chain = [*heads.kept.chain(known.last)][::-1]
            blocks = [heads.kept.blocks[key] for key in chain]
            # What others begin with as well has as many of its own.
            shared_to = max((n for n, one in enumerate(blocks, 1) if one.num_behind > 1), default=0)
            shared: list[int] = []
            own: list[int] = []
            for number, (key, block) in enumerate(zip(chain, blocks, strict=True), 1):
                if block.sizes.state and key not in pinned:
                    (shared if number <= shared_to else own).append(number)
            dense = [
                some.pop(densest(some))
                for some in (shared, own)
                for _ in range(len(some) - MAX_STATES)
            ]
            heads.remove_files(BlockFile(chain[number - 1], is_slot=False) for number in dense)


def _slot(sizes: Sizes, *, is_cold: bool) -> int:
    return sizes.cold if is_cold else sizes.slot


def _candidate(placed: _Placed, num_children: int) -> Candidate:
    """A file with so many behind it."""
    head = placed.user.head
    ttl_class: TtlClass = "extended" if head.ttl_s is None else class_of(head.ttl_s)
    return Candidate(
        id=placed.id,
        parent=placed.parent,
        num_children=num_children,
        size_bytes=placed.num_bytes,
        recompute_ms=placed.recompute_ms,
        last_used_s=placed.user.last_used_s,
        hits=placed.user.hits + placed.num_more,
        ttl_class=ttl_class,
        is_released=not placed.is_of_use,
    )
