"""Cold slots come back for the workers that ask for them, or the answer is that they cannot now."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from runtime.kv_channel import KvChannel
from runtime.open_store import Gone, OpenStore
from runtime.store_life import StoreLife
from store.errors import ColdAway, OverCap

Fetched = Literal["here", "away", "damaged", "evicted"]


class Promotions:
    """`tell` reports to all workers. It belongs to the event loop."""

    def __init__(self, life: StoreLife, tell: Callable[[Gone], None]) -> None:
        self._life = life
        self._tell = tell

    async def bring(self, channel: KvChannel, ids: tuple[str, ...]) -> None:
        """Have slots on the fast disk and say so; what is away is kept, what is lost is dropped."""
        for slot_id in ids:
            match await self._fetch(slot_id):
                case "here":
                    channel.tell_promoted([slot_id])
                case "away":
                    channel.tell_away([slot_id])
                case "damaged" | "evicted" as why:
                    lost = await self._life.attempt(lambda store, i=slot_id: store.drop([i]))
                    # Without a row it was not lost: it was evicted while it was asked for.
                    self._tell(Gone(lost, why) if lost else Gone((slot_id,), "evicted"))

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
