"""What a worker is told once there is a store: its model's names there, and what is on disk."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from runtime.kv_channel import MAX_SLOTS, KvChannel
from runtime.open_store import OpenStore
from runtime.settings import Settings
from runtime.slot_news import Attach
from runtime.store_life import StoreLife
from runtime.types import ModelSpec
from store.errors import StoreError
from store.types import SlotRow


class Welcome:
    """`on_named` is called once a worker has a name. It belongs to the event loop."""

    def __init__(
        self, settings: Settings, life: StoreLife, on_named: Callable[[KvChannel], None]
    ) -> None:
        self._settings = settings
        self._life = life
        self._on_named = on_named

    async def greet(self, channel: KvChannel) -> None:
        """By what it finds its KV in the store that was opened, and what is there of its model.

        What is pinned of that comes into its memory at once.
        """
        async with channel.welcoming:
            store = self._life.store
            names = await self._names(store, channel.spec) if store is not None else None
            if names is None or self._life.store is not store:
                channel.welcomed()
                return
            channel.attach(names)
            self._on_named(channel)
            rows = await self._stream(channel)
            channel.welcomed()
        if self._settings.prewarm:
            channel.bring([row.header.id for row in rows if row.is_pinned])

    async def tell_of_more(self, channel: KvChannel) -> None:
        """Recovery found more."""
        async with channel.welcoming:
            if channel.has_disk:
                await self._stream(channel)

    async def _names(self, store: OpenStore, spec: ModelSpec) -> Attach | None:
        """None for a model that cannot be identified; that may mean to read all its weights."""
        form = self._settings.kv_form_of(spec.id)
        try:
            model = await asyncio.to_thread(store.identify, spec, form)
        except StoreError as error:
            self._life.fail(error.reason, str(error))
            return None
        return Attach(model_hash=model, secret=store.secret) if model is not None else None

    async def _stream(self, channel: KvChannel) -> list[SlotRow]:
        model, size = channel.model_hash, channel.kv.block_size
        rows = await self._life.attempt(lambda store: store.index.slots_of(model)) or []
        rows = [row for row in rows if row.header.block_size == size]
        for start in range(0, len(rows), MAX_SLOTS):
            channel.tell_slots(rows[start : start + MAX_SLOTS])
            await asyncio.sleep(0)
        return rows
