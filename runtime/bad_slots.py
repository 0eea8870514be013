"""Slots that workers cannot read: they are repaired or dropped, and all workers are told."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Protocol

import structlog

from runtime.kv_channel import KvChannel
from runtime.open_store import Gone, Merged, News
from runtime.repair import repair
from runtime.store_life import StoreLife
from runtime.types import MissReason
from runtime.wire import SlotBad

_log = structlog.stdlib.get_logger("hearth.store")


class Tell(Protocol):
    """Tells all workers what happened to slots, one excepted that knows it."""

    def __call__(self, news: News, besides: KvChannel | None = None) -> None: ...


class BadSlots:
    """`bring` has cold slots brought for a worker; `on_changed` is called when slots changed.

    It belongs to the event loop.
    """

    def __init__(
        self,
        life: StoreLife,
        tell: Tell,
        bring: Callable[[KvChannel, tuple[str, ...]], Awaitable[None]],
        on_changed: Callable[[], None],
    ) -> None:
        self._life = life
        self._tell = tell
        self._bring = bring
        self._on_changed = on_changed

    async def hear(self, channel: KvChannel, bad: SlotBad) -> None:
        """A file that is not as it should be goes; who reads a missing one waits to hear of it."""
        if bad.reason != "missing":
            _log.warning("slot_bad", slot=bad.id, reason=bad.reason, why=bad.message)
        if bad.reason == "failed":
            self._life.fail(bad.reason, bad.message)
        if bad.parts:
            await self._repair(channel, bad)
        elif bad.reason in ("damaged", "missing"):
            await self._drop(channel, bad)

    async def _repair(self, channel: KvChannel, bad: SlotBad) -> None:
        """This worker has what is whole of a damaged slot in memory already; others read it."""
        news = await self._life.attempt(lambda store: repair(store, bad.id, bad.parts))
        saved = [row.header.id for row in news.rows] if isinstance(news, Merged) else []
        channel.tell_saved(saved)
        channel.tell_gone([one.id for one in bad.parts if one.id not in saved], "evicted")
        if news is not None:
            self._tell(news, besides=channel)
        self._on_changed()

    async def _drop(self, channel: KvChannel, bad: SlotBad) -> None:
        why: MissReason = "damaged" if bad.reason == "damaged" else "evicted"
        ids = await self._life.attempt(lambda store: store.drop_bad(bad.id))
        if ids:
            if bad.reason == "missing":
                _log.warning("slot_bad", slot=bad.id, reason=bad.reason, why=bad.message)
            self._tell(Gone(ids, why))
            self._on_changed()
        elif await self._life.attempt(lambda store: store.is_cold(bad.id)):
            await self._bring(channel, (bad.id,))
        else:
            channel.tell_gone([bad.id], why)
