"""What workers computed and have not on disk yet: what is left of it here is what a crash lost.

It is noted when it is queued to be written and goes in the transaction that makes it visible, so
nothing is here that is on disk, or ever was since it was computed. All of it is by hashes alone,
in the transaction of the caller.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby

from sqlalchemy import Connection, ScalarSelect, delete, select, update
from sqlalchemy.engine.interfaces import DBAPICursor

from store.tables import Model, Slot, Unpublished
from store.types import NAMELESS, LostRow, PrefixPiece, SlotHeader, UnpublishedRow

MAX_ROWS = 10_000
"""Blocks: a conversation of 2.5 million tokens. Of more the first ones are forgotten."""

MAX_AGE_S = 14 * 86_400.0
"""What is not asked for again so long after a crash nobody misses; what is kept shorter goes
when it would have gone.
"""

_IS_THERE = "SELECT 1 FROM slots WHERE name = ?"
_INSERT = """
INSERT INTO unpublished (slot, model_id, "key", name, hash, above, "end", start, is_lost, until_s)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, 0, ?)
"""
_TRIM = """
DELETE FROM unpublished
WHERE number <= (SELECT number FROM unpublished ORDER BY number DESC LIMIT 1 OFFSET ?)
"""
_FOUND = "DELETE FROM unpublished WHERE hash = ?"
_COVERED = """
DELETE FROM unpublished WHERE hash IN (SELECT hash FROM unpublished WHERE slot = ?)
"""


def note(connection: Connection, model_id: int, row: UnpublishedRow, now_s: float) -> None:
    """A slot of a model is queued, at trusted time `now_s`, and not on disk yet.

    It may have come there since whoever says so looked.
    """
    cursor = connection.connection.cursor()
    cursor.execute(_IS_THERE, (row.slot,))
    if cursor.fetchone() is not None:
        return
    until_s = now_s + min(row.ttl_s or MAX_AGE_S, MAX_AGE_S)
    said = (row.slot, model_id, row.key, row.name)
    cursor.execute("DELETE FROM unpublished WHERE slot = ?", (row.slot,))
    cursor.executemany(_INSERT, [(*said, *piece, row.start, until_s) for piece in row.pieces])
    cursor.execute(_TRIM, (MAX_ROWS,))


def forget_slots(connection: Connection, slots: Sequence[str]) -> None:
    """These are queued no longer: they left memory before they were on disk."""
    connection.execute(delete(Unpublished).where(Unpublished.slot.in_(slots)))


def published(cursor: DBAPICursor, header: SlotHeader) -> None:
    """This is on disk now, whoever computed it however often."""
    cursor.execute(_COVERED, (header.id,))
    cursor.executemany(_FOUND, [(one,) for one in {*header.block_hashes, header.end_hash}])


def lose(connection: Connection, model: bytes | None = None) -> None:
    """Who had it in memory, of a model or of all, is gone: what is here now is lost."""
    gone = update(Unpublished).values(is_lost=True).where(~Unpublished.is_lost)
    if model is not None:
        gone = gone.where(Unpublished.model_id == _number_of(model))
    connection.execute(gone)


def lost(connection: Connection, model: bytes, now_s: float) -> list[LostRow]:
    """What of a model was lost, by whose it was."""
    columns = select(
        Unpublished.key, Unpublished.name, Unpublished.hash, Unpublished.above, Unpublished.end
    )
    mine = (Unpublished.model_id == _number_of(model), Unpublished.is_lost)
    rows = connection.execute(
        columns.where(*mine, Unpublished.until_s > now_s).order_by(
            Unpublished.key, Unpublished.name, Unpublished.number
        )
    )
    return [
        LostRow(key=key, name=name, pieces=tuple(PrefixPiece(*row[2:]) for row in group))
        for (key, name), group in groupby(rows, lambda row: (row.key, row.name))
    ]


def drop_key(connection: Connection, key: bytes, model: bytes | None = None) -> int:
    """Forget a conversation's, with all models unless one is named; how many rows."""
    mine = delete(Unpublished).where(Unpublished.key == key)
    if model is not None:
        mine = mine.where(Unpublished.model_id == _number_of(model))
    return connection.execute(mine).rowcount


def drop_nameless(connection: Connection, slots: Iterable[int], name: str) -> None:
    """Forget all without a session id of the models of these slots, asked by that name.

    Hashes do not say which of it continued the chain that is deleted: none of it stays.
    """
    models = select(Slot.model_id).where(Slot.id.in_(list(slots)))
    is_asked = Unpublished.name.in_([name, ""])
    mine = (Unpublished.key == NAMELESS, is_asked, Unpublished.model_id.in_(models))
    connection.execute(delete(Unpublished).where(*mine))


def drop_name(connection: Connection, name: str) -> None:
    """Forget what was asked by a model's name."""
    connection.execute(delete(Unpublished).where(Unpublished.name == name))


def trim(connection: Connection, now_s: float) -> int:
    """Forget what is over at trusted time `now_s`; how many rows."""
    return connection.execute(delete(Unpublished).where(Unpublished.until_s <= now_s)).rowcount


def _number_of(model: bytes) -> ScalarSelect[int]:
    return select(Model.id).where(Model.hash == model).scalar_subquery()
