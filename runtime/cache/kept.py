"""Conversations that people pin: they stay, and so does what they become, until they are unpinned.

Every call blocks and may come from any thread; all of them raise StoreError when the store fails.
"""

from __future__ import annotations

from contextlib import suppress

from runtime.cache.conversations import Pinned
from runtime.cache.inventory import Inventory
from runtime.cache.opened import BlockStore
from runtime.errors import UnknownConversation
from store.head_file import KEPT, KnownHead, Owner
from store.keyed_names import conversation_key, keyed_hash


def pinned(store: BlockStore, inventory: Inventory, name: str) -> Pinned:
    """Have a conversation stay, with every model that it had. Raises UnknownConversation."""
    with inventory.lock:
        found = inventory.find_all(name)
        for one in found:
            for known in one.heads:
                _mark(store, known, is_pinned=known is one.last)
        return Pinned(found[0].id, True, inventory.view(inventory.find(name)).num_durable)


def pinned_ahead(
    store: BlockStore, inventory: Inventory, session_id: str, model: bytes, asked: str
) -> Pinned:
    """The same of a conversation with a model, asked by that name, that is yet to come."""
    with suppress(UnknownConversation):
        return pinned(store, inventory, session_id)
    key = conversation_key(store.secret, session_id)
    owner = Owner(keyed_hash(store.secret, "model", asked.encode()), key, b"")
    store.heads.keep_ahead(model, owner, asked)
    return Pinned(key.hex(), True, 0)


def unpinned(store: BlockStore, inventory: Inventory, name: str) -> Pinned:
    """Take back the pin of a conversation, also of one that is yet to come.

    Raises:
        UnknownConversation: there is none, and none was pinned ahead.
    """
    key = conversation_key(store.secret, name)
    with inventory.lock:
        known = [one for one in store.heads.known.values() if one.head.owner.session == key]
        ahead = [one for one in known if not one.head.num_tokens]
        for one in ahead:
            store.heads.forget(one.head.id)
        try:
            found = inventory.find_all(name)
        except UnknownConversation:
            if not ahead:
                raise
            return Pinned(key.hex(), False, 0)
        for one in (head for each in found for head in each.heads):
            _mark(store, one, is_pinned=False)
        return Pinned(found[0].id, False, inventory.view(inventory.find(name)).num_durable)


def _mark(store: BlockStore, known: KnownHead, *, is_pinned: bool) -> None:
    head = known.head
    others = {*head.pins} - {KEPT}
    pins = others | {KEPT} if is_pinned else others
    if pins != {*head.pins}:
        store.heads.mark(head.id, pins=pins, ttl_s=head.ttl_s)
