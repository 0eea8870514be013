"""What is done to the store while nobody asks for it: expiry, caps, demotion, scrubbing, order.

Every chore blocks, runs in the thread for chores, decides by `store.eviction`, and says which
slots are gone. Caps are global over all models and count what files really take.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Literal, NamedTuple

import msgspec
import structlog

from runtime.cache.disk_budget import RECOVERED, Evict
from runtime.cache.owned import INDEX, News, OpenStore
from runtime.cache.repair import repair
from runtime.config.settings import Settings
from runtime.keys import owner, plain
from runtime.slot_events import SlotsDemoted, SlotsGone
from runtime.types import MissReason
from store import pins, sightings, turns, unpublished, upkeep
from store.conversations import Conversations
from store.errors import OverCap, SlotDamaged, SlotMissing, StoreError
from store.eviction import choose
from store.recovery import Recovery
from store.slots import slot_path, verify
from store.types import Candidate, Tier

LOW_WATER = 0.9
"""What is left of the cap after an eviction, so that not every write causes one."""

PINNED_SHARE = 0.5
"""Of the cap at most so much may be pinned by clients, by all tenants together."""

ASKED = "prewarm-"
"""What the pins that clients asked for are called, after their tenant."""

FREED_WHEN_FULL = 0.1
SCRUB_PERIOD_S = 7 * 86_400.0
MAX_SCRUB_BYTES = 1 << 30
_MAX_FLOOR_SHARE = 0.1
_REMEMBERED_S = 90 * 86_400.0
_ORPHANED_S = 86_400.0

_log = structlog.stdlib.get_logger("hearth.store")


class StoreLimits(NamedTuple):
    """What the settings allow, in bytes and seconds."""

    cache_max_bytes: int | None
    cold_max_bytes: int
    cold_ttl_s: float
    pinned_max_bytes: int | None = None
    num_tenants: int = 1

    @staticmethod
    def of(settings: Settings) -> StoreLimits:
        return StoreLimits(
            settings.cache_max_bytes,
            settings.cold_max_bytes,
            settings.cold_ttl_s,
            settings.pinned_max_bytes,
            max(len(settings.api_keys), 1),
        )


class StoreUse(NamedTuple):
    """Bytes that a store takes: slots by tier, and everything else on the fast disk."""

    warm_bytes: int
    cold_bytes: int
    other_bytes: int

    @property
    def fast_bytes(self) -> int:
        return self.warm_bytes + self.other_bytes


def usage_of(store: OpenStore) -> StoreUse:
    """What is there now. Raises StoreError."""
    by_tier: Counter[Tier] = Counter()
    for total in store.index.totals():
        by_tier[total.tier] += total.disk_bytes
    other_bytes = max(store.disk.used_bytes() - by_tier["warm"], 0)
    return StoreUse(by_tier["warm"], by_tier["cold"], other_bytes)


def excess_bytes(used_bytes: int, cap_bytes: int, room: upkeep.DiskRoom) -> int:
    """How much has to go so that the cap holds and others have room; 0 when nothing has."""
    over_cap = used_bytes - int(cap_bytes * LOW_WATER) if used_bytes > cap_bytes else 0
    return max(over_cap, floor_of(room) - room.free_bytes, 0)


def floor_of(room: upkeep.DiskRoom) -> int:
    """The bytes that are to stay free; on a small disk fewer."""
    return min(room.floor_bytes, int(room.total_bytes * _MAX_FLOOR_SHARE))


def expire(store: OpenStore, limits: StoreLimits) -> Iterator[News]:
    """What was not used for its time goes to the cold store, or away; cold slots go at last."""
    store.database.keep_time().result()
    now_s = store.clock.now_s()
    ids = store.index.expired(now_s)
    tiers = dict(store.index.places()) if ids else {}
    warm = [slot_id for slot_id in ids if tiers.get(slot_id) == "warm"]
    if store.cold is None:
        yield from _dropped(store, warm, "expired", "expired")
    else:
        yield from _demoted(store, warm, limits, "expired")
    by_id = {one.id: one for one in store.index.candidates()} if ids else {}
    cold = [by_id[i] for i in ids if tiers.get(i) == "cold" and i in by_id]
    oldest_s = now_s - limits.cold_ttl_s
    over = _whole_subtrees(one for one in cold if one.last_used_s < oldest_s)
    yield from _dropped(store, over, "cold_expired", "expired")


def cap_of(store: OpenStore, limits: StoreLimits) -> int:
    """How many bytes of the fast disk the store may take now. Raises StoreError."""
    return limits.cache_max_bytes or store.disk.cap_bytes


def most_pinned(store: OpenStore, limits: StoreLimits) -> int:
    """How many bytes each tenant may pin. Raises StoreError."""
    share = int(cap_of(store, limits) * PINNED_SHARE) // limits.num_tenants
    return min(limits.pinned_max_bytes or share, share)


def pinned_by(store: OpenStore, tenant: str) -> list[str]:
    """The sources of what clients of a tenant pinned, the oldest first. Raises StoreError."""
    found = {one.source for one in store.index.pins() if owner(one.source) == tenant}
    return sorted(one for one in found if plain(one).startswith(ASKED))


def pinned_bytes(store: OpenStore, sources: Sequence[str]) -> int:
    """What these sources keep on disk. Raises StoreError."""
    return store.database.read(lambda c: pins.used_bytes(c, sources))


def keep_to_pins(store: OpenStore, limits: StoreLimits) -> None:
    """Take the latest pins of a tenant back until what it pinned is within its share."""
    for tenant in {owner(one.source) for one in store.index.pins()}:
        sources, most_bytes = pinned_by(store, tenant), most_pinned(store, limits)
        while sources and pinned_bytes(store, sources) > most_bytes:
            source = sources.pop()
            store.database.submit(lambda c, source=source: pins.drop(c, source)).result()
            _log.warning("pin taken back", pin=source, most_bytes=most_bytes)


def keep_within_caps(store: OpenStore, limits: StoreLimits) -> Iterator[News]:
    """Evict from both tiers what is worth least until the caps and the free-space floor hold.

    What is pinned goes only when everything else has gone.
    """
    keep_to_pins(store, limits)
    usage = usage_of(store)
    room = upkeep.disk_room(store.root)
    cap_bytes = cap_of(store, limits)
    excess = excess_bytes(usage.fast_bytes, cap_bytes, room)
    if excess:
        yield from _evict_warm(store, excess, limits)
        if (over := usage_of(store).fast_bytes - cap_bytes) > 0:
            yield from _evict_warm(store, over, limits, with_pinned=True)
    if store.cold is not None and _cold_room(store, limits) < 0:
        yield from _evict_cold(store, limits)


def make_way(
    store: OpenStore, limits: StoreLimits, num_bytes: int, needed: Collection[str]
) -> Iterator[News]:
    """Evict what is worth least until there is room for so much more, or nothing if that is not to
    be had. What is pinned stays, and so do the slots that are `needed` and what they continue.
    """
    parents = {one.parent for one in store.index.candidates() if one.id in needed}
    kept = {*needed, *parents}
    free = [one for one in store.index.candidates() if one.id not in kept]
    spare = int(cap_of(store, limits) * (1 - LOW_WATER))
    tiers = dict(store.index.places())
    if sum(one.size_bytes for one in free if tiers.get(one.id) == "warm") >= num_bytes:
        yield from _evict(store, free, num_bytes + spare, limits)


def evictor(store: OpenStore, limits: StoreLimits, tell: Callable[[News], object]) -> Evict:
    """What a store's `DiskBudget` evicts by, from any thread, and tells of."""

    def evict(num_bytes: int, needed: Collection[str]) -> None:
        for news in make_way(store, limits, num_bytes, needed):
            tell(news)

    return evict


