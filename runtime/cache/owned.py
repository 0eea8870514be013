"""The store while this server owns it: what is done to files and rows, in threads that may wait.

Every call blocks. Calls come from one thread, except where they say otherwise; `moving` is held by
whoever moves slots between tiers, `replacing` by whoever relies on a slot's being there or not.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import msgspec
import structlog

from runtime.cache.disk_budget import DiskBudget, Evict, Reserved
from runtime.cache.redirects import SlotRedirects
from runtime.cache.write_budget import WriteBudget
from runtime.models.identified import identify
from runtime.ranks import KvForm
from runtime.slot_events import (
    KnownSlot,
    SlotQueued,
    SlotsDemoted,
    SlotsGone,
    SlotsLeft,
    SlotsMerged,
    SlotStaged,
    TurnEnded,
)
from runtime.types import MissReason, ModelSpec
from store import slot_rows, unpublished, upkeep
from store.cold_gate import ColdGate
from store.conversations import Conversations
from store.database import Database
from store.disk import Reserve, disk_bytes
from store.errors import IndexDamaged, SlotDamaged, SlotMissing, StoreError, StoreLost
from store.index import SlotIndex
from store.keyed_names import NOBODY, Asker, conversation_key
from store.ownership import Ownership
from store.records import Records
from store.removal import unlink_condemned
from store.slots import (
    StagedSlot,
    is_bad,
    publish_all,
    publish_or_remove,
    read_header,
    remove,
    slot_path,
)
from store.types import (
    NAMELESS,
    ConversationRow,
    LostRow,
    SlotPlace,
    SlotRow,
    Tier,
    UnpublishedRow,
)

INDEX = "index.db"

_PATIENCE_S = 10.0

_log = structlog.stdlib.get_logger("hearth.store")


class Published(NamedTuple):
    """What became of a group of staged slots; `error` is why the store as a whole failed."""

    saved: tuple[SlotRow, ...]
    refused: tuple[str, ...]
    error: StoreError | None = None


class Merged(NamedTuple):
    """Slots of a model became fewer, which only its workers are told; old files leave later."""

    model: bytes
    told: SlotsMerged

    @staticmethod
    def of(ids: Sequence[str], rows: Sequence[SlotRow]) -> Merged:
        """The slots `ids` are these rows now, of which there is one at least."""
        told = SlotsMerged(tuple(ids), tuple(map(KnownSlot.of, rows)))
        return Merged(rows[0].header.model, told)

    @property
    def ids(self) -> tuple[str, ...]:
        """The old ones."""
        return self.told.ids


News = SlotsGone | SlotsDemoted | Merged
"""What workers are told of when it happens to slots."""


class UnderWay:
    """Files that have no row yet. Whoever deletes waits for them: they may have what goes.

    `rewriting` is held from reading slots until those that are made of them have their rows,
    `moving` while one is moved between tiers.
    """

    def __init__(self) -> None:
        self.rewriting = threading.RLock()
        self.moving = threading.Lock()

    def wait(self) -> None:
        """Return when what was under way is over; for a cold store that hangs, after a while."""
        with self.rewriting:
            pass
        if self.moving.acquire(timeout=_PATIENCE_S):
            self.moving.release()


class OpenStore:
    """Files and index of a store, for as long as its lock is held."""

    def __init__(self, owned: Ownership, database: Database, cold: ColdGate | None) -> None:
        self.root = owned.root
        self.secret = owned.secret
        self.database = database
        self.cold = cold
        self.clock = database.clock
        """What slots, conversations and their files age by; it parts from the wall clock."""
        self.index = SlotIndex(database)
        self.disk = DiskBudget(database)
        """What it takes of the fast disk, and may take."""
        self.records = Records(database)
        self.moving = threading.Lock()
        self.replacing = threading.Lock()
        self.under_way = UnderWay()
        self.redirects = SlotRedirects()
        self.counts: Counter[str] = Counter()
        self.write_budget = WriteBudget()
        self.replaced: list[SlotPlace] = []
        """Merged into others; their files leave once nobody can be reading them."""
        self.scrubbed_to = ""
        """Up to this slot, in order of ids, everything was read to find damage."""
        self._owned = owned
        self._conversations = Conversations(database)

    def keep_to(
        self, cap_bytes: int | None, evict: Evict, reserved: dict[str, Reserved] | None = None
    ) -> None:
        """It may take so much of the fast disk, and this is reserved already."""
        self.disk = DiskBudget(self.database, cap_bytes, reserved, evict)

    def close(self) -> None:
        """Finish what was submitted, mark the index as properly closed, let others own it."""
        try:
            self.database.close()
        finally:
            self._owned.close()

    # Identity

    def has_any(self, models: Collection[bytes]) -> bool:
        """Whether there is a slot of these models. Raises StoreError."""
        return any(total.model in models for total in self.index.totals())

    def identify(self, spec: ModelSpec, form: KvForm) -> bytes | None:
        """The model hash of a model, as `identified.identify`."""
        return identify(self.records, self.clock.now_s, spec, form)

    # What workers report

    def publish(self, group: Sequence[SlotStaged]) -> Published:
        """Give staged slots their names and rows; what is refused leaves no file."""
        if not self._owned.is_in_place:
            return Published((), tuple(one.header.id for one in group), self._lost())
        refused: list[str] = []
        staged: list[SlotStaged] = []
        there: list[SlotStaged] = []
        for one in group:
            if not _is_as_reported(self.root, one):
                refused.append(one.header.id)
                _discard(Path(one.path))
            elif self._is_published(one):
                there.append(one)
                _discard(Path(one.path))
            else:
                staged.append(one)
        try:
            with self.replacing:
                self._enter([], there)
                saved, misfits = self._publish(staged)
        except StoreError as error:
            for one in staged:
                self._discard_slot(one)
            refused += [one.header.id for one in staged]
            return Published((), tuple(refused), error)
        saved = [*map(self._row, there), *saved]
        refused += misfits
        self.counts["refused_slots"] += len(refused)
        _note(self, saved, {one.header.id: one for one in group})
        return Published(tuple(saved), tuple(refused))

    def _is_published(self, staged: SlotStaged) -> bool:
        """It is there already: its worker was told that it is not, as when the store is lost."""
        tier = dict(self.index.places()).get(staged.header.id)
        return tier == "cold" or (tier == "warm" and self._path(staged).exists())

    def _publish(self, group: Sequence[SlotStaged]) -> tuple[list[SlotRow], list[str]]:
        """All at once, or else one by one. Raises StoreError when the store as a whole fails."""
        try:
            rows = self._rename(group)
            self._enter(rows, group)
        except (SlotMissing, SlotDamaged) as error:
            return self._publish_each(group, error)
        except StoreError as error:
            if type(error) is not StoreError:
                raise
            return self._publish_each(group, error)
        return rows, []

    def _enter(self, rows: Sequence[SlotRow], group: Sequence[SlotStaged]) -> None:
        """Slots become visible together with whose they are: by that they are to be deleted."""
        asked = (one for one in group if one.asker != NOBODY)
        turns = [_conversation(self, one.header.model, _turn_of(one)) for one in asked]
        self._conversations.publish(rows, turns).result()

    def _publish_each(
        self, group: Sequence[SlotStaged], error: StoreError
    ) -> tuple[list[SlotRow], list[str]]:
        if len(group) == 1:
            _log.warning("slot_refused", slot=group[0].header.id, why=str(error))
            self._discard_slot(group[0])
            return [], [group[0].header.id]
        saved: list[SlotRow] = []
        misfits: list[str] = []
        for one in group:
            rows, refused = self._publish([one])
            saved += rows
            misfits += refused
        return saved, misfits

    def _rename(self, group: Sequence[SlotStaged]) -> list[SlotRow]:
        """Those that have their name already, from an attempt before, keep it."""
        waiting: list[StagedSlot] = []
        for one in group:
            is_staged, is_there = Path(one.path).exists(), self._path(one).exists()
            if is_staged and is_there:
                raise SlotDamaged("there is another file of that name")
            if not is_there:
                waiting.append(StagedSlot(one.header.id, Path(one.path), one.num_bytes))
        publish_all(waiting)
        return list(map(self._row, group))

    def _row(self, staged: SlotStaged) -> SlotRow:
        """What continues a slot that was merged meanwhile continues the one that stands for it."""
        return SlotRow(
            header=staged.header,
            disk_bytes=disk_bytes(self._path(staged)),
            last_used_s=self.clock.now_s(),
            parent=self.redirects.of(staged.parent, staged.header.start) or staged.parent,
        )

    def discard(self, staged: SlotStaged) -> None:
        """Do not publish what a worker staged."""
        if _is_as_reported(self.root, staged):
            _discard(Path(staged.path))

    def _discard_slot(self, staged: SlotStaged) -> None:
        _discard(Path(staged.path))
        _discard(self._path(staged))

    def _path(self, staged: SlotStaged) -> Path:
        return slot_path(self.root, staged.header.id)

    def conversation_key(self, session_id: str) -> bytes:
        """What stands for a session id in this store."""
        return conversation_key(self.secret, session_id)

    def end_turn(self, model: bytes, ended: TurnEnded) -> None:
        """A conversation with a model has tokens that are on disk already, whoever wrote them."""
        leaf = self.redirects.of(ended.slot_id, ended.num_tokens) or ended.slot_id
        tell = self._conversations.advance if ended.num_turns else self._conversations.note
        wait([tell(_conversation(self, model, msgspec.structs.replace(ended, slot_id=leaf)))])

    def touch(self, ids: Sequence[str], lives_s: Mapping[str, float] | None = None) -> None:
        """Requests reused these slots, which are to live for so long. Raises StoreError."""
        self.index.touch(ids, self.clock.now_s(), lives_s).result()

    def drop_bad(self, slot_id: str) -> tuple[str, ...]:
        """Forget a slot that cannot be read, and what continues it; its file is kept for a day.

        Returns the ids that are gone: none when it only went to the cold store meanwhile, got its
        name after it was looked for, or is of a later release's format.
        Raises StoreError.
        """
        path = slot_path(self.root, slot_id)
        if (not path.exists() and self.is_cold(slot_id)) or not is_bad(path):
            return ()
        places = self.index.drop([slot_id]).result()
        self.counts["evicted_damaged"] += len(places)
        with suppress(StoreError):
            if path.exists():
                upkeep.quarantine(self.root, path)
                self.counts["quarantined"] += 1
        self.unlink(places)
        return tuple(place.id for place in places)

    def drop(self, ids: Sequence[str]) -> tuple[str, ...]:
        """Forget slots and what continues them, with their files. From any thread.

        Returns the ids that are gone. Raises StoreError.
        """
        places = self.index.drop(ids).result()
        self.unlink(places)
        return tuple(place.id for place in places)

    def unlink(self, places: Sequence[SlotPlace]) -> None:
        """Remove the files of dropped slots; what fails now is finished by a later recovery."""
        done: list[SlotPlace] = []
        for place in places:
            with suppress(StoreError):
                if place.tier == "warm" or self.cold is not None:
                    unlink_condemned(self.root, self.index, self.cold, place, self.replacing)
                    done.append(place)
        if done:
            self.index.unlinked(done).result()

    def unlink_replaced(self) -> None:
        """Remove the files of what was merged before; who still reads one computes it again."""
        with self.replacing:
            before, self.replaced = self.replaced, []
        self.unlink(before)

    # Tiers

    def tiers(self) -> set[Tier]:
        """Those that the index knows slots in. From any thread. Raises StoreError."""
        return {tier for _, tier in self.index.places()}

    def is_cold(self, slot_id: str) -> bool:
        """Whether its row says that it is in the cold store. From any thread. Raises StoreError."""
        return self.index.tier_of(slot_id) == "cold"

    def demote(self, slot_id: str) -> None:
        """Move a slot to the cold store: first it is durable there, then its row, then its file.

        From any thread.

        Raises:
            SlotMissing, SlotDamaged: there is nothing worth moving.
            StoreError: the system or the network fails.
        """
        if self.cold is None:
            return
        warm, cold = SlotPlace(slot_id, "warm"), SlotPlace(slot_id, "cold")
        with self.moving, self.under_way.moving:
            self.index.condemn(cold).result()
            packed = self.cold.demote(slot_path(self.root, slot_id))
            is_kept = self.index.move(slot_id, "cold", packed.num_bytes).result()
            self.unlink([warm if is_kept else cold])
        self.counts["demoted"] += 1

    def promote(self, slot_id: str) -> bool:
        """As `fetch`; whether it is on the fast disk now."""
        return self.fetch(slot_id) is None

    def fetch(self, slot_id: str) -> MissReason | None:
        """Bring a cold slot back to the fast disk; the reason when it is not to be had any more.

        From any thread.

        Raises:
            ColdAway: it is kept and may be had later.
            OverCap: the same, but there is no room for it on the fast disk.
            StoreError: the system fails.
        """
        return self.disk.within(slot_id, lambda reserve: self._fetch(slot_id, reserve))

    def _fetch(self, slot_id: str, reserve: Reserve) -> MissReason | None:
        if self.cold is None:
            return "evicted"
        warm, cold = SlotPlace(slot_id, "warm"), SlotPlace(slot_id, "cold")
        with self.moving, self.under_way.moving:
            path = slot_path(self.root, slot_id)
            self.index.condemn(warm).result()
            try:
                if not path.exists():
                    publish_or_remove(self.cold.promote(self.root, slot_id, reserve))
                size = disk_bytes(path)
            except (SlotMissing, SlotDamaged) as error:
                if self.is_cold(slot_id):
                    _log.warning("cold_slot_lost", slot=slot_id, why=str(error))
                return "damaged" if isinstance(error, SlotDamaged) else "evicted"
            # Who asked for it needs it for longer than until the next look at what is over.
            self.touch([slot_id])
            is_kept = self.index.move(slot_id, "warm", size).result()
            self.unlink([cold if is_kept else warm])
            if not is_kept:  # it was evicted meanwhile
                return "evicted"
        self.counts["promoted"] += 1
        self.counts["written_bytes"] += size
        return None

    # Trouble

    def probe(self) -> None:
        """Write a little, everywhere. Raises StoreError where that fails."""
        if not self._owned.is_in_place:
            raise self._lost()
        if self.database.is_damaged:
            raise IndexDamaged("the index is damaged")
        upkeep.prepare(self.root)
        upkeep.probe(self.root)
        self.records.count({"probes": 1.0}, time.time()).result()

    def _lost(self) -> StoreLost:
        return StoreLost(f"{self.root} was removed or replaced")


def _note(store: OpenStore, saved: Sequence[SlotRow], staged: dict[str, SlotStaged]) -> None:
    """Count what was written."""
    wall_s = time.time()
    num_bytes = sum(staged[row.header.id].num_bytes for row in saved)
    store.counts["published_slots"] += len(saved)
    store.counts["published_bytes"] += num_bytes
    store.counts["written_bytes"] += num_bytes
    store.write_budget.add(num_bytes, wall_s)
    if saved:
        with suppress(StoreError):
            figures = {"published_bytes": num_bytes, "written_bytes": num_bytes}
            store.records.count(figures, wall_s)


def _is_as_reported(root: Path, staged: SlotStaged) -> bool:
    """The file is one of ours, where it belongs, and says what the worker says."""
    path = Path(staged.path)
    try:
        is_ours = path.parent == slot_path(root, staged.header.id).parent
        return is_ours and read_header(path) == staged.header
    except (StoreError, ValueError) as error:
        _log.warning("slot_refused", slot=staged.header.id, why=str(error))
        return False


def _turn_of(staged: SlotStaged) -> TurnEnded:
    """A slot is its conversation's to its end, whether or not that ends a turn."""
    header, num_turns = staged.header, int(staged.ends_turn)
    return TurnEnded(staged.asker, header.id, header.end, header.ttl_s, num_turns)


