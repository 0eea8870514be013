"""After a crash rows and files agree again; without an index the files make a new one."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from structlog.testing import capture_logs

from store import slots, upkeep
from store.cold import ColdDirectory
from store.database import Database
from store.index import SlotIndex
from store.recovery import Recovery, RecoveryReport
from store.types import Instant, SlotHeader, SlotRow
from tests.slot_samples import sample, slot_id
from tests.store_samples import NOW_S, opened

OLD_S = NOW_S - 3600.0


@pytest.fixture
def root(tmp_path: Path) -> Path:
    upkeep.prepare(tmp_path)
    return tmp_path


@pytest.fixture
def database(root: Path) -> Iterator[Database]:
    with opened(root) as database:
        yield database


def publish(root: Path, number: int, parent: SlotHeader | None = None) -> SlotRow:
    """A slot file from an hour ago, and the row that belongs to it."""
    header, token_ids, tensors = sample(number)
    start = parent.end if parent else 0
    header = msgspec.structs.replace(
        header,
        start_hash=parent.end_hash if parent else b"",
        start=start,
        end=start + header.end,
        block_hashes=tuple(
            bytes([number % 256, n] * 8) for n in range((start + 6) // 4 - start // 4)
        ),
    )
    path = slots.publish(slots.stage(root, header, token_ids, tensors))
    os.utime(path, (OLD_S, OLD_S))
    before = parent.id if parent else None
    return SlotRow(header=header, disk_bytes=slots_bytes(path), last_used_s=OLD_S, parent=before)


def slots_bytes(path: Path) -> int:
    return path.stat().st_blocks * 512


def publish_chain(root: Path, *numbers: int) -> list[SlotRow]:
    rows: list[SlotRow] = []
    for number in numbers:
        rows.append(publish(root, number, rows[-1].header if rows else None))
    return rows


def recover(root: Path, database: Database) -> RecoveryReport:
    """A run; and a second one, which must find nothing to do."""
    cold = ColdDirectory(root / upkeep.COLD)
    report = Recovery(root, database, cold, NOW_S).run()
    second = Recovery(root, database, cold, NOW_S).run()
    assert not second.has_changed
    return report


def files(root: Path) -> set[str]:
    return {path.name.removesuffix(".safetensors") for path in upkeep.slot_files(root)}


def names(database: Database) -> set[str]:
    return {place.id for place in SlotIndex(database).places()}


def test_what_agrees_is_left_alone(root: Path, database: Database):
    rows = publish_chain(root, 1, 2, 3)
    SlotIndex(database).insert(rows).result()
    assert recover(root, database) == RecoveryReport()
    assert len(names(database)) == 3


def test_a_row_without_its_file_goes_and_what_continues_it_stays(root: Path, database: Database):
    rows = [*publish_chain(root, 1, 2, 3), publish(root, 4)]
    SlotIndex(database).insert(rows).result()
    slots.slot_path(root, slot_id(2)).unlink()
    report = recover(root, database)
    assert (report.num_dropped, report.num_removed) == (1, 0)
    assert names(database) == files(root) == {slot_id(1), slot_id(3), slot_id(4)}


def test_without_an_index_the_files_make_a_new_one(root: Path, database: Database):
    rows = [*publish_chain(root, 5, 4, 3, 2, 1), publish(root, 9)]
    report = recover(root, database)
    assert report == RecoveryReport(num_adopted=6)
    found = {one.header.id: one for one in SlotIndex(database).all_slots()}
    for row in rows:
        one = found[row.header.id]
        assert (one.header, one.parent) == (row.header, row.parent)
        assert (one.disk_bytes, one.tier) == (row.disk_bytes, "warm")
        assert one.last_used_s == pytest.approx(database.clock.now_s(), abs=60)


def test_a_rebuild_that_is_stopped_goes_on_later(root: Path, database: Database):
    publish_chain(root, 1, 2, 3)
    publish(root, 4)
    looks = iter([False, False, True, True])
    report = Recovery(root, database, None, NOW_S, lambda: next(looks, True)).run()
    assert report.was_stopped
    assert len(names(database)) < 4
    recover(root, database)
    assert len(names(database)) == 4


def test_files_are_taken_up_without_what_comes_before_them(root: Path, database: Database):
    rows = publish_chain(root, 1, 2, 3)
    slots.slot_path(root, slot_id(1)).unlink()
    assert recover(root, database) == RecoveryReport(num_adopted=2)
    parents = {one.header.id: one.parent for one in SlotIndex(database).all_slots()}
    assert parents == {slot_id(2): None, slot_id(3): slot_id(2)}
    assert len(rows) == 3


def test_a_file_that_was_never_saved_is_not_taken_up(root: Path, database: Database):
    """Nobody knows whose it is, so that no deletion would find it."""
    SlotIndex(database).insert(publish_chain(root, 1, 2)).result()
    assert recover(root, database) == RecoveryReport()
    publish(root, 3)
    publish(root, 4)
    with slots.slot_path(root, slot_id(4)).open("r+b") as damaged:
        damaged.write(bytes(200))
    assert recover(root, database) == RecoveryReport(num_removed=2)
    assert names(database) == files(root) == {slot_id(1), slot_id(2)}


def test_after_the_machine_fell_it_may_have_been(root: Path):
    boots = iter(("one", "two"))
    for number in (1, 2):
        boot = next(boots)
        with opened(root, read=lambda boot=boot: Instant(NOW_S, 1.0, boot)) as database:
            publish(root, number)
            assert recover(root, database) == RecoveryReport(num_adopted=1)


def test_files_of_an_earlier_format_are_put_aside_and_told(root: Path, database: Database):
    publish_chain(root, 1, 2)
    path = slots.slot_path(root, slot_id(1))
    path.write_bytes(path.read_bytes().replace(b"hearth-slot/2", b"hearth-slot/1"))
    with capture_logs() as said:
        report = Recovery(root, database, None, NOW_S).run()
    assert (report.num_obsolete, report.num_quarantined, report.num_adopted) == (1, 1, 1)
    told = [one for one in said if one["event"] == "slots_of_an_earlier_format_put_aside"]
    assert [one["num_slots"] for one in told] == [1]
    assert names(database) == files(root) == {slot_id(2)}


def test_a_damaged_file_is_put_into_quarantine_when_it_is_old(root: Path, database: Database):
    publish_chain(root, 1, 2)
    path = slots.slot_path(root, slot_id(1))
    data = bytearray(path.read_bytes())
    data[40] ^= 1
    path.write_bytes(data)
    os.utime(path, (NOW_S, NOW_S))
    assert recover(root, database).num_quarantined == 0
    os.utime(path, (OLD_S, OLD_S))
    report = recover(root, database)
    assert report.num_quarantined == 1
    assert files(root) == names(database) == {slot_id(2)}
    assert len(list((root / upkeep.QUARANTINE).iterdir())) == 1


def test_what_was_deleted_stays_deleted(root: Path, database: Database):
    rows = publish_chain(root, 1, 2)
    index = SlotIndex(database)
    index.insert(rows).result()
    index.drop([slot_id(1)]).result()
    assert len(files(root)) == 2
    report = recover(root, database)
    assert (report.num_adopted, report.num_removed) == (0, 1)
    assert files(root) == names(database) == {slot_id(2)}
    assert index.condemned() == []


def test_a_slot_in_both_tiers_stays_where_its_row_says(root: Path, database: Database):
    rows = [publish(root, 1), publish(root, 2)]
    index = SlotIndex(database)
    index.insert(rows).result()
    cold = ColdDirectory(root / upkeep.COLD)
    for row in rows:
        cold.demote(slots.slot_path(root, row.header.id))
    index.set_tier(slot_id(2), "cold", 512).result()
    assert recover(root, database).num_removed == 2
    assert files(root) == {slot_id(1)}
    assert [one.id for one in cold.slots()] == [slot_id(2)]
    assert dict(index.places()) == {slot_id(1): "warm", slot_id(2): "cold"}


def test_a_row_follows_its_file_to_the_other_tier(root: Path, database: Database):
    index = SlotIndex(database)
    rows = publish_chain(root, 1, 2)
    index.insert(rows).result()
    cold = ColdDirectory(root / upkeep.COLD)
    path = slots.slot_path(root, slot_id(2))
    packed = cold.demote(path)
    path.unlink()
    index.set_tier(slot_id(1), "cold", 512).result()
    assert recover(root, database).num_moved == 2
    tiers = {one.header.id: (one.tier, one.disk_bytes) for one in index.all_slots()}
    assert tiers == {
        slot_id(1): ("warm", rows[0].disk_bytes),
        slot_id(2): ("cold", packed.num_bytes),
    }


def test_a_rebuild_finds_cold_slots_too(root: Path, database: Database):
    publish_chain(root, 1, 2)
    cold = ColdDirectory(root / upkeep.COLD)
    path = slots.slot_path(root, slot_id(1))
    cold.demote(path)
    path.unlink()
    assert recover(root, database).num_adopted == 2
    assert dict(SlotIndex(database).places()) == {slot_id(1): "cold", slot_id(2): "warm"}
    assert files(root) == {slot_id(2)}


def test_a_slot_of_a_newer_format_stays_where_it_is(tmp_path: Path):
    kept, newer = publish(tmp_path, 1), publish(tmp_path, 2)
    path = slots.slot_path(tmp_path, newer.header.id)
    path.write_bytes(path.read_bytes().replace(b"hearth-slot/2", b"hearth-slot/3", 1))
    os.utime(path, (OLD_S, OLD_S))
    before = path.read_bytes()
    with opened(tmp_path) as database:
        report = recover(tmp_path, database)
        assert (report.num_adopted, report.num_quarantined) == (1, 0)
        assert names(database) == {kept.header.id}
    assert path.read_bytes() == before
