"""The index of slots: what is on disk, for whom, and what may leave.

What changes it returns a future of the writer; what only reads runs in the caller's thread.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from typing import NamedTuple

import msgspec
from sqlalchemy import Connection, delete, func, literal, select, update
from sqlalchemy.dialects.sqlite import insert
from sqlalchemy.orm import aliased

from store import pins, slot_rows
from store.conversations import drop_unneeded, needed_of
from store.database import Database
from store.errors import StoreError
from store.tables import (
    Condemned,
    Conversation,
    ConversationSlot,
    Model,
    PendingCut,
    Slot,
)
from store.types import (
    Candidate,
    PinRow,
    SlotPlace,
    SlotRow,
    Tier,
    TierTotal,
    class_of,
    decayed_hits,
)


class SlotFootprint(NamedTuple):
    """Bytes of the slots on the fast disk, and the ids of dropped ones whose files may be there."""

    warm_bytes: int
    leaving: tuple[str, ...]


class SlotIndex:
    """The slots of a store. All futures fail as those of `Database.submit`."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def insert(self, rows: Sequence[SlotRow]) -> Future[int]:
        """Make published slots visible, in any order, all or none; the number of new ones.

        A slot that exists stays as it is.
        """
        return self._database.submit(lambda connection: slot_rows.insert_slots(connection, rows))

    def replace(
        self, merged: Sequence[SlotRow], old: Sequence[str]
    ) -> Future[tuple[SlotPlace, ...]]:
        """Put compacted slots in the place of parts of a chain; the places of the old files.

        Conversations that were part of these are part of the new slots, and what continues them
        continues those. The future fails with StoreError when something continues what is in no
        new slot, or when the end of one is to be cut off first.
        """
        return self._database.submit(lambda connection: _replace(connection, merged, old))

    def divide(self, slot: str, parts: Sequence[SlotRow]) -> Future[tuple[SlotPlace, ...]]:
        """Put what is whole of a damaged slot in its place, as slots; the place of its file.

        Conversations that were part of it are part of these, and what continues it continues them
        where they have the tokens before it. Where the end of it was to be cut off, parts of that
        are dropped again: their places are among those that are returned. Empty, and nothing is
        changed, if it is not there.
        """
        return self._database.submit(lambda connection: _divide(connection, slot, parts))

    def to_cut(self) -> list[tuple[SlotRow, int]]:
        """Slots of which the end is deleted, and up to where each is needed now."""
        return self._database.read(_to_cut)

    def cut(self, old: str, row: SlotRow) -> Future[SlotPlace | None]:
        """Put `row`, which has its first tokens, in the place of a slot; the old file's place.

        What continues the slot continues this one. None when it is not to be cut there any more.
        """
        return self._database.submit(lambda connection: _cut(connection, old, row))

    def not_cut(self, slot: str) -> Future[tuple[SlotPlace, ...]]:
        """A slot needs no cut: all of it is needed, or nothing of it is, and it is dropped."""
        return self._database.submit(lambda connection: _not_cut(connection, slot))

    def touch(
        self, ids: Sequence[str], now_s: float, lives_s: Mapping[str, float] | None = None
    ) -> Future[None]:
        """Count a hit for each slot at trusted time `now_s`, in seconds; unknown ids are ignored.

        From then on they live unused for `lives_s` at least.
        """
        lives_s = lives_s or {}
        return self._database.submit(lambda connection: _touch(connection, ids, now_s, lives_s))

    def drop(self, ids: Sequence[str]) -> Future[tuple[SlotPlace, ...]]:
        """Forget slots, pinned or not; what continues them stays.

        The files may be unlinked when the future is done; then call `unlinked`. Until that, a
        restart finishes the work: their rows are gone but they stay condemned.
        """
        return self._database.submit(lambda connection: slot_rows.delete_slots(connection, ids))

    def unlinked(self, places: Sequence[SlotPlace]) -> Future[None]:
        """The files of dropped slots are gone."""
        return self._database.submit(lambda connection: _forget(connection, places))

    def set_tier(self, slot: str, tier: Tier, disk_bytes: int) -> Future[bool]:
        """A slot's file is there, of that many bytes. False when it has no row any more."""
        return self._database.submit(
            lambda connection: _set_tier(connection, SlotPlace(slot, tier), disk_bytes)
        )

    def move(self, slot: str, tier: Tier, disk_bytes: int) -> Future[bool]:
        """A slot was demoted or promoted: the same, and its file in the other tier is condemned."""
        return self._database.submit(
            lambda connection: _move(connection, SlotPlace(slot, tier), disk_bytes)
        )

    def condemn(self, place: SlotPlace) -> Future[None]:
        """A file is about to appear there: a restart removes it unless its row says so by then."""
        return self._database.submit(lambda connection: _condemn(connection, place))

    def expired(self, now_s: float) -> tuple[str, ...]:
        """The ids whose time is over at trusted time `now_s`, children first.

        A slot outlives all that continues it.
        """
        return self._database.read(lambda connection: _over(connection, now_s))

    def pin(self, model: bytes, end_hash: bytes, source: str, name: str = "") -> Future[int]:
        """Keep the prefix that ends with `end_hash`, also when it is yet to come, for `source`.

        The number of slots there are of it. What such a slot continues stays as well. `name` is
        the model's that was asked for it.
        """
        return self._database.submit(lambda c: pins.pin(c, model, end_hash, source, name))

    def unpin(self, model: bytes, end_hash: bytes, source: str, name: str = "") -> Future[int]:
        """Take back one source's pin; the number of slots that ended there."""
        return self._database.submit(lambda c: pins.unpin(c, model, end_hash, source, name))

    def pins(self) -> list[PinRow]:
        """Everything that must stay."""
        return self._database.read(pins.rows)

    def slots_of(self, model: bytes) -> list[SlotRow]:
        """Every slot of a model, parents before children, with block hashes: a worker's map."""
        return self._database.read(lambda connection: slot_rows.read_slots(connection, model))

    def all_slots(self) -> list[SlotRow]:
        """Every slot of every model, parents before children."""
        return self._database.read(slot_rows.read_slots)

    def tier_of(self, slot: str) -> Tier | None:
        """Where a slot's file is; None of one that has no row."""
        found = select(Slot.tier).where(Slot.name == slot)
        return self._database.read(lambda connection: connection.execute(found).scalar())

    def places(self) -> list[SlotPlace]:
        """The id and tier of every slot."""
        return self._database.read(_places)

    def condemned(self) -> list[SlotPlace]:
        """The dropped slots whose files may still be there."""
        return self._database.read(_condemned)

    def is_condemned(self, place: SlotPlace) -> bool:
        """Whether that file is still to go; what was written again meanwhile is not."""
        return self._database.read(lambda connection: _is_condemned(connection, place))

    def candidates(self, *, with_pinned: bool = False) -> list[Candidate]:
        """Every slot that is not pinned, or every slot, for `store.eviction.choose`."""
        return self._database.read(lambda c: slot_rows.read_candidates(c, with_pinned=with_pinned))

    def footprint(self) -> SlotFootprint:
        """What the files of slots take on the fast disk."""
        return self._database.read(_footprint)

    def totals(self) -> list[TierTotal]:
        """What each model holds in each tier."""
        return self._database.read(_totals)


