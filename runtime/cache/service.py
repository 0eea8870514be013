"""`KvStore`: the server's side of KV by blocks, between the workers and the store.

It belongs to the event loop and never blocks it.
"""

from __future__ import annotations

import asyncio
import time
from array import array
from collections.abc import Callable, Collection, Coroutine, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import structlog
from msgspec import structs

from runtime.cache.channel import Report, WorkerChannel, options_of
from runtime.cache.deletion_log import DeletionLog, Models, Receipt
from runtime.cache.figures import (
    GAUGES,
    DiskFigures,
    KvFigures,
    TierFigure,
    WrittenGroup,
    added,
)
from runtime.cache.inventory import Inventory, conversation_of, whom_of
from runtime.cache.lifecycle import ColdStatus, KvStatus, StoreLife, StoreThread
from runtime.cache.memory import WorkersMemory
from runtime.cache.naming import Naming, Reader
from runtime.cache.opened import BlockStore, open_blocks
from runtime.cache.pins import Pins
from runtime.cache.request_rows import RequestRows
from runtime.cache.tending import (
    Gone,
    delete,
    delete_head,
    deleted,
    deleted_head,
    heads_meant,
    terms_of,
)
from runtime.cache.upkeep import make_room
from runtime.config.settings import Settings
from runtime.errors import StoreUnavailable, UnknownConversation
from runtime.kv_messages import (
    Allow,
    Allowance,
    Brought,
    Damaged,
    Ended,
    Forget,
    HotBudget,
    Kept,
    Opened,
    SliceLearned,
    Trouble,
    TurnsFound,
    TurnsWanted,
    Want,
)
from runtime.models.identified import Identity
from runtime.types import ModelSpec
from runtime.wire import KvCounts, KvOptions
from store.block_names import HashChain
from store.head_file import Head, HeadFile, owner_of
from store.heads import Heads, Published, TurnedAway
from store.keyed_names import Whom as Named
from store.slots import BlockKey, Slots
from store.types import ModelRow, RunFigures
from store.upkeep import disk_room, sweep_staged

T = TypeVar("T")

_OPEN_PATIENCE_S = 3.0
_NAMES_PATIENCE_S = 60.0
_PUBLISHED_PATIENCE_S = 1.0
_LOAD_SHARE = 4
"""Of the time that a load may take, what a loaded model may wait for the store."""

_MAX_HEADS = 4
"""So many heads are read to find a conversation's turns; each has all turns before its end."""

_TROUBLES = frozenset({"full", "failed"})

_log = structlog.stdlib.get_logger("hearth.store")


class Removed(NamedTuple):
    """What a deletion removed: conversations, blocks on disk, and pieces of workers' memory.

    `num_pieces` is None where a worker has not dropped it yet, which it does before anything that
    it reads after that.
    """

    num_conversations: int
    num_slots: int
    num_pieces: int | None


class Deleting:
    """A deletion that is under way, and the conversations of heads that it turned away."""

    def __init__(self, whom: Named, models: Collection[bytes] | None) -> None:
        self._whom, self._models = whom, models
        self.conversations: set[object] = set()

    def hear(self, secret: bytes, said: TurnedAway) -> None:
        """A head was turned away, perhaps by another deletion; `secret` keys its owner."""
        if heads_meant(secret, self._whom, self._models).means(said.head):
            self.conversations.add(conversation_of(said.head))


