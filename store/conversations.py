"""Conversations: which slots each was ever part of, so that they can be counted and deleted.

What was asked without a session id is one conversation for each name that was asked, under the
key `NAMELESS`. It ends in every slot of it that nothing else of it continues.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import Future

from sqlalchemy import Connection, Row, delete, func, or_, select, update
from sqlalchemy.dialects.sqlite import insert
from sqlalchemy.orm import aliased

from store import pins, slot_rows, unpublished
from store.database import Database
from store.errors import StoreError
from store.tables import Conversation, ConversationSlot, Model, PendingCut, Pin, Slot
from store.types import NAMELESS, ConversationRow, SlotPlace, SlotRow


class Conversations:
    """The conversations of a store, by keyed hash. Futures fail as those of `Database.submit`."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def advance(self, row: ConversationRow) -> Future[None]:
        """The first `row.num_tokens` tokens end in `row.leaf`; its whole chain is noted.

        Of what was asked without a session id only that is noted.

        Creation time is kept from the first call on, and `row.num_turns` more turns are counted.
        The future fails with StoreError when the leaf is unknown.
        """
        return self._database.submit(lambda connection: _advance(connection, row))

    def note(self, row: ConversationRow) -> Future[None]:
        """The same of one that may have gone on from there already: where it ends stays as it is.

        One that is not there yet ends there.
        """
        return self._database.submit(lambda connection: _note(connection, row))

    def publish(self, slots: Sequence[SlotRow], turns: Sequence[ConversationRow]) -> Future[None]:
        """Make published slots visible together with the conversations that end in them, as
        `SlotIndex.insert` and `advance`: all of it or nothing.
        """
        return self._database.submit(lambda connection: _publish(connection, slots, turns))

    def drop(self, key: bytes, model: bytes | None = None) -> Future[tuple[SlotPlace, ...]]:
        """Forget a conversation, for all models unless one is named, and all that only it said.

        Slots that something else needs to their end stay. Where something else leaves a slot
        before its end, the rest of that slot is nobody else's: it is to be cut off (`PendingCut`).
        The files may be unlinked when the future is done: see `SlotIndex.drop`.
        """
        return self._database.submit(lambda connection: _drop(connection, key, model))

    def listing(self) -> list[ConversationRow]:
        """All with a session id, the latest first."""
        return self._database.read(_rows)

    def forget_idle(self, before_s: float) -> Future[int]:
        """Forget those last used before that have nothing of their own on disk; how many.

        What a later one is part of as well is not, as the system prompt that all begin with.
        """
        return self._database.submit(lambda connection: _forget_idle(connection, before_s))


def _publish(
    connection: Connection, slots: Sequence[SlotRow], turns: Sequence[ConversationRow]
) -> None:
    slot_rows.insert_slots(connection, slots)
    for turn in turns:
        _advance(connection, turn)


def _advance(connection: Connection, row: ConversationRow) -> None:
    leaf = slot_rows.slot_ids(connection, [row.leaf]).get(row.leaf) if row.leaf else None
    if row.leaf and leaf is None:
        raise StoreError("the conversation ends in an unknown slot")
    model = slot_rows.known_model_id(connection, row.model)
    is_named = row.key != NAMELESS
    there = _there(connection, row) if is_named and not row.num_turns else None
    if there is not None and there.leaf_id is not None and there.num_tokens >= row.num_tokens:
        # Slots of one turn become visible in any order: its last one was before this one.
        _note(connection, row)
        return
    values = {
        "key": row.key,
        "model_id": model,
        "leaf_id": leaf if is_named else None,
        "num_tokens": row.num_tokens if is_named else 0,
        "num_turns": row.num_turns if is_named else 0,
        "ttl_s": row.ttl_s,
        "created_s": row.created_s,
        "last_used_s": row.last_used_s,
        "name": row.name,
    }
    changing = {name: values[name] for name in ("leaf_id", "num_tokens", "ttl_s", "last_used_s")}
    advanced = (
        insert(Conversation)
        .values(values)
        .on_conflict_do_update(
            index_elements=["key", "model_id", "name"],
            set_={**changing, "num_turns": Conversation.num_turns + values["num_turns"]},
        )
        .returning(Conversation.id)
    )
    number = connection.execute(advanced).scalar_one()
    _note_chain(connection, number, leaf, row.num_tokens)
    if leaf is not None and is_named:
        pins.carry(connection, model, pins.source_of(row.key.hex()), row.name, leaf)


def _note(connection: Connection, row: ConversationRow) -> None:
    there = _there(connection, row)
    if there is None:
        _advance(connection, row)
    elif row.leaf and (leaf := slot_rows.slot_ids(connection, [row.leaf]).get(row.leaf)):
        _note_chain(connection, there.id, leaf, row.num_tokens)