def _conversation(store: OpenStore, model: bytes, ended: TurnEnded) -> ConversationRow:
    return ConversationRow(
        key=_key_of(store.secret, ended.asker),
        model=model,
        leaf=ended.slot_id,
        num_tokens=ended.num_tokens,
        last_used_s=store.clock.now_s(),
        created_s=time.time(),
        ttl_s=ended.ttl_s,
        num_turns=ended.num_turns,
        name=ended.asker.model,
    )


def note(store: OpenStore, model: bytes, told: SlotQueued | SlotsLeft) -> Future[None]:
    """A worker has a slot in memory that is not on disk yet, or has it no longer.

    From any thread; it does not block. Raises StoreError.
    """
    submit = store.database.submit
    if isinstance(told, SlotsLeft):
        return submit(lambda c: unpublished.forget_slots(c, told.ids))
    now_s = store.clock.now_s()
    row = UnpublishedRow(
        slot=told.id,
        key=_key_of(store.secret, told.asker),
        name=told.asker.model,
        pieces=told.pieces,
        start=told.start,
        ttl_s=told.ttl_s,
    )
    return submit(lambda c: unpublished.note(c, slot_rows.known_model_id(c, model), row, now_s))


def lost(store: OpenStore, model: bytes, *, is_alone: bool) -> list[LostRow]:
    """What was computed of a model and lost before it was on disk. Raises StoreError.

    `is_alone` says that nobody has anything of it in memory.
    """
    if is_alone:
        store.database.submit(lambda c: unpublished.lose(c, model)).result()
    now_s = store.clock.now_s()
    return store.database.read(lambda c: unpublished.lost(c, model, now_s))


def _key_of(secret: bytes, asker: Asker) -> bytes:
    session_id = asker.session_id
    return NAMELESS if session_id is None else conversation_key(secret, session_id)


def _discard(path: Path) -> None:
    with suppress(StoreError):
        remove(path)
