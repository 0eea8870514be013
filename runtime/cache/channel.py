"""A worker's share of the KV store, whatever it is told of it: its life, its name, its figures."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from typing import Any, Protocol

import psutil
from msgspec import structs

from runtime import kv_messages, kv_sizes
from runtime.cache.deletion_log import Receipt
from runtime.config.settings import Settings
from runtime.kv_messages import (
    Drop,
    Dropped,
    Ended,
    Forget,
    HotBudget,
    InMemory,
    KvNews,
    MemoryAsked,
)
from runtime.models.identified import look
from runtime.models.identity import ModelFiles
from runtime.types import ModelSpec
from runtime.wire import Heartbeat, KvCounts, KvOptions
from store.types import ModelRow, RunFigures

_PATIENCE_S = 1.0
"""A worker answers between two steps; one that takes longer is not worth waiting for."""

_DROP_PATIENCE_S = 5.0
"""Deleting waits longer."""


_READING_SHARE = 6
"""Weights may take long, and what is computed meanwhile is written later."""

Send = Callable[[Any], None]
"""Sends a command to a worker."""


Report = kv_messages.KvReport
"""What workers report."""


def options_of(
    settings: Settings, spec: ModelSpec, budget: HotBudget | None, secret: bytes
) -> KvOptions:
    """What a worker for this model is loaded with; without a `budget` its KV has what is usual."""
    form, memory_bytes = settings.kv_form_of(spec.id), psutil.virtual_memory().total
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
        kv_bits=form.kv_bits,
        kv_start=form.kv_start,
        secret=secret,
        has_cold=settings.cold_store is not None,
        advance_bytes=kv_sizes.advance_budget(settings.cache_max_bytes),
    )


class KvServer(Protocol):
    """The store, as the supervisor sees it."""

    def receive(self) -> Receipt: ...

    def channel(self, spec: ModelSpec, budget: HotBudget | None = None) -> WorkerChannel: ...

    async def remembered(self) -> dict[str, ModelRow]: ...


class ChannelOwner(Protocol):
    """The store, as a channel sees it."""

    def options(self, spec: ModelSpec, budget: HotBudget | None) -> KvOptions: ...

    @property
    def patience_s(self) -> float: ...

    async def is_open(self) -> bool: ...

    def join(self, channel: WorkerChannel) -> None: ...

    def leave(self, channel: WorkerChannel) -> None: ...

    def hear(self, channel: WorkerChannel, event: Report) -> None: ...

    def measured(self, channel: WorkerChannel, run: RunFigures) -> None: ...


class WorkerChannel:
    """Between one worker and the store; it belongs to the event loop.

    First `options()`, then `open()` once the worker was told to load, then events, then `close()`.
    The store may be opened before that or at any time later, and again: the worker is told, and
    keeps what it has in memory. `names` key its blocks until the store is open.
    """

    def __init__(
        self, owner: ChannelOwner, spec: ModelSpec, budget: HotBudget | None = None
    ) -> None:
        self.spec = spec
        self.budget = budget
        """What KV its memory may have, as it was told last; None leaves that to the store."""
        self.kv = KvOptions()
        self.counts = KvCounts()
        self.files: ModelFiles | None = None
        """The model's, as they were before the worker read them; None: nobody can say."""
        self.model: bytes | None = None
        """The hash of what the worker read, once that is known."""
        self.model_hash = b""
        """The same, once the worker was told that the store is open; empty before."""
        self.measured_runs: list[RunFigures] = []
        """What it showed before it had a name."""
        self.welcoming = asyncio.Lock()
        self.send: Send | None = None
        """Says something to the worker; None before it was told to load and when it is gone."""
        self.is_closed = False
        """Whether the worker is gone."""
        self.names = os.urandom(16)
        self.unnamed: dict[str, Ended] = {}
        """The heads in its memory that it told before the store was open, by their ids."""
        self.unpublished: list[Ended] = []
        """Heads that it staged and that the store could not take yet."""
        self.before: Receipt | None = None
        """Held until it has names: what is deleted by model hashes may be of what it has."""
        self._owner = owner
        self._asked: dict[int, asyncio.Future[Dropped | InMemory | None]] = {}
        self._num_asked = 0
        self._dropping: dict[int, Receipt] = {}
        """What it was told to drop and has not dropped yet, by the numbers of these questions."""
        self._is_told = asyncio.Event()
        self._is_loaded = asyncio.Event()
        self._naming_wait_s: float | None = None
        self._is_named = asyncio.Event()
        self._is_named.set()

    @property
    def has_disk(self) -> bool:
        """Whether this worker was told that the store is open."""
        return bool(self.model_hash)

    @property
    def is_loaded(self) -> bool:
        """Whether the worker has read the model's files, or is gone."""
        return self._is_loaded.is_set()

    @property
    def key(self) -> str:
        """What its allowances go by."""
        return self.names.hex()

    @property
    def model_key(self) -> bytes:
        """By what the blocks in its memory are known: its model's hash, or names of its own."""
        return self.model_hash or self.names

    async def options(self) -> KvOptions:
        """What the worker is loaded with. It must not have begun to read the model's files."""
        options = self._owner.options(self.spec, self.budget)
        self.kv = structs.replace(options, names=self.names)
        if self.kv.root is not None:
            self.files = await asyncio.to_thread(look, self.spec)
        return self.kv

    def open(self, send: Send) -> None:
        """The worker was told to load: tell it what is kept of its model, unless it is gone."""
        if not self.is_closed:
            self.send = send
            self._owner.join(self)

    def close(self) -> None:
        """The worker is gone; everything it reported has arrived."""
        self.is_closed = True
        self._is_loaded.set()
        self._is_named.set()
        if self.send is not None:
            self.send = None
            for number in list(self._asked):
                self._answer(number, None)
            self._dropping.clear()
            self._owner.leave(self)

    def on_event(self, event: Report) -> None:
        """The worker reports."""
        if isinstance(event, Dropped | InMemory):
            self._dropping.pop(event.number, None)
            self._answer(event.number, event)
        else:
            self._owner.hear(self, event)

    def measured(self, run: RunFigures) -> None:
        """What the worker's run showed so far, for next time. Call it before `close()`."""
        self._owner.measured(self, run)

    async def told(self) -> None:
        """The worker has read the model's files: wait until it was told what is on disk.

        While the store is being opened as long as that takes, within reason, and not at all for
        one that failed.
        """
        self._is_loaded.set()
        if self._naming_wait_s is not None:
            self._wait_for_name(self._naming_wait_s)
        if self.kv.root is not None and await self._owner.is_open():
            with suppress(TimeoutError):
                async with asyncio.timeout(self._owner.patience_s):
                    await self._is_told.wait()

    async def named(self, patience_s: float) -> float:
        """Wait for what is being read for the model's name: until then nothing can be written.

        The seconds it took.
        """
        start_s = time.monotonic()
        with suppress(TimeoutError):
            async with asyncio.timeout(patience_s):
                await self._is_named.wait()
        return time.monotonic() - start_s

    def on_beat(self, beat: Heartbeat) -> None:
        """The worker's counters, as they are now."""
        if beat.kv is not None:
            self.counts = beat.kv

    def set_budget(self, budget: HotBudget) -> None:
        """So much KV may be in the worker's memory from now on, or from its start on."""
        is_new, self.budget = budget != self.budget, budget
        if is_new and self.send is not None:
            self.send(budget)

    # What follows is the store's side.

    def welcomed(self) -> None:
        """The worker was told by what it finds its KV in the store."""
        self._is_told.set()
        self._is_named.set()

    async def until_loaded(self) -> None:
        """Wait until the worker has read the model's files, or is gone."""
        await self._is_loaded.wait()

    def is_being_named(self, *, is_awaited: bool) -> None:
        """Its files are being read; requests wait a while for that, or not at all.

        The while begins when the model is loaded: before that nobody waits for the reading.
        """
        self._is_named.clear()
        self._naming_wait_s = self._owner.patience_s / _READING_SHARE if is_awaited else 0.0
        if self._is_loaded.is_set():
            self._wait_for_name(self._naming_wait_s)

    def _wait_for_name(self, wait_s: float) -> None:
        asyncio.get_running_loop().call_later(wait_s, self._is_told.set)

    def is_nameless(self) -> None:
        """It stays so: what its memory holds is not for the disk, and may be of any model."""
        self._is_told.set()
        self._is_named.set()

    def tell(self, news: KvNews | Forget) -> None:
        """Say it to the worker, if it is there."""
        if self.send is not None:
            self.send(news)

    def drop(self, names: Iterable[bytes]) -> None:
        """Have nothing of these in its memory; nobody waits for that."""
        if names := tuple(names):
            self.tell(Drop(number=0, names=names))

    async def dropped(self, names: Collection[bytes], before: Receipt) -> int | None:
        """The same; how many pieces it had. None: it has not done it yet, and `before` is held
        until it has.
        """

        def ask(number: int) -> Drop:
            self._dropping[number] = before
            return Drop(number, tuple(names))

        told = await self._ask(ask, _DROP_PATIENCE_S)
        if isinstance(told, Dropped):
            return told.num_pieces
        return None if self.send is not None else 0

    async def in_memory(self, names: Collection[bytes]) -> frozenset[bytes]:
        """Those of these that are in its memory; none if it does not answer."""
        told = await self._ask(lambda number: MemoryAsked(number, tuple(names)), _PATIENCE_S)
        return frozenset(told.names) if isinstance(told, InMemory) else frozenset()

    async def _ask(self, say: Ask, patience_s: float) -> Dropped | InMemory | None:
        if self.send is None:
            return None
        self._num_asked += 1
        number = self._num_asked
        asked = self._asked[number] = asyncio.get_running_loop().create_future()
        self.send(say(number))
        try:
            async with asyncio.timeout(patience_s):
                return await asked
        except TimeoutError:
            return None
        finally:
            del self._asked[number]

    def _answer(self, number: int, event: Dropped | InMemory | None) -> None:
        asked = self._asked.get(number)
        if asked is not None and not asked.done():
            asked.set_result(event)


class Ask(Protocol):
    """Makes a question of its number."""

    def __call__(self, number: int, /) -> Drop | MemoryAsked: ...
