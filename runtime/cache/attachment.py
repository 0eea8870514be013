"""What a worker is told once there is a store: its model's names there, and what is on disk."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from runtime.cache.channel import MAX_SLOTS, KvChannel
from runtime.cache.lifecycle import StoreLife
from runtime.cache.naming import Naming
from runtime.cache.owned import OpenStore, lost
from runtime.config.settings import Settings
from runtime.slot_events import Attach, Bring, KnownSlot, Lost, Slots
from store.types import SlotRow

_REST_SHARE = 10
"""After all slots were told, the next time begins after so many times what that took."""


class WorkerAttachment:
    """`on_named` is called once a worker has a name. It belongs to the event loop."""

    def __init__(
        self,
        settings: Settings,
        life: StoreLife[OpenStore],
        naming: Naming[OpenStore],
        on_named: Callable[[KvChannel], None],
    ) -> None:
        self._settings = settings
        self._life = life
        self._naming = naming
        self._on_named = on_named
        self._awaiting: set[KvChannel] = set()
        """Those that are about to be told of more."""
        self._telling_s = 0.0
        """What telling all slots took the last time."""

    async def greet(self, channel: KvChannel) -> None:
        """By what it finds its KV in the store that was opened, and what is there of its model.

        What is pinned of that comes into its memory at once.
        """
        async with channel.welcoming:
            model, store = await self._naming.of(channel), self._life.store
            if store is None or model is None:
                return
            is_new = not channel.has_disk
            row = await self._life.attempt(lambda one: one.records.model(model))
            size, device = (row.prefill_slice, row.slice_device) if row is not None else (None, "")
            channel.attach(Attach(model, store.secret, size, device or ""))
            self._on_named(channel)
            rows = await self._stream(channel)
            # After what is on disk: what comes there meanwhile is not lost, and it is told so.
            gone = await self._life.attempt(lambda one: lost(one, model, is_alone=is_new))
            if gone:
                channel.tell(Lost(tuple(gone)))
            channel.welcomed()
        pinned = tuple(row.header.id for row in rows if row.is_pinned)
        if self._settings.prewarm and pinned:
            channel.tell(Bring(pinned))

    async def tell_of_more(self, channel: KvChannel) -> None:
        """There may be more on disk. Calls until it is told are answered all at once."""
        if channel in self._awaiting:
            return
        self._awaiting.add(channel)
        await self._life.pause(_REST_SHARE * self._telling_s)
        async with channel.welcoming:
            self._awaiting.discard(channel)
            if channel.has_disk and not self._life.stopping.is_set():
                start_s = time.monotonic()
                await self._stream(channel)
                self._telling_s = time.monotonic() - start_s

    async def _stream(self, channel: KvChannel) -> list[SlotRow]:
        model, size = channel.model_hash, channel.kv.block_size
        rows = await self._life.attempt(lambda store: store.index.slots_of(model)) or []
        rows = [row for row in rows if row.header.block_size == size]
        for start in range(0, len(rows), MAX_SLOTS):
            channel.tell(Slots(tuple(map(KnownSlot.of, rows[start : start + MAX_SLOTS]))))
            await asyncio.sleep(0)
        return rows
