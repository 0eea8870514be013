"""What workers staged gets its names and rows, group by group; they are told what became of it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Coroutine, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, NamedTuple

from runtime.cache.channel import KvChannel
from runtime.cache.deletion_log import DeletionLog, Models
from runtime.cache.figures import WrittenGroup
from runtime.cache.lifecycle import StoreLife
from runtime.cache.owned import OpenStore, Published, note
from runtime.slot_events import (
    KnownSlot,
    SlotQueued,
    Slots,
    SlotsGone,
    SlotsLeft,
    SlotsSaved,
    SlotStaged,
    TurnEnded,
)
from store.errors import StoreError
from store.keyed_names import Whom
from store.types import SlotRow

_MAX_GROUP = 64


class ForgetOutcome(NamedTuple):
    """How many pieces of memory were forgotten; `is_pending` where a worker has yet to do it."""

    num_forgotten: int
    is_pending: bool


class Publisher:
    """`on_published` is called after each group. It belongs to the event loop."""

    def __init__(
        self,
        life: StoreLife[OpenStore],
        channels: Collection[KvChannel],
        on_published: Callable[[], None],
        deletions: DeletionLog | None = None,
    ) -> None:
        self._life = life
        self._channels = channels
        self._on_published = on_published
        self._listeners: list[Callable[[WrittenGroup], None]] = []
        self._staged: list[tuple[KvChannel, SlotStaged]] = []
        self._running: asyncio.Task[None] | None = None
        self._group: asyncio.Future[Published | None] | None = None
        self._under_way: set[asyncio.Task[None]] = set()
        self._noting: Future[None] | None = None
        self.deletions = DeletionLog() if deletions is None else deletions

    def listen(self, tell: Callable[[WrittenGroup], None]) -> None:
        """Have `tell` called for every group of slots."""
        self._listeners.append(tell)

    def take(self, channel: KvChannel, staged: SlotStaged) -> None:
        """A worker staged a slot: it is published soon, unless its conversation was deleted."""
        if channel.is_forgotten(staged.asker, staged.header):
            self._turn_away(channel, staged)
            return
        self._staged.append((channel, staged))
        if self._running is None or self._running.done():
            self._running = self._life.spawn(self._publish())

    def end_turn(self, channel: KvChannel, ended: TurnEnded) -> None:
        """A turn ended in slots of others: they are its conversation's as well."""
        if not channel.is_forgotten(ended.asker):
            model = channel.model_hash
            self._see_through(self._life.attempt(lambda store: store.end_turn(model, ended)))

    def note(self, channel: KvChannel, told: SlotQueued | SlotsLeft) -> None:
        """A slot is to be written, or is not any more: noted before anything of it is published.

        Nobody waits for that. Where it fails a crash is not told apart from what was never said.
        """
        store = self._life.store
        if store is None or (isinstance(told, SlotQueued) and channel.is_forgotten(told.asker)):
            return
        with suppress(StoreError):
            self._noting = note(store, channel.model_hash, told)

    async def noted(self) -> None:
        """Wait until all that was heard so far is noted; who stops waiting disturbs nobody."""
        if (noting := self._noting) is not None:
            with suppress(StoreError):
                await asyncio.shield(asyncio.wrap_future(noting))

    async def forget(self, whom: Whom, models: Models = None) -> ForgetOutcome:
        """Have forgotten what of a conversation is not published.

        Only with these models, if any are named. Afterwards the index has all that is on disk of
        it, and nothing more comes but what is said of it from now on.
        """
        secret = self._life.secret
        news = self.deletions.record(whom, secret, models)
        told = await asyncio.gather(*(one.forget(news, models) for one in list(self._channels)))
        # Also of workers that have left.
        meant = [
            (channel, one)
            for channel, one in self._staged
            if (models is None or channel.model_hash in models) and whom.means(one.asker, secret)
        ]
        self._turn_away_staged({one.header.id for _, one in meant})
        # Whose tokens these are is not known here: what was staged of a chain goes with its rows.
        other = {one.header.id for _, one in self._staged if whom.may_mean(one.asker, secret)}
        while (running := self._running) is not None and not running.done():
            if not other & {one.header.id for _, one in self._staged}:
                break
            await asyncio.wait([self._group or running])
        self._turn_away_staged(other)  # what publishing broke off left would get its rows later
        under_way = [*self._under_way, *([self._group] if self._group is not None else [])]
        if under_way:
            await asyncio.wait(under_way)
        return ForgetOutcome(sum(filter(None, told)), is_pending=None in told)

    async def _publish(self) -> None:
        """One group after the other, for as long as something waits."""
        while self._staged:
            group, self._staged = self._staged[:_MAX_GROUP], self._staged[_MAX_GROUP:]
            channels = {staged.header.id: channel for channel, staged in group}
            slots = [staged for _, staged in group]
            start_ns = time.time_ns() - int(max(one.write_ms for one in slots) * 1e6)
            self._group = asyncio.ensure_future(
                self._life.attempt(lambda store, s=slots: _published(store, s))
            )
            published = await self._group
            self._announce(published or Published((), tuple(channels)), channels)
            num_bytes = sum(one.num_bytes for one in slots)
            for tell in self._listeners:
                tell(WrittenGroup(len(slots), num_bytes, start_ns, time.time_ns()))
            self._on_published()

    def _announce(self, outcome: Published, channels: dict[str, KvChannel]) -> None:
        saved: dict[KvChannel, list[SlotRow]] = {}
        for row in outcome.saved:
            saved.setdefault(channels[row.header.id], []).append(row)
        for channel, rows in saved.items():
            channel.tell(SlotsSaved(tuple(row.header.id for row in rows)))
            for other in self._channels:
                if other is not channel and other.model_hash == channel.model_hash:
                    other.tell(Slots(tuple(map(KnownSlot.of, rows))))
        for slot_id in outcome.refused:
            channels[slot_id].tell(SlotsGone((slot_id,), "evicted"))
        if outcome.error is not None:
            self._life.fail(outcome.error.reason, str(outcome.error))

    def _turn_away_staged(self, ids: Collection[str]) -> None:
        """Of those that are still to be published."""
        staged, self._staged = self._staged, []
        for channel, one in staged:
            if one.header.id in ids:
                self._turn_away(channel, one)
            else:
                self._staged.append((channel, one))

    def _turn_away(self, channel: KvChannel, staged: SlotStaged) -> None:
        """What it belongs to was deleted while it was written."""
        self._see_through(self._discard(channel, staged))

    def _see_through(self, work: Coroutine[Any, Any, None]) -> None:
        """Who deletes waits for it."""
        task = self._life.spawn(work)
        self._under_way.add(task)
        task.add_done_callback(self._under_way.discard)

    async def _discard(self, channel: KvChannel, staged: SlotStaged) -> None:
        await self._life.attempt(lambda store: _discarded(store, staged))
        channel.tell(SlotsGone((staged.header.id,), "evicted"))


def _published(store: OpenStore, group: Sequence[SlotStaged]) -> Published:
    """From now on rows tell of what was reserved."""
    try:
        return store.publish(group)
    finally:
        for one in group:
            store.disk.release(one.header.id)


def _discarded(store: OpenStore, staged: SlotStaged) -> None:
    store.discard(staged)
    store.disk.release(staged.header.id)
