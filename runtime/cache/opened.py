"""The store while this server owns it: heads, slots, the cold store, and what is remembered.

Every call blocks and may come from any thread, but for those that touch the cold store: these come
from one.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, cast

import structlog

from migrations.run import upgrade
from runtime.kv_messages import Ended
from store import earlier, ownership, upkeep
from store.block_names import HashChain
from store.clock import Clock, now
from store.cold import ColdDirectory, ColdStore, open_cold
from store.cold_blocks import ColdBlocks
from store.cold_gate import ColdGate
from store.cold_owner import Claim
from store.database import Database
from store.disk import bytes_below, disk_bytes, make_directory
from store.errors import (
    ColdAway,
    IndexDamaged,
    SlotDamaged,
    SlotMissing,
    StoreError,
    StoreLocked,
    StoreLost,
)
from store.head_file import KnownHead
from store.heads import Heads, Published, TurnedAway
from store.index import Index
from store.opening import open_database
from store.ownership import Ownership
from store.records import Records
from store.room import Limits, Room, Surroundings
from store.slots import RANKS, BlockKey, Slots
from store.temp_names import TEMPORARY
from store.types import Tier

INDEX = "index.db"
SLOTS = "slots"
HEADS = "heads"

_SERVER = "server"
"""What the server's own allowance goes by."""

_LOOK_AT_OTHERS_S = 10.0
"""So long it is believed what files take that are neither slots nor heads."""

_log = structlog.stdlib.get_logger("hearth.store")


class Terms(NamedTuple):
    """How a store is opened: how large its blocks are, its cold store, and what it may take."""

    block_size: int
    cold_store: str | None
    limits: Limits