class KvStore:
    """Give each worker a `channel`; `start` before the first, `stop` after the last."""

    def __init__(self, settings: Settings, reader: Reader = Identity.read) -> None:
        self._settings = settings
        self._life = StoreLife(self, has_disk=settings.kv_disk)
        self.requests = RequestRows(self._life)
        self._retired: dict[str, KvCounts] = {}
        self._disk = DiskFigures()
        self._naming = Naming(settings, self._life, reader)
        self._channels: set[WorkerChannel] = set()
        self.memory = WorkersMemory(self._life, self._channels, self.all_heads, settings)
        self.pins = Pins(settings, self._life, self.hash_of)
        self._deletions = DeletionLog()
        self._listeners: list[Callable[[WrittenGroup], None]] = []
        self._publishing: set[asyncio.Task[None]] = set()
        """Heads that were told and are being published, or turned away."""
        self._settled = 0
        """The number up to which deletions are known to be over in the store."""
        self._deleting: set[Deleting] = set()
        self._is_asked: Callable[[str], bool] = lambda _: False
        self._unnamed = Heads(None, Slots(Path()), self._chain_of_unnamed, time.monotonic)
        """Heads of workers that have no names of a store, which are in their memory only."""

    @property
    def settings(self) -> Settings:
        return self._settings

    @property
    def status(self) -> KvStatus:
        """Whether the store works, and why not."""
        return self._life.status

    @property
    def cold(self) -> ColdStatus:
        """Whether there is a cold store and it answers."""
        return self._life.cold

    @property
    def store(self) -> BlockStore | None:
        """The open store; None while there is none."""
        return self._life.store

    @property
    def secret(self) -> bytes:
        """By which keys stand for session ids."""
        return self._life.secret

    def start(self) -> None:
        """Begin to open the store; returns at once."""
        self._life.start()

    async def stop(self) -> None:
        """Publish what has arrived, then close; the workers are gone already."""
        await self._life.close()

    def channel(self, spec: ModelSpec, budget: HotBudget | None = None) -> WorkerChannel:
        """A new worker's share, whose KV may take so much memory; None leaves it to us."""
        return WorkerChannel(self, spec, budget)

    def listen(self, tell: Callable[[WrittenGroup], None]) -> None:
        """Have `tell` called for what was written for each head, once that is published."""
        self._listeners.append(tell)

    def ask_requests(self, is_asked: Callable[[str], bool]) -> None:
        """Who is asked whether there is an open request of a conversation, by its session id."""
        self._is_asked = is_asked

    def loaded(self) -> list[WorkerChannel]:
        """Those of the workers that have names of the store."""
        return [one for one in self._channels if one.has_disk]

    async def remembered(self) -> dict[str, ModelRow]:
        """What former runs showed, by model id; nothing while there is no store."""
        await self.settled()
        rows = await self._life.attempt(lambda store: store.records.models()) or []
        return {row.label: row for row in reversed(rows)}

    def measured(self, channel: WorkerChannel, run: RunFigures) -> None:
        """Remember what a worker's run showed."""
        if channel.has_disk:
            self._life.spawn(self._remember(channel.model_hash, run))
        else:
            channel.measured_runs.append(run)

    async def settled(self, patience_s: float = _OPEN_PATIENCE_S) -> None:
        """Wait a moment for a store that is being opened."""
        with suppress(TimeoutError):
            async with asyncio.timeout(patience_s):
                await self._life.settled.wait()

    def receive(self) -> Receipt:
        """A request came: what is deleted from now on, its receipt is held, is deleted for it."""
        return self._deletions.receive()

    def is_deleted(self, received: Receipt, is_meant: Callable[[Forget], bool]) -> bool:
        """Whether something was deleted since then, and is meant."""
        return self._deletions.is_deleted(received, is_meant)

    async def is_open(self) -> bool:
        """Whether there is a store, while one is being opened after `patience_s` at the latest."""
        await self.settled(self.patience_s)
        return self._life.store is not None

    @property
    def patience_s(self) -> float:
        """How long a loaded model waits for a store that is being opened, and to be told of it.

        Computing what may be on disk, or what a swap would then take away, costs more than that.
        """
        return min(_NAMES_PATIENCE_S, self._settings.load_timeout_s / _LOAD_SHARE)

    async def _remember(self, model: bytes, run: RunFigures) -> None:
        await self._life.attempt(lambda store: store.records.measured(model, run).result())

    @property
    def is_stopping(self) -> bool:
        """Whether long work is to come to its end."""
        return self._life.stopping.is_set()

    def loaded_models(self) -> frozenset[bytes]:
        """The model hashes of the workers there are, as far as they are known."""
        return frozenset(one.model_hash for one in self._channels if one.has_disk)

    async def refresh(self) -> None:
        """Count what is on disk, for `figures`."""
        self._disk = await self._life.attempt(_disk_figures) or DiskFigures()

    def figures(self) -> KvFigures:
        """All counters as they are now."""
        models = dict(self._retired)
        for channel in self._channels:
            model = channel.spec.id
            models[model] = added(models.get(model, KvCounts()), channel.counts)
        store = self._life.store
        counts = dict(store.counts) if store is not None else {}
        is_up = self.status.state == "ok" if self.status.state != "off" else None
        return KvFigures(models, counts, self._disk, self._life.reach.is_away, is_up)

    def inventory(self, *, on_disk: bool = False) -> Inventory:
        """What is kept on disk; unless that is asked for alone, what is in memory only as well,
        where it has names of the store.

        Raises:
            StoreUnavailable: there is no store.
        """
        store = self._life.store
        if store is None:
            raise StoreUnavailable(f"There is no store to work on: {self.status.message}.")
        size, wall_s = self._settings.block_size, store.clock.wall_s
        return Inventory(store.heads, size, store.secret, wall_s, on_disk=on_disk)

    def hint(self, whom: Named, pause_s: float | None, *, is_over: bool) -> None:
        """These conversations go on in so many seconds, or not at all."""
        for heads in self.all_heads():
            meant = heads_meant(self.secret_of(heads), whom, None)
            known = [*heads.known.items()]  # at once, as the lock may be waited for
            ids = [head_id for head_id, one in known if meant.means(one.head)]
            self.memory.hint(ids, pause_s, is_over=is_over)

    def all_heads(self) -> list[Heads]:
        """Those of workers without names of a store, and those of the store."""
        store = self._life.store
        return [self._unnamed] if store is None else [self._unnamed, store.heads]

    def secret_of(self, heads: Heads) -> bytes:
        """What keys the owners of these heads."""
        return b"" if heads is self._unnamed else self.secret

    def hash_of(self, model: str) -> bytes | None:
        """The model hash of a model that is loaded and has a disk."""
        return next((c.model_hash for c in self.loaded() if model in c.spec.names), None)

    # Deleting

    async def delete(self, whom: Named, models: Collection[bytes] | None = None) -> Removed:
        """Delete what these said, on disk and in memory, and what is on its way of it.

        A conversation of which there is only a request that waits counts as one.

        Raises:
            StoreUnavailable: what is on disk is not deleted; what is in memory is.
        """
        await self.settled()
        before = self._deletions.receive()
        news = self._deletions.record(whom, self.secret, models)
        number = news.number
        is_asked = whom.session_id is not None and self._is_asked(whom.session_id)
        self._deleting.add(deleting := Deleting(whom, models))
        try:
            gone = await self._life.attempt(lambda store: delete(store, whom, models, number))
            is_deleted = gone is not None or not self._settings.kv_disk
            unnamed = deleted(self._unnamed, heads_meant(b"", whom, models), number)
            every = [one for one in (gone, unnamed) if one is not None]
            removed = await self._dropped(before, (news, models), every, is_deleted=is_deleted)
        finally:
            self._deleting.discard(deleting)
        found = deleting.conversations.union(*(one.conversations for one in every))
        return removed._replace(num_conversations=max(len(found), int(is_asked)))

    async def delete_head(self, head_id: str) -> Removed:
        """The same of a conversation without a session id, which this head is.

        Raises:
            UnknownConversation: there is no such head.
            StoreUnavailable: as `delete`.
        """
        await self.settled()
        heads = next((one for one in self.all_heads() if head_id in one.known), None)
        if heads is None:
            message = f"The conversation {head_id} has gone meanwhile."
            raise UnknownConversation(message, "conversation")

        head, size = heads.known[head_id].head, self._settings.block_size
        whom = await self._with(heads, lambda: whom_of(heads, head_id, size))
        if whom is None:
            raise StoreUnavailable(f"The store fails: {self.status.message}.")
        before = self._deletions.receive()
        news = self._deletions.record(whom, self.secret, {head.model})
        if heads is self._unnamed:
            gone = deleted_head(heads, head_id, news.number)
        else:
            gone = await self._life.attempt(lambda store: delete_head(store, head_id, news.number))
        every = [gone] if gone is not None else []
        told = news, {head.model}
        return await self._dropped(before, told, every, is_deleted=bool(every))

    async def _with(self, heads: Heads, work: Callable[[], T]) -> T | None:
        """What is done to the store's heads is done in its thread; None where it fails."""
        if heads is self._unnamed:
            return work()
        return await self._life.attempt(lambda _: work())

    async def _dropped(
        self,
        before: Receipt,
        news: tuple[Forget, Models],
        gone: Sequence[Gone],
        *,
        is_deleted: bool,
    ) -> Removed:
        """Have the workers keep nothing of what was deleted; what that was.

        Heads of it may be on their way until the workers have dropped it: the deletion is known
        for as long as the receipt `before` is held.
        """
        by_model: dict[bytes, list[bytes]] = {}
        for key in (key for one in gone for key in one.keys):
            by_model.setdefault(key.model, []).append(key.name)
        asking: list[Coroutine[Any, Any, int | None]] = []
        for channel in list(self._channels):
            self._tell_deletion(channel, *news)
            asking.append(channel.dropped(by_model.get(channel.model_key, ()), before))
        told = await asyncio.gather(*asking)
        if publishing := [*self._publishing]:  # what it was told of while it dropped the rest
            await asyncio.wait(publishing)
        if not is_deleted:
            raise StoreUnavailable(f"There is no store to work on: {self.status.message}.")
        return Removed(
            sum(len(one.conversations) for one in gone),
            sum(one.num_slots for one in gone),
            None if None in told else sum(filter(None, told)),
        )

    def _tell_deletion(self, channel: WorkerChannel, news: Forget, models: Models) -> None:
        """Tell a worker of what is deleted, unless that is known to be of other weights."""
        if models is None or channel.model_key in models:
            channel.tell(news)

    def drop(self, keys: Iterable[BlockKey]) -> None:
        """Have no worker keep in memory what nobody has any more."""
        by_model: dict[bytes, list[bytes]] = {}
        for key in keys:
            by_model.setdefault(key.model, []).append(key.name)
        for channel in self._channels:
            channel.drop(by_model.get(channel.model_key, ()))

    # What the store's life calls

    def open(self, secret: bytes | None) -> BlockStore:
        return open_blocks(self._settings.kv_root, terms_of(self._settings), secret)

    def on_opening(self, store: BlockStore) -> None:
        for news, models in self._deletions.known():
            store.heads.remember(heads_meant(store.secret, news.whom, models), news.number)
        _log.info("conversations are kept", directory=str(store.root))

    def on_opened(self) -> None:
        for channel in self._channels:
            self._life.spawn(self._greet(channel))

    def on_full(self) -> None:
        self._life.spawn(self._make_room())

    def on_probed(self) -> None:
        for channel in self._channels:
            if channel.has_disk:
                self._tell_names(channel)
                self._publish_again(channel)

    # What the channels call

    def options(self, spec: ModelSpec, budget: HotBudget | None) -> KvOptions:
        """What a worker for this model is loaded with."""
        return options_of(self._settings, spec, budget, self._life.secret)

    def join(self, channel: WorkerChannel) -> None:
        """A worker is loading: tell it by what names it finds its KV, if there is a store yet.

        First what was deleted: requests that are to be handed to it may have come before that.
        """
        self._channels.add(channel)
        channel.before = self._deletions.hold() if self._settings.kv_disk else None
        for news, models in self._deletions.known():
            self._tell_deletion(channel, news, models)
        if self._life.store is not None:
            self._life.spawn(self._greet(channel))

    def leave(self, channel: WorkerChannel) -> None:
        """A worker is gone, and with it what was in its memory."""
        self._channels.discard(channel)
        channel.before = None
        model, counts = channel.spec.id, structs.replace(channel.counts, **GAUGES)
        self._retired[model] = added(self._retired.get(model, KvCounts()), counts)
        self._unnamed.leave_memory(channel.names)
        self._life.spawn(self._leave(channel, time.time()))

    async def _leave(self, channel: WorkerChannel, before_s: float) -> None:
        """After what it told last was published: what it left of unfinished turns goes."""
        model = channel.model_hash
        is_last = all(one.model_hash != model for one in self._channels)

        def leave(store: BlockStore) -> None:
            if model and is_last:
                store.heads.leave_memory(model)
            store.room.leave(channel.key, model if is_last else b"", before_s)
            for ended in channel.unpublished:  # its process may live on
                Path(ended.path or "").unlink(missing_ok=True)
            sweep_staged(store.staging_folders, before_s)

        if publishing := [*self._publishing]:
            await asyncio.wait(publishing)
        await self._life.attempt(leave)

    def hear(self, channel: WorkerChannel, event: Report) -> None:
        """A worker reports."""
        match event:
            case Ended(path=None):
                self._keep_in_memory(channel, event)
            case Ended():
                self._spawn(self._publish(channel, event))
            case Allow():
                self._life.spawn(self._allow(channel, event))
            case Want():
                self._life.spawn(self._bring(channel, event.names))
            case Damaged(names=names):
                keys = [BlockKey(channel.model_hash, one) for one in names]
                self._life.spawn(self._note_damaged(keys))
            case Trouble(reason=reason):
                if reason in _TROUBLES:
                    self._life.fail(reason, "a worker could not write")
            case TurnsWanted():
                self._life.spawn(self._find_turns(channel, event))
            case SliceLearned(num_tokens=size, device=device, was=was):
                _log.info("prefill slice learned", model=channel.spec.id, size=size, was=was)
                self.measured(channel, RunFigures(prefill_slice=size, slice_device=device))
            case _:
                pass

    # Names

    def _chain_of_unnamed(self, names: bytes) -> HashChain:
        return HashChain(names, b"", block_size=self._settings.block_size)

    async def _greet(self, channel: WorkerChannel) -> None:
        """Tell a worker by what names it finds its KV in the store that was opened."""
        async with channel.welcoming:
            model = await self._naming.of(channel)
            if self._life.store is None or model is None:
                return
            row = await self._life.attempt(lambda one: one.records.model(model))
            channel.model_hash = model
            for news, models in self._deletions.known():
                if models is not None:
                    self._tell_deletion(channel, news, models)
            self._tell_names(channel, row)
            unnamed, channel.unnamed = channel.unnamed, {}
            kept = [ended for one, ended in unnamed.items() if one in self._unnamed.known]
            self._unnamed.leave_memory(channel.names)
            keeping = [self._spawn(self._keep_named(channel, ended)) for ended in kept]
            await asyncio.gather(*keeping)  # what was deleted of it leaves memory before it is used
            channel.before = None
            self._publish_again(channel)
            runs, channel.measured_runs = channel.measured_runs, []
            for run in runs:
                self.measured(channel, run)
            channel.welcomed()
        await self.memory.warm(channel, channel.kv.prewarm_bytes)

    def _tell_names(self, channel: WorkerChannel, row: ModelRow | None = None) -> None:
        size, device = (row.prefill_slice, row.slice_device or "") if row else (None, "")
        channel.tell(Opened(channel.model_hash, self.secret, size, device))

    # Heads

    def _keep_in_memory(self, channel: WorkerChannel, ended: Ended) -> None:
        """A head that is in a worker's memory only."""
        if not channel.has_disk:
            said = self._unnamed.publish(
                _told_head(self._chain_of_unnamed(channel.names), channel.names, b"", ended),
                ended.received,
                ended.ends,
            )
            if isinstance(said, TurnedAway):
                channel.drop(one.name for one in self._turned_away(b"", said))
            else:
                channel.unnamed[ended.head_id] = ended
                channel.unnamed = {
                    one: told for one, told in channel.unnamed.items() if one in self._unnamed.known
                }
            return
        self._spawn(self._keep_named(channel, ended))

    async def _keep_named(self, channel: WorkerChannel, ended: Ended) -> None:
        model = channel.model_hash

        def keep(store: BlockStore) -> Published | TurnedAway:
            head = _told_head(store.chain_of(model), model, store.secret, ended)
            return store.heads.publish(head, ended.received, ended.ends)

        said = await self._life.attempt(keep)
        if isinstance(said, TurnedAway):
            self.drop(self._turned_away(self.secret, said))

    async def _publish(self, channel: WorkerChannel, ended: Ended) -> None:
        """Have a staged head, and say so: from then on its blocks stay."""
        store, start_ns = self._life.store, time.time_ns()
        said = None
        if store is not None:
            tried: list[Published | TurnedAway | None] = []
            await self._life.attempt(lambda one: tried.append(self._published(one, channel, ended)))
            if not tried:
                channel.unpublished.append(ended)
                return
            (said,) = tried
            # Requests of the others, and of those that are tried again, may have come before.
            if len(self._publishing) == 1 and not any(one.unpublished for one in self._channels):
                self._settle(self._deletions.floor)
        is_kept = isinstance(said, Published)
        lacking = tuple(key.name for key in said.lacking) if isinstance(said, Published) else ()
        channel.tell(Kept(ended.head_id, is_kept, lacking))
        if isinstance(said, TurnedAway):
            self.drop(self._turned_away(self.secret, said))
        if isinstance(said, Published):
            num_slots, num_bytes = said.num_new_slots, ended.num_bytes
            for tell in self._listeners:
                tell(WrittenGroup(num_slots, num_bytes, start_ns, time.time_ns()))

    async def published(self) -> None:
        """Wait a moment for heads that were told: who asks after an answer is to see it."""
        if publishing := [*self._publishing]:
            await asyncio.wait(publishing, timeout=_PUBLISHED_PATIENCE_S)

    def _settle(self, floor: int) -> None:
        """Nothing is on its way any more that came before the deletion after this one."""
        if floor > self._settled:
            self._settled = floor
            self._life.spawn(self._life.attempt(lambda store: store.heads.settle(floor)))

    def _turned_away(self, secret: bytes, said: TurnedAway) -> list[BlockKey]:
        """What leaves memory with it; who deletes it is to know that it was there."""
        for one in self._deleting:
            one.hear(secret, said)
        return said.gone

    def _published(
        self, store: BlockStore, channel: WorkerChannel, ended: Ended
    ) -> Published | TurnedAway | None:
        said = store.publish(channel.key, ended)
        if isinstance(said, Published):
            self.pins.check(store, said.known)
        return said

    def _publish_again(self, channel: WorkerChannel) -> None:
        waiting, channel.unpublished = channel.unpublished, []
        for ended in waiting:
            self._spawn(self._publish(channel, ended))

    def _spawn(self, publishing: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Who deletes waits for it."""
        task = self._life.spawn(publishing)
        self._publishing.add(task)
        task.add_done_callback(self._publishing.discard)
        return task

    # Room

    async def _allow(self, channel: WorkerChannel, asked: Allow) -> None:
        def allow(store: BlockStore) -> int:
            age_s = time.monotonic() - asked.made_s
            num_bytes, is_pinned = asked.num_bytes, asked.is_pinned
            return store.room.allow(channel.key, num_bytes, age_s, is_pinned=is_pinned)

        if publishing := [*self._publishing]:  # what they go through may leave then
            await asyncio.wait(publishing)
        given = await self._life.attempt(allow, "room")
        channel.tell(Allowance(given or 0))

    async def _find_turns(self, channel: WorkerChannel, wanted: TurnsWanted) -> None:
        """A request waits to be read; not while a store is opened."""
        model, digests, store = channel.model_hash, wanted.digests, self._life.store
        found: list[Path] = []
        try:
            if store is not None:
                find = store.heads.with_turns
                found = await asyncio.to_thread(find, model, wanted.owner, digests, _MAX_HEADS)
        finally:
            channel.tell(TurnsFound(number=wanted.number, paths=tuple(map(str, found))))

    async def _bring(self, channel: WorkerChannel, names: Sequence[bytes]) -> None:
        keys = [BlockKey(channel.model_hash, one) for one in names]
        there = await self._life.attempt(lambda store: store.bring(keys), "promote") or []
        is_away = self._life.store is not None and self._life.store.is_away(keys)
        channel.tell(Brought(tuple(one.name for one in there), tuple(names), is_away))

    async def _note_damaged(self, keys: Sequence[BlockKey]) -> None:
        await self._life.attempt(lambda store: store.note_damaged(keys))

    async def _make_room(self) -> None:
        await self.chore(make_room)

    async def tend_cold(self, work: Callable[[BlockStore], T]) -> T:
        """What is done to the cold store, in the thread for it. Raises StoreUnavailable."""
        done = await self._life.attempt(work, "promote")
        if done is None:
            raise StoreUnavailable(f"The store fails: {self.status.message}.")
        return done

    async def chore(
        self, work: Callable[[BlockStore], Iterable[BlockKey]], thread: StoreThread = "promote"
    ) -> bool:
        """Do long work in a thread, without another that for the cold store; what it says is gone
        leaves the workers' memory. Whether it was done.
        """
        gone = None if self.is_stopping else await self._life.attempt(work, thread)
        self.drop(gone or ())
        return gone is not None


def _disk_figures(store: BlockStore) -> DiskFigures:
    """What is on disk now. Raises StoreError."""
    labels = {row.hash: row.label for row in store.records.models()}
    tiers = tuple(
        TierFigure(labels.get(model) or model.hex()[:16], tier, *sums)
        for (model, tier), sums in store.totals().items()
    )
    room = disk_room(store.root)
    return DiskFigures(tiers, room.free_bytes, room.floor_bytes, store.room.warm_bytes)


def _told_head(chain: HashChain, model: bytes, secret: bytes, ended: Ended) -> HeadFile:
    """A head that was told with its tokens."""
    token_ids = array("I", ended.token_ids)
    owner = owner_of(secret, ended.asker, chain.root_of(ended.tenant))
    head = Head(
        id=ended.head_id,
        model=model,
        owner=owner,
        num_tokens=len(token_ids),
        name=ended.asker.model,
        continues=ended.continues,
    )
    return HeadFile(head, token_ids)
