"""Slots to rows and back, and what reads or writes many rows at once.

Bulk work goes through the driver's own cursor: a million blocks must not pass through objects
that nobody needs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from operator import itemgetter
from typing import cast

from sqlalchemy import Connection, delete, select, update
from sqlalchemy.dialects.sqlite import insert
from sqlalchemy.engine.interfaces import DBAPICursor

from store.errors import StoreError
from store.tables import Block, Condemned, Conversation, Layout, Model, Slot
from store.types import Candidate, SlotHeader, SlotPlace, SlotRow, Tier, TtlClass

CHUNK = 500
"""Values in one IN list; far below SQLite's limit and enough to make a statement worth it."""

_SLOTS = """
SELECT s.id, s.name, m.hash, p.name, s.start, s."end", s.block_size, s.end_hash, l.text,
  s.has_state, s.recompute_ms, s.created_s, s.ttl_class, s.ttl_s, s.disk_bytes, s.tier,
  s.last_used_s, s.hits, s.num_children, s.is_pinned, s.root
FROM slots s JOIN models m ON m.id = s.model_id JOIN layouts l ON l.id = s.layout_id
  LEFT JOIN slots p ON p.id = s.parent_id
"""
_BLOCKS = "SELECT slot_id, hash FROM blocks {where} ORDER BY slot_id, position"
_INSERT_SLOT = """
INSERT INTO slots (name, model_id, parent_id, start, "end", block_size, end_hash, layout_id,
  has_state, recompute_ms, created_s, ttl_class, ttl_s, disk_bytes, tier, last_used_s, hits,
  is_pinned, root)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?) RETURNING id
"""
_OF_MODEL = "WHERE s.model_id = :model"
_BLOCKS_OF_MODEL = "WHERE slot_id IN (SELECT id FROM slots WHERE model_id = :model)"

_SlotTuple = tuple[
    int, str, bytes, str | None, int, int, int, bytes, str,
    int, float, float, TtlClass, float | None, int, Tier, float, float, int, int, bytes | None,
]  # fmt: skip


def chunks(values: Sequence[str]) -> Iterator[Sequence[str]]:
    """The values in pieces that fit one statement."""
    return (values[i : i + CHUNK] for i in range(0, len(values), CHUNK))


def model_id(connection: Connection, model: bytes) -> int | None:
    """The number of a model hash."""
    return connection.execute(select(Model.id).where(Model.hash == model)).scalar()


def known_model_id(connection: Connection, model: bytes) -> int:
    """The number of a model hash, which gets one now if it had none."""
    found = model_id(connection, model)
    if found is None:
        blank = {"hash": model, "label": "", "layout": "", "last_used_s": 0.0}
        connection.execute(insert(Model).values(blank))
        found = cast("int", model_id(connection, model))
    return found


def slot_ids(connection: Connection, names: Sequence[str]) -> dict[str, int]:
    """The numbers of those of these slots that exist."""
    found: dict[str, int] = {}
    for some in chunks(names):
        rows = connection.execute(select(Slot.name, Slot.id).where(Slot.name.in_(some)))
        found.update(rows.all())
    return found


def read_slots(connection: Connection, model: bytes | None = None) -> list[SlotRow]:
    """All slots of a model, or of all models, parents before children, with their blocks."""
    number = -1 if model is None else model_id(connection, model)
    if number is None:
        return []
    where, where_blocks = ("", "") if model is None else (_OF_MODEL, _BLOCKS_OF_MODEL)
    parameters = {} if model is None else {"model": number}
    cursor = connection.connection.cursor()
    blocks: dict[int, tuple[bytes, ...]] = {}
    cursor.execute(_BLOCKS.format(where=where_blocks), parameters)
    pairs = cast("Iterator[tuple[int, bytes]]", cursor)
    for slot, group in groupby(pairs, itemgetter(0)):
        blocks[slot] = tuple([block for _, block in group])
    cursor.execute(f"{_SLOTS} {where} ORDER BY s.id", parameters)
    rows = cast("Iterator[_SlotTuple]", cursor)
    return [_slot_row(row, blocks.get(row[0], ())) for row in rows]


