"""Conversations: which slots each was ever part of, so that they can be counted and deleted."""

from __future__ import annotations

from concurrent.futures import Future

from sqlalchemy import Connection, delete, func, or_, select
from sqlalchemy.dialects.sqlite import insert
from sqlalchemy.orm import aliased

from store import pins, slot_rows
from store.database import Database
from store.errors import StoreError
from store.tables import Conversation, ConversationSlot, Model, Pin, Slot
from store.types import ConversationRow, SlotPlace


class Conversations:
    """The conversations of a store, by keyed hash. Futures fail as those of `Database.submit`."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def advance(self, row: ConversationRow) -> Future[None]:
        """The first `row.num_tokens` tokens end in `row.leaf`; its whole chain is noted.

        Creation time is kept from the first call on, and `row.num_turns` more turns are counted.
        The future fails with StoreError when the leaf is unknown.
        """
        return self._database.submit(lambda connection: _advance(connection, row))

    def drop(self, key: bytes, model: bytes | None = None) -> Future[tuple[SlotPlace, ...]]:
        """Forget a conversation, for all models unless one is named, and all that only it said.

        Slots that something else needs to their end stay. Where something else leaves a slot
        before its end, the rest of that slot is nobody else's: it goes, with what continues it.
        The files may be unlinked when the future is done: see `SlotIndex.drop`.
        """
        return self._database.submit(lambda connection: _drop(connection, key, model))

    def get(self, key: bytes, model: bytes) -> ConversationRow | None:
        """One conversation with one model."""
        rows = self._database.read(lambda connection: _rows(connection, key, model))
        return rows[0] if rows else None

    def listing(self) -> list[ConversationRow]:
        """All conversations, the latest first, with the slots and bytes they are part of."""
        return self._database.read(_rows)

    def forget_idle(self, before_s: float) -> Future[int]:
        """Forget those last used before that have nothing of their own on disk; how many.

        What a later one is part of as well is not, as the system prompt that all begin with.
        """
        return self._database.submit(lambda connection: _forget_idle(connection, before_s))


def _advance(connection: Connection, row: ConversationRow) -> None:
    leaf = slot_rows.slot_ids(connection, [row.leaf]).get(row.leaf) if row.leaf else None
    if row.leaf and leaf is None:
        raise StoreError("the conversation ends in an unknown slot")
    model = slot_rows.known_model_id(connection, row.model)
    values = {
        "key": row.key,
        "model_id": model,
        "leaf_id": leaf,
        "num_tokens": row.num_tokens,
        "num_turns": row.num_turns,
        "ttl_s": row.ttl_s,
        "created_s": row.created_s,
        "last_used_s": row.last_used_s,
    }
    changing = {name: values[name] for name in ("leaf_id", "num_tokens", "ttl_s", "last_used_s")}
    advanced = (
        insert(Conversation)
        .values(values)
        .on_conflict_do_update(
            index_elements=["key", "model_id"],
            set_={**changing, "num_turns": Conversation.num_turns + row.num_turns},
        )
        .returning(Conversation.id)
    )
    number = connection.execute(advanced).scalar_one()
    _note_chain(connection, number, leaf)
    if leaf is not None:
        pins.carry(connection, model, pins.source_of(row.key.hex()), leaf)


def _note_chain(connection: Connection, conversation: int, slot: int | None) -> None:
    """From the leaf up to the first slot that is noted already: its ancestors are as well."""
    while slot is not None:
        member = {"conversation_id": conversation, "slot_id": slot}
        noted = insert(ConversationSlot).values(member).on_conflict_do_nothing()
        if not connection.execute(noted).rowcount:
            return
        slot = connection.execute(select(Slot.parent_id).where(Slot.id == slot)).scalar()


def _drop(connection: Connection, key: bytes, model: bytes | None) -> tuple[SlotPlace, ...]:
    find = select(Conversation.id).where(Conversation.key == key)
    if model is not None:
        find = find.where(Conversation.model_id == slot_rows.model_id(connection, model))
    numbers = list(connection.execute(find).scalars())
    member = ConversationSlot.conversation_id.in_(numbers)
    mine = set(connection.execute(select(ConversationSlot.slot_id).where(member)).scalars())
    connection.execute(delete(Conversation).where(Conversation.id.in_(numbers)))
    dropped: list[SlotPlace] = []
    for slot in sorted(mine, reverse=True):
        dropped += drop_unneeded(connection, slot)
    return tuple(dropped)


def drop_unneeded(
    connection: Connection, slot: int, leave: int | None = None
) -> tuple[SlotPlace, ...]:
    """Delete a slot, with what continues it, unless something needs its tokens up to `leave`.

    That is its end unless given. Needed is what is pinned, where another conversation ends, and
    what comes before a slot that continues it.
    """
    columns = select(Slot.name, Slot.end, Slot.is_pinned, Slot.num_children)
    row = connection.execute(columns.where(Slot.id == slot)).first()
    if row is None or row.is_pinned:
        return ()
    remembered = select(ConversationSlot.slot_id).where(ConversationSlot.slot_id == slot)
    ends = select(Conversation.id).where(Conversation.leaf_id == slot)
    is_end = remembered if not row.num_children else ends
    starts = select(func.max(Slot.start)).where(Slot.parent_id == slot)
    needed = connection.execute(starts).scalar() or 0
    if connection.execute(is_end).first() is not None:
        needed = row.end
    if needed >= (row.end if leave is None else leave):
        return ()
    return slot_rows.delete_subtrees(connection, [row.name])


def _rows(
    connection: Connection, key: bytes | None = None, model: bytes | None = None
) -> list[ConversationRow]:
    held = (
        select(
            ConversationSlot.conversation_id,
            func.count().label("num_slots"),
            func.sum(Slot.disk_bytes).label("disk_bytes"),
        )
        .join(Slot, Slot.id == ConversationSlot.slot_id)
        .group_by(ConversationSlot.conversation_id)
        .subquery()
    )
    columns = (
        select(
            Conversation.key,
            Model.hash,
            Slot.name,
            Conversation.num_tokens,
            Conversation.last_used_s,
            Conversation.created_s,
            Conversation.num_turns,
            Conversation.ttl_s,
            func.coalesce(held.c.num_slots, 0),
            func.coalesce(held.c.disk_bytes, 0),
        )
        .join(Model, Model.id == Conversation.model_id)
        .outerjoin(Slot, Slot.id == Conversation.leaf_id)
        .outerjoin(held, held.c.conversation_id == Conversation.id)
        .order_by(Conversation.last_used_s.desc(), Conversation.id)
    )
    if key is not None:
        columns = columns.where(Conversation.key == key)
    if model is not None:
        columns = columns.where(Model.hash == model)
    return [ConversationRow(*row) for row in connection.execute(columns)]


def _forget_idle(connection: Connection, before_s: float) -> int:
    other, of_other = aliased(Conversation), aliased(ConversationSlot)
    is_of_other = (
        select(of_other.slot_id)
        .join(other, other.id == of_other.conversation_id)
        .where(of_other.slot_id == ConversationSlot.slot_id, other.last_used_s >= before_s)
    )
    held = (
        select(ConversationSlot.slot_id)
        .where(ConversationSlot.conversation_id == Conversation.id)
        .where(~is_of_other.exists())
    )
    source = pins.source_of("") + func.lower(func.hex(Conversation.key))
    is_kept = or_(held.exists(), select(Pin.source).where(Pin.source == source).exists())
    idle = delete(Conversation).where(Conversation.last_used_s < before_s, ~is_kept)
    return connection.execute(idle).rowcount
