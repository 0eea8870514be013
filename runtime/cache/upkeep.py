"""What is done to a store by blocks while nobody asks for it: expiry, caps, scrubbing, order.

Each of these blocks, and gives the names that leave workers' memory. `keep`, `make_room` and `tidy`
touch the cold store, so that they have to be called by the thread that does.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from contextlib import suppress
from typing import NamedTuple

from runtime.cache.opened import HEADS, INDEX, SLOTS, BlockStore
from runtime.cache.verification import StoredFile, files_of, verify
from runtime.cache.views import CollectedView
from store import earlier, upkeep
from store.errors import ColdAway
from store.slots import BlockKey

SCRUB_PERIOD_S = 7 * 86_400.0
MAX_SCRUB_BYTES = 1 << 30
_SCRUBBED = frozenset({"slot", "state", "head"})

UNLOADED_S = 3600.0
LOADED_S = 86_400.0
"""A turn is not under way for so long; its slots may have no head before it ends."""

_STAGED_S = 600.0
"""What was staged longer ago is published by nobody any more, if its writer has ended."""

_REMEMBERED_S = 90 * 86_400.0


def keep(store: BlockStore) -> list[BlockKey]:
    """Have the caps and lives hold again, and keep the time by which things age."""
    store.database.keep_time().result()
    return store.room.keep()


def make_room(store: BlockStore) -> list[BlockKey]:
    """The disk is full: give up the ballast, so that rows can be deleted, then what is too much."""
    store.drop_ballast()
    return store.room.keep()


def tidy(store: BlockStore) -> list[BlockKey]:
    """Unfinished files, what was put aside, old rows, the ballast, the WAL."""
    root = store.root
    upkeep.sweep_temp(root)
    upkeep.sweep_staged(store.staging_folders, time.time() - _STAGED_S)
    if store.cold is not None:
        with suppress(ColdAway):
            store.cold.sweep()
    upkeep.trim_asides(root, INDEX)
    earlier.remove(root, earlier.KEPT_S)
    store.keep_ballast()
    store.records.trim(store.clock.now_s() - _REMEMBERED_S).result()
    store.database.checkpoint().result()
    return []


def scrub(store: BlockStore, period_s: float, should_stop: Callable[[], bool]) -> list[BlockKey]:
    """Read the next files here to find damage before they are wanted; all of them once a week.

    `period_s` is how often this is called. It ends when requests come.
    """
    here = (one for one in files_of(store) if one.kind in _SCRUBBED)
    files = sorted((_name_of(one), one) for one in here)
    left_bytes = int(store.heads.kept.warm_bytes * period_s / SCRUB_PERIOD_S) + 1
    left_bytes = min(left_bytes, MAX_SCRUB_BYTES)
    gone: list[BlockKey] = []
    for name, file in [one for one in files if one[0] > store.scrubbed_to] or files:
        if left_bytes <= 0 or should_stop():
            break
        read = verify(store, file)
        store.counts["scrubbed_bytes"] += read.num_bytes
        left_bytes -= read.num_bytes
        gone += read.gone
        store.scrubbed_to = name
    return gone


def sweep_orphans(store: BlockStore, loaded: Collection[bytes]) -> list[BlockKey]:
    """Remove old slots through which no head goes, and count anew what there is of the others.

    `loaded` are the models that workers have: what these write has no head until their turns end.
    For the thread that publishes: what has left with its worker is published before.
    """
    now_s = time.time()
    return store.heads.sweep_each(
        lambda model: now_s - (LOADED_S if model in loaded else UNLOADED_S)
    )


def forget_all(store: BlockStore) -> None:
    """Remove what is left when all heads are deleted: past requests, what was set aside."""
    store.records.forget_requests().result()
    upkeep.remove_asides(store.root, INDEX)
    earlier.remove(store.root)


class Use(NamedTuple):
    """The blocks of which there are files here, and in the cold store, and what all of it takes."""

    warm: frozenset[BlockKey]
    cold: frozenset[BlockKey]
    num_bytes: int

    @staticmethod
    def of(store: BlockStore) -> Use:
        """As the files are, those without a head as well. Raises StoreError."""
        with store.heads.lock:
            blocks = store.heads.kept.blocks
            cold = frozenset(key for key, block in blocks.items() if block.sizes.cold)
            return Use(frozenset(store.slots.found()), cold, store.used_bytes())

    def changed(self, after: Use) -> CollectedView:
        """What was done between this and another one."""
        left = self.warm - after.warm
        gone = (self.warm | self.cold) - after.warm - after.cold
        return CollectedView(
            num_dropped=len(gone),
            num_demoted=len(left & after.cold),
            freed_bytes=self.num_bytes - after.num_bytes,
        )


def _name_of(file: StoredFile) -> str:
    """Where a file comes among all; those of a block are together."""
    if file.key is None:
        return f"{HEADS}/{file.head_id}"
    return f"{SLOTS}/{file.key.model.hex()}/{file.key.name.hex()}/{file.kind}"