def _slot_row(row: _SlotTuple, block_hashes: tuple[bytes, ...]) -> SlotRow:
    header = SlotHeader(
        id=row[1],
        model=row[2],
        parent=row[3],
        start=row[4],
        end=row[5],
        block_size=row[6],
        block_hashes=block_hashes,
        end_hash=row[7],
        layout=row[8],
        has_state=bool(row[9]),
        recompute_ms=row[10],
        created_s=row[11],
        ttl_class=row[12],
        ttl_s=row[13],
        root=row[20] or b"",
    )
    return SlotRow(
        header=header,
        disk_bytes=row[14],
        last_used_s=row[16],
        tier=row[15],
        hits=row[17],
        num_children=row[18],
        is_pinned=bool(row[19]),
    )


def insert_slots(connection: Connection, rows: Iterable[SlotRow]) -> int:
    """Insert slots, parents first; those that exist stay as they are. Returns how many were new.

    Raises:
        StoreError: a parent is unknown, of another model, or ends before its child starts.
    """
    cursor = connection.connection.cursor()
    return sum(_insert_slot(cursor, row) for row in rows)


def _insert_slot(cursor: DBAPICursor, row: SlotRow) -> bool:
    header = row.header
    if _value(cursor, "SELECT 1 FROM slots WHERE name = ?", header.id):
        return False
    place = (header.id, row.tier)
    cursor.execute("DELETE FROM condemned WHERE name = ? AND tier = ?", place)
    model = _number(
        cursor,
        "INSERT INTO models (hash, label, layout, last_used_s) VALUES (?, '', '', 0.0)",
        "SELECT id FROM models WHERE hash = ?",
        header.model,
    )
    parent = _parent_id(cursor, header, model)
    layout = _layout(cursor, header.layout)
    pin = "SELECT 1 FROM pins WHERE model_id = ? AND end_hash = ?"
    is_pinned = header.ttl_class == "pinned" or bool(_value(cursor, pin, model, header.end_hash))
    values = (
        header.id,
        model,
        parent,
        header.start,
        header.end,
        header.block_size,
        header.end_hash,
        layout,
        header.has_state,
        header.recompute_ms,
        header.created_s,
        header.ttl_class,
        header.ttl_s,
        row.disk_bytes,
        row.tier,
        row.last_used_s,
        row.hits,
        is_pinned,
        header.root or None,
    )
    number = _value(cursor, _INSERT_SLOT, *values)
    blocks = [(number, position, block) for position, block in enumerate(header.block_hashes)]
    cursor.executemany("INSERT INTO blocks VALUES (?, ?, ?)", blocks)
    adopt = "UPDATE slots SET num_children = num_children + 1 WHERE id = ?"
    cursor.execute(adopt, (parent,))
    return True


def shorten(connection: Connection, number: int, row: SlotRow) -> None:
    """Have a slot be another one that has its first tokens; it stays in its place."""
    header = row.header
    cursor = connection.connection.cursor()
    layout = _layout(cursor, header.layout)
    before = connection.execute(select(Slot.layout_id).where(Slot.id == number)).scalar_one()
    pin = "SELECT 1 FROM pins p JOIN slots s ON p.model_id = s.model_id WHERE s.id = ?"
    values = {
        "name": header.id,
        "end": header.end,
        "end_hash": header.end_hash,
        "layout_id": layout,
        "has_state": header.has_state,
        "recompute_ms": header.recompute_ms,
        "created_s": header.created_s,
        "disk_bytes": row.disk_bytes,
        "is_pinned": bool(_value(cursor, f"{pin} AND p.end_hash = ?", number, header.end_hash)),
    }
    connection.execute(update(Slot).where(Slot.id == number).values(values))
    _drop_layout(connection, before)
    num_blocks = len(header.block_hashes)
    later = (Block.slot_id == number, Block.position >= num_blocks)
    connection.execute(delete(Block).where(*later))


