"""One worker's share of the KV store: what it is told of the disk, what it reports, its figures."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Protocol

from runtime.cache.deletion_log import Models
from runtime.cache.told_deletions import ToldDeletions
from runtime.models.identified import look
from runtime.models.identity import ModelFiles
from runtime.slot_events import (
    AllSlotsTold,
    Attach,
    Forget,
    Forgotten,
    Hint,
    HotAsked,
    HotBudget,
    HotNow,
    KvNews,
    KvReport,
    RoomGiven,
)
from runtime.types import ModelSpec
from runtime.wire import Heartbeat, KvCounts, KvOptions
from store.keyed_names import Asker
from store.types import RunFigures, SlotHeader

MAX_SLOTS = 2000
"""Slots in one frame: a worker must not be kept from its requests for long."""

_PATIENCE_S = 1.0
"""A worker answers between two steps; one that takes longer is not worth waiting for."""

_READING_SHARE = 6
"""Weights may take long, and what is computed meanwhile is written later."""

_FORGET_PATIENCE_S = 5.0
"""Deleting waits longer; what a worker that is later still stages is refused until it answers."""

Question = tuple[type[HotAsked | Forget], int]
"""What was asked, and its number."""


class ChannelOwner(Protocol):
    """The store, as a channel sees it."""

    def options(self, spec: ModelSpec, budget: HotBudget | None) -> KvOptions: ...

    @property
    def patience_s(self) -> float: ...

    async def is_open(self) -> bool: ...

    def join(self, channel: KvChannel) -> None: ...

    def leave(self, channel: KvChannel) -> None: ...

    def hear(self, channel: KvChannel, event: KvReport) -> None: ...

    def measured(self, channel: KvChannel, run: RunFigures) -> None: ...

    def deletions(self) -> list[tuple[Forget, Models]]: ...


class KvChannel:
    """Between one worker and the store; it belongs to the event loop.

    First `options()`, then `open()` once the worker was told to load, then events, then `close()`.
    The store may be opened before that or at any time later, and again: the worker is told, and
    keeps what it has in memory.
    """

    def __init__(
        self, desk: ChannelOwner, spec: ModelSpec, budget: HotBudget | None = None
    ) -> None:
        self.spec = spec
        self.budget = budget
        """What KV its memory may have, as it was told last; None leaves that to the store."""
        self.kv = KvOptions()
        self.names: Attach | None = None
        """By what its KV is found in the store; None before the store was open."""
        self.counts = KvCounts()
        self.files: ModelFiles | None = None
        """The model's, as they were before the worker read them; None: nobody can say."""
        self.model: bytes | None = None
        """The hash of what the worker read, once that is known."""
        self.measured_runs: list[RunFigures] = []
        """What it showed before it had a name."""
        self.welcoming = asyncio.Lock()
        self._service = desk
        self._send: Callable[[KvNews | RoomGiven], None] | None = None
        self._is_closed = False
        self._is_told = asyncio.Event()
        self._is_loaded = asyncio.Event()
        self._naming_wait_s: float | None = None
        self._is_named = asyncio.Event()
        self._is_named.set()
        self._asked: dict[Question, asyncio.Future[HotNow | Forgotten | None]] = {}
        self._num_asked = 0
        self._deletions = ToldDeletions(self._tell_deletion, self.on_event)

    @property
    def has_disk(self) -> bool:
        """Whether this worker was told that the store is open."""
        return self.names is not None

    @property
    def model_hash(self) -> bytes:
        """Its model's in the store, empty before it was told."""
        return self.names.model_hash if self.names is not None else b""

    async def options(self) -> KvOptions:
        """What the worker is loaded with. It must not have begun to read the model's files."""
        self.kv = self._service.options(self.spec, self.budget)
        if self.kv.root is not None:
            self.files = await asyncio.to_thread(look, self.spec)
        return self.kv

    def open(self, send: Callable[[KvNews | RoomGiven], None]) -> None:
        """The worker was told to load: tell it what is on disk of its model, unless it is gone.

        First what was deleted: requests that are to be handed to it may have come before that.
        """
        if not self._is_closed:
            self._send = send
            self._deletions.begin(self._service.deletions())
            self._service.join(self)

    async def told(self) -> None:
        """The worker has read the model's files: wait until it was told what is on disk.

        While the store is being opened as long as that takes, within reason, and not at all for
        one that failed.
        """
        self._is_loaded.set()
        if self._naming_wait_s is not None:
            self._wait_for_name(self._naming_wait_s)
        if self.kv.root is not None and await self._service.is_open():
            with suppress(TimeoutError):
                async with asyncio.timeout(self._service.patience_s):
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

    def on_event(self, event: KvReport) -> None:
        """The worker reports."""
        if isinstance(event, Forgotten):
            self._deletions.answered(event.number)
        if not isinstance(event, HotNow | Forgotten):
            self._service.hear(self, event)
        elif (asked := self._asked.get(_answered(event))) is not None:
            _answer(asked, event)

    def on_beat(self, beat: Heartbeat) -> None:
        """The worker's counters, as they are now."""
        if beat.kv is not None:
            self.counts = beat.kv

    def measured(self, run: RunFigures) -> None:
        """What the worker's run showed so far, for next time. Call it before `close()`."""
        self._service.measured(self, run)

    def close(self) -> None:
        """The worker is gone; everything it reported has arrived."""
        self._is_closed = True
        self._is_loaded.set()
        self._is_named.set()
        if self._send is not None:
            self._send = None
            for asked in self._asked.values():
                _answer(asked, None)
            self._service.leave(self)

    # What follows is the store's side.

    def attach(self, names: Attach) -> None:
        """The store is open; what it has is told next, and then that it was all.

        First what was deleted of its model: nothing of that gets the names it has in the store.
        """
        self.names = names
        self._deletions.named(names.model_hash)
        self.tell(names)

    def welcomed(self) -> None:
        """All that is on disk was told, or cannot be: what is in memory only may be written."""
        self.tell(AllSlotsTold())
        self._is_told.set()
        self._is_named.set()

    def try_again(self) -> None:
        """The store may work again: what is in memory only may be written once more."""
        if not self.welcoming.locked():
            self.tell(AllSlotsTold())

    @property
    def is_closed(self) -> bool:
        """Whether the worker is gone."""
        return self._is_closed

    async def until_loaded(self) -> None:
        """Wait until the worker has read the model's files, or is gone."""
        await self._is_loaded.wait()

    def is_being_named(self, *, is_awaited: bool) -> None:
        """Its files are being read; requests wait a while for that, or not at all.

        The while begins when the model is loaded: before that nobody waits for the reading.
        """
        self._is_named.clear()
        self._naming_wait_s = self._service.patience_s / _READING_SHARE if is_awaited else 0.0
        if self._is_loaded.is_set():
            self._wait_for_name(self._naming_wait_s)

    def _wait_for_name(self, wait_s: float) -> None:
        asyncio.get_running_loop().call_later(wait_s, self._is_told.set)

    def is_nameless(self) -> None:
        """It stays so: what its memory holds is not for the disk, and may be of any model."""
        self._deletions.named(None)
        self._is_told.set()
        self._is_named.set()

    async def hot(self, ids: Sequence[str]) -> tuple[str, ...]:
        """Those of these slots that are in the worker's memory; none if it does not answer."""
        if not self.has_disk:
            return ()
        told = await self._ask(HotAsked(self._next_number(), ids=tuple(ids)))
        return told.ids if isinstance(told, HotNow) else ()

    async def held(self, session_ids: Sequence[str]) -> tuple[tuple[Asker, int], ...]:
        """What of these conversations is in the worker's memory; nothing if it does not answer."""
        told = await self._ask(HotAsked(self._next_number(), sessions=tuple(session_ids)))
        return told.sessions if isinstance(told, HotNow) else ()

    async def forget(self, news: Forget, models: Models = None) -> int | None:
        """Have the worker forget what of a conversation is not published; how many pieces.

        With any model, or with these. None: it has not done it yet, and does it before anything
        that it reads after that.
        """
        if self._send is None:  # it is gone, or is told when it opens
            return 0
        if not self._is_loaded.is_set():  # it was handed nothing yet, and reads this before
            self._deletions.tell(news, models)
            return 0
        told = await self._ask(news, _FORGET_PATIENCE_S, lambda: self._deletions.tell(news, models))
        if isinstance(told, Forgotten):
            return told.num_forgotten
        return None if self._send is not None else 0

    def is_forgotten(self, asker: Asker, header: SlotHeader | None = None) -> bool:
        """Whether the worker has yet to forget what was asked so, as in `ToldDeletions.mean`."""
        return self._deletions.mean(asker, self._is_waited_for, header)

    def _tell_deletion(self, news: Forget) -> None:
        """Also to a worker that has no disk."""
        if self._send is not None:
            self._send(news)

    def _is_waited_for(self, number: int) -> bool:
        return (Forget, number) in self._asked

    def _next_number(self) -> int:
        self._num_asked += 1
        return self._num_asked

    async def _ask(
        self,
        question: HotAsked | Forget,
        patience_s: float = _PATIENCE_S,
        say: Callable[[], None] | None = None,
    ) -> HotNow | Forgotten | None:
        """The answer; None from a worker that gives none in time, or is gone.

        What is asked is sent, unless `say` does that in another way.
        """
        if self._send is None:
            return None
        key = type(question), question.number
        asked = self._asked[key] = asyncio.get_running_loop().create_future()
        if say is not None:
            say()
        else:
            self._send(question)
        try:
            async with asyncio.timeout(patience_s):
                return await asked
        except TimeoutError:
            return None
        finally:
            del self._asked[key]

    def set_budget(self, budget: HotBudget) -> None:
        """So much KV may be in the worker's memory from now on, or from its start on."""
        is_new, self.budget = budget != self.budget, budget
        if is_new and self._send is not None:
            self._send(budget)

    def tell(self, news: KvNews) -> None:
        """Say it to a worker that knows the store."""
        if self._send is not None and self.has_disk:
            self._send(news)

    def hint(self, hint: Hint) -> None:
        """Say it to a worker, also to one that has no disk."""
        if self._send is not None:
            self._send(hint)

    def tell_room(self, key: str, *, is_given: bool) -> None:
        """Its writer waits for this, also where the store went away meanwhile."""
        if self._send is not None:
            self._send(RoomGiven(key=key, is_given=is_given))


def _answer(
    asked: asyncio.Future[HotNow | Forgotten | None], event: HotNow | Forgotten | None
) -> None:
    if not asked.done():
        asked.set_result(event)


def _answered(event: HotNow | Forgotten) -> Question:
    return Forget if isinstance(event, Forgotten) else HotAsked, event.number