def _set_tier(connection: Connection, place: SlotPlace, disk_bytes: int) -> bool:
    moved = update(Slot).where(Slot.name == place.id)
    return bool(connection.execute(moved.values(tier=place.tier, disk_bytes=disk_bytes)).rowcount)


def _move(connection: Connection, place: SlotPlace, disk_bytes: int) -> bool:
    if not _set_tier(connection, place, disk_bytes):
        return False
    _forget(connection, [place])
    _condemn(connection, place._replace(tier="cold" if place.tier == "warm" else "warm"))
    return True


def _condemn(connection: Connection, place: SlotPlace) -> None:
    there = select(Slot.id).where(Slot.name == place.id, Slot.tier == place.tier)
    if connection.execute(there).first() is None:
        condemned = insert(Condemned).values(name=place.id, tier=place.tier)
        connection.execute(condemned.on_conflict_do_nothing())


def _is_condemned(connection: Connection, place: SlotPlace) -> bool:
    found = select(Condemned.name).where(Condemned.name == place.id, Condemned.tier == place.tier)
    return connection.execute(found).first() is not None


def _replace(
    connection: Connection, merged: Sequence[SlotRow], old: Sequence[str]
) -> tuple[SlotPlace, ...]:
    numbers = list(slot_rows.slot_ids(connection, old).values())
    outside = select(Slot.start_hash).where(Slot.parent_id.in_(numbers), Slot.id.not_in(numbers))
    ends = {end for row in merged for end in (*row.header.block_hashes, row.header.end_hash)}
    is_whole = len(numbers) == len(old) and not _is_to_cut(connection, numbers)
    if not is_whole or set(connection.execute(outside).scalars()) - ends:
        raise StoreError("the chain that was compacted is no longer what it was")
    new = _insert_for(connection, merged, numbers)
    for row in merged:
        inside = select(Slot.id).where(
            Slot.id.in_(numbers), Slot.end > row.header.start, Slot.start < row.header.end
        )
        ended = update(Conversation).where(Conversation.leaf_id.in_(inside))
        connection.execute(ended.values(leaf_id=new[row.header.id]))
    places = slot_rows.delete_slots(connection, old)
    for row in merged:
        slot_rows.adopt(connection, row.header)
    return places


