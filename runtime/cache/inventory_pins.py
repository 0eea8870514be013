"""Conversations of a store by their ends: pinned, with their time to live, and as a tree of slots.

Every call blocks and may come from any thread; all of them raise StoreError when the store fails.
"""

from __future__ import annotations

from contextlib import suppress

from runtime.cache.contents import KeptConversation, Pinned, models_beginning
from runtime.cache.inventory import Inventory
from runtime.cache.inventory_views import ShownView, SlotNode, SlotView
from runtime.errors import UnknownConversation
from store import listing, pins
from store.listing import Entry


def kept(inventory: Inventory) -> list[KeptConversation]:
    """Every conversation, the latest used first."""
    database = inventory.store.database
    entries = database.read(listing.entries)
    ends = database.read(listing.ends)
    known = {(pin.model, pin.source, pin.name) for pin in inventory.store.index.pins()}
    found: list[KeptConversation] = []
    for entry, view in zip(entries, inventory.views(entries), strict=True):
        end = ends.get(entry.leaf or "")
        is_pinned = (entry.model, _source(entry), entry.name) in known
        ttl_s = end.ttl_s if end is not None else None
        found.append(KeptConversation(view, entry.model, entry.leaf, ttl_s, is_pinned))
    return found


def shown(inventory: Inventory, name: str) -> ShownView:
    """One conversation with its slots. Raises UnknownConversation."""
    entry = inventory.find(name)
    database = inventory.store.database
    end = database.read(listing.ends).get(entry.leaf or "")
    links = database.read(lambda c: listing.way_to(c, entry.leaf or ""))
    pinned = {(pin.model, pin.source, pin.name) for pin in inventory.store.index.pins()}
    return ShownView(
        conversation=inventory.views([entry])[0],
        is_kept=(entry.model, _source(entry), entry.name) in pinned,
        ttl_s=end.ttl_s if end is not None else None,
        slots=tuple(
            SlotView(id=link.place.id, tier=link.place.tier, start=link.start, leave=link.leave)
            for link in links
        ),
    )


def pin(inventory: Inventory, name: str) -> Pinned:
    """Keep a conversation, and what it becomes, until it is unpinned.

    Raises:
        UnknownConversation: there is none; `pin_ahead` pins those that are yet to come.
    """
    entry = inventory.find(name)
    database, source = inventory.store.database, _source(entry)
    ends = database.read(listing.ends)
    for one in database.read(listing.entries):
        if one.id != entry.id:
            continue
        end = ends.get(one.leaf or "")
        if end is None:
            ahead = (one.model, source, one.name)
            database.submit(lambda c, ahead=ahead: pins.pin_ahead(c, *ahead)).result()
        else:
            inventory.store.index.pin(one.model, end.end_hash, source, one.name).result()
    return Pinned(id=entry.id, is_pinned=True, num_tokens=entry.num_durable)


def pin_ahead(inventory: Inventory, session_id: str, model: bytes, asked: str) -> Pinned:
    """Pin a conversation with a model as soon as something of it is on disk, asked by that name."""
    database, key = inventory.store.database, inventory.store.conversation_key(session_id).hex()
    with suppress(UnknownConversation):
        return pin(inventory, session_id)
    database.submit(lambda c: pins.pin_ahead(c, model, pins.source_of(key), asked)).result()
    return Pinned(id=key, is_pinned=True, num_tokens=0)


def unpin(inventory: Inventory, name: str) -> Pinned:
    """Take back the pins of a conversation, also of one that is yet to come.

    Raises:
        UnknownConversation: there is none, and none was pinned ahead.
    """
    store, key, num_tokens = inventory.store, inventory.store.conversation_key(name).hex(), 0
    unknown: UnknownConversation | None = None
    try:
        entry = inventory.find(name)
        key, num_tokens = entry.id, entry.num_durable
    except UnknownConversation as error:
        unknown = error
    num_pins = store.database.submit(lambda c: pins.drop(c, pins.source_of(key))).result()
    if unknown is not None and not num_pins:
        raise unknown
    return Pinned(id=key, is_pinned=False, num_tokens=num_tokens)


def slots_of(inventory: Inventory, model: str) -> list[SlotNode]:
    """Every slot of a model by its label or hash, parents before children."""
    sharers = inventory.store.database.read(listing.num_conversations)
    return [
        SlotNode(
            id=row.header.id,
            parent=row.parent,
            start=row.header.start,
            end=row.header.end,
            tier=row.tier,
            disk_bytes=row.disk_bytes,
            is_pinned=row.is_pinned,
            num_conversations=sharers.get(row.header.id, 0),
        )
        for one in sorted(_models_named(inventory, model))
        for row in inventory.store.index.slots_of(one)
    ]


def _models_named(inventory: Inventory, name: str) -> set[bytes]:
    """The model hashes that go by a name, were asked by it, or begin with it in hex."""
    entries = inventory.store.database.read(listing.entries)
    asked = {entry.model for entry in entries if entry.name == name}
    labelled = {model for model, label in inventory.labels().items() if label == name}
    return asked | labelled | models_beginning(inventory.labels(), name)


def _source(entry: Entry) -> str:
    return pins.source_of(entry.id)
