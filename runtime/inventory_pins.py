"""Conversations of a store by their ends: pinned, with their time to live, and as a tree of slots.

Every call blocks and may come from any thread; all of them raise StoreError when the store fails.
"""

from __future__ import annotations

from typing import NamedTuple

from runtime.errors import UnknownConversation
from runtime.inventory import Inventory
from runtime.inventory_views import ConversationView
from runtime.types import Struct
from store import listing
from store.listing import Entry
from store.types import Tier


class KeptConversation(NamedTuple):
    """A conversation, the slot it ends in, and how long that lives unused; None is for ever.

    `is_pinned` says that somebody pinned the conversation itself.
    """

    view: ConversationView
    model: bytes
    leaf: str | None
    ttl_s: float | None
    is_pinned: bool


class SlotNode(Struct, frozen=True):
    """One slot: tokens `start` to `end` of what its parents hold. Sizes in bytes."""

    id: str
    parent: str | None
    start: int
    end: int
    tier: Tier
    disk_bytes: int
    is_pinned: bool


def kept(inventory: Inventory) -> list[KeptConversation]:
    """Every conversation, the latest used first."""
    database = inventory.store.database
    entries = database.read(listing.entries)
    ends = database.read(listing.ends)
    pins = {(pin.model, pin.end_hash, pin.source) for pin in inventory.store.index.pins()}
    found: list[KeptConversation] = []
    for entry, view in zip(entries, inventory.views(entries), strict=True):
        end = ends.get(entry.leaf or "")
        is_pinned = end is not None and (entry.model, end.end_hash, _source(entry)) in pins
        ttl_s = end.ttl_s if end is not None else None
        found.append(KeptConversation(view, entry.model, entry.leaf, ttl_s, is_pinned))
    return found


def pin(inventory: Inventory, name: str) -> int:
    """Keep what a conversation has on disk now until it is unpinned; the number of its tokens.

    Raises:
        UnknownConversation: there is none, or nothing of it is on disk.
    """
    entry = inventory.find(name)
    end = inventory.store.database.read(listing.ends).get(entry.leaf or "")
    if end is None:
        message = "Nothing of that conversation is on disk, so there is nothing to pin."
        raise UnknownConversation(message, "conversation")
    unpin(inventory, name)
    inventory.store.index.pin(entry.model, end.end_hash, _source(entry)).result()
    return entry.num_durable


def unpin(inventory: Inventory, name: str) -> int:
    """Take back the pins of a conversation; how many there were. Raises UnknownConversation."""
    source, index = _source(inventory.find(name)), inventory.store.index
    mine = [one for one in index.pins() if one.source == source]
    for one in mine:
        index.unpin(one.model, one.end_hash, one.source).result()
    return len(mine)


def slots_of(inventory: Inventory, model: str) -> list[SlotNode]:
    """Every slot of a model by its label or hash, parents before children."""
    return [
        SlotNode(
            id=row.header.id,
            parent=row.header.parent,
            start=row.header.start,
            end=row.header.end,
            tier=row.tier,
            disk_bytes=row.disk_bytes,
            is_pinned=row.is_pinned,
        )
        for one in sorted(inventory.models_named(model))
        for row in inventory.store.index.slots_of(one)
    ]


def _source(entry: Entry) -> str:
    return f"conversation:{entry.id}"