def _layout(cursor: DBAPICursor, text: str) -> int:
    return _number(
        cursor,
        "INSERT INTO layouts (text) VALUES (?)",
        "SELECT id FROM layouts WHERE text = ?",
        text,
    )


def _drop_layout(connection: Connection, layout: int) -> None:
    """Unless a slot has it."""
    is_shared = select(Slot.id).where(Slot.layout_id == layout).exists()
    connection.execute(delete(Layout).where(Layout.id == layout, ~is_shared))


def _value(cursor: DBAPICursor, query: str, *parameters: object) -> object:
    """The first column of the first row; None without one."""
    cursor.execute(query, parameters)
    row = cursor.fetchone()
    return row[0] if row else None


def _number(cursor: DBAPICursor, insertion: str, query: str, value: object) -> int:
    """The number that stands for `value`, which gets one now if it had none."""
    found = _value(cursor, query, value)
    if found is None:
        cursor.execute(insertion, (value,))
        found = _value(cursor, query, value)
    return cast("int", found)


def _parent_id(cursor: DBAPICursor, header: SlotHeader, model: int) -> int | None:
    if header.parent is None:
        return None
    cursor.execute('SELECT id, model_id, "end" FROM slots WHERE name = ?', (header.parent,))
    parent = cast("tuple[int, int, int] | None", cursor.fetchone())
    if parent is None:
        raise StoreError(f"slot {header.id} names an unknown parent")
    if parent[1] != model or header.start > parent[2]:
        raise StoreError(f"slot {header.id} does not continue its parent")
    return parent[0]


def delete_subtrees(connection: Connection, names: Sequence[str]) -> tuple[SlotPlace, ...]:
    """Delete slots and all that continue them, children first; their files are now condemned.

    Conversations that ended in them end at the deepest slot that is left.
    """
    found = set(slot_ids(connection, names).values())
    level = list(found)
    while level:
        level = [child for child in _children(connection, level) if child not in found]
        found.update(level)
    # A parent's number is below its children's, as it was there first and never changes.
    descending = sorted(found, reverse=True)
    return tuple(_delete_leaf(connection, number) for number in descending)


def _children(connection: Connection, parents: Sequence[int]) -> list[int]:
    found: list[int] = []
    for i in range(0, len(parents), CHUNK):
        some = Slot.parent_id.in_(parents[i : i + CHUNK])
        found += connection.execute(select(Slot.id).where(some)).scalars()
    return found


def _delete_leaf(connection: Connection, number: int) -> SlotPlace:
    columns = select(Slot.name, Slot.tier, Slot.parent_id, Slot.layout_id)
    row = connection.execute(columns.where(Slot.id == number)).one()
    shorten = update(Conversation).where(Conversation.leaf_id == number)
    connection.execute(shorten.values(leaf_id=row.parent_id))
    connection.execute(delete(Slot).where(Slot.id == number))
    _drop_layout(connection, row.layout_id)
    if row.parent_id is not None:
        leave = update(Slot).where(Slot.id == row.parent_id)
        connection.execute(leave.values(num_children=Slot.num_children - 1))
    condemn = insert(Condemned).values(name=row.name, tier=row.tier).on_conflict_do_nothing()
    connection.execute(condemn)
    return SlotPlace(row.name, row.tier)


def read_candidates(connection: Connection, *, with_pinned: bool = False) -> list[Candidate]:
    """Every slot that is not pinned, or every slot, as eviction weighs it."""
    cursor = connection.connection.cursor()
    cursor.execute(
        "SELECT s.name, p.name, s.num_children, s.disk_bytes, s.recompute_ms, s.last_used_s,"
        " s.hits, s.ttl_class FROM slots s LEFT JOIN slots p ON p.id = s.parent_id"
        " WHERE ? OR NOT s.is_pinned",
        (with_pinned,),
    )
    rows = cast("Iterator[tuple[str, str | None, int, int, float, float, float, TtlClass]]", cursor)
    return [Candidate(*row) for row in rows]
