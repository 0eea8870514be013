"""What lies in the store by blocks, as `KvContents` says it."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import TypeVar

from msgspec.structs import replace

from runtime.cache.by_blocks import upkeep
from runtime.cache.by_blocks.inventory import Conversation, Inventory, conversation_of
from runtime.cache.by_blocks.opened import BlockStore
from runtime.cache.by_blocks.service import BlockKvStore, Removed
from runtime.cache.by_blocks.verification import Verified, files_of
from runtime.cache.by_blocks.verification import verify as verify_file
from runtime.cache.contents import (
    KeptConversation,
    KnownModels,
    Pinned,
    Selection,
    StoreJob,
    models_beginning,
)
from runtime.cache.inventory_views import (
    CollectedView,
    ConversationView,
    RemovalView,
    ShownView,
    SlotNode,
    SlotView,
    StatsView,
    TierView,
    VerifyView,
)
from runtime.errors import StoreUnavailable, UnknownConversation
from runtime.progress import Progress, Watch
from store.blocks.head_file import KnownHead
from store.blocks.heads import Heads
from store.blocks.slots import BlockKey
from store.errors import StoreError
from store.keyed_names import Whom, conversation_key
from store.types import Tier
from store.upkeep import disk_room

T = TypeVar("T")

_CHECKPOINT_TRIES = 5
_SCRUB_S = 300.0


class BlockContents:
    """See `KvContents`. Pins ahead, and exchange with mlx-lm are still to come."""

    def __init__(self, kv: BlockKvStore, block_size: int) -> None:
        self._kv = kv
        self._block_size = block_size

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
        return await self._tend(lambda _, inventory: _kept(inventory, inventory.conversations()))

    async def of_sessions(self, names: Sequence[str]) -> dict[str, list[KeptConversation]]:
        def look(_: BlockStore, inventory: Inventory) -> dict[str, list[KeptConversation]]:
            found = inventory.of_sessions(names)
            return {name: _kept(inventory, every) for name, every in found.items()}

        return await self._tend(look)

    async def find(self, name: str) -> KeptConversation:
        return await self._tend(lambda _, inventory: _as_kept(inventory, inventory.find(name)))

    async def seen(self, kept: Sequence[KeptConversation]) -> list[ConversationView]:
        ends = {one.end: one.view.num_tokens for one in kept if one.end is not None}
        held = await self._kv.memory.num_held(ends)
        hot = {end for end, num_tokens in ends.items() if held.get(end, 0) >= num_tokens}
        return [replace(one.view, tier="hot") if one.end in hot else one.view for one in kept]

    async def held(self, sessions: Sequence[str]) -> dict[str, dict[str, int]]:
        whose: dict[str, tuple[str, str]] = {}
        for heads in self._kv.all_heads():
            secret = self._kv.secret_of(heads)
            names = {conversation_key(secret, name): name for name in sessions}
            with heads.lock:
                for head_id, one in heads.known.items():
                    if (name := names.get(one.head.owner.session)) is not None:
                        whose[head_id] = name, one.head.name
        held: dict[str, dict[str, int]] = {name: {} for name in sessions}
        for head_id, num_tokens in (await self._kv.memory.num_held(whose)).items():
            name, model = whose[head_id]
            held[name][model] = max(held[name].get(model, 0), num_tokens)
        return held

    async def shown(self, name: str) -> ShownView:
        def look(_: BlockStore, inventory: Inventory) -> tuple[KeptConversation, ShownView]:
            one = inventory.find(name)
            kept = _as_kept(inventory, one)
            slots = tuple(
                SlotView(node.key.name.hex(), tier, node.start, node.start + self._block_size)
                for node in inventory.blocks(one)
                if (tier := _tier(node.block.sizes.tier)) is not None
            )
            return kept, ShownView(kept.view, kept.is_pinned, kept.ttl_s, slots)

        kept, shown = await self._tend(look)
        return replace(shown, conversation=(await self.seen([kept]))[0])

    async def tree(self, model: str) -> list[SlotNode]:
        def look(store: BlockStore, _: Inventory) -> list[SlotNode]:
            labels = _labels(store)
            with store.heads.lock:
                named = {one.head.model for one in _on_disk(store.heads) if one.head.name == model}
                named |= {one for one, label in labels.items() if label == model}
                named |= models_beginning(labels, model)
                return _nodes(store.heads, named, self._block_size)

        return await self._tend(look)

    async def stats(self) -> StatsView:
        def look(store: BlockStore, inventory: Inventory) -> StatsView:
            labels = _labels(store)
            tiers = tuple(
                TierView(labels.get(model, ""), model.hex(), tier, *sums)
                for (model, tier), sums in store.totals().items()
            )
            return StatsView(
                root=str(store.root),
                tiers=tiers,
                num_conversations=len(_kept(inventory, inventory.conversations())),
                quarantine_bytes=0,
                free_bytes=disk_room(store.root).free_bytes,
                counters=store.records.counters(),
            )

        return await self._tend(look)

    async def known_models(self) -> KnownModels:
        def look(store: BlockStore, _: Inventory) -> KnownModels:
            with store.heads.lock:
                asked = {one.head.name for one in store.heads.known.values()}
            return KnownModels(asked, _labels(store))

        return await self._tend(look)

    async def counters(self) -> tuple[dict[str, float], dict[str, float]]:
        def look(store: BlockStore, _: Inventory) -> tuple[dict[str, float], dict[str, float]]:
            return store.records.counters(time.time()), store.records.counters()

        return await self._tend(look)

    async def count(self, values: Mapping[str, float]) -> None:
        await self._tend(lambda store, _: store.records.count(values, time.time()).result())

    # Using

    async def bring(self, one: KeptConversation) -> int:
        if one.end is None:
            return 0
        return await self._kv.memory.bring(one.end)

    async def branch(self, source: str, copy: str, ends: Mapping[str, int]) -> None:
        def fork(store: BlockStore, inventory: Inventory) -> None:
            session = conversation_key(store.secret, copy)
            for one in inventory.of_sessions([source])[source]:
                head = one.last.head
                end = min(ends.get(head.name, 0), head.num_tokens)
                if end > 0:
                    store.branch(one.last, session, end)

        await self._tend(fork)

    def hint(self, whom: Whom, pause_s: float | None, *, is_over: bool) -> None:
        self._kv.hint(whom, pause_s, is_over=is_over)

    async def pin(self, name: str) -> Pinned:
        return await self._mark(name, is_pinned=True)

    async def unpin(self, name: str) -> Pinned:
        return await self._mark(name, is_pinned=False)

    async def _mark(self, name: str, *, is_pinned: bool) -> Pinned:
        def mark(store: BlockStore, inventory: Inventory) -> Pinned:
            found = inventory.find_all(name)
            for one in found:
                for head in one.heads[:1] if is_pinned else one.heads:
                    ttl_s = head.head.ttl_s
                    store.heads.mark(head.head.id, is_pinned=is_pinned, ttl_s=ttl_s)
            num_tokens = inventory.view(inventory.find(name)).num_durable
            return Pinned(found[0].id, is_pinned, num_tokens)

        return await self._tend(mark)

    # Deleting

    async def named(self, name: str) -> Selection:
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
        found: Sequence[Conversation] = selection.found
        if found and not found[0].is_named:
            ids = [head.head.id for one in found for head in one.heads]
            return await self._removed([await self._kv.delete_head(one) for one in ids])
        removed = [await self._kv.delete(whom) for whom in selection.whoms]
        if not any(one.num_conversations or one.num_pieces != 0 for one in removed):
            message = f"No conversation has the session id {selection.name[:64]!r}."
            raise UnknownConversation(message, "conversation")
        return await self._removed(removed)

    async def remove_name(self, name: str) -> RemovalView:
        return await self._removed([await self._kv.delete(Whom(model=name))])

    async def remove_weights(self, models: Collection[bytes]) -> RemovalView:
        return await self._removed([await self._kv.delete(Whom(), models)])

    async def remove_all(self) -> RemovalView:
        removed = await self._kv.delete(Whom())
        if self._kv.store is not None:
            await self._tend(lambda store, _: upkeep.forget_all(store))
        return await self._removed([removed])

    async def _removed(self, removed: Sequence[Removed]) -> RemovalView:
        """After that neither the cold store nor the index's log is to hold a trace."""

        def is_cut(store: BlockStore, _: Inventory) -> bool:
            tries = (store.database.checkpoint().result() for _ in range(_CHECKPOINT_TRIES))
            return any(tries)

        is_done = True
        with suppress(StoreUnavailable):  # there is none
            await self._kv.tend_cold(lambda store: store.finish_cold())
            is_done = await self._tend(is_cut)
        return RemovalView(
            num_conversations=sum(one.num_conversations for one in removed),
            num_slots=sum(one.num_slots for one in removed),
            is_cut=is_done,
            is_pending=any(one.num_pieces is None for one in removed),
        )

    # Work

    async def verify(self, watch: Watch, should_stop: Callable[[], bool]) -> VerifyView:
        files = await self._tend(lambda store, _: files_of(store))
        done: list[Verified] = []
        for number, file in enumerate(files):
            watch(Progress(step="verify", num_done=number, num_total=len(files)))
            if should_stop():
                break
            done.append(await self._kv.tend_cold(partial(verify_file, file=file)))
            self._kv.drop(done[-1].gone)
        found = Counter(one.found for one in done)
        return VerifyView(
            num_verified=found["whole"],
            verified_bytes=sum(one.num_bytes for one in done),
            num_damaged=found["damaged"],
            num_unread=found["unread"],
        )

    async def collect(self, watch: Watch, should_stop: Callable[[], bool]) -> CollectedView:
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
        return await self._kv.chore(upkeep.keep)

    async def _tidy(self) -> bool:
        return await self._kv.chore(upkeep.tidy)

    async def _sweep_orphans(self) -> bool:
        loaded = self._kv.loaded_models()
        return await self._kv.chore(lambda store: upkeep.sweep_orphans(store, loaded), "write")


