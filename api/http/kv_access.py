"""What handlers are given of the KV that is kept: looking at it, deleting it, bringing it."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Collection, Iterable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import TypeVar

from msgspec.structs import replace

from api.http.chains import Chains
from runtime.cache.collection import GarbageCollection
from runtime.cache.contents import ModelSelection
from runtime.cache.deletion_log import Models
from runtime.cache.inventory import Inventory, Named, meant, named, total
from runtime.cache.inventory_views import CollectedView, RemovalView
from runtime.cache.maintenance import StoreLimits
from runtime.cache.publisher import ForgetOutcome
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

    def __init__(
        self,
        settings: Settings,
        catalog: Catalog,
        kv: KvStore,
        prewarm: Prewarm,
        stored: Chains,
    ) -> None:
        self._settings = settings
        self._catalog = catalog
        self.kv = kv
        self._prewarm = prewarm
        self._stored = stored

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
            if one.model == mine and one.end is not None:
                self.kv.memory.bring({one.model: [one.end]})
                return one.view.num_tokens
        return 0

    async def remove_conversation(self, name: str) -> RemovalView:
        """Delete a conversation everywhere: on disk, in the workers' memory, in what was learned.

        The text of responses and threads that were asked for by its session id goes as well.

        Raises:
            UnknownConversation: nothing goes by that name, and every worker has looked.
            StoreUnavailable: there is no store, or it fails.
        """
        entries, whoms = await self._named(name)
        async with self._forgetting(whoms) as told:
            try:
                view = await self._removed(name, entries, told)
            except UnknownConversation:
                if not await self._stored.forget(whoms, self.kv.secret):
                    raise
                return RemovalView(1, num_slots=0, is_cut=True, is_pending=told.is_pending)
            except StoreUnavailable:
                await self._stored.forget(whoms, self.kv.secret)
                raise
            await self._stored.forget(whoms, self.kv.secret)
            return view

    @asynccontextmanager
    async def _forgetting(
        self, whoms: Sequence[Whom], models: Models = None
    ) -> AsyncGenerator[ForgetOutcome]:
        """While it is deleted from the disk, so that nothing in memory brings it back; how many
        pieces of memory it had.
        """
        for whom in whoms:
            self._prewarm.forget(whom, models)
        told = [await self.kv.publisher.forget(whom, models) for whom in whoms]
        is_pending = any(one.is_pending for one in told)
        try:
            yield ForgetOutcome(sum(one.num_forgotten for one in told), is_pending)
        finally:
            for whom in whoms:
                await self._prewarm.forget_stored(whom, models)

    async def _removed(
        self, name: str, entries: Sequence[Entry], told: ForgetOutcome
    ) -> RemovalView:
        try:
            if entries and not entries[0].is_named:
                view = await self.tend(lambda inventory: inventory.remove(entries))
            else:
                view = await self.tend(lambda inventory: inventory.remove_conversation(name))
        except (UnknownConversation, StoreUnavailable) as error:
            is_all = isinstance(error, UnknownConversation) or not self._settings.kv_disk
            if not is_all or not (told.num_forgotten or told.is_pending):
                raise
            view = RemovalView(int(told.num_forgotten > 0), num_slots=0, is_cut=True)
        return replace(view, is_pending=told.is_pending)

    async def _named(self, name: str) -> Named:
        """As `inventory.named`; what the store does not know may be in a worker's memory."""
        with suppress(UnknownConversation, StoreUnavailable):
            return await self.tend(lambda inventory: named(inventory, name))
        return Named([], [Whom(session_id=name)])

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
            async with self._forgetting([Whom(model=one)]) as told:
                view = await self.tend(lambda inventory, one=one: inventory.remove_name(one))
            views.append(replace(view, is_pending=told.is_pending))
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
        async with self._forgetting([Whom()]) as told:
            view = await self.tend(lambda inventory: inventory.remove_all())
        return replace(view, is_pending=told.is_pending)

    async def _remove_weights(self, models: Collection[bytes]) -> RemovalView:
        async with self._forgetting([Whom()], models) as told:
            view = await self.tend(lambda inventory: inventory.remove_models(models))
        return replace(view, is_pending=told.is_pending)

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
