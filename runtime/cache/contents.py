"""What lies in the KV store, as whoever is asked for it sees it, and what may be done to it.

A conversation is named by its session id, by the beginning of its id in lists, or by the id itself.
Everything here belongs to the event loop, and raises StoreUnavailable where there is no store, or
where it fails.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import TypeVar

from msgspec.structs import replace

from runtime.cache import tending, upkeep
from runtime.cache.conversations import (
    Exchanged,
    ImportRequest,
    KeptConversation,
    KnownModels,
    Pinned,
    Selection,
    StoreJob,
)
from runtime.cache.inventory import Conversation, Inventory
from runtime.cache.kept import pinned, pinned_ahead, unpinned
from runtime.cache.opened import BlockStore
from runtime.cache.service import KvStore, Removed
from runtime.cache.taking_in import take_in
from runtime.cache.verification import Verified, files_of
from runtime.cache.verification import verify as verify_file
from runtime.cache.views import (
    ChainView,
    CollectedView,
    ConversationView,
    RemovalView,
    ShownView,
    SlotNode,
    StatsView,
    VerifyView,
)
from runtime.config.settings import Settings
from runtime.errors import StoreUnavailable, UnknownConversation
from runtime.progress import Progress, Watch
from runtime.types import ModelSpec
from store.errors import StoreError
from store.keyed_names import Whom, conversation_key
from store.slots import BlockKey

T = TypeVar("T")

_SCRUB_S = 300.0


class KvContents:
    """The conversations of the store that `kv` has."""

    def __init__(self, kv: KvStore, settings: Settings) -> None:
        self._kv = kv
        self._settings = settings
        self._block_size = settings.block_size

    async def _tend(self, work: Callable[[BlockStore, Inventory], T], *, on_disk: bool = True) -> T:
        """Have something done to the store, in a thread. Raises StoreUnavailable."""
        await self._kv.settled()
        inventory, store = self._kv.inventory(on_disk=on_disk), self._kv.store
        assert store is not None  # `inventory` says so
        try:
            return await asyncio.to_thread(work, store, inventory)
        except StoreError as error:
            raise StoreUnavailable(f"The store fails: {error}.") from error

    # Looking

    async def kept(self) -> list[KeptConversation]:
        """Every conversation, the latest used first."""
        return await self._tend(
            lambda _, inventory: tending.all_kept(inventory, inventory.conversations())
        )

    async def of_sessions(self, names: Sequence[str]) -> dict[str, list[KeptConversation]]:
        """Those with these session ids, each with every model it had, by session id."""

        def look(_: BlockStore, inventory: Inventory) -> dict[str, list[KeptConversation]]:
            found = inventory.of_sessions(names)
            return {name: tending.all_kept(inventory, every) for name, every in found.items()}

        return await self._tend(look)

    async def find(self, name: str) -> KeptConversation:
        """The one that goes by this name; of the latest use.

        Raises:
            UnknownConversation: there is none, or the beginning fits several.
        """
        return await self._tend(
            lambda _, inventory: tending.as_kept(inventory, inventory.find(name))
        )

    async def seen(self, kept: Sequence[KeptConversation]) -> list[ConversationView]:
        """The same as people see them: the tier of what ends in the memory of a worker is hot."""
        ends = {one.end: one.view.num_tokens for one in kept if one.end is not None}
        held = await self._kv.memory.num_held(ends)
        hot = {end for end, num_tokens in ends.items() if held.get(end, 0) >= num_tokens}
        return [replace(one.view, tier="hot") if one.end in hot else one.view for one in kept]

    async def held(self, sessions: Sequence[str]) -> dict[str, dict[str, int]]:
        """How many first tokens are in workers' memory, by session id and name of the model; also
        of what is never on disk.
        """
        await self._kv.published()
        whose: dict[str, tuple[str, str]] = {}
        for heads in self._kv.all_heads():
            secret = self._kv.secret_of(heads)
            names = {conversation_key(secret, name): name for name in sessions}
            for head_id, one in [*heads.known.items()]:  # at once, without the lock
                if (name := names.get(one.head.owner.session)) is not None:
                    whose[head_id] = name, one.head.name
        held: dict[str, dict[str, int]] = {name: {} for name in sessions}
        for head_id, num_tokens in (await self._kv.memory.num_held(whose)).items():
            name, model = whose[head_id]
            held[name][model] = max(held[name].get(model, 0), num_tokens)
        return held

    async def shown(self, name: str) -> ShownView:
        """One conversation with its slots. Raises as `find`."""
        kept, shown = await self._tend(
            lambda _, inventory: tending.shown(inventory, name, self._block_size)
        )
        return replace(shown, conversation=(await self.seen([kept]))[0])

    async def chain(self, name: str) -> ChainView:
        """Where a conversation's tokens lie, all on the fast disk. Raises as `find`."""
        await self._kv.settled()
        inventory = self._kv.inventory(on_disk=True)
        return await self._kv.tend_cold(lambda store: tending.chain(store, inventory, name))

    async def tree(self, model: str) -> list[SlotNode]:
        """Every slot of a model by its name or hash, parents before children."""
        return await self._tend(lambda store, _: tending.slots_of(store, model))

    async def stats(self) -> StatsView:
        """Sums and counters."""
        return await self._tend(tending.stats)

    async def known_models(self) -> KnownModels:
        """By what names and hashes models can be meant."""
        return await self._tend(lambda store, _: tending.known_models(store))

    async def counters(self) -> tuple[dict[str, float], dict[str, float]]:
        """The counters of today and of all time."""

        def look(store: BlockStore, _: Inventory) -> tuple[dict[str, float], dict[str, float]]:
            return store.records.counters(time.time()), store.records.counters()

        return await self._tend(look)

    async def count(self, values: Mapping[str, float]) -> None:
        """Add to these counters."""
        await self._tend(lambda store, _: store.records.count(values, time.time()).result())

    # Using

    async def bring(self, one: KeptConversation) -> int:
        """Have a conversation in memory soon; its tokens, 0 where there is nothing to bring."""
        if one.end is None:
            return 0
        return await self._kv.memory.bring(one.end)

    async def branch(self, source: str, copy: str, ends: Mapping[str, int]) -> None:
        """Let the session id `copy` share the KV of another, by model up to the token in `ends`.

        What is shared is not deleted with `source`; nothing beyond is shared.
        """
        await self._tend(
            lambda store, inventory: tending.branch(store, inventory, source, copy, ends)
        )

    def hint(self, whom: Whom, pause_s: float | None, *, is_over: bool) -> None:
        """Tell the workers when a conversation goes on, or that it does not."""
        self._kv.hint(whom, pause_s, is_over=is_over)

    async def pin(self, name: str) -> Pinned:
        """Keep a conversation, and what it becomes, until it is unpinned. Raises as `find`."""
        return await self._tend(lambda store, inventory: pinned(store, inventory, name))

    async def pin_ahead(self, session_id: str, spec: ModelSpec) -> Pinned:
        """The same of one of which nothing may be on disk yet.

        Raises:
            InterchangeFailed: the files of the model cannot be read.
        """
        form = self._settings.kv_form_of(spec.id)

        def pin(store: BlockStore, inventory: Inventory) -> Pinned:
            model = tending.identify(store, spec, form)
            return pinned_ahead(store, inventory, session_id, model, spec.id)

        return await self._tend(pin)

    async def unpin(self, name: str) -> Pinned:
        """Take back the pins of a conversation. Raises as `find`, if none was pinned ahead."""
        return await self._tend(lambda store, inventory: unpinned(store, inventory, name))

    # Deleting

    async def named(self, name: str) -> Selection:
        """Who goes by a name; what the store does not know may be in a worker's memory."""

        def look(_: BlockStore, inventory: Inventory) -> Selection:
            found = inventory.find_all(name)
            if found[0].is_named:
                key = found[0].last.head.owner.session
                return Selection(name, found, [Whom(session_id=name, key=key)])
            return Selection(name, found, [inventory.whom_of(one.last.head.id) for one in found])

        with suppress(UnknownConversation, StoreUnavailable):
            return await self._tend(look, on_disk=False)
        return Selection(name, (), [Whom(session_id=name)])

    async def remove(self, selection: Selection) -> RemovalView:
        """Delete these, on disk and in memory.

        Raises:
            UnknownConversation: nothing goes by that name, and every worker has looked.
        """
        found: Sequence[Conversation] = selection.found
        if found and not found[0].is_named:
            ids = [head.head.id for one in found for head in one.heads]
            return await self._removed([await self._kv.delete_head(one) for one in ids])
        removed = [await self._kv.delete(whom) for whom in selection.whoms]
        if not any(one.num_conversations or one.num_pieces != 0 for one in removed):
            message = (
                f"No conversation has the session id {selection.name[:64]!r}. "
                "`hearth cache ls` lists them."
            )
            raise UnknownConversation(message, "conversation")
        return await self._removed(removed)

    async def remove_name(self, name: str) -> RemovalView:
        """Delete what was asked of a model by this name, with all weights it had."""
        return await self._removed([await self._kv.delete(Whom(model=name))])

    async def remove_weights(self, models: Collection[bytes]) -> RemovalView:
        """Delete everything of these weights."""
        return await self._removed([await self._kv.delete(Whom(), models)])

    async def remove_all(self) -> RemovalView:
        """Delete everything."""
        removed = await self._kv.delete(Whom())
        if self._kv.store is not None:
            await self._tend(lambda store, _: upkeep.forget_all(store))
        return await self._removed([removed])

    async def _removed(self, removed: Sequence[Removed]) -> RemovalView:
        """After that neither the cold store nor the index's log is to hold a trace."""
        is_done = True
        with suppress(StoreUnavailable):  # there is none
            await self._kv.tend_cold(lambda store: store.finish_cold())
            is_done = await self._tend(lambda store, _: tending.is_cut(store))
        return RemovalView(
            num_conversations=sum(one.num_conversations for one in removed),
            num_slots=sum(one.num_slots for one in removed),
            is_cut=is_done,
            is_pending=any(one.num_pieces is None for one in removed),
        )

    # Work

    async def verify(self, watch: Watch, should_stop: Callable[[], bool]) -> VerifyView:
        """Read every slot and compare every checksum; what is not as written goes."""
        files = await self._tend(lambda store, _: files_of(store))
        done: list[Verified] = []
        for number, file in enumerate(files):
            watch(Progress(step="verify", num_done=number, num_total=len(files)))
            if should_stop():
                break
            done.append(await self._kv.tend_cold(partial(verify_file, file=file)))
            self._kv.drop(done[-1].gone)
        return tending.verified(done)

    async def take_in(self, spec: ModelSpec, wanted: ImportRequest, watch: Watch) -> Exchanged:
        """Have a prompt-cache file of stock mlx-lm as slots.

        Raises:
            InterchangeFailed: it cannot be read, does not belong to the model, or has no room.
        """
        await self._kv.settled()
        receipt, settings = self._kv.receive(), self._kv.settings  # held until it is published

        def take(store: BlockStore, _: Inventory) -> Exchanged:
            return take_in(store, settings, spec, wanted, watch, receipt.number)

        return await self._tend(take)

    async def collect(self, watch: Watch, should_stop: Callable[[], bool]) -> CollectedView:
        """Do now what is done now and then."""
        before = await self._tend(lambda store, _: upkeep.Use.of(store))
        steps = (
            ("expire", self._keep),
            ("agree", self._sweep_orphans),
            ("tidy", self._tidy),
            ("caps", self._keep),
        )
        for number, (name, work) in enumerate(steps):
            watch(Progress(step=name, num_done=number, num_total=len(steps)))
            if should_stop() or not await work():
                raise StoreUnavailable(f"It was not done to the end: {self._kv.status.message}.")
        watch(Progress(step="done", num_done=len(steps), num_total=len(steps)))
        return before.changed(await self._tend(lambda store, _: upkeep.Use.of(store)))

    def jobs(self, is_busy: Callable[[], bool]) -> Sequence[StoreJob]:
        """What is to be done now and then; long work stops when `is_busy` says so."""

        def is_over() -> bool:
            return self._kv.is_stopping or is_busy()

        scrub = partial(upkeep.scrub, period_s=_SCRUB_S, should_stop=is_over)
        return (
            StoreJob("caps", 60.0, self._keep),
            StoreJob("tidy", 600.0, self._tidy),
            StoreJob("scrub", _SCRUB_S, partial(self._kv.chore, scrub, "chore"), is_for_idle=True),
            StoreJob("orphans", 86_400.0, self._sweep_orphans),
        )

    async def _keep(self) -> bool:
        def keep(store: BlockStore) -> list[BlockKey]:
            self._kv.pins.keep_to_share(store)
            return upkeep.keep(store)

        return await self._kv.chore(keep)

    async def _tidy(self) -> bool:
        return await self._kv.chore(upkeep.tidy)

    async def _sweep_orphans(self) -> bool:
        loaded = self._kv.loaded_models()
        return await self._kv.chore(lambda store: upkeep.sweep_orphans(store, loaded), "write")