def make_room(store: OpenStore) -> Iterator[News]:
    """The disk is full: give up the ballast, so that rows can be deleted, then a tenth of it."""
    upkeep.drop_ballast(store.root)
    upkeep.trim_quarantine(store.root, max_bytes=0)
    usage = usage_of(store)
    tiers = dict(store.index.places())
    warm = [one for one in store.index.candidates() if tiers.get(one.id) == "warm"]
    excess = max(int(usage.warm_bytes * FREED_WHEN_FULL), 1)
    yield from _dropped(store, _chosen(store, warm, excess), "full", "evicted")


def scrub(store: OpenStore, period_s: float, should_stop: Callable[[], bool]) -> Iterator[News]:
    """Read the next slots to find damage before they are wanted; all of them once a week.

    `period_s` is how often this is called. It ends when requests come.
    """
    places = [place.id for place in store.index.places() if place.tier == "warm"]
    places.sort()
    left_bytes = int(usage_of(store).warm_bytes * period_s / SCRUB_PERIOD_S) + 1
    left_bytes = min(left_bytes, MAX_SCRUB_BYTES)
    later = [slot_id for slot_id in places if slot_id > store.scrubbed_to]
    for slot_id in later or places:
        if left_bytes <= 0 or should_stop():
            return
        try:
            num_bytes = verify(slot_path(store.root, slot_id)).num_bytes
            store.counts["scrubbed_bytes"] += num_bytes
            left_bytes -= num_bytes
        except (SlotDamaged, SlotMissing):
            if not store.is_cold(slot_id):
                yield repair(store, slot_id)
        store.scrubbed_to = slot_id


