"""One worker's share of the KV store: what it is told of the disk, what it reports, its figures."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Protocol

from runtime.identified import look
from runtime.identity import Look
from runtime.slot_news import (
    Attach,
    KnownSlot,
    Lost,
    Slots,
    SlotsAway,
    SlotsDemoted,
    SlotsGone,
    SlotsMerged,
    SlotsPromoted,
    SlotsSaved,
    Told,
    WritesPaused,
)
from runtime.types import MissReason, ModelSpec
from runtime.wire import (
    Bring,
    Forget,
    Forgotten,
    Heartbeat,
    HotAsked,
    HotBudget,
    HotNow,
    KvCounts,
    KvNews,
    KvOptions,
    PinWanted,
    RoomGiven,
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
from store.keyed_names import Asker, Whom
from store.types import LostRow, Run, SlotRow

MAX_SLOTS = 2000
"""Slots in one frame: a worker must not be kept from its requests for long."""

_PATIENCE_S = 1.0
"""A worker answers between two steps; one that takes longer is not worth waiting for."""

_READING_SHARE = 6
"""Weights may take long, and what is computed meanwhile is written later."""

_FORGET_PATIENCE_S = 5.0
"""Deleting waits longer; what a worker that is later still stages is refused until it answers."""

KvEvent = (
    SlotQueued
    | SlotsLeft
    | SlotStaged
    | TurnEnded
    | SlotBad
    | SlotsUsed
    | SlotsWanted
    | PinWanted
    | RoomWanted
    | RoomLeft
    | StoreTrouble
)
Answer = HotNow | Forgotten
"""What answers a question."""

KvReport = KvEvent | Answer
"""Everything that a worker says of its KV."""


class KvDesk(Protocol):
    """The store, as a channel sees it."""

    def options(self, spec: ModelSpec, budget: HotBudget | None) -> KvOptions: ...

    @property
    def patience_s(self) -> float: ...

    async def is_open(self) -> bool: ...

    def join(self, channel: KvChannel) -> None: ...

    def leave(self, channel: KvChannel) -> None: ...

    def hear(self, channel: KvChannel, event: KvEvent) -> None: ...

    def measured(self, channel: KvChannel, run: Run) -> None: ...


class KvChannel:
    """Between one worker and the store; it belongs to the event loop.

    First `options()`, then `open()` once the worker was told to load, then events, then `close()`.
    The store may be opened before that or at any time later, and again: the worker is told, and
    keeps what it has in memory.
    """

    def __init__(self, desk: KvDesk, spec: ModelSpec, budget: HotBudget | None = None) -> None:
        self.spec = spec
        self._budget = budget
        self.kv = KvOptions()
        self.names: Attach | None = None
        """By what its KV is found in the store; None before the store was open."""
        self.counts = KvCounts()
        self.files: Look | None = None
        """The model's, as they were before the worker read them; None: nobody can say."""
        self.model: bytes | None = None
        """The hash of what the worker read, once that is known."""
        self.measured_runs: list[Run] = []
        """What it showed before it had a name."""
        self.welcoming = asyncio.Lock()
        self._desk = desk
        self._send: Callable[[KvNews | RoomGiven], None] | None = None
        self._is_closed = False
        self._is_told = asyncio.Event()
        self._is_loaded = asyncio.Event()
        self._naming_wait_s: float | None = None
        self._is_named = asyncio.Event()
        self._is_named.set()
        self._asked: dict[int, asyncio.Future[Answer]] = {}
        self._num_asked = 0
        self._forgotten: dict[int, tuple[Whom, bytes]] = {}

    @property
    def has_disk(self) -> bool:
        """Whether this worker was told that the store is open."""
        return self.names is not None

    @property
    def model_hash(self) -> bytes:
        """Its model's in the store, empty before it was told."""
        return self.names.model_hash if self.names is not None else b""

    @property
    def hot_budget_bytes(self) -> int | None:
        """What its hot tier may take, as it was told last; None leaves that to the store."""
        return self._budget.num_bytes if self._budget is not None else None

    async def options(self) -> KvOptions:
        """What the worker is loaded with. It must not have begun to read the model's files."""
        self.kv = self._desk.options(self.spec, self._budget)
        if self.kv.root is not None:
            self.files = await asyncio.to_thread(look, self.spec)
        return self.kv

    def open(self, send: Callable[[KvNews | RoomGiven], None]) -> None:
        """The worker was told to load: tell it what is on disk of its model, unless it is gone."""
        if not self._is_closed:
            self._send = send
            self._desk.join(self)

    async def told(self) -> None:
        """The worker has read the model's files: wait until it was told what is on disk.

        While the store is being opened as long as that takes, within reason, and not at all for
        one that failed.
        """
        self._is_loaded.set()
        if self._naming_wait_s is not None:
            self._wait_for_name(self._naming_wait_s)
        if self.kv.root is not None and await self._desk.is_open():
            with suppress(TimeoutError):
                async with asyncio.timeout(self._desk.patience_s):
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
            self._forgotten.pop(event.number, None)
        if not isinstance(event, Answer):
            self._desk.hear(self, event)
        elif (asked := self._asked.get(event.number)) is not None and not asked.done():
            asked.set_result(event)

    def on_beat(self, beat: Heartbeat) -> None:
        """The worker's counters, as they are now."""
        if beat.kv is not None:
            self.counts = beat.kv

    def measured(self, run: Run) -> None:
        """What the worker's run showed so far, for next time. Call it before `close()`."""
        self._desk.measured(self, run)

    def close(self) -> None:
        """The worker is gone; everything it reported has arrived."""
        self._is_closed = True
        self._is_loaded.set()
        self._is_named.set()
        if self._send is not None:
            self._send = None
            self._desk.leave(self)

    # What follows is the store's side.

    def attach(self, names: Attach) -> None:
        """The store is open; what it has is told next, and then that it was all."""
        self.names = names
        self._tell(names)

    def welcomed(self) -> None:
        """All that is on disk was told, or cannot be: what is in memory only may be written."""
        self._tell(Told())
        self._is_told.set()
        self._is_named.set()

    def try_again(self) -> None:
        """The store may work again: what is in memory only may be written once more."""
        if not self.welcoming.locked():
            self._tell(Told())

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
        self._naming_wait_s = self._desk.patience_s / _READING_SHARE if is_awaited else 0.0
        if self._is_loaded.is_set():
            self._wait_for_name(self._naming_wait_s)

    def _wait_for_name(self, wait_s: float) -> None:
        asyncio.get_running_loop().call_later(wait_s, self._is_told.set)

    def is_nameless(self) -> None:
        """It stays so: what its memory holds is not for the disk."""
        self._is_told.set()
        self._is_named.set()

    async def hot(self, ids: Sequence[str]) -> tuple[str, ...]:
        """Those of these slots that are in the worker's memory; none if it does not answer."""
        if not self.has_disk:
            return ()
        told = await self._ask(lambda number: HotAsked(number=number, ids=tuple(ids)))
        return told.ids if isinstance(told, HotNow) else ()

    async def forget(self, whom: Whom, secret: bytes) -> int:
        """Have the worker forget what of a conversation is not published; how many pieces.

        `secret` is the store's, which the worker may not know yet.
        """
        told = await self._ask(
            lambda number: self._forgetting(number, whom, secret), _FORGET_PATIENCE_S
        )
        return told.num_forgotten if isinstance(told, Forgotten) else 0

    def is_forgotten(self, asker: Asker) -> bool:
        """Whether the worker was told to forget what was asked so and has yet to do it."""
        return any(whom.means(asker, secret) for whom, secret in self._forgotten.values())

    def _forgetting(self, number: int, whom: Whom, secret: bytes) -> Forget:
        self._forgotten[number] = whom, secret
        return Forget(number=number, whom=whom, secret=secret)

    async def _ask(
        self, question: Callable[[int], HotAsked | Forget], patience_s: float = _PATIENCE_S
    ) -> Answer | None:
        """The answer; None from a worker that gives none in time."""
        if self._send is None:
            return None
        self._num_asked += 1
        number = self._num_asked
        asked = self._asked[number] = asyncio.get_running_loop().create_future()
        self._send(question(number))
        try:
            async with asyncio.timeout(patience_s):
                return await asked
        except TimeoutError:
            return None
        finally:
            del self._asked[number]

    def set_budget(self, budget: HotBudget) -> None:
        """So much KV may be in the worker's memory from now on, or from its start on."""
        is_new, self._budget = budget != self._budget, budget
        if is_new and self._send is not None:
            self._send(budget)

    def bring(self, ids: Sequence[str]) -> None:
        """Have what ends with these slots in memory soon."""
        if ids:
            self._tell(Bring(ids=tuple(ids)))

    def tell_slots(self, rows: Sequence[SlotRow]) -> None:
        """These are on disk, parents before children."""
        self._tell(Slots(slots=tuple(known(row) for row in rows)))

    def tell_lost(self, rows: Sequence[LostRow]) -> None:
        """These were computed and are not on disk; nobody has them."""
        if rows:
            self._tell(Lost(rows=tuple(rows)))

    def tell_saved(self, ids: Sequence[str]) -> None:
        if ids:
            self._tell(SlotsSaved(ids=tuple(ids)))

    def tell_merged(self, ids: Sequence[str], rows: Sequence[SlotRow]) -> None:
        self._tell(SlotsMerged(ids=tuple(ids), slots=tuple(known(row) for row in rows)))

    def tell_promoted(self, ids: Sequence[str]) -> None:
        if ids:
            self._tell(SlotsPromoted(ids=tuple(ids)))

    def tell_away(self, ids: Sequence[str]) -> None:
        self._tell(SlotsAway(ids=tuple(ids)))

    def tell_demoted(self, ids: Sequence[str]) -> None:
        if ids:
            self._tell(SlotsDemoted(ids=tuple(ids)))

    def tell_room(self, key: str, *, is_given: bool) -> None:
        """Its writer waits for this, also where the store went away meanwhile."""
        if self._send is not None:
            self._send(RoomGiven(key=key, is_given=is_given))

    def tell_rest(self, seconds: float) -> None:
        self._tell(WritesPaused(seconds=seconds))

    def tell_gone(self, ids: Sequence[str], reason: MissReason) -> None:
        if ids:
            self._tell(SlotsGone(ids=tuple(ids), reason=reason))

    def _tell(self, news: KvNews) -> None:
        if self._send is not None and self.has_disk:
            self._send(news)


def known(row: SlotRow) -> KnownSlot:
    """A row as a worker sees it."""
    header = row.header
    return KnownSlot(
        id=header.id,
        parent=row.parent,
        start_hash=header.start_hash,
        start=header.start,
        end=header.end,
        block_hashes=header.block_hashes,
        end_hash=header.end_hash,
        has_state=header.has_state,
        tier=row.tier,
        disk_bytes=row.disk_bytes,
        recompute_ms=header.recompute_ms,
        last_used_s=row.last_used_s,
        hits=row.hits,
        ttl_class=header.ttl_class,
        ttl_s=header.ttl_s,
        root=header.root,
    )
