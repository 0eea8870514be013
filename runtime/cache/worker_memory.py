"""What the workers have in memory: asked for, brought, forgotten, and pinned where it also lies."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple, TypeVar

from runtime.cache import maintenance
from runtime.cache.channel import KvChannel
from runtime.cache.lifecycle import StoreLife
from runtime.cache.maintenance import StoreLimits
from runtime.cache.owned import OpenStore
from runtime.errors import PinsFull
from runtime.keys import owner, plain
from runtime.slot_events import Bring, Hint, PinWanted
from store import pins
from store.keyed_names import Whom
from store.types import PinRow

T = TypeVar("T")

_MAX_TAKEN_BACK = 1024


class PinUse(NamedTuple):
    """What a tenant has pinned, and how much it may."""

    num_bytes: int
    most_bytes: int


class WorkerMemory:
    """`channels` are those of the workers there are. It belongs to the event loop."""

    def __init__(
        self, life: StoreLife[OpenStore], channels: Collection[KvChannel], limits: StoreLimits
    ) -> None:
        self.refused_pins: dict[str, PinsFull] = {}
        """Why what a source wanted pinned is not, of the latest."""
        self._limits = limits
        self._promised: dict[str, int] = {}
        self._life = life
        self._channels = channels
        self._taken_back: dict[str, None] = {}
        self._pinning = asyncio.Lock()

    async def hot(self, slots: Mapping[bytes, Sequence[str]]) -> set[str]:
        """Those of these slots, by model hash, that are in the memory of a worker now."""
        asking = [
            channel.hot(slots[channel.model_hash])
            for channel in self._channels
            if slots.get(channel.model_hash)
        ]
        return {slot_id for told in await asyncio.gather(*asking) for slot_id in told}

    async def held(self, session_ids: Sequence[str]) -> dict[str, dict[str, int]]:
        """How many first tokens of conversations are in workers' memory, by session id and model;
        also of what is never on disk.
        """
        held: dict[str, dict[str, int]] = {one: {} for one in session_ids}
        asking = [channel.held(session_ids) for channel in self._channels] if session_ids else []
        for told in await asyncio.gather(*asking):
            for asker, num_tokens in told:
                if asker.session_id is not None:
                    held[asker.session_id][asker.model] = num_tokens
        return held

    def hash_of(self, model: str) -> bytes | None:
        """The model hash of a model that is loaded and has a disk."""
        hashes = (c.model_hash for c in self._channels if model in c.spec.names and c.has_disk)
        return next(hashes, None)

    def bring(self, slots: Mapping[bytes, Sequence[str]]) -> None:
        """Have what ends with these slots, by model hash, in the workers' memory soon."""
        for channel in self._channels:
            if ids := slots.get(channel.model_hash):
                channel.tell(Bring(tuple(ids)))

    def hint(self, whom: Whom, pause_s: float | None, *, is_over: bool) -> None:
        """Tell the workers when a conversation goes on, or that it does not."""
        for channel in self._channels:
            channel.hint(Hint(whom=whom, secret=b"", pause_s=pause_s, is_over=is_over))

    async def unpin(self, sources: Collection[str]) -> int:
        """Take back all pins of these sources; how many there were."""
        async with self._pinning:
            known = await self._life.attempt(lambda store: store.index.pins()) or []
            mine = [one for one in known if one.source in sources]
            await self._unpin(mine)
        return len(mine)

    async def unpin_all(self, model: str, is_stale: Callable[[str, str], bool]) -> None:
        """Take back the pins of a model that is loaded of which this says so, by who pinned and by
        what name the model was asked.
        """
        model_hash = self.hash_of(model)
        async with self._pinning:
            known = await self._life.attempt(lambda store: store.index.pins()) or []
            mine = [one for one in known if one.model == model_hash]
            await self._unpin([one for one in mine if is_stale(one.source, one.name)])

    async def _unpin(self, which: Collection[PinRow]) -> None:
        for one in which:
            await self._life.attempt(lambda store, pin=one: store.index.unpin(*pin).result())

    async def take_back(self, source: str) -> int:
        """The same of one source for ever, also where a worker is about to ask for a pin of it."""
        self._taken_back[source] = None
        _trim(self._taken_back)
        return await self.unpin([source])

    async def pin(self, model: bytes, wanted: PinWanted) -> None:
        """Have a prefix stay, as a worker found it."""
        async with self._pinning:
            if wanted.source in self._taken_back:
                return
            self._promised[wanted.source] = wanted.num_bytes
            refusal = await self._life.attempt(lambda store: self._pin(store, model, wanted))
            if refusal is not None:
                self.refused_pins[wanted.source] = refusal
                _trim(self.refused_pins)
            _trim(self._promised)

    def _pin(self, store: OpenStore, model: bytes, wanted: PinWanted) -> PinsFull | None:
        if plain(wanted.source).startswith(maintenance.ASKED):
            use = self._pin_use(store, owner(wanted.source), wanted.num_bytes)
            if use.num_bytes > use.most_bytes:
                return PinsFull(use.num_bytes, use.most_bytes)
        store.index.pin(model, wanted.end_hash, wanted.source, wanted.model).result()
        return None

    def _pin_use(self, store: OpenStore, tenant: str, num_more_bytes: int) -> PinUse:
        sources = maintenance.pinned_by(store, tenant)
        unmet = store.database.read(lambda c: pins.unmet(c, sources))
        promised = sum(self._promised.get(one, 0) for one in unmet)
        used = maintenance.pinned_bytes(store, sources) + promised + num_more_bytes
        return PinUse(used, maintenance.most_pinned(store, self._limits))

    async def check_pins(self, tenant: str, num_bytes: int) -> None:
        """See that a tenant may pin so much more.

        Raises:
            PinsFull: it would be more than its share.
        """
        use = await self._life.attempt(lambda store: self._pin_use(store, tenant, num_bytes))
        if use is not None and use.num_bytes > use.most_bytes:
            raise PinsFull(use.num_bytes, use.most_bytes)


def _trim(notes: dict[str, T]) -> None:
    while len(notes) > _MAX_TAKEN_BACK:
        del notes[next(iter(notes))]
