"""What is noted as computed and not on disk yet: when it goes, how much stays and how long."""

from __future__ import annotations

from pathlib import Path

import pytest

from store import slot_rows, unpublished
from store.conversations import Conversations
from store.database import Database
from store.index import SlotIndex
from store.removal import drop_chain, drop_name, forget
from store.types import NAMELESS, PrefixPiece, UnpublishedRow
from tests.slot_samples import slot_id
from tests.store_samples import MODEL, NOW_S, opened, row

DAY_S = 86_400.0


def noted(
    number: int, key: bytes = b"k", name: str = "m", ttl_s: float | None = None
) -> UnpublishedRow:
    """What the sample slot of this number is to hold."""
    header = row(number).header
    ends = PrefixPiece(header.end_hash, b"above", header.end)
    pieces = (*map(PrefixPiece, header.block_hashes), ends)
    return UnpublishedRow(slot=header.id, key=key, name=name, pieces=pieces, ttl_s=ttl_s)


def note(database: Database, *rows: UnpublishedRow, model: bytes = MODEL) -> None:
    for one in rows:
        database.submit(
            lambda c, one=one: unpublished.note(c, slot_rows.known_model_id(c, model), one, NOW_S)
        ).result()


def lost(database: Database, now_s: float = NOW_S, model: bytes = MODEL) -> set[bytes]:
    """As if everything was killed now."""
    database.submit(unpublished.lose).result()
    rows = database.read(lambda c: unpublished.lost(c, model, now_s))
    return {piece.hash for one in rows for piece in one.pieces}


def hashes(*numbers: int) -> set[bytes]:
    return {piece.hash for number in numbers for piece in noted(number).pieces}


def test_what_is_published_is_not_lost_whoever_computed_it_and_as_whatever_slot(tmp_path: Path):
    with opened(tmp_path) as database:
        note(database, noted(1), noted(1, b"other"), noted(2))
        assert lost(database) == hashes(1, 2)
        as_another = row(1, id=slot_id(9))
        SlotIndex(database).insert([as_another]).result()
        assert lost(database) == hashes(2)
        SlotIndex(database).drop([as_another.header.id]).result()
        assert lost(database) == hashes(2), "what was on disk and left it is not lost"


def test_a_lost_end_goes_with_the_slot_that_goes_through_it(tmp_path: Path):
    with opened(tmp_path) as database:
        end = noted(1).pieces[-1]
        note(database, noted(1, b"former"))
        two = noted(2)
        note(database, UnpublishedRow(slot=two.slot, key=b"k", name="m", pieces=(*two.pieces, end)))
        SlotIndex(database).insert([row(2)]).result()
        assert lost(database) == hashes(1) - {end.hash}


def test_what_is_on_disk_already_is_not_noted(tmp_path: Path):
    with opened(tmp_path) as database:
        SlotIndex(database).insert([row(1)]).result()
        note(database, noted(1))
        assert not lost(database)


def test_what_left_memory_first_is_not_lost(tmp_path: Path):
    with opened(tmp_path) as database:
        note(database, noted(1), noted(2))
        database.submit(lambda c: unpublished.forget_slots(c, [slot_id(1)])).result()
        assert lost(database) == hashes(2)


@pytest.mark.parametrize("how", ["conversation", "name", "model", "everything"])
def test_what_is_deleted_leaves_no_trace(tmp_path: Path, how: str):
    with opened(tmp_path) as database:
        note(database, noted(1, b"mine", "mine"))
        note(database, noted(2, b"other", "other"), model=b"o" * 32)
        match how:
            case "conversation":
                Conversations(database).drop(b"mine").result()
            case "name":
                database.submit(lambda c: drop_name(c, "mine")).result()
            case "model":
                database.submit(lambda c: forget(c, MODEL)).result()
            case _:
                database.submit(lambda c: forget(c, None)).result()
        left = {b"other"} if how != "everything" else set[bytes]()
        rows = database.read(
            lambda c: c.exec_driver_sql("SELECT DISTINCT key FROM unpublished").scalars().all()
        )
        assert set(rows) == left


def test_with_a_chain_that_has_no_name_goes_all_that_has_none(tmp_path: Path):
    with opened(tmp_path) as database:
        SlotIndex(database).insert([row(1)]).result()
        note(database, noted(2, NAMELESS), noted(3))
        database.submit(lambda c: drop_chain(c, slot_id(1), "m")).result()
        assert lost(database) == hashes(3)


def test_it_is_kept_as_long_as_the_kv_would_have_been_and_two_weeks_at_most(tmp_path: Path):
    with opened(tmp_path) as database:
        note(database, noted(1, ttl_s=DAY_S), noted(2, ttl_s=30 * DAY_S), noted(3))
        assert lost(database, NOW_S + DAY_S) == hashes(2, 3)
        assert lost(database, NOW_S + 13 * DAY_S) == hashes(2, 3)
        assert lost(database, NOW_S + 15 * DAY_S) == set()
        assert database.submit(lambda c: unpublished.trim(c, NOW_S + 15 * DAY_S)).result() == 9


def test_of_more_than_there_is_room_for_the_newest_are_kept(tmp_path: Path):
    with opened(tmp_path) as database:
        many = unpublished.MAX_ROWS // 2
        pieces = tuple(
            PrefixPiece(number.to_bytes(8, "big") * 2) for number in range(99, 99 + many)
        )
        big = UnpublishedRow(slot=slot_id(8), key=b"k", name="m", pieces=pieces)
        note(database, noted(1), big)
        assert hashes(1) < lost(database)
        note(database, UnpublishedRow(slot=slot_id(9), key=b"k", name="m", pieces=pieces))
        found = database.read(
            lambda c: c.exec_driver_sql("SELECT count(*) FROM unpublished").scalar()
        )
        assert found == unpublished.MAX_ROWS
        assert not hashes(1) & lost(database)