def _divide(connection: Connection, slot: str, parts: Sequence[SlotRow]) -> tuple[SlotPlace, ...]:
    number = slot_rows.slot_ids(connection, [slot]).get(slot)
    if number is None:
        return ()
    before = aliased(Slot)
    columns = select(Slot.start, before.name).outerjoin(before, before.id == Slot.parent_id)
    start, parent = connection.execute(columns.where(Slot.id == number)).one()
    is_first = parts[0].header.start == start
    is_to_cut = _is_to_cut(connection, [number])
    first = msgspec.structs.replace(parts[0], parent=parent if is_first else None)
    new = _insert_for(connection, [first, *parts[1:]], [number])
    _end_in(connection, new.values(), number)
    places = slot_rows.delete_slots(connection, [slot])
    for part in parts:
        slot_rows.adopt(connection, part.header)
    return places + drop_unneeded(connection, new.values()) if is_to_cut else places


def _end_in(connection: Connection, parts: Iterable[int], number: int) -> None:
    """Conversations that end in a slot end in the last of its parts that they are part of."""
    columns = select(ConversationSlot.slot_id).join(Slot, Slot.id == ConversationSlot.slot_id)
    its = columns.where(
        ConversationSlot.conversation_id == Conversation.id, Slot.id.in_(list(parts))
    )
    last = its.order_by(Slot.end.desc()).limit(1).scalar_subquery()
    ended = update(Conversation).where(Conversation.leaf_id == number)
    connection.execute(ended.values(leaf_id=func.coalesce(last, number)))


def _is_to_cut(connection: Connection, numbers: Sequence[int]) -> bool:
    """Something that was deleted is still in one of these slots."""
    return (
        connection.execute(
            select(PendingCut.slot_id).where(PendingCut.slot_id.in_(numbers))
        ).first()
        is not None
    )


def _insert_for(
    connection: Connection, rows: Sequence[SlotRow], numbers: Sequence[int]
) -> dict[str, int]:
    """Insert slots that stand for those with these numbers, in conversations too; their numbers."""
    slot_rows.insert_slots(connection, rows)
    new = slot_rows.slot_ids(connection, [row.header.id for row in rows])
    for number in new.values():
        place = select(Slot.start, Slot.end).where(Slot.id == number)
        start, end = connection.execute(place).one()
        reach = func.max(ConversationSlot.reach)
        members = (
            select(ConversationSlot.conversation_id, literal(number), func.min(reach, end))
            .where(ConversationSlot.slot_id.in_(numbers))
            .group_by(ConversationSlot.conversation_id)
            .having(reach > start)
        )
        columns = ["conversation_id", "slot_id", "reach"]
        joined = insert(ConversationSlot).from_select(columns, members)
        connection.execute(joined.on_conflict_do_nothing())
    return new