def tidy(store: OpenStore, limits: StoreLimits) -> Iterator[News]:
    """Unfinished files, what was put aside, old rows and turns, the ballast, the WAL."""
    now_s = store.clock.now_s()
    upkeep.sweep_temp(store.root)
    with store.replacing:
        store.disk.drop_lost()
    if store.cold is not None:
        store.cold.sweep()
    lain = _ages(store, upkeep.QUARANTINE, upkeep.quarantined(store.root))
    old = {path for path, age_s in lain.items() if age_s > upkeep.MAX_QUARANTINE_AGE_S}
    upkeep.trim_quarantine(store.root, old=old)
    upkeep.trim_asides(store.root, INDEX)
    _keep_ballast(store, upkeep.ballast_bytes(limits.cache_max_bytes))
    store.records.trim(now_s - _REMEMBERED_S).result()
    store.database.submit(lambda c: unpublished.trim(c, now_s)).result()
    Conversations(store.database).forget_idle(now_s - _REMEMBERED_S).result()
    _drop_old_turns(store)
    store.database.checkpoint().result()
    yield from ()


def _keep_ballast(store: OpenStore, num_bytes: int) -> None:
    """Where there is no room for it under the cap, a later call makes it."""
    is_there = (store.root / upkeep.BALLAST).exists()
    with suppress(OverCap):
        if not is_there:
            store.disk.reserve_spare(upkeep.BALLAST, num_bytes)
        upkeep.keep_ballast(store.root, num_bytes)
    store.disk.release(upkeep.BALLAST)


def sweep_orphans(store: OpenStore, should_stop: Callable[[], bool]) -> Iterator[News]:
    """Put rows and files in agreement again, as at boot."""
    with store.moving:
        now_s = time.time()
        lock = store.replacing
        recovery = Recovery(store.root, store.database, store.cold, now_s, should_stop, lock)
        recovery.reserve = partial(store.disk.reserve_spare, RECOVERED)
        recovery.run()
        store.disk.release(RECOVERED)
    yield from ()


def _ages(store: OpenStore, kind: str, files: Mapping[str, int]) -> dict[str, float]:
    """For how long files have lain untouched, as `sightings.ages`."""
    now_s = store.clock.now_s()
    return store.database.submit(lambda c: sightings.ages(c, kind, files, now_s)).result()


def _drop_old_turns(store: OpenStore) -> None:
    """Of conversations without slots those of long ago; of models without any after a day."""
    rows = Conversations(store.database).listing()
    held = {(row.model.hex(), row.key.hex()) for row in rows if row.leaf is not None}
    with_slots = {total.model.hex() for total in store.index.totals()}
    folders = {
        f"{turns.TURNS}/{one.model}/{one.path.name}": one for one in turns.folders(store.root)
    }
    lain = _ages(store, turns.TURNS, {name: one.mtime_ns for name, one in folders.items()})
    for name, one in folders.items():
        lives_s = _REMEMBERED_S if one.model in with_slots else _ORPHANED_S
        if (one.model, one.conversation) not in held and lain[name] > lives_s:
            turns.drop_folder(one)


