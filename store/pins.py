"""Pins: prefixes that must stay, whether a slot ends there now or not, and who wants that.

Who pins a conversation pins what it becomes as well: its pin goes on with each turn, and may be
there before anything of it is.
"""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import ColumnElement, Connection, bindparam, delete, select, text, update
from sqlalchemy.dialects.sqlite import insert

from store import slot_rows
from store.tables import Model, Pin, Slot
from store.types import PinRow

_USED = text("""
WITH RECURSIVE held (slot) AS (
  SELECT s.id FROM slots s JOIN pins p ON p.model_id = s.model_id AND p.end_hash = s.end_hash
  WHERE p.source IN :sources
  UNION
  SELECT s.parent_id FROM slots s JOIN held ON s.id = held.slot WHERE s.parent_id IS NOT NULL
)
SELECT coalesce(sum(disk_bytes), 0) FROM slots WHERE tier = 'warm' AND id IN held
""").bindparams(bindparam("sources", expanding=True))

_NOWHERE = b""
"""Where a conversation ends of which nothing is known yet."""


def source_of(conversation: str) -> str:
    """Who wants it when a conversation is pinned, by the hex of its key."""
    return f"conversation:{conversation}"


def pin(connection: Connection, model: bytes, end_hash: bytes, source: str, name: str = "") -> int:
    """Have the slots that end there stay, now and later; how many there are now.

    `name` is the model's that was asked for them.
    """
    number = slot_rows.known_model_id(connection, model)
    return _pin(connection, number, PinRow(model, end_hash, source, name))


def pin_ahead(connection: Connection, model: bytes, source: str, name: str = "") -> None:
    """Pin a conversation of which nothing is on disk, as soon as something is."""
    pin(connection, model, _NOWHERE, source, name)


def unpin(
    connection: Connection, model: bytes, end_hash: bytes, source: str, name: str = ""
) -> int:
    """Take a pin back; how many slots it was for."""
    number = slot_rows.known_model_id(connection, model)
    return _unpin(connection, number, PinRow(model, end_hash, source, name))


def drop(connection: Connection, source: str) -> int:
    """Take back all pins of a source, of every model; how many there were."""
    return _drop(connection, Pin.source == source)


def drop_named(connection: Connection, name: str) -> int:
    """Take back all pins of what was asked by this name; how many there were."""
    return _drop(connection, Pin.name == name)


def carry(connection: Connection, model: int, source: str, name: str, leaf: int) -> None:
    """A conversation ends in `leaf` now: what is pinned of it ends there as well."""
    mine = (Pin.model_id == model, Pin.source == source, Pin.name == name)
    before = list(connection.execute(select(Pin.end_hash).where(*mine)).scalars())
    if not before:
        return
    end_hash = connection.execute(select(Slot.end_hash).where(Slot.id == leaf)).scalar_one()
    for old in before:
        if old != end_hash:
            _unpin(connection, model, PinRow(b"", old, source, name))
    _pin(connection, model, PinRow(b"", end_hash, source, name))


def used_bytes(connection: Connection, sources: Sequence[str]) -> int:
    """What stays on disk for these sources: slots that end there and all that they continue."""
    parameters = {"sources": list(sources)}
    return connection.execute(_USED, parameters).scalar_one()


def unmet(connection: Connection, sources: Sequence[str]) -> set[str]:
    """Those of these sources that pinned something which is not on disk yet."""
    slot = select(Slot.id).where(Slot.model_id == Pin.model_id, Slot.end_hash == Pin.end_hash)
    found = select(Pin.source).where(Pin.source.in_(list(sources)), ~slot.exists())
    return set(connection.execute(found).scalars())


def rows(connection: Connection) -> list[PinRow]:
    """All pins."""
    columns = select(Model.hash, Pin.end_hash, Pin.source, Pin.name)
    return [
        PinRow(*row) for row in connection.execute(columns.join(Model, Model.id == Pin.model_id))
    ]


def _drop(connection: Connection, which: ColumnElement[bool]) -> int:
    columns = select(Pin.model_id, Model.hash, Pin.end_hash, Pin.source, Pin.name)
    found = connection.execute(columns.join(Model, Model.id == Pin.model_id).where(which)).all()
    for model, model_hash, end_hash, source, name in found:
        _unpin(connection, model, PinRow(model_hash, end_hash, source, name))
    return len(found)


def _pin(connection: Connection, model: int, row: PinRow) -> int:
    values = {"end_hash": row.end_hash, "source": row.source, "name": row.name}
    connection.execute(insert(Pin).values(model_id=model, **values).on_conflict_do_nothing())
    slots = update(Slot).where(Slot.model_id == model, Slot.end_hash == row.end_hash)
    return connection.execute(slots.values(is_pinned=True)).rowcount


def _unpin(connection: Connection, model: int, row: PinRow) -> int:
    here = (Pin.model_id == model, Pin.end_hash == row.end_hash)
    connection.execute(delete(Pin).where(*here, Pin.source == row.source, Pin.name == row.name))
    slots = update(Slot).where(Slot.model_id == model, Slot.end_hash == row.end_hash)
    is_pinned = (Slot.ttl_class == "pinned") | select(Pin.source).where(*here).exists()
    return connection.execute(slots.values(is_pinned=is_pinned)).rowcount
