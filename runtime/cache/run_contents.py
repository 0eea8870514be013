"""What lies in the store of runs, as `KvContents` says it."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import TypeVar

from msgspec.structs import replace

from runtime.cache import inventory_pins, maintenance, mlx_lm_import
from runtime.cache.collection import GarbageCollection
from runtime.cache.compaction import compact
from runtime.cache.contents import (
    Exchanged,
    ImportRequest,
    KeptConversation,
    KnownModels,
    Pinned,
    Selection,
    StoreJob,
)
from runtime.cache.deletion_log import Models
from runtime.cache.inventory import Inventory, named
from runtime.cache.inventory_views import (
    ChainView,
    CollectedView,
    ConversationView,
    RemovalView,
    ShownView,
    SlotNode,
    StatsView,
    VerifyView,
)
from runtime.cache.maintenance import News, StoreLimits
from runtime.cache.owned import OpenStore
from runtime.cache.publisher import ForgetOutcome
from runtime.cache.service import KvStore
from runtime.config.settings import Settings
from runtime.errors import StoreUnavailable, UnknownConversation
from runtime.progress import Watch
from runtime.types import ModelSpec
from store import removal
from store.keyed_names import Whom
from store.listing import Entry

T = TypeVar("T")

_SCRUB_S = 300.0


class RunContents:
    """See `KvContents`."""

    def __init__(self, kv: KvStore, settings: Settings) -> None:
        self._kv = kv
        self._settings = settings
        self._limits = StoreLimits.of(settings)

    async def tend(self, work: Callable[[Inventory], T]) -> T:
        """Have something done to what is on disk, in a thread. Raises StoreUnavailable."""
        return await self._kv.tend(lambda store, on_gone: work(Inventory(store, on_gone)))

    # Looking

    async def kept(self) -> list[KeptConversation]:
        return await self.tend(inventory_pins.kept)

    async def of_sessions(self, names: Sequence[str]) -> dict[str, list[KeptConversation]]:
        return await self.tend(lambda inventory: inventory.of_sessions(names))

    async def find(self, name: str) -> KeptConversation:
        def find(inventory: Inventory) -> KeptConversation:
            entry = inventory.find(name)
            return KeptConversation(inventory.views([entry])[0], entry.model, entry.leaf)

        return await self.tend(find)

    async def seen(self, kept: Sequence[KeptConversation]) -> list[ConversationView]:
        slots: dict[bytes, list[str]] = {}
        for one in kept:
            if one.end is not None:
                slots.setdefault(one.model, []).append(one.end)
        hot = await self._kv.memory.hot(slots)
        return [replace(one.view, tier="hot") if one.end in hot else one.view for one in kept]

    async def held(self, sessions: Sequence[str]) -> dict[str, dict[str, int]]:
        return await self._kv.memory.held(sessions)

    async def shown(self, name: str) -> ShownView:
        found = await self.tend(lambda inventory: inventory_pins.shown(inventory, name))
        view, end = found.conversation, found.slots[-1].id if found.slots else None
        kept = KeptConversation(view, bytes.fromhex(view.model_hash), end)
        return replace(found, conversation=(await self.seen([kept]))[0])

    async def chain(self, name: str) -> ChainView:
        return await self.tend(lambda inventory: inventory.chain(name))

    async def tree(self, model: str) -> list[SlotNode]:
        return await self.tend(lambda inventory: inventory_pins.slots_of(inventory, model))

    async def stats(self) -> StatsView:
        return await self.tend(lambda inventory: inventory.stats())

    async def known_models(self) -> KnownModels:
        return await self.tend(known_models)

    async def counters(self) -> tuple[dict[str, float], dict[str, float]]:
        return await self.tend(_counters)

    async def count(self, values: Mapping[str, float]) -> None:
        await self.tend(lambda inventory: _count(inventory, values))

    # Using

    async def bring(self, one: KeptConversation) -> int:
        if one.end is None or one.model not in self._kv.loaded_models():
            return 0
        self._kv.memory.bring({one.model: [one.end]})
        return one.view.num_durable

    async def branch(self, source: str, copy: str, ends: Mapping[str, int]) -> None:
        await self.tend(lambda inventory: inventory.branch(source, copy, ends))

    def hint(self, whom: Whom, pause_s: float | None, *, is_over: bool) -> None:
        self._kv.memory.hint(whom, pause_s, is_over=is_over)

    async def pin(self, name: str) -> Pinned:
        return await self.tend(lambda inventory: inventory_pins.pin(inventory, name))

    async def pin_ahead(self, session_id: str, spec: ModelSpec) -> Pinned:
        form = self._settings.kv_form_of(spec.id)

        def pin(inventory: Inventory) -> Pinned:
            model = inventory.identify(spec, form)
            return inventory_pins.pin_ahead(inventory, session_id, model, spec.id)

        return await self.tend(pin)

    async def unpin(self, name: str) -> Pinned:
        return await self.tend(lambda inventory: inventory_pins.unpin(inventory, name))

    # Deleting

    async def named(self, name: str) -> Selection:
        with suppress(UnknownConversation, StoreUnavailable):
            found = await self.tend(lambda inventory: named(inventory, name))
            return Selection(name, found.entries, found.whoms)
        return Selection(name, (), [Whom(session_id=name)])

    async def remove(self, selection: Selection) -> RemovalView:
        told = await self._forget(selection.whoms)
        try:
            view = await self.tend(lambda inventory: _removed(inventory, selection))
        except (UnknownConversation, StoreUnavailable) as error:
            is_all = isinstance(error, UnknownConversation) or not self._settings.kv_disk
            if not is_all or not (told.num_forgotten or told.is_pending):
                raise
            view = RemovalView(int(told.num_forgotten > 0), num_slots=0, is_cut=True)
        return replace(view, is_pending=told.is_pending)

    async def remove_name(self, name: str) -> RemovalView:
        told = await self._forget([Whom(model=name)])
        view = await self.tend(lambda inventory: inventory.remove_name(name))
        return replace(view, is_pending=told.is_pending)

    async def remove_weights(self, models: Collection[bytes]) -> RemovalView:
        told = await self._forget([Whom()], models)
        view = await self.tend(lambda inventory: inventory.remove_models(models))
        return replace(view, is_pending=told.is_pending)

    async def remove_all(self) -> RemovalView:
        told = await self._forget([Whom()])
        view = await self.tend(lambda inventory: inventory.remove_all())
        return replace(view, is_pending=told.is_pending)

    async def _forget(self, whoms: Sequence[Whom], models: Models = None) -> ForgetOutcome:
        """Have nothing in memory bring it back; how many pieces of memory it had."""
        told = [await self._kv.publisher.forget(whom, models) for whom in whoms]
        is_pending = any(one.is_pending for one in told)
        return ForgetOutcome(sum(one.num_forgotten for one in told), is_pending)

    # Work

    async def verify(self, watch: Watch, should_stop: Callable[[], bool]) -> VerifyView:
        return await self.tend(lambda inventory: inventory.verify(watch, should_stop))

    async def collect(self, watch: Watch, should_stop: Callable[[], bool]) -> CollectedView:
        loaded = self._kv.loaded_models()
        collection = GarbageCollection(self._limits, loaded, watch, should_stop)
        await self._kv.chore(collection.run)
        if collection.outcome is None:
            raise StoreUnavailable(f"It was not done to the end: {self._kv.status.message}.")
        return collection.outcome

    async def take_in(self, spec: ModelSpec, wanted: ImportRequest, watch: Watch) -> Exchanged:
        settings = self._settings
        done = await self.tend(
            lambda inventory: mlx_lm_import.take_in(inventory, settings, spec, wanted, watch)
        )
        self._kv.on_slots()
        return done

    def jobs(self, is_busy: Callable[[], bool]) -> Sequence[StoreJob]:
        def is_over() -> bool:
            return self._kv.is_stopping or is_busy()

        def merge(store: OpenStore) -> Iterable[News]:
            return compact(store, self._kv.loaded_models, is_over)

        expire = partial(maintenance.expire, limits=self._limits)
        caps = partial(maintenance.keep_within_caps, limits=self._limits)
        tidy = partial(maintenance.tidy, limits=self._limits)
        scrub = partial(maintenance.scrub, period_s=_SCRUB_S, should_stop=is_over)
        orphans = partial(maintenance.sweep_orphans, should_stop=is_over)
        chore = self._kv.chore
        return (
            StoreJob("expire", 60.0, partial(chore, expire)),
            StoreJob("caps", 60.0, partial(chore, caps)),
            StoreJob("tidy", 600.0, partial(chore, tidy)),
            StoreJob("compact", 600.0, partial(chore, merge), is_for_idle=True),
            StoreJob("scrub", _SCRUB_S, partial(chore, scrub), is_for_idle=True),
            StoreJob("orphans", 86_400.0, partial(chore, orphans)),
        )


def _removed(inventory: Inventory, selection: Selection) -> RemovalView:
    entries: Sequence[Entry] = selection.found
    if entries and not entries[0].is_named:
        return inventory.remove(entries)
    return inventory.remove_conversation(selection.name)


def _counters(inventory: Inventory) -> tuple[dict[str, float], dict[str, float]]:
    records = inventory.store.records
    return records.counters(time.time()), records.counters()


def _count(inventory: Inventory, values: Mapping[str, float]) -> None:
    inventory.store.records.count(values, time.time()).result()


def known_models(inventory: Inventory) -> KnownModels:
    """See `KvContents.known_models`."""
    return KnownModels(inventory.store.database.read(removal.names), inventory.labels())
