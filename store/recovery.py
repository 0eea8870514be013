"""Recovery makes index and directories agree, both ways; a lost index is read from the files.

It runs beside the server, in batches, in a thread of its own. Only demoting, promoting and another
recovery must not run meanwhile; who publishes holds `replacing`. A second run changes nothing.

A file without a row is taken up where the index may have lost the row: a new index has none, and
one that the machine's fall has cut short lacks the last ones. An index that agreed with the files
since the machine was started has lost nothing. There such a file was never told saved, and whose
it is nobody knows, so that no deletion would find it: it goes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from threading import Lock

import msgspec
import structlog
from sqlalchemy import Connection, select, text

from store import slot_rows, upkeep
from store.clock import UNKNOWN_BOOT
from store.cold import ColdStore
from store.database import Database
from store.disk import Reserve, disk_bytes, no_cap, reported
from store.errors import SlotDamaged, SlotForeign, SlotMissing, SlotObsolete, StoreFailed
from store.index import SlotIndex
from store.removal import unlink_condemned
from store.slots import read_header, remove, slot_path
from store.tables import Condemned, Slot
from store.temp_names import SUFFIX
from store.types import SlotHeader, SlotPlace, SlotRow, Tier

MIN_ORPHAN_AGE_S = 600.0
"""A file without a row may be about to get one: younger than this it is left alone."""

BATCH = 256
"""Rows in one transaction; between two of them the server's own writes get their turn."""

_AGREED = text("SELECT agreed_boot FROM store_state")
_AGREE = text("UPDATE store_state SET agreed_boot = :boot WHERE agreed_boot <> :boot")
_HAS_ROW = text("SELECT 1 FROM slots WHERE name = :name")

log = structlog.stdlib.get_logger("store.recovery")


def never_stop() -> bool:
    """Go on to the end."""
    return False


@dataclass(slots=True)
class RecoveryReport:
    """What one run changed: slots adopted, rows dropped or moved, files removed or quarantined."""

    num_adopted: int = 0
    num_dropped: int = 0
    num_moved: int = 0
    num_removed: int = 0
    num_quarantined: int = 0
    num_unreadable: int = 0
    num_obsolete: int = 0
    was_stopped: bool = False

    @property
    def has_changed(self) -> bool:
        """Whether anything was not as it should be."""
        parts = (self.num_adopted, self.num_dropped, self.num_moved, self.num_removed)
        return any(parts) or bool(self.num_quarantined)


