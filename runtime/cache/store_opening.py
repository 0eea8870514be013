"""Opening the store: whose it is, its index, its cold store."""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path

from migrations.run import upgrade
from runtime.cache.compaction import cut_ends
from runtime.cache.owned import INDEX, OpenStore
from store import ownership, unpublished, upkeep
from store.clock import Clock, now
from store.cold import ColdDirectory, ColdStore, open_cold
from store.cold_gate import ColdGate
from store.cold_owner import Claim
from store.errors import StoreError, StoreLocked
from store.opening import open_database


def open_store(
    root: Path, cold_store: str | None, secret: bytes | None = None, read: Clock = now
) -> OpenStore:
    """Make or open the store at `root` and own it. `secret` is used where there is none yet, and
    `read` are the system's clocks.

    Raises:
        StoreLocked: another server owns it.
        StoreTooNew, StoreFull, StoreFailed: it cannot be used.
    """
    owned = ownership.take(root, secret=secret)
    if not owned.is_owner:
        owned.close()
        raise StoreLocked(f"another server owns {root}")
    try:
        upkeep.prepare(root)
        cold = _cold(root, cold_store)
        database = open_database(
            root / INDEX, upgrade, lambda: upkeep.drop_ballast(root), read=read
        )
    except StoreError:
        owned.close()
        raise
    store = OpenStore(owned, database, None)
    if cold is not None and cold_store is not None:
        claim = Claim(root, owned.secret, cold_store, lambda: "cold" in store.tiers())
        store.cold = ColdGate(cold, claim)
    with suppress(StoreError):
        database.submit(unpublished.lose).result()
    with suppress(StoreError):
        now_s = time.time()
        store.write_budget.add(store.records.counters(now_s).get("written_bytes", 0.0), now_s)
    with suppress(StoreError):  # what a deletion that was broken off left; nobody knows of it yet
        for _ in cut_ends(store):
            pass
    return store


def _cold(root: Path, where: str | None) -> ColdStore | None:
    return cold_at(root, where) if where is not None else None


def cold_at(root: Path, where: str) -> ColdStore:
    """The bucket or the directory that `cold_store` names. Raises StoreFailed."""
    return open_cold(root, where) if "://" in where else ColdDirectory(Path(where))
