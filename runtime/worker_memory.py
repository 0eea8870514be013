"""What the workers have in memory: asked for, brought, forgotten, and pinned where it also lies."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping, Sequence

from runtime.kv_channel import KvChannel
from runtime.store_life import StoreLife
from runtime.wire import PinWanted
from store.types import PinRow

_MAX_TAKEN_BACK = 1024


class WorkerMemory:
    """`channels` are those of the workers there are. It belongs to the event loop."""

    def __init__(self, life: StoreLife, channels: Collection[KvChannel]) -> None:
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

    def hash_of(self, model: str) -> bytes | None:
        """The model hash of a model that is loaded and has a disk."""
        hashes = (c.model_hash for c in self._channels if model in c.spec.names and c.has_disk)
        return next(hashes, None)

    def bring(self, slots: Mapping[bytes, Sequence[str]]) -> None:
        """Have what ends with these slots, by model hash, in the workers' memory soon."""
        for channel in self._channels:
            if ids := slots.get(channel.model_hash):
                channel.bring(ids)

    async def pins(self, model: str) -> list[PinRow]:
        """What is pinned of a model that is loaded."""
        model_hash = self.hash_of(model)
        pins = await self._life.attempt(lambda store: store.index.pins()) or []
        return [one for one in pins if one.model == model_hash]

    async def unpin(self, sources: Collection[str]) -> int:
        """Take back all pins of these sources; how many there were."""
        async with self._pinning:
            pins = await self._life.attempt(lambda store: store.index.pins()) or []
            mine = [one for one in pins if one.source in sources]
            await self._unpin(mine)
        return len(mine)

    async def unpin_all(self, pins: Collection[PinRow]) -> None:
        """Take back these pins."""
        async with self._pinning:
            await self._unpin(pins)

    async def _unpin(self, pins: Collection[PinRow]) -> None:
        for one in pins:
            await self._life.attempt(lambda store, pin=one: store.index.unpin(*pin).result())

    async def take_back(self, source: str) -> int:
        """The same of one source for ever, also where a worker is about to ask for a pin of it."""
        self._taken_back[source] = None
        while len(self._taken_back) > _MAX_TAKEN_BACK:
            del self._taken_back[next(iter(self._taken_back))]
        return await self.unpin([source])

    async def pin(self, model: bytes, wanted: PinWanted) -> None:
        """Have a prefix stay, as a worker found it."""
        async with self._pinning:
            if wanted.source not in self._taken_back:
                await self._life.attempt(
                    lambda store: store.index.pin(
                        model, wanted.end_hash, wanted.source, wanted.model
                    ).result()
                )
