"""What handlers are given of the KV that is kept: looking at it, deleting it, bringing it."""

from __future__ import annotations

from collections.abc import Sequence

from api.http.chains import Chains
from runtime.cache.contents import KvContents
from runtime.cache.conversations import ModelSelection, meant, total
from runtime.cache.service import KvStore
from runtime.cache.views import RemovalView
from runtime.errors import StoreUnavailable, UnknownConversation
from runtime.models.catalog import Catalog
from runtime.prewarm.prewarm import Prewarm
from runtime.types import ModelSpec
from store.keyed_names import Whom


class KvAccess:
    """The KV of all conversations, on disk and in workers' memory. One for the whole server.

    Deletions also reach what is about to be warmed, and the text that is kept of conversations.
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
        """Delete a conversation everywhere: on disk, in the workers' memory, in what is to be warm.

        The text of responses and threads that were asked for by its session id goes as well.

        Raises:
            UnknownConversation: nothing goes by that name, and every worker has looked.
            StoreUnavailable: there is no store, or it fails.
        """
        found = await self.contents.named(name)
        self._forget(found.whoms)
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

    def _forget(self, whoms: Sequence[Whom]) -> None:
        """What goes on from it is not warmed any more."""
        for whom in whoms:
            self._prewarm.forget(whom)

    async def remove_model(self, name: str) -> RemovalView:
        """Delete what was asked of a model by this name, or all of weights by their hash.

        Raises:
            UnknownModel: neither is there such a model, nor was there.
            StoreUnavailable: there is no store, or it fails.
        """
        names, hashes = await self.meant(name)
        if hashes:
            self._forget([Whom()])
            return await self.contents.remove_weights(hashes)
        self._forget([Whom(model=one) for one in names])
        return total([await self.contents.remove_name(one) for one in sorted(names)])

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
        self._forget([Whom()])
        return await self.contents.remove_all()