def _kept(inventory: Inventory, found: Iterable[Conversation]) -> list[KeptConversation]:
    return [_as_kept(inventory, one) for one in found]


def _as_kept(inventory: Inventory, one: Conversation) -> KeptConversation:
    view, head = inventory.view(one), one.last.head
    return KeptConversation(view, head.model, head.id, head.ttl_s, view.is_pinned)


def _labels(store: BlockStore) -> dict[bytes, str]:
    return {row.hash: row.label for row in store.records.models()}


def _on_disk(heads: Heads) -> list[KnownHead]:
    return [one for one in heads.known.values() if one.path is not None]


def _tier(tier: str) -> Tier | None:
    """None where there are no files of a block."""
    return "warm" if tier == "warm" else "cold" if tier == "cold" else None


def _nodes(heads: Heads, models: Collection[bytes], block_size: int) -> list[SlotNode]:
    """The blocks of these models of which there are files, those before others first."""
    sharers: dict[BlockKey, set[object]] = {}
    pinned: set[BlockKey] = set()
    starts: dict[BlockKey, int] = {}
    for one in _on_disk(heads):
        if one.head.model in models:
            chain = [*heads.kept.chain(one.last)][::-1]
            for number, key in enumerate(chain):
                sharers.setdefault(key, set()).add(conversation_of(one.head))
                starts[key] = number * block_size
            if one.head.is_pinned:
                pinned.update(chain)
    nodes: list[SlotNode] = []
    blocks = heads.kept.blocks
    for key in sorted(starts, key=lambda key: starts[key]):
        sizes, above = blocks[key].sizes, blocks[key].above
        while above is not None and _tier(blocks[above].sizes.tier) is None:
            above = blocks[above].above
        if (tier := _tier(sizes.tier)) is not None:
            node = SlotNode(
                id=key.name.hex(),
                parent=above.name.hex() if above is not None else None,
                start=starts[key],
                end=starts[key] + block_size,
                tier=tier,
                disk_bytes=sizes.warm if tier == "warm" else sizes.cold,
                is_pinned=key in pinned,
                num_conversations=len(sharers[key]),
            )
            nodes.append(node)
    return nodes