def _there(connection: Connection, row: ConversationRow) -> Row[int, int, int | None] | None:
    """The number of a conversation, and where it ends, if it is there."""
    columns = select(Conversation.id, Conversation.num_tokens, Conversation.leaf_id)
    mine = (Conversation.key == row.key, Conversation.name == row.name, Model.hash == row.model)
    found = columns.join(Model, Model.id == Conversation.model_id).where(*mine)
    return connection.execute(found).first()


def _note_chain(connection: Connection, conversation: int, slot: int | None, reach: int) -> None:
    """From the leaf up to the first slot that is noted already: its ancestors are as well."""
    while slot is not None:
        columns = select(Slot.parent_id, Slot.start, Slot.end).where(Slot.id == slot)
        parent, start, end = connection.execute(columns).one()
        mine = (
            ConversationSlot.conversation_id == conversation,
            ConversationSlot.slot_id == slot,
        )
        reach = reach if start < reach <= end else end
        noted = update(ConversationSlot).where(*mine)
        further = func.max(ConversationSlot.reach, reach)
        if connection.execute(noted.values(reach=further)).rowcount:
            return
        member = {"conversation_id": conversation, "slot_id": slot, "reach": reach}
        connection.execute(insert(ConversationSlot).values(member))
        slot, reach = parent, start


def _drop(connection: Connection, key: bytes, model: bytes | None) -> tuple[SlotPlace, ...]:
    unpublished.drop_key(connection, key, model)
    find = select(Conversation.id).where(Conversation.key == key)
    if model is not None:
        find = find.where(Conversation.model_id == slot_rows.model_id(connection, model))
    return drop_rows(connection, list(connection.execute(find).scalars()))


def drop_rows(
    connection: Connection, numbers: Sequence[int], *, keeps_class: bool = True
) -> tuple[SlotPlace, ...]:
    """The same of these conversations, by their numbers."""
    member = ConversationSlot.conversation_id.in_(numbers)
    mine = set(connection.execute(select(ConversationSlot.slot_id).where(member)).scalars())
    connection.execute(delete(Conversation).where(Conversation.id.in_(numbers)))
    return drop_unneeded(connection, mine, keeps_class=keeps_class)


def drop_unneeded(
    connection: Connection, slots: Iterable[int], *, keeps_class: bool = True
) -> tuple[SlotPlace, ...]:
    """Delete what nothing needs of these slots, the later ones first.

    A slot that something needs a part of is to be cut (`PendingCut`): nothing that continues it
    goes. What is pinned stays; without `keeps_class` only what somebody pins now.
    """
    dropped: list[SlotPlace] = []
    pin = select(Pin.source).where(Pin.model_id == Slot.model_id, Pin.end_hash == Slot.end_hash)
    stays = Slot.is_pinned if keeps_class else pin.exists()
    for slot in _latest_first(connection, slots):
        columns = select(Slot.name, Slot.start, Slot.end, stays.label("stays"))
        row = connection.execute(columns.where(Slot.id == slot)).first()
        if row is None or row.stays or (needed := needed_of(connection, slot)) >= row.end:
            continue
        if needed > row.start:
            connection.execute(insert(PendingCut).values(slot_id=slot).on_conflict_do_nothing())
        else:
            dropped += slot_rows.delete_slots(connection, [row.name])
    return tuple(dropped)


def _latest_first(connection: Connection, slots: Iterable[int]) -> list[int]:
    """What continues a slot comes before it."""
    found: dict[int, int] = {}
    numbers = list(slots)
    for i in range(0, len(numbers), slot_rows.CHUNK):
        some = Slot.id.in_(numbers[i : i + slot_rows.CHUNK])
        found.update(connection.execute(select(Slot.id, Slot.start).where(some)).all())
    return sorted(found, key=lambda slot: (-found[slot], -slot))


def needed_of(connection: Connection, slot: int) -> int:
    """Up to which position something needs the tokens of a slot that is not pinned; 0 for nothing.

    That is as far as a conversation goes, and what comes before what continues it.
    """
    reach = select(func.max(ConversationSlot.reach)).where(ConversationSlot.slot_id == slot)
    starts = select(func.max(Slot.start)).where(Slot.parent_id == slot)
    ends = (connection.execute(one).scalar() for one in (reach, starts))
    return max(end or 0 for end in ends)


def _rows(connection: Connection) -> list[ConversationRow]:
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
            Conversation.name,
        )
        .where(Conversation.key != NAMELESS)
        .join(Model, Model.id == Conversation.model_id)
        .outerjoin(Slot, Slot.id == Conversation.leaf_id)
        .order_by(Conversation.last_used_s.desc(), Conversation.id)
    )
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
