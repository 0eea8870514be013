"""What a worker is told once there is a store: its model's names there, and what is on disk."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from runtime.kv_channel import MAX_SLOTS, KvChannel
from runtime.naming import Naming
from runtime.open_store import lost
from runtime.settings import Settings
from runtime.slot_news import Attach
from runtime.store_life import StoreLife
from store.types import SlotRow


class Welcome:
    """`on_named` is called once a worker has a name. It belongs to the event loop."""

    def __init__(
        self,
        settings: Settings,
        life: StoreLife,
        naming: Naming,
        on_named: Callable[[KvChannel], None],
    ) -> None:
        self._settings = settings
        self._life = life
        self._naming = naming
        self._on_named = on_named

    async def greet(self, channel: KvChannel) -> None:
        """By what it finds its KV in the store that was opened, and what is there of its model.

        What is pinned of that comes into its memory at once.
        """
        async with channel.welcoming:
            model, store = await self._naming.of(channel), self._life.store
            if store is None or model is None:
                return
            is_new = not channel.has_disk
            channel.attach(Attach(model_hash=model, secret=store.secret))
            self._on_named(channel)
            rows = await self._stream(channel)
            # After what is on disk: what comes there meanwhile is not lost, and it is told so.
            gone = await self._life.attempt(lambda one: lost(one, model, is_alone=is_new))
            channel.tell_lost(gone or [])
            channel.welcomed()
        if self._settings.prewarm:
            channel.bring([row.header.id for row in rows if row.is_pinned])

    async def tell_of_more(self, channel: KvChannel) -> None:
        """Recovery found more."""
        async with channel.welcoming:
            if channel.has_disk:
                await self._stream(channel)

    async def _stream(self, channel: KvChannel) -> list[SlotRow]:
        model, size = channel.model_hash, channel.kv.block_size
        rows = await self._life.attempt(lambda store: store.index.slots_of(model)) or []
        rows = [row for row in rows if row.header.block_size == size]
        for start in range(0, len(rows), MAX_SLOTS):
            channel.tell_slots(rows[start : start + MAX_SLOTS])
            await asyncio.sleep(0)
        return rows
