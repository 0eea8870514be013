"""Deleting on request: chains, models, everything. Rows go here, files after them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from threading import Lock

from sqlalchemy import Connection, and_, delete, func, or_, select, update

from store import pins, slot_rows, unpublished
from store.cold import ColdStore
from store.conversations import drop_rows, drop_unneeded
from store.index import SlotIndex
from store.slots import remove, slot_path
from store.tables import (
    Conversation,
    ConversationSlot,
    Counter,
    Model,
    Pin,
    Request,
    Slot,
    Unpublished,
)
from store.types import NAMELESS, SlotPlace

BATCH = 500
"""Slots in one transaction: a running server's own writes get their turn in between."""

STRAY_TOKENS = 64
"""An end that is left so soon after a turn is what the client gave back otherwise, no branch."""

_CONVERSATIONS = 20
"""In one transaction, for the same reason."""


def drop_chain(connection: Connection, leaf: str, name: str) -> tuple[SlotPlace, ...]:
    """Delete a chain without a session id, asked by that name, and what only it continues.

    Stops at the first slot that the chain leaves well before its end: its end is another's. What
    was said without a session id after its last slot, since that was the last one, goes first.
    """
    number = slot_rows.slot_ids(connection, [leaf]).get(leaf)
    way: list[tuple[int, int]] = []
    leave: int | None = None
    is_branch = False
    while number is not None:
        columns = select(Slot.parent_id, Slot.start, Slot.end).where(Slot.id == number)
        parent, start, end = connection.execute(columns).one()
        way.append((number, end if leave is None else leave))
        is_branch = leave is not None and leave + STRAY_TOKENS < end
        if is_branch:
            break
        number, leave = parent, start
    later = _later(connection, [slot for slot, _ in way[:1]])
    for conversation in _nameless_of(connection, [slot for slot, _ in way[:1]], name):
        its = [one for one in later if _is_of(connection, conversation, one[0])]
        for slot, left_at in (*its, *way):
            if not _leave(connection, conversation, slot, left_at):
                break
    mine = [slot for slot, _ in (*later, *way)]
    unpublished.drop_nameless(connection, [slot for slot, _ in way[:1]], name)
    return drop_unneeded(connection, mine[:-1] if is_branch else mine)


def num_shared(connection: Connection, leaf: str, name: str) -> int:
    """How many of the first tokens stay when a chain is deleted, as by `drop_chain`."""
    number = slot_rows.slot_ids(connection, [leaf]).get(leaf)
    mine = _nameless_of(connection, [number] if number is not None else [], name)
    below, left_at = None, None
    while number is not None:
        columns = select(Slot.parent_id, Slot.start, Slot.end, Slot.is_pinned)
        parent, start, end, is_pinned = connection.execute(columns.where(Slot.id == number)).one()
        left_at = end if left_at is None else left_at
        others = (
            select(func.max(ConversationSlot.reach))
            .where(ConversationSlot.slot_id == number)
            .where(ConversationSlot.conversation_id.not_in(mine))
        )
        further = select(func.max(Slot.start)).where(Slot.parent_id == number, Slot.id != below)
        # What continues its last slot came while it was being deleted.
        asked = (others, further) if below is not None else (others,)
        needed = max(connection.execute(one).scalar() or 0 for one in asked)
        if is_pinned or left_at + STRAY_TOKENS < end:
            needed = left_at
        if needed > start:
            return min(needed, left_at)
        number, below, left_at = parent, number, start
    return 0


def _later(connection: Connection, slots: Sequence[int]) -> list[tuple[int, int]]:
    """The slots that continue these, the last ones first, and where each ends."""
    if not slots:
        return []
    children = select(Slot.id, Slot.end).where(Slot.parent_id.in_(slots))
    found = [(number, end) for number, end in connection.execute(children)]
    return [*_later(connection, [slot for slot, _ in found]), *found]


def _nameless_of(connection: Connection, slots: Sequence[int], name: str) -> list[int]:
    """What was asked by that name without a session id and has these slots."""
    member = ConversationSlot.conversation_id == Conversation.id
    found = select(Conversation.id).join(ConversationSlot, member)
    found = found.join(Model, Model.id == Conversation.model_id)
    is_asked = or_(Conversation.name == name, and_(Conversation.name == "", Model.label == name))
    found = found.where(Conversation.key == NAMELESS, is_asked)
    found = found.where(ConversationSlot.slot_id.in_(slots))
    return list(connection.execute(found.distinct()).scalars())


