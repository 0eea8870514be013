"""What handlers are given of the KV that is kept: looking at it, deleting it, bringing it."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager

from api.http.chains import Chains
from runtime.cache.contents import KvContents, ModelSelection, meant, total
from runtime.cache.deletion_log import Models
from runtime.cache.either import KvStore
from runtime.cache.inventory_views import RemovalView
from runtime.errors import StoreUnavailable, UnknownConversation
from runtime.models.catalog import Catalog
from runtime.prewarm.prewarm import Prewarm
from runtime.types import ModelSpec
from store.keyed_names import Whom


class KvAccess:
    """The KV of all conversations, on disk and in workers' memory. One for the whole server.

    Deletions also reach what was learned to be warm, and the text that is kept of conversations.
    """

    def __init__(
        self,
        catalog: Catalog,
        kv: KvStore,
        contents: KvContents,
        prewarm: Prewarm,
        stored: Chains,
    ) -> None:
        self.kv = kv
        self.contents = contents
        self._catalog = catalog
        self._prewarm = prewarm
        self._stored = stored

    async def bring(self, session_id: str, spec: ModelSpec) -> int:
        """Have a conversation's KV in memory soon; its tokens, 0 where there is nothing to bring.

        Raises:
            StoreUnavailable: there is no store, or it fails.
        """
        found = await self.contents.of_sessions([session_id])
        mine = self.kv.hash_of(spec.id)
        for one in found[session_id]:
            if one.model == mine and await self.contents.bring(one):
                return one.view.num_tokens
        return 0

    async def remove_conversation(self, name: str) -> RemovalView:
        """Delete a conversation everywhere: on disk, in the workers' memory, in what was learned.

        The text of responses and threads that were asked for by its session id goes as well.

        Raises:
            UnknownConversation: nothing goes by that name, and every worker has looked.
            StoreUnavailable: there is no store, or it fails.
        """
        found = await self.contents.named(name)
        async with self._forgetting(found.whoms):
            try:
                view = await self.contents.remove(found)
            except UnknownConversation:
                if not await self._stored.forget(found.whoms, self.kv.secret):
                    raise
                return RemovalView(1, num_slots=0, is_cut=True)
            except StoreUnavailable:
                await self._stored.forget(found.whoms, self.kv.secret)
                raise
            await self._stored.forget(found.whoms, self.kv.secret)
            return view

    @asynccontextmanager
    async def _forgetting(
        self, whoms: Sequence[Whom], models: Models = None
    ) -> AsyncGenerator[None]:
        """While it is deleted: what was learned of it goes before that, and once more after it."""
        for whom in whoms:
            self._prewarm.forget(whom, models)
        try:
            yield
        finally:
            for whom in whoms:
                await self._prewarm.forget_stored(whom, models)

    async def remove_model(self, name: str) -> RemovalView:
        """Delete what was asked of a model by this name, or all of weights by their hash.

        Raises:
            UnknownModel: neither is there such a model, nor was there.
            StoreUnavailable: there is no store, or it fails.
        """
        names, hashes = await self.meant(name)
        if hashes:
            async with self._forgetting([Whom()], hashes):
                return await self.contents.remove_weights(hashes)
        views: list[RemovalView] = []
        for one in sorted(names):
            async with self._forgetting([Whom(model=one)]):
                views.append(await self.contents.remove_name(one))
        return total(views)

    async def meant(self, name: str) -> ModelSelection:
        """What of the store somebody means who names a model like that.

        Raises:
            UnknownModel: neither is there such a model, nor was there.
            StoreUnavailable: there is no store, or it fails.
        """
        configured, known = self._catalog.look_up(name)
        return meant(await self.contents.known_models(), name, configured, known)

    async def remove_all(self) -> RemovalView:
        """Delete everything there is. Raises StoreUnavailable."""
        async with self._forgetting([Whom()]):
            return await self.contents.remove_all()