class BlockStore:
    """Heads and blocks of a store, for as long as its lock is held."""

    def __init__(self, owned: Ownership, database: Database, terms: Terms) -> None:
        self._owned = owned
        self.block_size = terms.block_size
        self._chains: dict[bytes, HashChain] = {}
        self.root = owned.root
        self.database = database
        database.keep_log_within(terms.limits.warm_bytes)
        self.clock = database.clock
        self.records = Records(database)
        self.slots = Slots(self.root / SLOTS)
        self.heads = Heads(
            self.root / HEADS, self.slots, self.chain_of, self.clock.now_s, Index(database)
        )
        self.cold: ColdGate | None = None
        self.scrubbed_to = ""
        """The name of the file that was scrubbed last."""
        self._others = (0.0, 0)
        self._cold_blocks: ColdBlocks | None = None
        if terms.cold_store is not None:
            had_cold = bool(self.heads.kept.cold_bytes or self.heads.left_cold)
            claim = Claim(self.root, owned.secret, terms.cold_store, lambda: had_cold)
            self.cold = ColdGate(cold_at(terms.cold_store), claim)
            self._cold_blocks = ColdBlocks(self.heads, self.cold)
        self.room = Room(
            self.heads,
            terms.limits,
            Surroundings(self._disk_room, self._other_bytes, self._remove_earlier),
            time.time,
            self._cold_blocks,
        )

    def _remove_earlier(self) -> None:
        """What an earlier release left makes way before anything that this one reads."""
        if (self.root / earlier.ASIDE).exists():
            earlier.remove(self.root)
            self._others = (0.0, 0)

    @property
    def counts(self) -> Counter[str]:
        """What happened since it was opened."""
        return self.room.counts

    @property
    def secret(self) -> bytes:
        """What keys all names in it."""
        return self._owned.secret

    def chain_of(self, model: bytes) -> HashChain:
        """The names of a model's blocks."""
        if (chain := self._chains.get(model)) is None:
            chain = HashChain(self.secret, model, block_size=self.block_size)
            self._chains[model] = chain
        return chain

    def has_any(self, models: Collection[bytes]) -> bool:
        """Whether there is a head of these models."""
        with self.heads.lock:
            return any(one.head.model in models for one in self.heads.known.values())

    def totals(self) -> dict[tuple[bytes, Tier], tuple[int, int, int]]:
        """How many slots each model has in each tier, of how many tokens, and what they take."""
        sums: dict[tuple[bytes, Tier], tuple[int, int, int]] = {}
        with self.heads.lock:
            for key, block in self.heads.kept.blocks.items():
                if block.sizes.tier != "missing":
                    is_warm = block.sizes.tier == "warm"
                    where = key.model, cast("Tier", block.sizes.tier)
                    num, num_tokens, num_bytes = sums.get(where, (0, 0, 0))
                    num_bytes += block.sizes.warm if is_warm else block.sizes.cold
                    sums[where] = num + 1, num_tokens + self.block_size, num_bytes
        return sums

    def used_bytes(self) -> int:
        """What all of it takes now, slots without a head and the cold store as well."""
        self._others = (0.0, 0)
        found = self.slots.found()
        with self.heads.lock:
            ends = {*self.heads.ends}
            slot_bytes = sum(sum(sizes) for key, sizes in found.items() if key not in ends)
            head_bytes = sum(one.num_bytes for one in self.heads.known.values())
            cold_bytes = self.heads.kept.cold_bytes
        return slot_bytes + head_bytes + cold_bytes + self._other_bytes()

    @property
    def staging_folders(self) -> list[Path]:
        """Where heads and slots are made before they have their names."""
        slots = self.root / SLOTS
        return [self.root / HEADS, *slots.glob("*"), *(slots / RANKS).glob("*/*")]

    def close(self) -> None:
        """Finish what was submitted, mark the index as properly closed, let others own it."""
        try:
            self.database.close()
        finally:
            self._owned.close()

    # What workers report

    def publish(self, worker: str, ended: Ended) -> Published | TurnedAway | None:
        """Have the head that a worker staged; None where nothing of it is to be had.

        Raises:
            StoreError: the system refuses; it may be published again.
        """
        if not self._owned.is_in_place:
            raise self._lost()
        path = Path(ended.path or "")
        if path.parent != self.root / HEADS or not path.name.startswith(TEMPORARY):
            _log.warning("head_refused", path=str(path))
            return None
        age_s = 0.0 if ended.ended_s is None else time.monotonic() - ended.ended_s
        try:
            said = self.heads.publish(path, ended.received, ended.ends, age_s)
        except SlotMissing as error:
            _log.warning("head_refused", head=ended.head_id, why=str(error))
            return None
        known = said.known if isinstance(said, Published) else None
        self.counts["published_heads"] += known is not None
        self.counts["published_slots"] += said.num_new_slots if isinstance(said, Published) else 0
        self.counts["written_bytes"] += ended.num_bytes
        self.room.settle(worker, ended.num_bytes, known)
        return said

    def note_damaged(self, keys: Collection[BlockKey]) -> None:
        """A worker removed these slots, which were not as they were written."""
        self.counts["evicted_damaged"] += len(keys)
        self.heads.note(keys)

    def read_cold(self, key: BlockKey, *, is_state: bool) -> int:
        """The bytes of a file in the cold store, if it is whole; a damaged one goes.

        Raises:
            SlotMissing, SlotDamaged: it is not to be had.
            ColdAway: the cold store is away, or there is none.
        """
        if self._cold_blocks is None:
            raise ColdAway("there is no cold store")
        try:
            return self._cold_blocks.read(key, is_state=is_state)
        except (SlotDamaged, SlotMissing):
            self._cold_blocks.lose(key, is_state=is_state)
            raise

    def branch(self, source: KnownHead, session: bytes, end: int) -> None:
        """Let another session have the first `end` tokens of a head, if there is room for that."""
        given = self.room.allow(_SERVER, source.num_bytes)
        try:
            if given >= source.num_bytes:
                self.heads.fork(source.head.id, session, end)
        finally:
            self.room.settle(_SERVER, given)

    def finish_cold(self) -> bool:
        """Remove from the cold store what no head goes through; whether all of it is gone."""
        return self._cold_blocks is None or self._cold_blocks.finish()

    def bring(self, keys: Sequence[BlockKey]) -> list[BlockKey]:
        """As `Room.bring`."""
        there = self.room.bring(keys)
        self.counts["promoted"] += len(there)
        return there

    def is_away(self, keys: Iterable[BlockKey]) -> bool:
        """Whether some of these are in the cold store alone, which does not answer."""
        if self.cold is None or not self.cold.reach.is_away:
            return False
        with self.heads.lock:
            there = (self.heads.kept.blocks.get(one) for one in keys)
            return any(one is not None and one.sizes.tier == "cold" for one in there)

    # Trouble

    def keep_ballast(self) -> None:
        """Hold some disk that can be given up when it is full, where nothing has to leave for it.

        Raises StoreFailed.
        """
        num_bytes = upkeep.ballast_bytes(self.room.warm_bytes)
        if not (self.root / upkeep.BALLAST).exists() and (
            not num_bytes or not self.room.reserve_spare(upkeep.BALLAST, num_bytes)
        ):
            return
        try:
            upkeep.keep_ballast(self.root, num_bytes)
        finally:
            self._others = (0.0, 0)  # it is counted among them from now on
            self.room.release(upkeep.BALLAST)

    def drop_ballast(self) -> None:
        """Give it up. Raises StoreFailed."""
        upkeep.drop_ballast(self.root)
        self._others = (0.0, 0)

    def probe(self) -> None:
        """Write a little, everywhere. Raises StoreError where that fails."""
        if not self._owned.is_in_place:
            raise self._lost()
        if self.database.is_damaged:
            raise IndexDamaged("the index is damaged")
        upkeep.probe(self.root)
        self.records.count({"probes": 1.0}, time.time()).result()

    def _lost(self) -> StoreLost:
        return StoreLost(f"{self.root} was removed or replaced")

    def _disk_room(self) -> upkeep.DiskRoom:
        return upkeep.disk_room(self.root)

    def _other_bytes(self) -> int:
        """What the index may take; and what took a moment ago the ballast, and what an earlier
        release left.
        """
        looked_s, num_bytes = self._others
        if time.monotonic() - looked_s > _LOOK_AT_OTHERS_S or not looked_s:
            num_bytes = disk_bytes_of([self.root / upkeep.BALLAST])
            num_bytes += bytes_below(self.root / earlier.ASIDE)
            self._others = time.monotonic(), num_bytes
        log = self.root / f"{INDEX}-wal"
        index_bytes = disk_bytes_of(one for one in self.root.glob(f"{INDEX}*") if one != log)
        # The log grows behind what is published, up to its limit.
        return num_bytes + index_bytes + max(disk_bytes_of([log]), self.database.log_limit_bytes)