def _to_cut(connection: Connection) -> list[tuple[SlotRow, int]]:
    columns = select(Slot.name, Slot.id, Model.hash).join(PendingCut, PendingCut.slot_id == Slot.id)
    named = {
        name: (number, model)
        for name, number, model in connection.execute(
            columns.join(Model, Model.id == Slot.model_id)
        )
    }
    return [
        (row, needed_of(connection, named[row.header.id][0]))
        for model in {model for _, model in named.values()}
        for row in slot_rows.read_slots(connection, model)
        if row.header.id in named
    ]


def _cut(connection: Connection, old: str, row: SlotRow) -> SlotPlace | None:
    header = row.header
    found = connection.execute(select(Slot.id, Slot.tier).where(Slot.name == old)).first()
    if found is None or found.tier != "warm" or needed_of(connection, found.id) != header.end:
        return None
    slot_rows.shorten(connection, found.id, row)
    connection.execute(delete(PendingCut).where(PendingCut.slot_id == found.id))
    place = SlotPlace(old, "warm")
    _forget(connection, [SlotPlace(header.id, "warm")])
    _condemn(connection, place)
    return place


def _not_cut(connection: Connection, slot: str) -> tuple[SlotPlace, ...]:
    number = slot_rows.slot_ids(connection, [slot]).get(slot)
    connection.execute(delete(PendingCut).where(PendingCut.slot_id == number))
    return drop_unneeded(connection, [number] if number is not None else [])


def _touch(
    connection: Connection, ids: Sequence[str], now_s: float, lives_s: Mapping[str, float]
) -> None:
    for some in slot_rows.chunks(ids):
        columns = select(Slot.id, Slot.name, Slot.last_used_s, Slot.hits)
        for number, name, last_used_s, hits in connection.execute(
            columns.where(Slot.name.in_(some))
        ).all():
            hit = update(Slot).where(Slot.id == number)
            counted = decayed_hits(hits, now_s - last_used_s) + 1.0
            connection.execute(hit.values(last_used_s=now_s, hits=counted))
            if life_s := lives_s.get(name):
                is_longer = hit.where(Slot.ttl_s < life_s)
                connection.execute(is_longer.values(ttl_s=life_s, ttl_class=class_of(life_s)))


def _forget(connection: Connection, places: Sequence[SlotPlace]) -> None:
    for name, tier in places:
        done = delete(Condemned).where(Condemned.name == name, Condemned.tier == tier)
        connection.execute(done)


def _over(connection: Connection, now_s: float) -> tuple[str, ...]:
    """From the last positions on: what continues a slot comes before it."""
    columns = select(
        Slot.id, Slot.name, Slot.parent_id, Slot.ttl_s, Slot.last_used_s, Slot.is_pinned
    )
    over: list[str] = []
    alive_parents: set[int | None] = set()
    for row in connection.execute(columns.order_by(Slot.start.desc(), Slot.id.desc())):
        number, name, parent, ttl_s, last_used_s, is_pinned = row
        is_over = ttl_s is not None and not is_pinned and now_s - last_used_s > ttl_s
        if is_over and number not in alive_parents:
            over.append(name)
        else:
            alive_parents.add(parent)
    return tuple(over)


def _places(connection: Connection) -> list[SlotPlace]:
    rows = connection.execute(select(Slot.name, Slot.tier).order_by(Slot.id))
    return [SlotPlace(*row) for row in rows]


def _condemned(connection: Connection) -> list[SlotPlace]:
    rows = connection.execute(select(Condemned.name, Condemned.tier))
    return [SlotPlace(*row) for row in rows]


def _footprint(connection: Connection) -> SlotFootprint:
    warm = select(func.coalesce(func.sum(Slot.disk_bytes), 0)).where(Slot.tier == "warm")
    leaving = select(Condemned.name).where(Condemned.tier == "warm")
    return SlotFootprint(connection.execute(warm).scalar_one(), tuple(connection.scalars(leaving)))


def _totals(connection: Connection) -> list[TierTotal]:
    columns = select(
        Model.hash,
        Slot.tier,
        func.count(),
        func.sum(Slot.end - Slot.start),
        func.sum(Slot.disk_bytes),
    )
    groups = columns.join(Model, Model.id == Slot.model_id).group_by(Model.hash, Slot.tier)
    return [TierTotal(*row) for row in connection.execute(groups.order_by(Model.hash))]
