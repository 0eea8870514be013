"""Deleting on request: chains, models, everything. Rows go here, files after them."""

from __future__ import annotations

from pathlib import Path
from threading import Lock

from sqlalchemy import Connection, delete, select

from store import slot_rows
from store.cold import ColdStore
from store.conversations import drop_unneeded
from store.index import SlotIndex
from store.slots import remove, slot_path
from store.tables import Conversation, Counter, Pin, Request, Slot
from store.types import SlotPlace

BATCH = 500
"""Slots in one transaction: a running server's own writes get their turn in between."""


def drop_chain(connection: Connection, leaf: str) -> tuple[SlotPlace, ...]:
    """Delete a slot that nobody continues, and what only it continues, from its end on.

    Stops at the first slot whose tokens on this way something else needs.
    """
    number = slot_rows.slot_ids(connection, [leaf]).get(leaf)
    leave: int | None = None
    dropped: list[SlotPlace] = []
    while number is not None:
        columns = select(Slot.parent_id, Slot.start).where(Slot.id == number)
        parent, start = connection.execute(columns).one()
        places = drop_unneeded(connection, number, leave)
        if not places:
            break
        dropped += places
        number, leave = parent, start
    return tuple(dropped)


def drop_some(connection: Connection, model: bytes | None) -> tuple[SlotPlace, ...]:
    """Delete up to `BATCH` slots of a model, or of any, children first; empty when none is left."""
    last = select(Slot.name).order_by(Slot.id.desc()).limit(BATCH)
    if model is not None:
        last = last.where(Slot.model_id == slot_rows.model_id(connection, model))
    return slot_rows.delete_subtrees(connection, list(connection.execute(last).scalars()))


def forget(connection: Connection, model: bytes | None) -> None:
    """Delete a model's conversations and pins; without one, those of all, and all past requests."""
    if model is None:
        for table in (Conversation, Pin, Request, Counter):
            connection.execute(delete(table))
        return
    number = slot_rows.model_id(connection, model)
    connection.execute(delete(Conversation).where(Conversation.model_id == number))
    connection.execute(delete(Pin).where(Pin.model_id == number))


def unlink_condemned(
    root: Path, index: SlotIndex, cold: ColdStore | None, place: SlotPlace, replacing: Lock
) -> bool:
    """Remove the file of a dropped slot, unless its worker wrote it again meanwhile.

    Whoever publishes holds `replacing`. Whether there was a file. Raises StoreError.
    """
    if place.tier == "cold":
        return cold is not None and index.is_condemned(place) and cold.delete(place.id)
    with replacing:
        return index.is_condemned(place) and remove(slot_path(root, place.id))
