"""`KvStore`: the server's side of the KV hierarchy, between the workers and the store.

It belongs to the event loop and never blocks it.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Collection, Iterable
from typing import TypeVar

import msgspec
import psutil
import structlog

from runtime import kv_sizes
from runtime.bad_slots import BadSlots
from runtime.disk_budget import Evict
from runtime.errors import StoreUnavailable
from runtime.housekeeping import Limits, evictor, keep_within_caps, make_room
from runtime.identified import Identity
from runtime.kv_channel import KvChannel, KvEvent
from runtime.kv_figures import GAUGES, DiskFigures, KvFigures, added, disk_figures
from runtime.naming import Naming, Reader
from runtime.open_store import Demoted, Gone, Merged, News, OpenStore
from runtime.promotions import Promotions
from runtime.publisher import Publisher
from runtime.request_rows import RequestRows
from runtime.reservations import Reservations
from runtime.settings import Settings
from runtime.store_life import ColdStatus, KvStatus, Opener, StoreLife
from runtime.store_opening import open_store
from runtime.types import ModelSpec
from runtime.welcome import Welcome
from runtime.wire import (
    HotBudget,
    KvCounts,
    KvOptions,
    PinWanted,
    RoomLeft,
    RoomWanted,
    SlotBad,
    SlotQueued,
    SlotsLeft,
    SlotStaged,
    SlotsUsed,
    SlotsWanted,
    StoreTrouble,
    TurnEnded,
)
from runtime.worker_memory import WorkerMemory
from store.errors import StoreError
from store.keyed_names import Whom
from store.types import ModelRow, Run

T = TypeVar("T")

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
        self._life = StoreLife(settings, self, opener)
        self._channels: set[KvChannel] = set()
        self.memory = WorkerMemory(self._life, self._channels, Limits.of(settings))
        self._retired: dict[str, KvCounts] = {}
        self._disk = DiskFigures()
        self.publisher = Publisher(self._life, self._channels, self._on_published)
        self.requests = RequestRows(self._life)
        naming = Naming(settings, self._life, reader)
        self._welcome = Welcome(settings, self._life, naming, self._on_named)
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

    def measured(self, channel: KvChannel, run: Run) -> None:
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

    async def _remember(self, model: bytes, run: Run) -> None:
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

    def loaded_models(self) -> frozenset[bytes]:
        """The model hashes of the workers there are, as far as they are known."""
        return frozenset(one.model_hash for one in list(self._channels) if one.has_disk)

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

    async def tend(self, work: Callable[[OpenStore, Callable[[Gone | Merged], None]], T]) -> T:
        """Do what somebody asked for, in a thread; what it reports as gone the workers are told.

        Raises:
            StoreUnavailable: there is no store, or it fails.
        """
        await self.settled()
        await self.publisher.noted()
        loop, store = asyncio.get_running_loop(), self._life.store
        if store is None:
            raise StoreUnavailable(f"There is no store to work on: {self.status.message}.")

        def on_gone(news: Gone | Merged) -> None:
            loop.call_soon_threadsafe(self._tell, news)

        try:
            return await asyncio.to_thread(work, store, on_gone)
        except StoreError as error:
            raise StoreUnavailable(f"The store fails: {error}.") from error

    async def forget(self, whom: Whom, models: Collection[bytes] | None = None) -> int:
        """The same as `Publisher.forget`."""
        return await self.publisher.forget(whom, models)

    # The household

    def on_opened(self) -> None:
        for channel in self._channels:
            self._life.spawn(self._welcome.greet(channel))

    def evictor(self, store: OpenStore) -> Evict:
        loop, limits = asyncio.get_running_loop(), Limits.of(self._settings)
        return evictor(store, limits, lambda news: loop.call_soon_threadsafe(self._tell, news))

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

    # The desk of the channels

    def options(self, spec: ModelSpec, budget: HotBudget | None) -> KvOptions:
        """What a worker for this model is loaded with."""
        settings = self._settings
        memory_bytes = psutil.virtual_memory().total
        if budget is None:
            hot_bytes = settings.hot_bytes or kv_sizes.hot_budget(memory_bytes, spec.nbytes)
            budget = HotBudget(num_bytes=hot_bytes)
        return KvOptions(
            root=str(settings.kv_root) if settings.kv_disk else None,
            block_size=settings.block_size,
            hot_bytes=budget.num_bytes,
            pool_bytes=budget.pool_bytes,
            most_bytes=budget.most_bytes,
            prewarm_bytes=int(budget.num_bytes * settings.prewarm_share),
            queue_bytes=settings.kv_write_queue_bytes or kv_sizes.queue_budget(memory_bytes),
            kv_bits=settings.kv_form_of(spec.id).kv_bits,
            secret=self._life.secret,
        )

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

    def hear(self, channel: KvChannel, event: KvEvent) -> None:
        """A worker reports."""
        match event:
            case SlotStaged() | TurnEnded():
                if isinstance(event, SlotStaged):
                    self._reservations.staged(event.header.id)
                self.publisher.hear(channel, event)
            case SlotQueued() | SlotsLeft():
                self.publisher.note(channel, event)
            case RoomWanted() | RoomLeft():
                self._reservations.hear(channel, event)
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
            case StoreTrouble(reason=reason):
                if reason in _TROUBLES:
                    self._life.fail(reason, "a worker could not write a slot")

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
        rest_s = store.wear.rest_s(self._settings.kv_daily_write_bytes, time.time())
        if rest_s:
            _log.warning("daily_writes_used_up", resumes_in_s=round(rest_s))
            for channel in channels:
                channel.tell_rest(rest_s)

    async def _cap(self) -> None:
        """Writes may have exceeded a cap; several at a time are looked at together."""
        await self._life.pause(_CAP_S)
        limits = Limits.of(self._settings)
        await self.chore(lambda store: keep_within_caps(store, limits))

    async def _touch(self) -> None:
        await self._life.pause(_TOUCH_S)
        used, self._used = self._used, {}
        await self._life.attempt(lambda store: store.touch(list(used), used))

    def _tell(self, news: News, besides: KvChannel | None = None) -> None:
        for channel in self._channels - {besides}:
            match news:
                case Gone(ids, reason):
                    channel.tell_gone(ids, reason)
                case Demoted(ids):
                    channel.tell_demoted(ids)
                case Merged(model, ids, rows):
                    if channel.model_hash == model:
                        channel.tell_merged(ids, rows)
