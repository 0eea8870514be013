"""Prompts that somebody wants to stay: who pinned what, and how much each tenant may pin.

A pin is in the head that ends where the prompt does; so it goes with what is deleted.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import NamedTuple, TypeVar

import structlog

from runtime.cache.lifecycle import StoreLife
from runtime.cache.opened import BlockStore
from runtime.config.settings import Settings
from runtime.errors import PinsFull
from runtime.keys import owner, plain
from store.head_file import KEPT, KnownHead

T = TypeVar("T")

PINNED_SHARE = 0.5
"""Of the cap at most so much may be pinned by clients, by all tenants together."""

ASKED = "prewarm-"
"""What the pins that clients asked for are called, after their tenant."""

_MAX_REMEMBERED = 1024

_log = structlog.stdlib.get_logger("hearth.store")


class Pin(NamedTuple):
    """Somebody wants a head to stay, whose model was asked by `name`."""

    source: str
    name: str
    head_id: str


class Pins:
    """What is pinned in the store of `life`. It belongs to the event loop.

    `hash_of` gives the model hash of a model that is loaded.
    """

    def __init__(
        self,
        settings: Settings,
        life: StoreLife,
        hash_of: Callable[[str], bytes | None],
    ) -> None:
        self.refused_pins: dict[str, PinsFull] = {}
        """Why what a source wanted pinned is not, of the latest."""
        self._settings = settings
        self._life = life
        self._hash_of = hash_of
        self._taken_back: dict[str, None] = {}

    async def unpin_all(self, model: str, is_stale: Callable[[str, str], bool]) -> None:
        """Take back the pins of a model that is loaded of which this says so, by who pinned and by
        what name the model was asked.
        """
        model_hash = self._hash_of(model)

        def unpin(store: BlockStore) -> None:
            mine = _pins(store, {model_hash})
            _unpin(store, [one for one in mine if is_stale(one.source, one.name)])

        await self._life.attempt(unpin)

    async def take_back(self, source: str) -> int:
        """Take back all pins of a source for ever, also where a worker is about to pin something
        for it; how many there were.
        """
        self._taken_back[source] = None
        _trim(self._taken_back)

        def take(store: BlockStore) -> int:
            mine = [one for one in _pins(store) if one.source == source]
            _unpin(store, mine)
            return len(mine)

        return await self._life.attempt(take) or 0

    async def check_pins(self, tenant: str, num_bytes: int) -> None:
        """See that a tenant may pin so much more. Raises PinsFull."""
        refusal = await self._life.attempt(lambda store: self._refusal(store, tenant, num_bytes))
        if refusal is not None:
            raise refusal

    def check(self, store: BlockStore, known: KnownHead) -> None:
        """A head with pins was published: those that nobody wants any more, or that are more than
        the share of their tenant, are taken back. Blocks.
        """
        for source in known.head.pins:
            pin = Pin(source, known.head.name, known.head.id)
            if source in self._taken_back:
                _unpin(store, [pin])
            elif plain(source).startswith(ASKED):
                refusal = self._refusal(store, owner(source), 0)
                if refusal is not None:
                    self.refused_pins[source] = refusal
                    _trim(self.refused_pins)
                    _unpin(store, [pin])

    def keep_to_share(self, store: BlockStore) -> None:
        """Take the latest pins of each tenant back until what it pinned is within its share.
        Blocks.
        """
        for tenant in {owner(one.source) for one in _asked(store)}:
            sources = sorted({one.source for one in _asked(store) if owner(one.source) == tenant})
            while sources and self._refusal(store, tenant, 0) is not None:
                source = sources.pop()
                _unpin(store, [one for one in _asked(store) if one.source == source])
                _log.warning("pin taken back", pin=source)

    def _refusal(self, store: BlockStore, tenant: str, num_bytes: int) -> PinsFull | None:
        """What a tenant has pinned and so much more, if that is more than its share."""
        mine = {one.head_id for one in _asked(store) if owner(one.source) == tenant}
        used_bytes = store.room.bytes_of(mine) + num_bytes
        settings = self._settings
        share = int(store.room.warm_bytes * PINNED_SHARE) // max(len(settings.api_keys), 1)
        most_bytes = min(settings.pinned_max_bytes or share, share)
        return PinsFull(used_bytes, most_bytes) if used_bytes > most_bytes else None


def _pins(store: BlockStore, models: Collection[bytes | None] | None = None) -> list[Pin]:
    with store.heads.lock:
        known = [one.head for one in store.heads.known.values() if one.head.pins and one.path]
    return [
        Pin(source, head.name, head.id)
        for head in known
        if models is None or head.model in models
        for source in head.pins
        if source != KEPT
    ]


def _asked(store: BlockStore) -> list[Pin]:
    """What clients pinned."""
    return [one for one in _pins(store) if plain(one.source).startswith(ASKED)]


def _unpin(store: BlockStore, which: Iterable[Pin]) -> None:
    heads = store.heads
    for one in which:
        with heads.lock:
            known = heads.known.get(one.head_id)
            if known is not None and one.source in known.head.pins:
                left = [source for source in known.head.pins if source != one.source]
                heads.mark(one.head_id, pins=left, ttl_s=known.head.ttl_s)


def _trim(notes: dict[str, T]) -> None:
    while len(notes) > _MAX_REMEMBERED:
        del notes[next(iter(notes))]
