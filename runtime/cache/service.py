"""`KvStore`: the server's side of the KV hierarchy, between the workers and the store.

It belongs to the event loop and never blocks it.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Generator, Iterable
from functools import partial
from pathlib import Path
from typing import TypeVar
from uuid import uuid4

import msgspec
import structlog

from runtime.cache.attachment import WorkerAttachment
from runtime.cache.channel import KvChannel
from runtime.cache.deletion_log import Models, Receipt
from runtime.cache.disk_budget import RECOVERED, Reserved
from runtime.cache.figures import (
    GAUGES,
    DiskFigures,
    KvFigures,
    WrittenGroup,
    added,
    disk_figures,
)
from runtime.cache.lifecycle import ColdStatus, KvStatus, StoreLife
from runtime.cache.maintenance import StoreLimits, evictor, keep_within_caps, make_room
from runtime.cache.naming import Naming, Reader
from runtime.cache.owned import Merged, News, OpenStore
from runtime.cache.publisher import Publisher
from runtime.cache.request_rows import RequestRows
from runtime.cache.reservations import Reservations
from runtime.cache.store_opening import open_store
from runtime.cache.unread_slots import BadSlots, Promotions
from runtime.cache.worker_channel import Report, options_of
from runtime.cache.worker_memory import WorkerMemory
from runtime.config.settings import Settings
from runtime.errors import StoreUnavailable
from runtime.models.identified import Identity
from runtime.slot_events import (
    Forget,
    HotBudget,
    PinWanted,
    RoomLeft,
    RoomWanted,
    SliceLearned,
    SlotBad,
    SlotQueued,
    SlotsGone,
    SlotsLeft,
    SlotStaged,
    SlotsUsed,
    SlotsWanted,
    StoreTrouble,
    TurnEnded,
    WritesPaused,
)
from runtime.types import ModelSpec
from runtime.wire import KvCounts, KvOptions
from store.errors import StoreError
from store.prefixes import PrefixFiles
from store.recovery import Recovery
from store.types import ModelRow, RunFigures

T = TypeVar("T")

Opener = Callable[[Path, str | None, bytes | None], OpenStore]

_RESTREAM_S = 1.0
_OPEN_PATIENCE_S = 3.0
_NAMES_PATIENCE_S = 60.0
_LOAD_SHARE = 4
"""Of the time that a load may take, what a loaded model may wait for the store."""

_TOUCH_S = 1.0
_CAP_S = 1.0
_MAKE_ROOM_S = 30.0
"""A disk that others fill is no reason to throw everything away at once."""

_TROUBLES = frozenset({"full", "failed"})

_log = structlog.stdlib.get_logger("hearth.store")


class KvStore:
    """Give each worker a `channel`; `start` before the first, `stop` after the last."""

    def __init__(
        self, settings: Settings, opener: Opener = open_store, reader: Reader = Identity.read
    ) -> None:
        self._settings = settings
        self._open_store = opener
        self._reserved: dict[str, Reserved] = {}
        self._life = StoreLife[OpenStore](self, has_disk=settings.kv_disk)
        self._channels: set[KvChannel] = set()
        self.memory = WorkerMemory(self._life, self._channels, StoreLimits.of(settings))
        self._retired: dict[str, KvCounts] = {}
        self._disk = DiskFigures()
        self.publisher = Publisher(self._life, self._channels, self._on_published)
        self.requests = RequestRows[OpenStore](self._life)
        naming = Naming[OpenStore](settings, self._life, reader)
        self._welcome = WorkerAttachment(settings, self._life, naming, self._on_named)
        self._promotions = Promotions(self._life, self._tell)
        self._bad = BadSlots(self._life, self._tell, self._bring, self.on_slots)
        self._reservations = Reservations(self._life)
        self._used: dict[str, float] = {}
        self._toucher: asyncio.Task[None] | None = None
        self._made_room_s = -_MAKE_ROOM_S
        self._capper: asyncio.Task[None] | None = None

    @property
    def status(self) -> KvStatus:
        """Whether the store works, and why not."""
        return self._life.status

    @property
    def cold(self) -> ColdStatus:
        """Whether there is a cold store and it answers."""
        return self._life.cold

    @property
    def store(self) -> OpenStore | None:
        """The open store; None while there is none."""
        return self._life.store

    def start(self) -> None:
        """Begin to open the store; returns at once."""
        self._life.start()

    async def stop(self) -> None:
        """Publish what has arrived, then close; the workers are gone already."""
        await self._life.close()

    def channel(self, spec: ModelSpec, budget: HotBudget | None = None) -> KvChannel:
        """A new worker's share, whose KV may take so much memory; None leaves it to us."""
        return KvChannel(self, spec, budget)

    async def remembered(self) -> dict[str, ModelRow]:
        """What former runs showed, by model id; nothing while there is no store."""
        await self.settled()
        rows = await self._life.attempt(lambda store: store.records.models()) or []
        return {row.label: row for row in reversed(rows)}

    def measured(self, channel: KvChannel, run: RunFigures) -> None:
        """Remember what a worker's run showed."""
        if channel.has_disk:
            self._life.spawn(self._remember(channel.model_hash, run))
        else:
            channel.measured_runs.append(run)

    async def settled(self, patience_s: float = _OPEN_PATIENCE_S) -> None:
        """Wait a moment for a store that is being opened."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(patience_s):
                await self._life.settled.wait()

    def receive(self) -> Receipt:
        """A request came: what is deleted from now on, its receipt is held, is deleted for it."""
        return self.publisher.deletions.receive()

    @property
    def secret(self) -> bytes:
        """By which keys stand for session ids."""
        return self._life.secret

    def is_deleted(self, received: Receipt, is_meant: Callable[[Forget], bool]) -> bool:
        """Whether something was deleted since then, and is meant."""
        return self.publisher.deletions.is_deleted(received, is_meant)

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

    async def refresh(self) -> None:
        """Count what is on disk, for `figures`."""
        self._disk = await self._life.attempt(disk_figures) or DiskFigures()

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

    @property
    def is_stopping(self) -> bool:
        """Whether long work is to come to its end."""
        return self._life.stopping.is_set()

    def hash_of(self, model: str) -> bytes | None:
        """The model hash of a model that is loaded and has a disk."""
        return self.memory.hash_of(model)

    def loaded_models(self) -> frozenset[bytes]:
        """The model hashes of the workers there are, as far as they are known."""
        return frozenset(one.model_hash for one in list(self._channels) if one.has_disk)

    def listen(self, tell: Callable[[WrittenGroup], None]) -> None:
        """Have `tell` called for every group of slots that was published."""
        self.publisher.listen(tell)

    async def chore(self, work: Callable[[OpenStore], Iterable[News]]) -> None:
        """Do long work in the thread for it, and tell the workers what changes as it does."""
        loop, stopping = asyncio.get_running_loop(), self._life.stopping

        def run(store: OpenStore) -> None:
            for news in work(store):
                loop.call_soon_threadsafe(self._tell, news)
                if stopping.is_set():
                    return

        if not stopping.is_set():
            await self._life.attempt(run, "chore")

    async def tend(self, work: Callable[[OpenStore, Callable[[SlotsGone | Merged], None]], T]) -> T:
        """Do what somebody asked for, in a thread; what it reports as gone the workers are told.

        Raises:
            StoreUnavailable: there is no store, or it fails.
        """
        await self.settled()
        await self.publisher.noted()
        loop, store = asyncio.get_running_loop(), self._life.store
        if store is None:
            raise StoreUnavailable(f"There is no store to work on: {self.status.message}.")

        def on_gone(news: SlotsGone | Merged) -> None:
            loop.call_soon_threadsafe(self._tell, news)

        try:
            return await asyncio.to_thread(work, store, on_gone)
        except StoreError as error:
            raise StoreUnavailable(f"The store fails: {error}.") from error

    async def tend_prefixes(self, work: Callable[[PrefixFiles], T]) -> T:
        """Do something to the files of learned prefixes, in a thread. Raises StoreUnavailable."""

        def tend(store: OpenStore, _: object) -> T:
            @contextlib.contextmanager
            def room(num_bytes: int) -> Generator[bool]:
                key = f"prefix-{uuid4().hex}"
                try:
                    yield store.disk.reserve(key, num_bytes, is_small=True)
                finally:
                    store.disk.release(key)

            return work(PrefixFiles(store.root, store.secret, room))

        return await self.tend(tend)

    @property
    def pins(self) -> WorkerMemory:
        """What is pinned."""
        return self.memory

    # What the store's life calls

    def open(self, secret: bytes | None) -> OpenStore:
        settings = self._settings
        return self._open_store(settings.kv_root, settings.cold_store, secret)

    def on_opening(self, store: OpenStore) -> None:
        loop, limits = asyncio.get_running_loop(), StoreLimits.of(self._settings)
        evict = evictor(store, limits, lambda news: loop.call_soon_threadsafe(self._tell, news))
        store.keep_to(self._settings.cache_max_bytes, evict, self._reserved)
        _log.info("conversations are kept", directory=str(self._settings.kv_root))

    def on_opened(self) -> None:
        for channel in self._channels:
            self._life.spawn(self._welcome.greet(channel))
        if (store := self._life.store) is not None:
            self._life.spawn(self._recover(store))

    async def _recover(self, store: OpenStore) -> None:
        """Put rows and files in agreement beside the requests; tell what is found as it is."""
        now_s = time.time()
        is_over, lock = self._life.stopping.is_set, store.replacing
        recovery = Recovery(store.root, store.database, store.cold, now_s, is_over, lock)
        recovery.reserve = partial(store.disk.reserve_spare, RECOVERED)

        def run(_: OpenStore) -> None:
            with store.moving:
                recovery.run()
            store.disk.release(RECOVERED)

        running = asyncio.ensure_future(self._life.attempt(run, "chore"))
        num_told = 0
        while not running.done():
            await asyncio.wait([running], timeout=_RESTREAM_S)
            if recovery.report.num_adopted != num_told:
                num_told = recovery.report.num_adopted
                self.on_slots()

    def on_slots(self) -> None:
        for channel in self._channels:
            self._life.spawn(self._welcome.tell_of_more(channel))

    def on_full(self) -> None:
        if time.monotonic() - self._made_room_s > _MAKE_ROOM_S:
            self._made_room_s = time.monotonic()
            self._life.spawn(self.chore(make_room))

    def on_probed(self) -> None:
        for channel in self._channels:
            channel.try_again()

    # What the channels call

    def options(self, spec: ModelSpec, budget: HotBudget | None) -> KvOptions:
        """What a worker for this model is loaded with."""
        return options_of(self._settings, spec, budget, self._life.secret)

    def join(self, channel: KvChannel) -> None:
        """A worker is loading: tell it what is on disk of its model, if there is a store yet."""
        self._channels.add(channel)
        if self._life.store is not None:
            self._life.spawn(self._welcome.greet(channel))

    def leave(self, channel: KvChannel) -> None:
        """A worker is gone."""
        self._channels.discard(channel)
        self._reservations.leave(channel)
        model, counts = channel.spec.id, msgspec.structs.replace(channel.counts, **GAUGES)
        self._retired[model] = added(self._retired.get(model, KvCounts()), counts)

    def deletions(self) -> list[tuple[Forget, Models]]:
        """What a worker that comes now is to be told was deleted, if it is of these models."""
        return self.publisher.deletions.known()

    def hear(self, channel: KvChannel, event: Report) -> None:
        """A worker reports."""
        match event:
            case SlotStaged():
                self._reservations.staged(event.header.id)
                self.publisher.take(channel, event)
            case TurnEnded():
                self.publisher.end_turn(channel, event)
            case SlotQueued() | SlotsLeft():
                self.publisher.note(channel, event)
            case RoomWanted():
                self._reservations.wanted(channel, event)
            case RoomLeft(key=key):
                self._reservations.left(key)
            case SlotsUsed(ids=ids, longer=longer):
                for one in ids:
                    self._used[one] = max(self._used.get(one, 0.0), longer.get(one, 0.0))
                if self._toucher is None or self._toucher.done():
                    self._toucher = self._life.spawn(self._touch())
            case SlotBad():
                self._life.spawn(self._bad.hear(channel, event))
            case PinWanted():
                self._life.spawn(self.memory.pin(channel.model_hash, event))
            case SlotsWanted(ids=ids):
                self._life.spawn(self._bring(channel, ids))
            case SliceLearned(num_tokens=size, device=device, was=was):
                _log.info("prefill slice learned", model=channel.spec.id, size=size, was=was)
                self.measured(channel, RunFigures(prefill_slice=size, slice_device=device))
            case StoreTrouble(reason=reason):
                if reason in _TROUBLES:
                    self._life.fail(reason, "a worker could not write a slot")
            case _:
                pass  # the channel takes answers

    def _on_named(self, channel: KvChannel) -> None:
        runs, channel.measured_runs = channel.measured_runs, []
        for run in runs:
            self.measured(channel, run)
        self._rest([channel])

    async def _bring(self, channel: KvChannel, ids: tuple[str, ...]) -> None:
        await self._promotions.bring(channel, ids)
        self._look_at_caps()

    def _on_published(self) -> None:
        self._rest(self._channels)
        self._look_at_caps()

    def _look_at_caps(self) -> None:
        if self._capper is None or self._capper.done():
            self._capper = self._life.spawn(self._cap())

    def _rest(self, channels: Iterable[KvChannel]) -> None:
        """Spare the disk when enough was written today."""
        store = self._life.store
        if store is None:
            return
        rest_s = store.write_budget.rest_s(self._settings.kv_daily_write_bytes, time.time())
        if rest_s:
            _log.warning("daily_writes_used_up", resumes_in_s=round(rest_s))
            for channel in channels:
                channel.tell(WritesPaused(rest_s))

    async def _cap(self) -> None:
        """Writes may have exceeded a cap; several at a time are looked at together."""
        await self._life.pause(_CAP_S)
        limits = StoreLimits.of(self._settings)
        await self.chore(lambda store: keep_within_caps(store, limits))

    async def _touch(self) -> None:
        await self._life.pause(_TOUCH_S)
        used, self._used = self._used, {}
        await self._life.attempt(lambda store: store.touch(list(used), used))

    def _tell(self, news: News, besides: KvChannel | None = None) -> None:
        if not news.ids:
            return
        for channel in self._channels - {besides}:
            if not isinstance(news, Merged):
                channel.tell(news)
            elif channel.model_hash == news.model:
                channel.tell(news.told)
