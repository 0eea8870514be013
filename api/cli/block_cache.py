"""What `hearth cache` does to a store by blocks while no server has it."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from runtime.cache import tending, upkeep
from runtime.cache.conversations import Exchanged, ImportRequest, ModelSelection, Pinned, meant
from runtime.cache.kept import pinned, pinned_ahead, unpinned
from runtime.cache.opened import BlockStore, open_blocks
from runtime.cache.taking_in import take_in
from runtime.cache.tending import Gone
from runtime.cache.upkeep import Use
from runtime.cache.verification import Verified, files_of
from runtime.cache.verification import verify as verify_file
from runtime.cache.views import (
    ChainView,
    CollectedView,
    ConversationView,
    RemovalView,
    ShownView,
    StatsView,
    VerifyView,
)
from runtime.config.settings import Settings
from runtime.models.catalog import Catalog
from runtime.progress import Progress, Watch
from store.keyed_names import Whom


def open_blocks_of(settings: Settings) -> BlockStore:
    """Make or open the store of these settings. Raises as `open_blocks`."""
    return open_blocks(settings.kv_root, tending.terms_of(settings))


class BlockCache:
    """Nobody else has the store, and no worker has anything of it in memory."""

    def __init__(self, store: BlockStore, settings: Settings) -> None:
        self._store = store
        self._settings = settings
        self._inventory = tending.inventory_of(store)

    def conversations(self, model: str | None) -> list[ConversationView]:
        wanted = self._meant(model) if model is not None else None
        found = tending.all_kept(self._inventory, self._inventory.conversations())
        return [one.view for one in found if wanted is None or wanted.has(one.view)]

    def stats(self) -> StatsView:
        return tending.stats(self._store, self._inventory)

    def chain(self, name: str) -> ChainView:
        return tending.chain(self._store, self._inventory, name)

    def show(self, name: str) -> ShownView:
        _, shown = tending.shown(self._inventory, name, self._store.block_size)
        return shown

    def pin(self, name: str, model: str | None) -> Pinned:
        if model is None:
            return pinned(self._store, self._inventory, name)
        spec = Catalog(self._settings).resolve(model)
        weights = tending.identify(self._store, spec, self._settings.kv_form_of(spec.id))
        return pinned_ahead(self._store, self._inventory, name, weights, spec.id)

    def unpin(self, name: str) -> Pinned:
        return unpinned(self._store, self._inventory, name)

    def remove_conversation(self, name: str) -> RemovalView:
        found = self._inventory.find_all(name)
        if found[0].is_named:
            return self._delete([Whom(key=found[0].last.head.owner.session)])
        ids = [head.head.id for one in found for head in one.heads]
        return self._removed([tending.delete_head(self._store, one) for one in ids])

    def remove_model(self, name: str) -> RemovalView:
        names, hashes = self._meant(name)
        if hashes:
            return self._delete([Whom()], hashes)
        return self._delete([Whom(model=one) for one in sorted(names)])

    def remove_all(self) -> RemovalView:
        gone = tending.delete(self._store, Whom(), None)
        upkeep.forget_all(self._store)
        return self._removed([gone])

    def _delete(
        self, whoms: Sequence[Whom], models: Collection[bytes] | None = None
    ) -> RemovalView:
        return self._removed([tending.delete(self._store, whom, models) for whom in whoms])

    def _removed(self, gone: Sequence[Gone]) -> RemovalView:
        """After that neither the cold store nor the index's log is to hold a trace."""
        self._store.finish_cold()
        return RemovalView(
            num_conversations=sum(len(one.conversations) for one in gone),
            num_slots=sum(one.num_slots for one in gone),
            is_cut=tending.is_cut(self._store),
        )

    def verify(self, watch: Watch) -> VerifyView:
        files, done = files_of(self._store), list[Verified]()
        for number, file in enumerate(files):
            watch(Progress(step="verify", num_done=number, num_total=len(files)))
            done.append(verify_file(self._store, file))
        return tending.verified(done)

    def collect_garbage(self, watch: Watch) -> CollectedView:
        store = self._store
        before = Use.of(store)
        steps = (
            ("expire", lambda: upkeep.keep(store)),
            ("agree", lambda: upkeep.sweep_orphans(store, ())),
            ("tidy", lambda: upkeep.tidy(store)),
            ("caps", lambda: upkeep.keep(store)),
        )
        for number, (name, work) in enumerate(steps):
            watch(Progress(step=name, num_done=number, num_total=len(steps)))
            work()
        return before.changed(Use.of(store))

    def import_(self, wanted: ImportRequest, watch: Watch) -> Exchanged:
        spec = Catalog(self._settings).resolve(wanted.model)
        received = self._store.heads.number
        return take_in(self._store, self._settings, spec, wanted, watch, received)

    def _meant(self, model: str) -> ModelSelection:
        known = tending.known_models(self._store)
        return meant(known, model, *Catalog(self._settings).look_up(model))