def disk_bytes_of(paths: Iterable[Path]) -> int:
    """What these files take of the disk; those that are gone take nothing."""
    num_bytes = 0
    for path in paths:
        with suppress(StoreError):
            num_bytes += disk_bytes(path)
    return num_bytes


def open_blocks(
    root: Path, terms: Terms, secret: bytes | None = None, read: Clock = now
) -> BlockStore:
    """Make or open the store at `root` and own it. `secret` is used where there is none yet, and
    `read` are the system's clocks.

    Raises:
        StoreLocked: another server owns it.
        StoreTooNew, StoreFull, StoreFailed: it cannot be used.
    """
    owned = ownership.take(root, secret=secret)
    if not owned.is_owner:
        owned.close()
        raise StoreLocked(f"another server owns {root}")
    try:
        make_directory(root)
        earlier.set_aside(root)
        for folder in (root / SLOTS, root / HEADS):
            make_directory(folder)
        upkeep.sweep_temp(root)
        database = open_database(
            root / INDEX, upgrade, lambda: upkeep.drop_ballast(root), read=read
        )
        return BlockStore(owned, database, terms)
    except StoreError:
        owned.close()
        raise


def cold_at(where: str) -> ColdStore:
    """The bucket or the directory that `cold_store` names. Raises StoreFailed."""
    return open_cold(where) if "://" in where else ColdDirectory(Path(where))
