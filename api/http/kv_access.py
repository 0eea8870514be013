"""What handlers are given of the KV that is kept: looking at it, deleting it, bringing it."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Collection, Iterable
from contextlib import asynccontextmanager, suppress
from typing import TypeVar

from runtime.cache.collection import GarbageCollection
from runtime.cache.deletion_log import Models
from runtime.cache.inventory import Inventory, ModelSelection, meant, named, total
from runtime.cache.inventory_views import CollectedView, RemovalView
from runtime.cache.maintenance import StoreLimits
from runtime.cache.service import KvStore
from runtime.config.settings import Settings
from runtime.errors import StoreUnavailable, UnknownConversation
from runtime.models.catalog import Catalog
from runtime.prewarm.prewarm import Prewarm
from runtime.progress import Watch
from runtime.types import ModelSpec
from store.keyed_names import Whom
from store.listing import Entry

T = TypeVar("T")


class KvAccess:
    """The KV of all conversations, on disk and in workers' memory. One for the whole server."""

    def __init__(self, settings: Settings, catalog: Catalog, kv: KvStore, prewarm: Prewarm) -> None:
        self._settings = settings
        self._catalog = catalog
        self.kv = kv
        self._prewarm = prewarm

    async def tend(self, work: Callable[[Inventory], T]) -> T:
        """Have something done to what is on disk, in a thread.

        Raises:
            StoreUnavailable: there is no store, or it fails.
        """
        return await self.kv.tend(lambda store, on_gone: work(Inventory(store, on_gone)))

    async def hot_ends(self, ends: Iterable[tuple[bytes, str | None]]) -> set[str]:
        """Of conversations, by model hash and the slot they end in: those slots that are hot."""
        slots: dict[bytes, list[str]] = {}
        for model, leaf in ends:
            if leaf is not None:
                slots.setdefault(model, []).append(leaf)
        return await self.kv.memory.hot(slots)

    async def bring(self, session_id: str, spec: ModelSpec) -> int:
        """Have a conversation's KV in memory soon; its tokens, 0 where there is nothing to bring.

        Raises:
            StoreUnavailable: there is no store, or it fails.
        """
        found = await self.tend(lambda inventory: inventory.of_sessions([session_id]))
        mine = self.kv.memory.hash_of(spec.id)
        for one in found[session_id]:
            if one.model == mine and one.leaf is not None:
                self.kv.memory.bring({one.model: [one.leaf]})
                return one.view.num_tokens
        return 0

    async def remove_conversation(self, name: str) -> RemovalView:
        """Delete a conversation everywhere: on disk, in the workers' memory, in what was learned.

        Raises:
            UnknownConversation: nothing goes by that name.
            StoreUnavailable: there is no store, or it fails.
        """
        entry, whom = await self._named(name)
        async with self._forgetting(whom) as num_forgotten:
            return await self._removed(name, entry, num_forgotten)

    @asynccontextmanager
    async def _forgetting(self, whom: Whom, models: Models = None) -> AsyncGenerator[int]:
        """While it is deleted from the disk, so that nothing in memory brings it back; how many
        pieces of memory it had.
        """
        self._prewarm.forget(whom, models)
        num_forgotten = await self.kv.publisher.forget(whom, models)
        try:
            yield num_forgotten
        finally:
            await self._prewarm.forget_stored(whom, models)

    async def _removed(self, name: str, entry: Entry | None, num_forgotten: int) -> RemovalView:
        try:
            if entry is not None and not entry.is_named:
                return await self.tend(lambda inventory: inventory.remove(entry))
            return await self.tend(lambda inventory: inventory.remove_conversation(name))
        except (UnknownConversation, StoreUnavailable) as error:
            is_all = isinstance(error, UnknownConversation) or not self._settings.kv_disk
            if num_forgotten and is_all:
                return RemovalView(num_conversations=1, num_slots=0, is_cut=True)
            raise

    async def _named(self, name: str) -> tuple[Entry | None, Whom]:
        """As `inventory.named`; what the store does not know may be in a worker's memory."""
        with suppress(UnknownConversation, StoreUnavailable):
            return await self.tend(lambda inventory: named(inventory, name))
        return None, Whom(session_id=name)

    async def remove_model(self, name: str) -> RemovalView:
        """Delete what was asked of a model by this name, or all of weights by their hash.

        Raises:
            UnknownModel: neither is there such a model, nor was there.
            StoreUnavailable: there is no store, or it fails.
        """
        names, hashes = await self.meant(name)
        if hashes:
            return await self._remove_weights(hashes)
        views: list[RemovalView] = []
        for one in sorted(names):
            async with self._forgetting(Whom(model=one)):
                views.append(await self.tend(lambda inventory, one=one: inventory.remove_name(one)))
        return total(views)

    async def meant(self, name: str) -> ModelSelection:
        """What of the store somebody means who names a model like that.

        Raises:
            UnknownModel: neither is there such a model, nor was there.
            StoreUnavailable: there is no store, or it fails.
        """
        configured, known = self._catalog.look_up(name)
        return await self.tend(lambda inventory: meant(inventory, name, configured, known))

    async def remove_all(self) -> RemovalView:
        """Delete everything there is. Raises StoreUnavailable."""
        async with self._forgetting(Whom()):
            return await self.tend(lambda inventory: inventory.remove_all())

    async def _remove_weights(self, models: Collection[bytes]) -> RemovalView:
        async with self._forgetting(Whom(), models):
            return await self.tend(lambda inventory: inventory.remove_models(models))

    async def identify(self, spec: ModelSpec) -> bytes:
        """The model hash of a model as it is now.

        Raises:
            InterchangeFailed: its files cannot be read.
            StoreUnavailable: there is no store, or it fails.
        """
        form = self._settings.kv_form_of(spec.id)
        return await self.tend(lambda inventory: inventory.identify(spec, form))

    async def collect_garbage(self, watch: Watch, should_stop: Callable[[], bool]) -> CollectedView:
        """Do now what is done to the store now and then.

        Raises:
            StoreUnavailable: there is no store, it fails, or the server is stopping.
        """
        loaded = self.kv.loaded_models()
        collection = GarbageCollection(StoreLimits.of(self._settings), loaded, watch, should_stop)
        await self.kv.chore(collection.run)
        if collection.outcome is None:
            raise StoreUnavailable(f"It was not done to the end: {self.kv.status.message}.")
        return collection.outcome
