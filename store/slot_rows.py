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

from store import unpublished
from store.tables import Block, Condemned, Conversation, Layout, Model, Slot
from store.types import Candidate, SlotHeader, SlotPlace, SlotRow, Tier, TtlClass

CHUNK = 500
"""Values in one IN list; far below SQLite's limit and enough to make a statement worth it."""

_SLOTS = """
SELECT s.id, s.name, m.hash, p.name, s.start, s."end", s.block_size, s.end_hash, l.text,
  s.has_state, s.recompute_ms, s.created_s, s.ttl_class, s.ttl_s, s.disk_bytes, s.tier,
  s.last_used_s, s.hits, s.is_pinned, s.root, s.start_hash
FROM slots s JOIN models m ON m.id = s.model_id JOIN layouts l ON l.id = s.layout_id
  LEFT JOIN slots p ON p.id = s.parent_id
"""
_BLOCKS = "SELECT slot_id, hash FROM blocks {where} ORDER BY slot_id, position"
_INSERT_SLOT = """
INSERT INTO slots (name, model_id, parent_id, start_hash, start, "end", block_size, end_hash,
  layout_id, has_state, recompute_ms, created_s, ttl_class, ttl_s, disk_bytes, tier, last_used_s,
  hits, is_pinned, root)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?) RETURNING id
"""
_ADOPT = """
UPDATE slots SET parent_id = ?
WHERE parent_id IS NULL AND start > 0 AND start_hash = ? AND model_id = ? AND start > ?
  AND start <= ?
"""
_JOIN_MEMBERS = """
WITH RECURSIVE above(conversation, slot, reach) AS (
  SELECT member.conversation_id, below.parent_id, below.start
  FROM slots below JOIN conversation_slots member ON member.slot_id = below.id
  WHERE below.parent_id = ?
  UNION
  SELECT above.conversation, slots.parent_id, slots.start
  FROM above JOIN slots ON slots.id = above.slot WHERE slots.parent_id IS NOT NULL
)
INSERT INTO conversation_slots (conversation_id, slot_id, reach)
SELECT conversation, slot, max(reach) FROM above WHERE true GROUP BY conversation, slot
ON CONFLICT DO UPDATE SET reach = max(reach, excluded.reach)
"""
_OF_MODEL = "WHERE s.model_id = :model"
_BLOCKS_OF_MODEL = "WHERE slot_id IN (SELECT id FROM slots WHERE model_id = :model)"

_SlotTuple = tuple[
    int, str, bytes, str | None, int, int, int, bytes, str,
    int, float, float, TtlClass, float | None, int, Tier, float, float, int, bytes | None,
    bytes,
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
    cursor.execute(f"{_SLOTS} {where} ORDER BY s.start, s.id", parameters)
    rows = cast("Iterator[_SlotTuple]", cursor)
    return [_slot_row(row, blocks.get(row[0], ())) for row in rows]


def _slot_row(row: _SlotTuple, block_hashes: tuple[bytes, ...]) -> SlotRow:
    header = SlotHeader(
        id=row[1],
        model=row[2],
        start_hash=row[20],
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
        root=row[19] or b"",
    )
    return SlotRow(
        header=header,
        disk_bytes=row[14],
        last_used_s=row[16],
        parent=row[3],
        tier=row[15],
        hits=row[17],
        is_pinned=bool(row[18]),
    )


def insert_slots(connection: Connection, rows: Iterable[SlotRow]) -> int:
    """Insert slots; those that exist stay as they are. Returns how many were new.

    Each is joined to the slot that has the tokens before it, if one is there, and to those that
    continue it and had none: in whatever order they come.
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
    parent = _parent_id(cursor, row, model)
    layout = _layout(cursor, header.layout)
    pin = "SELECT 1 FROM pins WHERE model_id = ? AND end_hash = ?"
    is_pinned = header.ttl_class == "pinned" or bool(_value(cursor, pin, model, header.end_hash))
    values = (
        header.id,
        model,
        parent,
        header.start_hash,
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
    cursor.execute("UPDATE slots SET num_children = num_children + 1 WHERE id = ?", (parent,))
    unpublished.published(cursor, header)
    _adopt(cursor, header, model, cast("int", number))
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


def _parent_id(cursor: DBAPICursor, row: SlotRow, model: int) -> int | None:
    """A slot that has the tokens before this one's: the one that is named, or one that ends there.

    None where there is none: it is joined to the one that comes later.
    """
    header = row.header
    if not header.start:
        return None
    span = 'SELECT id FROM slots WHERE model_id = ? AND start < ? AND "end" >= ?'
    place = (model, header.start, header.start)
    found = row.parent and _value(cursor, f"{span} AND name = ?", *place, row.parent)
    found = found or _value(cursor, f"{span} AND end_hash = ?", *place, header.start_hash)
    return cast("int | None", found)


def adopt(connection: Connection, header: SlotHeader) -> None:
    """Join those that continue a slot to it, as far as no slot had the tokens before them."""
    cursor = connection.connection.cursor()
    number, model = slot_ids(connection, [header.id])[header.id], model_id(connection, header.model)
    _adopt(cursor, header, cast("int", model), number)


def _adopt(cursor: DBAPICursor, header: SlotHeader, model: int, number: int) -> None:
    """Whoever is part of these is part of the slot, and of what comes before it, from now on."""
    num_joined = 0
    for end in (*header.block_hashes, header.end_hash):
        cursor.execute(_ADOPT, (number, end, model, header.start, header.end))
        num_joined += cursor.rowcount
    if num_joined:
        joined = "UPDATE slots SET num_children = num_children + ? WHERE id = ?"
        cursor.execute(joined, (num_joined, number))
        cursor.execute(_JOIN_MEMBERS, (number,))


def delete_slots(connection: Connection, names: Sequence[str]) -> tuple[SlotPlace, ...]:
    """Delete slots, the later ones first; their files are now condemned.

    What continues one stays: the tokens before it may be computed again. Conversations that ended
    in them end at the slot before.
    """
    descending = sorted(slot_ids(connection, names).values(), reverse=True)
    return tuple(_delete(connection, number) for number in descending)


def _delete(connection: Connection, number: int) -> SlotPlace:
    columns = select(Slot.name, Slot.tier, Slot.parent_id, Slot.layout_id)
    row = connection.execute(columns.where(Slot.id == number)).one()
    shorten = update(Conversation).where(Conversation.leaf_id == number)
    connection.execute(shorten.values(leaf_id=row.parent_id))
    continued = update(Slot).where(Slot.parent_id == number)
    connection.execute(continued.values(parent_id=None))
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