def _is_of(connection: Connection, conversation: int, slot: int) -> bool:
    mine = (ConversationSlot.slot_id == slot, ConversationSlot.conversation_id == conversation)
    return connection.execute(select(ConversationSlot.reach).where(*mine)).first() is not None


def _leave(connection: Connection, conversation: int, slot: int, left_at: int) -> bool:
    """Let a slot not be part of a conversation that ends at `left_at`; whether it is not now.

    It stays part of one that goes on from there or further.
    """
    mine = (ConversationSlot.slot_id == slot, ConversationSlot.conversation_id == conversation)
    reach = connection.execute(select(ConversationSlot.reach).where(*mine)).scalar()
    if reach is None or reach > left_at + STRAY_TOKENS:
        return False
    starts = (
        select(func.max(Slot.start))
        .join(ConversationSlot, ConversationSlot.slot_id == Slot.id)
        .where(Slot.parent_id == slot, ConversationSlot.conversation_id == conversation)
    )
    goes_on_at = connection.execute(starts).scalar()
    if goes_on_at is None:
        connection.execute(delete(ConversationSlot).where(*mine))
        return True
    connection.execute(update(ConversationSlot).where(*mine).values(reach=goes_on_at))
    return False


def drop_name(connection: Connection, name: str) -> tuple[SlotPlace, ...] | None:
    """Delete some of what was asked by this name, pins first; None when nothing is left.

    What was asked by other names stays whole.
    """
    pins.drop_named(connection, name)
    unpublished.drop_name(connection, name)
    named = select(Conversation.id).where(Conversation.name == name, Conversation.key != NAMELESS)
    rows = list(connection.execute(named.limit(_CONVERSATIONS)).scalars())
    if rows:
        return drop_rows(connection, rows, keeps_class=False)
    nameless = select(Conversation.id).where(Conversation.name == name)
    last = (
        select(ConversationSlot.conversation_id, ConversationSlot.slot_id)
        .where(ConversationSlot.conversation_id.in_(nameless))
        .order_by(ConversationSlot.slot_id.desc())
        .limit(BATCH)
    )
    members = connection.execute(last).all()
    for conversation, slot in members:
        member = ConversationSlot.conversation_id == conversation
        connection.execute(delete(ConversationSlot).where(member, ConversationSlot.slot_id == slot))
    if members:
        return drop_unneeded(connection, {slot for _, slot in members}, keeps_class=False)
    connection.execute(delete(Conversation).where(Conversation.name == name))
    return drop_unneeded(connection, _unowned(connection, name), keeps_class=False) or None


def _unowned(connection: Connection, name: str) -> list[int]:
    """Slots that are no conversation's, of weights that go by this name."""
    columns = select(Slot.id).join(Model, Model.id == Slot.model_id).where(Model.label == name)
    member = select(ConversationSlot.slot_id).where(ConversationSlot.slot_id == Slot.id)
    unowned = columns.where(~member.exists()).order_by(Slot.id.desc()).limit(BATCH)
    return list(connection.execute(unowned).scalars())


def names(connection: Connection) -> set[str]:
    """By which models were asked of which something is remembered."""
    found = select(Conversation.name).union(select(Pin.name))
    return {name for name in connection.execute(found).scalars() if name}


def drop_some(connection: Connection, model: bytes | None) -> tuple[SlotPlace, ...]:
    """Delete up to `BATCH` slots of a model, or of any, children first; empty when none is left."""
    last = select(Slot.name).order_by(Slot.id.desc()).limit(BATCH)
    if model is not None:
        last = last.where(Slot.model_id == slot_rows.model_id(connection, model))
    return slot_rows.delete_slots(connection, list(connection.execute(last).scalars()))


def forget(connection: Connection, model: bytes | None) -> None:
    """Delete a model's conversations and pins; without one, those of all, and all past requests."""
    if model is None:
        for table in (Conversation, Pin, Unpublished, Request, Counter):
            connection.execute(delete(table))
        return
    number = slot_rows.model_id(connection, model)
    connection.execute(delete(Conversation).where(Conversation.model_id == number))
    connection.execute(delete(Pin).where(Pin.model_id == number))
    connection.execute(delete(Unpublished).where(Unpublished.model_id == number))


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