class Recovery:
    """One run over a store whose lock is held. `now_s` is the wall clock's, as files' times are.

    What is adopted counts as used now: those times are anybody's to set.
    """

    def __init__(
        self,
        root: Path,
        database: Database,
        cold: ColdStore | None,
        now_s: float,
        should_stop: Callable[[], bool] = never_stop,
        replacing: Lock | None = None,
    ) -> None:
        self._root = root
        self._database = database
        self._index = SlotIndex(database)
        self._cold = cold
        self._now_s = now_s
        self._should_stop = should_stop
        self._replacing = replacing or Lock()
        self._boot = database.clock.instant().boot_id
        self._has_all_rows = False
        self._leaves_some = False
        self.report = RecoveryReport()
        self.reserve: Reserve = no_cap
        """Asked before a packed slot is unpacked to be read."""

    def run(self) -> RecoveryReport:
        """Do it all. Slots become visible batch by batch.

        Raises:
            StoreFull, StoreFailed, IndexDamaged: the store cannot be put in order now.
        """
        agreed = self._database.read(lambda c: c.execute(_AGREED).scalar())
        self._has_all_rows = agreed == self._boot != UNKNOWN_BOOT
        cold = self._look_into_cold()
        self.report.num_removed += upkeep.sweep_temp(self._root)
        self._remove(self._index.condemned())
        tiers = dict(self._index.places())
        warm = {path.name.removesuffix(SUFFIX): path for path in upkeep.slot_files(self._root)}
        self._match_rows(tiers, warm.keys(), cold)
        self._remove_leftovers(tiers, warm, cold)
        orphans: dict[str, Tier] = {name: "cold" for name in cold if name not in tiers}
        orphans |= {name: "warm" for name in warm if name not in tiers}
        self._adopt(orphans, cold)
        if not (self.report.was_stopped or self.report.num_unreadable or self._leaves_some):
            self._database.submit(lambda c: c.execute(_AGREE, {"boot": self._boot})).result()
        if self.report.has_changed:
            log.info("store_recovered", **asdict(self.report))
        if self.report.num_obsolete:
            log.warning(
                "slots_of_an_earlier_format_put_aside",
                num_slots=self.report.num_obsolete,
                remedy="none is needed: what they held is computed again when it is asked for",
            )
        return self.report

    def _look_into_cold(self) -> dict[str, int]:
        """What is in the cold store. One that fails is left alone: the rest is put in order."""
        if self._cold is None:
            return {}
        try:
            self.report.num_removed += self._cold.sweep()
            return {slot.id: slot.num_bytes for slot in self._cold.slots()}
        except StoreFailed as error:
            log.warning("cold_store_fails", why=str(error))
            self._cold = None
            return {}

    def _match_rows(
        self, tiers: dict[str, Tier], warm: Iterable[str], cold: dict[str, int]
    ) -> None:
        """Rows whose file is in the other tier follow it; rows without any file go."""
        warm = set(warm)
        for name, tier in tiers.items():
            if self._is_stopped():
                return
            if name in (warm if tier == "warm" else cold):
                continue
            if tier == "warm" and name in cold:
                self._index.set_tier(name, "cold", cold[name]).result()
                self.report.num_moved += 1
            elif tier == "cold" and name in warm:
                size = disk_bytes(slot_path(self._root, name))
                self._index.set_tier(name, "warm", size).result()
                self.report.num_moved += 1
            elif tier == "warm" or self._cold:
                self._drop_missing(SlotPlace(name, tier))

    def _drop_missing(self, place: SlotPlace) -> None:
        path = slot_path(self._root, place.id)
        dropped = self._database.submit(lambda connection: _drop(connection, place, path)).result()
        self.report.num_dropped += len(dropped)
        self._remove(dropped)

    def _remove_leftovers(
        self, tiers: dict[str, Tier], warm: dict[str, Path], cold: dict[str, int]
    ) -> None:
        """After a crash between two tiers a slot is in both; its row says which is meant."""
        for name in tiers.keys() & warm.keys() & cold.keys():
            other: Tier = "cold" if tiers[name] == "warm" else "warm"
            self._unlink(SlotPlace(name, other))

    def _adopt(self, orphans: dict[str, Tier], cold: dict[str, int]) -> None:
        """Give a row to each file that has none; where it belongs its hashes say."""
        holders: dict[bytes, str] = {}
        if orphans:
            for row in self._index.all_slots():
                holders |= dict.fromkeys(row.header.block_hashes, row.header.id)
        batch: list[SlotRow] = []
        for name, tier in orphans.items():
            if self._is_stopped():
                return
            row = self._row_of(SlotPlace(name, tier), cold.get(name, 0))
            if row is None:
                continue
            if tier == "warm" and self._has_all_rows:
                self._drop_unsaved(name)
                continue
            holders |= dict.fromkeys(row.header.block_hashes, name)
            parent = holders.get(row.header.start_hash)
            batch.append(msgspec.structs.replace(row, parent=parent))
            if len(batch) >= BATCH:
                self._insert(batch)
                batch = []
        self._insert(batch)

    def _drop_unsaved(self, name: str) -> None:
        """Unless it has got its row meanwhile: who publishes does both at once."""
        with self._replacing:
            if self._database.read(lambda c: c.execute(_HAS_ROW, {"name": name}).first()) is None:
                self._unlink(SlotPlace(name, "warm"))

    def _row_of(self, place: SlotPlace, cold_bytes: int) -> SlotRow | None:
        """What the file says of itself; None where it says nothing now."""
        path = slot_path(self._root, place.id)
        try:
            if place.tier == "warm":
                header, size = read_header(path), disk_bytes(path)
            else:
                header, size = self._cold_header(place.id), cold_bytes
        except SlotObsolete:
            self._put_aside(place, path)
            self.report.num_obsolete += 1
            return None
        except (SlotMissing, SlotForeign):
            return None  # what a later release wrote is its own to delete
        except SlotDamaged:
            self._set_aside(place, path)
            return None
        except StoreFailed:
            self.report.num_unreadable += 1
            return None
        return SlotRow(
            header=header,
            disk_bytes=size,
            last_used_s=self._database.clock.now_s(),
            tier=place.tier,
        )

    def _cold_header(self, name: str) -> SlotHeader:
        """A packed slot is read by unpacking it; that is rare enough to pay for."""
        if self._cold is None:
            raise SlotMissing(name)
        staged = self._cold.promote(self._root, name, self.reserve)
        try:
            return read_header(staged.path)
        finally:
            remove(staged.path)

    def _insert(self, rows: list[SlotRow]) -> None:
        if rows:
            adopting = self._database.submit(lambda c: _insert_adopted(c, rows, self._root))
            self.report.num_adopted += adopting.result()

    def _set_aside(self, place: SlotPlace, path: Path) -> None:
        if place.tier == "warm" and self._has_all_rows:
            self._drop_unsaved(place.id)
        elif place.tier == "cold" or self._is_old(path):
            self._put_aside(place, path)
        else:
            self._leaves_some = True

    def _put_aside(self, place: SlotPlace, path: Path) -> None:
        if place.tier == "cold":
            self._unlink(place)
        else:
            upkeep.quarantine(self._root, path)
            self.report.num_quarantined += 1

    def _is_old(self, path: Path) -> bool:
        """Also a time far in the future is no reason to keep an orphan for ever."""
        try:
            return abs(self._now_s - _modified_s(path)) > MIN_ORPHAN_AGE_S
        except StoreFailed:
            return False

    def _remove(self, places: Iterable[SlotPlace]) -> None:
        """Unlink the files of slots that were dropped, then forget that they were."""
        done: list[SlotPlace] = []
        for place in places:
            if place.tier == "warm" or self._cold:
                args = (self._root, self._index, self._cold, place, self._replacing)
                self.report.num_removed += int(unlink_condemned(*args))
                done.append(place)
        if done:
            self._index.unlinked(done).result()

    def _unlink(self, place: SlotPlace) -> None:
        if place.tier == "cold":
            is_gone = self._cold is not None and self._cold.delete(place.id)
        else:
            is_gone = remove(slot_path(self._root, place.id))
        self.report.num_removed += int(is_gone)

    def _is_stopped(self) -> bool:
        self.report.was_stopped = self.report.was_stopped or self._should_stop()
        return self.report.was_stopped


def _modified_s(path: Path) -> float:
    with reported(path):
        return path.lstat().st_mtime


def _drop(connection: Connection, place: SlotPlace, path: Path) -> tuple[SlotPlace, ...]:
    """Drop a row whose file is missing, unless that has changed since it was looked at."""
    tier = connection.execute(select(Slot.tier).where(Slot.name == place.id)).scalar()
    if tier != place.tier or (tier == "warm" and path.exists()):
        return ()
    return slot_rows.delete_slots(connection, [place.id])


def _insert_adopted(connection: Connection, rows: list[SlotRow], root: Path) -> int:
    """Insert what is still there and was not deleted meanwhile; how many that were not there."""
    there: list[SlotRow] = []
    for row in rows:
        name = row.header.id
        condemned = select(Condemned.name).where(Condemned.name == name)
        is_gone = row.tier == "warm" and not slot_path(root, name).exists()
        if not is_gone and connection.execute(condemned).first() is None:
            there.append(row)
    slot_rows.insert_slots(connection, there)
    return len(there)
