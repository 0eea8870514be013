"""Slots that workers cannot read: cold ones come back, bad ones are repaired or dropped.

All workers are told what became of them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Literal, Protocol

import structlog

from runtime.cache.channel import KvChannel
from runtime.cache.lifecycle import StoreLife
from runtime.cache.owned import Merged, News, OpenStore
from runtime.cache.repair import repair
from runtime.slot_events import SlotBad, SlotsAway, SlotsGone, SlotsPromoted, SlotsSaved
from runtime.types import MissReason
from store.errors import ColdAway, OverCap

_log = structlog.stdlib.get_logger("hearth.store")


Fetched = Literal["here", "away", "damaged", "evicted"]


class Tell(Protocol):
    """Tells all workers what happened to slots, one excepted that knows it."""

    def __call__(self, news: News, besides: KvChannel | None = None) -> None: ...


class BadSlots:
    """`bring` has cold slots brought for a worker; `on_changed` is called when slots changed.

    It belongs to the event loop.
    """

    def __init__(
        self,
        life: StoreLife[OpenStore],
        tell: Tell,
        bring: Callable[[KvChannel, tuple[str, ...]], Awaitable[None]],
        on_changed: Callable[[], None],
    ) -> None:
        self._life = life
        self._tell = tell
        self._bring = bring
        self._on_changed = on_changed
        self._one_by_one = asyncio.Lock()

    async def hear(self, channel: KvChannel, bad: SlotBad) -> None:
        """A file that is not as it should be goes; who reads a missing one waits to hear of it.

        A disk may have thousands of them: other work goes on between two, and what a server that
        stops leaves is found again.
        """
        if bad.reason != "missing":
            _log.warning("slot_bad", slot=bad.id, reason=bad.reason, why=bad.message)
        if bad.reason == "failed":
            self._life.fail(bad.reason, bad.message)
        async with self._one_by_one:
            if self._life.stopping.is_set():
                return
            is_cold = False
            if bad.parts:
                await self._repair(channel, bad)
            elif bad.reason in ("damaged", "missing"):
                is_cold = await self._is_cold_or_dropped(channel, bad)
        if is_cold:  # to bring it may take long, and keeps nobody else waiting
            await self._bring(channel, (bad.id,))

    async def _repair(self, channel: KvChannel, bad: SlotBad) -> None:
        """This worker has what is whole of a damaged slot in memory already; others read it."""
        news = await self._life.attempt(lambda store: repair(store, bad.id, bad.parts))
        saved = [one.id for one in news.told.slots] if isinstance(news, Merged) else []
        if saved:
            channel.tell(SlotsSaved(tuple(saved)))
        if unsaved := tuple(one.id for one in bad.parts if one.id not in saved):
            channel.tell(SlotsGone(unsaved, "evicted"))
        if news is not None:
            self._tell(news, besides=channel)
        self._on_changed()

    async def _is_cold_or_dropped(self, channel: KvChannel, bad: SlotBad) -> bool:
        """Whether it only went to the cold store; else nobody looks for it any more."""
        why: MissReason = "damaged" if bad.reason == "damaged" else "evicted"
        ids = await self._life.attempt(lambda store: store.drop_bad(bad.id))
        if ids:
            if bad.reason == "missing":
                _log.warning("slot_bad", slot=bad.id, reason=bad.reason, why=bad.message)
            self._tell(SlotsGone(ids, why))
            self._on_changed()
        elif await self._life.attempt(lambda store: store.is_cold(bad.id)):
            return True
        else:
            channel.tell(SlotsGone((bad.id,), why))
        return False


class Promotions:
    """`tell` reports to all workers. It belongs to the event loop."""

    def __init__(self, life: StoreLife[OpenStore], tell: Callable[[SlotsGone], None]) -> None:
        self._life = life
        self._tell = tell

    async def bring(self, channel: KvChannel, ids: tuple[str, ...]) -> None:
        """Have slots on the fast disk and say so; what is away is kept, what is lost is dropped."""
        for slot_id in ids:
            match await self._fetch(slot_id):
                case "here":
                    channel.tell(SlotsPromoted((slot_id,)))
                case "away":
                    channel.tell(SlotsAway((slot_id,)))
                case "damaged" | "evicted" as why:
                    lost = await self._life.attempt(lambda store, i=slot_id: store.drop([i]))
                    # Without a row it was not lost: it was evicted while it was asked for.
                    told = SlotsGone(lost, why) if lost else SlotsGone((slot_id,), "evicted")
                    self._tell(told)

    async def _fetch(self, slot_id: str) -> Fetched:
        """Without a store that works it is away as well: a later request may ask again."""
        if self._life.reach.is_away:
            return "away"
        fetched: Fetched | None = await self._life.attempt(
            lambda store: _fetched(store, slot_id), "promote"
        )
        return fetched or "away"


def _fetched(store: OpenStore, slot_id: str) -> Fetched:
    try:
        why = store.fetch(slot_id)
    except (ColdAway, OverCap):
        return "away"
    if why is None:
        return "here"
    return "damaged" if why == "damaged" else "evicted"
