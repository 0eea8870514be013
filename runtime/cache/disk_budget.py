"""What a store takes of the fast disk, and may take: one owner of the sum.

Counted are the disk blocks of every file below the store's folder, each once however many names it
has: slots and what is being written of them, turns, learned prefixes, what was put aside, the
ballast, the index and its log. Folders are not, nor is a cold store.

Who makes a file reserves its bytes before. The index and its log grow by themselves, so more is
held for them than they take.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

from runtime import kv_sizes
from store import upkeep
from store.database import Database
from store.disk import Reserve, bytes_below, disk_bytes
from store.errors import OverCap
from store.index import SlotIndex
from store.prefixes import PREFIXES
from store.slots import SLOTS, slot_path
from store.temp_names import slot_id_of
from store.turns import TURNS

Evict = Callable[[int, Collection[str]], None]
"""Has so many bytes leave the disk, but not these slots nor what they continue."""

T = TypeVar("T")

_BLOCK_BYTES = 4096
_MAX_TRIES = 3
_FIXED_BYTES = 96 << 10
"""For the secret, the lock and the file that is written to find out whether the disk works."""

RECOVERED = "recovered"
"""What is reserved for a packed slot that recovery reads."""

LOGS = ("-wal", "-shm")


@dataclass(slots=True)
class Reserved:
    """Room for a file that continues the slot `parent`. What `is_small` no row will tell of."""

    num_bytes: int
    parent: str | None = None
    is_small: bool = False
    is_staged: bool = False


class DiskBudget:
    """From any thread. `cap_bytes` None leaves a share of what is free; `reserved` may be given on
    from the store that was open before.
    """

    def __init__(
        self,
        database: Database,
        cap_bytes: int | None = None,
        reserved: dict[str, Reserved] | None = None,
        evict: Evict | None = None,
    ) -> None:
        self._root = database.path.parent
        self._database = database
        self._index = SlotIndex(database)
        self._cap_bytes = cap_bytes
        self._evict = evict
        database.keep_log_within(cap_bytes)
        self._reserved = reserved if reserved is not None else {}
        self._lock = threading.Lock()
        self._small_bytes: int | None = None
        self._strangers: dict[str, Path] | None = None
        """Slots that no row tells of yet, of the run before; recovery sees to them."""

    @property
    def cap_bytes(self) -> int:
        """How many bytes the store may take now. Raises StoreError."""
        with self._lock:
            return self._cap(self._there_bytes() if self._cap_bytes is None else 0)

    def used_bytes(self) -> int:
        """What is there and what is reserved, all small files counted anew. Raises StoreError."""
        with self._lock:
            self._small_bytes = None
            return self._reserved_bytes() + self._there_bytes()

    def reserve(
        self, key: str, num_bytes: int, *, parent: str | None = None, is_small: bool = False
    ) -> bool:
        """Hold room for a file of `num_bytes` until `release`, evicting others where need be.

        False where that does not do. What the file continues stays; nothing is evicted for what
        continues a slot that is not there. Raises StoreError.
        """
        wanted = Reserved(_blocks(num_bytes), parent, is_small)
        missing = self._take(key, wanted)
        for _ in range(_MAX_TRIES):
            if not missing or self._evict is None or not self._has_place(parent):
                break
            before = missing
            self._evict(missing, self._needed({key} | ({parent} if parent else set[str]())))
            missing = self._take(key, wanted)
            if missing >= before:
                break
        return not missing

    def reserve_spare(self, key: str, num_bytes: int) -> None:
        """The same without evicting anything. Raises OverCap, StoreError."""
        if self._take(key, Reserved(_blocks(num_bytes))):
            raise OverCap(num_bytes)

    def within(self, key: str, work: Callable[[Reserve], T]) -> T:
        """The result of `work`, which reserves room for a file and has it in the index at the end.

        Where there is none others are evicted, while nothing of `work` is under way, and it is
        done once more. Raises OverCap, StoreError.
        """
        reserve = partial(self.reserve_spare, key)
        try:
            try:
                return work(reserve)
            except OverCap as error:
                if not self.reserve(key, error.num_bytes):
                    raise
                return work(reserve)
        finally:
            self.release(key)

    def release(self, key: str) -> None:
        """The file is in the index, or small, or gone."""
        with self._lock:
            self._drop(key)

    def note_staged(self, key: str) -> None:
        """The file is there, for the store to publish."""
        with self._lock:
            if (one := self._reserved.get(key)) is not None:
                one.is_staged = True

    def drop_lost(self) -> None:
        """Release what was staged for files that are gone. Nothing is published meanwhile."""
        with self._lock:
            staged = [key for key, one in self._reserved.items() if one.is_staged]
            for key in staged:
                if not any(slot_path(self._root, key).parent.glob(f".tmp-*-{key}.*")):
                    self._drop(key)

    def _has_place(self, slot: str | None) -> bool:
        """It is there, or will be."""
        with self._lock:
            is_reserved = slot in self._reserved
        return slot is None or is_reserved or slot in {one.id for one in self._index.places()}

    def _needed(self, others: set[str]) -> set[str]:
        """The slots that are being written, what they continue, and others."""
        with self._lock:
            parents = {one.parent for one in self._reserved.values() if one.parent is not None}
            return {*self._reserved, *parents, *others}

    def _take(self, key: str, wanted: Reserved) -> int:
        """Reserve, or say how much has to go before that."""
        with self._lock:
            self._drop(key)
            missing = self._missing(wanted.num_bytes)
            if not missing:
                self._reserved[key] = wanted
            return missing

    def _drop(self, key: str) -> None:
        one = self._reserved.pop(key, None)
        if one is not None and one.is_small and self._small_bytes is not None:
            self._small_bytes += one.num_bytes

    def _missing(self, num_bytes: int) -> int:
        """Small files are counted anew only where it matters: those that went were not told."""
        excess = self._excess(num_bytes)
        if excess > 0:
            self._small_bytes = None
            excess = self._excess(num_bytes)
        return max(excess, 0)

    def _excess(self, num_bytes: int) -> int:
        # First what is reserved: what becomes a row meanwhile is counted twice, never not at all.
        held_bytes = self._reserved_bytes() + num_bytes + self._growth_bytes()
        there_bytes = self._there_bytes()
        return held_bytes + there_bytes - self._cap(there_bytes)

    def _cap(self, there_bytes: int) -> int:
        if self._cap_bytes is not None:
            return self._cap_bytes
        return kv_sizes.cache_budget(upkeep.disk_room(self._root).free_bytes, there_bytes)

    def _reserved_bytes(self) -> int:
        return sum(one.num_bytes for one in self._reserved.values())

    def _there_bytes(self) -> int:
        """In this order: a file on its way from one kind to the next is counted, maybe twice."""
        warm_bytes, leaving = self._index.footprint()
        files = [slot_path(self._root, one) for one in leaving]
        files += [*self._found_strangers(leaving), *self._kept()]
        if self._small_bytes is None:
            self._small_bytes = bytes_below(self._root / TURNS, self._root / PREFIXES)
        return warm_bytes + sum(map(disk_bytes, files)) + self._small_bytes

    def _found_strangers(self, leaving: Collection[str]) -> Collection[Path]:
        if self._strangers is None:
            temporary = self._root.glob(f"{SLOTS}/??/.tmp-*")
            names = {path: slot_id_of(path.name) or "" for path in temporary}
            names |= {path: path.stem for path in upkeep.slot_files(self._root)}
            self._strangers = {name: path for path, name in names.items() if name}
        if self._strangers:
            warm = {one.id for one in self._index.places() if one.tier == "warm"}
            known = warm | self._reserved.keys() | set(leaving)
            there = {k: v for k, v in self._strangers.items() if k not in known and v.exists()}
            self._strangers = there
        return self._strangers.values()

    def _kept(self) -> list[Path]:
        root, index = self._root, self._database.path
        found = [index, *(index.with_name(f"{index.name}{log}") for log in LOGS)]
        found += [root / upkeep.BALLAST, *upkeep.asides(root, index.name)]
        with suppress(FileNotFoundError):
            found += (root / upkeep.QUARANTINE).iterdir()
        return found

    def _growth_bytes(self) -> int:
        """What the index may grow by: its log up to its limit, and then by as much itself.

        When it is closed the log is empty: as much takes the copy before an upgrade, and its log.
        """
        index, limit_bytes = self._database.path, self._database.log_limit_bytes
        log_bytes = disk_bytes(index.with_name(f"{index.name}{LOGS[0]}"))
        return max(limit_bytes - log_bytes, 0) + limit_bytes + _FIXED_BYTES


def _blocks(num_bytes: int) -> int:
    """A file's size on disk, with a block for where it lies."""
    return (-(-num_bytes // _BLOCK_BYTES) + 1) * _BLOCK_BYTES
