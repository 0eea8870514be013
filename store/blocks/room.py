"""Room on the fast disk: who may write how much, and what leaves so that he may.

Caps are over all models and count what files really take. A worker is given an allowance of bytes
before it writes, and says at each turn's end what it has written of it; what is there is counted
from the files then. So what is there and what is allowed together never exceed the cap, whatever
workers do within their allowances.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from typing import NamedTuple

from store.blocks.cold_blocks import ColdBlocks
from store.blocks.head_file import KnownHead
from store.blocks.heads import BlockFile, Heads
from store.blocks.slots import BlockKey
from store.blocks.tree import Block, Sizes
from store.errors import OverCap
from store.eviction import choose, densest
from store.types import Candidate, TtlClass, class_of
from store.upkeep import DiskRoom

MAX_STATES = 8
"""States of layers that cannot be sliced, of one conversation; those at pinned ends not counted."""

SPARE_SHARE = 0.02
"""Of the cap, so much more is freed at once, so that not every turn has to."""

_MAX_FLOOR_SHARE = 0.1
_UNIT_BYTES = 4096
_DAY_S = 86_400.0


class Limits(NamedTuple):
    """What the settings allow. `day_bytes` may be written in one day: a disk wears out by that."""

    warm_bytes: int
    cold_bytes: int = 0
    cold_ttl_s: float = 0.0
    day_bytes: int | None = None


def file_bytes(num_bytes: int) -> int:
    """What a file of that size takes of an allowance: whole units, and one for where it lies."""
    return (-(-num_bytes // _UNIT_BYTES) + 1) * _UNIT_BYTES


class Room:
    """Of the store of `heads`, with or without a cold store. For any thread but those of `cold`.

    `disk` says what the filesystem has, `other_bytes` what the store takes of it beside slots and
    heads: its index above all. `wall_s` is the wall clock, for which day it is.
    """

    def __init__(
        self,
        heads: Heads,
        limits: Limits,
        disk: Callable[[], DiskRoom],
        other_bytes: Callable[[], int],
        wall_s: Callable[[], float],
        cold: ColdBlocks | None = None,
    ) -> None:
        self._heads = heads
        self._limits = limits
        self._disk = disk
        self._other_bytes = other_bytes
        self._wall_s = wall_s
        self._cold = cold
        self._day = 0
        self._day_bytes = 0
        self.allowed: Counter[str] = Counter()
        """Bytes that each worker may write and has not said that it wrote."""

    @property
    def warm_bytes(self) -> int:
        """What the fast disk may have at most."""
        return self._limits.warm_bytes

    # Allowances

    def allow(self, worker: str, num_bytes: int) -> int:
        """Let a worker write so many bytes more, or fewer; how many. Others leave for them.

        Raises StoreError.
        """
        if self._written_today() >= (self._limits.day_bytes or float("inf")):
            return 0
        self._make(num_bytes)
        with self._heads.lock:
            given = max(min(num_bytes, self.spare_bytes()), 0)
            self.allowed[worker] += given
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
            return heads.kept.warm_bytes + head_bytes + heads.unowned_bytes + self._other_bytes()

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
        disk = self._disk()
        floor_bytes = min(disk.floor_bytes, int(disk.total_bytes * _MAX_FLOOR_SHARE))
        free = min(self._limits.warm_bytes - self.used_bytes(), disk.free_bytes - floor_bytes)
        return free - self.allowed.total()

    def _written_today(self) -> int:
        day = int(self._wall_s() // _DAY_S)
        if day != self._day:
            self._day, self._day_bytes = day, 0
        return self._day_bytes

    # Leaving

    def keep(self) -> list[BlockKey]:
        """Have the caps and lives hold again: the blocks that leave altogether.

        With a cold store what rests goes there first, and its own life and cap end it.
        """
        longer_s = self._limits.cold_ttl_s if self._cold else 0.0
        gone = self._heads.expire(longer_s)
        if self._cold is not None:
            with self._heads.lock:
                idle = {one.head.id for one in self._heads.idle()}
                used = self._users(self._heads.known.keys() - idle)
                resting = self._chosen(sys.maxsize, used) if idle else []
            for file in resting:
                if not self._cold.demote(file):
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

    def _make(self, num_bytes: int, needed: Collection[BlockKey] = ()) -> None:
        """Have so much to spare, if that is to be had."""
        missing = num_bytes - self.spare_bytes()
        if missing > 0:
            self._evict(missing + int(self._limits.warm_bytes * SPARE_SHARE), needed)

    def _evict(self, num_bytes: int, needed: Collection[BlockKey]) -> None:
        """Have what is worth least leave the fast disk, later blocks before earlier ones."""
        chosen = self._chosen(num_bytes, needed)
        if self._cold is None:
            self._heads.remove_files(chosen)
            return
        for file in chosen:
            if not self._cold.demote(file):
                self._heads.remove_files([file])

    def _keep_cold(self, cold: ColdBlocks) -> None:
        cold.finish()
        excess = self._heads.kept.cold_bytes - self._limits.cold_bytes
        for file in self._chosen(excess, (), is_cold=True):
            cold.remove(file.key)

    def _chosen(
        self, num_bytes: int, needed: Collection[BlockKey], *, is_cold: bool = False
    ) -> list[BlockFile]:
        """What leaves the fast disk, or the cold store, for so many bytes, in this order."""
        if num_bytes <= 0:
            return []
        with self._heads.lock:
            files, candidates = self._candidates(needed, is_cold=is_cold)
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
        self, needed: Collection[BlockKey], *, is_cold: bool = False
    ) -> tuple[dict[str, BlockFile], list[Candidate]]:
        """What may leave the fast disk, or the cold store. States are behind the slot that they
        belong to, and slots behind the last one before them that is there.
        """
        blocks, users = self._heads.kept.blocks, self._users(self._heads.known)
        files: dict[str, BlockFile] = {}
        found: list[tuple[str, str | None, int]] = []
        for key in users:
            sizes, above = blocks[key].sizes, blocks[key].above
            while above is not None and not _slot(blocks[above].sizes, is_cold=is_cold):
                above = blocks[above].above
            name, parent = key.name.hex(), above.name.hex() if above else None
            if num_bytes := _slot(sizes, is_cold=is_cold):
                files[name] = BlockFile(key)
                found.append((name, parent, num_bytes))
            if sizes.state and not is_cold:
                files[name + "s"] = BlockFile(key, is_slot=False)
                found.append((name + "s", name if sizes.slot else parent, sizes.state))
        children = Counter(parent for _, parent, _ in found)
        return files, [
            _candidate((name, parent, children[name]), num_bytes, users[key], blocks[key])
            for name, parent, num_bytes in found
            if (key := files[name].key) not in needed and not users[key].head.is_pinned
        ]

    def _thin(self, known: KnownHead) -> None:
        """Remove the states of a conversation that are missed least, until it has few enough."""
        heads = self._heads
        with heads.lock:
            if known.head.id not in heads.known:
                return
            pinned = {one.last for one in heads.known.values() if one.head.is_pinned}
            chain = [*heads.kept.chain(known.last)][::-1]
            states = [
                number
                for number, key in enumerate(chain, 1)
                if heads.kept.blocks[key].sizes.state and key not in pinned
            ]
            excess = len(states) - MAX_STATES
            dense = [states.pop(densest(states)) for _ in range(excess)]
            heads.remove_files(BlockFile(chain[number - 1], is_slot=False) for number in dense)


def _slot(sizes: Sizes, *, is_cold: bool) -> int:
    return sizes.cold if is_cold else sizes.slot


def _candidate(
    place: tuple[str, str | None, int], num_bytes: int, user: KnownHead, block: Block
) -> Candidate:
    """A file that is called, is behind, and has so many behind it as `place` says. Each block or
    head more that is right behind its block counts as a use.
    """
    name, parent, num_children = place
    ttl_class: TtlClass = "extended" if user.head.ttl_s is None else class_of(user.head.ttl_s)
    return Candidate(
        id=name,
        parent=parent,
        num_children=num_children,
        size_bytes=num_bytes,
        recompute_ms=block.recompute_ms,
        last_used_s=user.last_used_s,
        hits=user.hits + block.num_behind - 1,
        ttl_class=ttl_class,
    )