def _evict_warm(
    store: OpenStore, excess: int, limits: StoreLimits, *, with_pinned: bool = False
) -> Iterator[News]:
    yield from _evict(store, store.index.candidates(with_pinned=with_pinned), excess, limits)


def _evict(
    store: OpenStore, candidates: Sequence[Candidate], excess: int, limits: StoreLimits
) -> Iterator[News]:
    """From the fast disk, of these slots."""
    tiers = dict(store.index.places())
    if store.cold is None:
        yield from _dropped(store, _chosen(store, candidates, excess), "cap", "evicted")
        return
    # Demoting a slot takes nothing from cold ones that continue it: only warm children count.
    warm = [one for one in candidates if tiers.get(one.id) == "warm"]
    everything = store.index.candidates(with_pinned=True)
    children = Counter(one.parent for one in everything if tiers.get(one.id) == "warm")
    leaves_first = [msgspec.structs.replace(one, num_children=children[one.id]) for one in warm]
    yield from _demoted(store, _chosen(store, leaves_first, excess), limits, "evicted")


def _cold_room(store: OpenStore, limits: StoreLimits) -> int:
    used = sum(total.disk_bytes for total in store.index.totals() if total.tier == "cold")
    return limits.cold_max_bytes - used


def _evict_cold(store: OpenStore, limits: StoreLimits, wanted_bytes: int = 0) -> Iterator[News]:
    """What is worth least in the cold store goes, until so much more would have room there."""
    tiers = dict(store.index.places())
    cold = [one for one in store.index.candidates() if tiers.get(one.id) == "cold"]
    spare = int(limits.cold_max_bytes * (1 - LOW_WATER))
    excess = wanted_bytes + spare - _cold_room(store, limits)
    yield from _dropped(store, _chosen(store, cold, excess), "cold_cap", "evicted")


def _chosen(store: OpenStore, candidates: Iterable[Candidate], excess: int) -> tuple[str, ...]:
    return choose(candidates, excess, store.clock.now_s())


def _whole_subtrees(over: Iterable[Candidate]) -> list[str]:
    """Those of which everything that continues them goes as well; children come first."""
    gone: list[str] = []
    num_gone_children: Counter[str | None] = Counter()
    for one in over:
        if num_gone_children[one.id] == one.num_children:
            gone.append(one.id)
            num_gone_children[one.parent] += 1
    return gone


def _dropped(store: OpenStore, ids: Sequence[str], why: str, reason: MissReason) -> Iterator[News]:
    """Who may be about to read them is told before their files leave."""
    places = store.index.drop(ids).result() if ids else ()
    store.counts[f"evicted_{why}"] += len(places)
    try:
        yield SlotsGone(tuple(place.id for place in places), reason)
    finally:
        store.unlink(places)


def _demoted(
    store: OpenStore, ids: Sequence[str], limits: StoreLimits, reason: Literal["expired", "evicted"]
) -> Iterator[News]:
    """Move slots to the cold store, one by one; what is damaged goes altogether.

    Room is made there before each, and what has none goes as well. Where the cold store fails
    what only expired stays.
    """
    why = "cap" if reason == "evicted" else "expired"
    sizes = {one.id: one.size_bytes for one in store.index.candidates()}
    room = _cold_room(store, limits)
    for number, slot_id in enumerate(ids):
        size = sizes.get(slot_id, 0)
        if size > room and size > (room := _cold_room(store, limits)):
            yield from _evict_cold(store, limits, size)
            room = _cold_room(store, limits)
        if size > room:
            yield from _dropped(store, [slot_id], why, reason)
            continue
        try:
            store.demote(slot_id)
            room -= size
            yield SlotsDemoted((slot_id,))
        except (SlotDamaged, SlotMissing):
            yield repair(store, slot_id)
        except StoreError as error:
            _log.warning("cold_store_fails", why=str(error), num_left=len(ids) - number)
            if reason == "evicted":
                yield from _dropped(store, ids[number:], why, reason)
            return
