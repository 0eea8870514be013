"""What can go wrong with files and rows. None of these ever reaches a client."""

from __future__ import annotations


class StoreError(Exception):
    """Base of everything the store reports. `reason` is machine-readable and counted."""

    reason = "store"


class SlotDamaged(StoreError):
    """A slot file is not, or no longer, what its header says: truncated, flipped, foreign, old."""

    reason = "damaged"


class SlotForeign(SlotDamaged):
    """A slot of another format version; not ours to delete."""

    reason = "foreign"


class SlotMissing(StoreError):
    """The file of a slot is gone."""

    reason = "missing"


class StoreFull(StoreError):
    """There is no room: the disk, the quota or the cap."""

    reason = "full"


class OverCap(StoreError):
    """A file of `num_bytes` was not begun: with it the store would take more than it may."""

    reason = "cap"

    def __init__(self, num_bytes: int) -> None:
        super().__init__(f"{num_bytes} bytes more would exceed the cap")
        self.num_bytes = num_bytes


class StoreFailed(StoreError):
    """Reading or writing failed for another reason of the system: I/O error, read-only, denied."""

    reason = "failed"


class ColdAway(StoreFailed):
    """The cold store does not answer, or refuses: what it has is kept and not to be had now."""

    reason = "cold_away"


class ColdForeign(ColdAway):
    """The cold store is another Hearth's: nothing of it is ours to read or delete."""

    reason = "cold_foreign"


class StoreLocked(StoreError):
    """Another server owns this store."""

    reason = "locked"


class StoreLost(StoreError):
    """The store's directory was removed or replaced while this server used it."""

    reason = "lost"


class IndexDamaged(StoreError):
    """SQLite found its own file malformed. The next start checks it and rebuilds from slots."""

    reason = "index_damaged"


class StoreTooNew(StoreError):
    """A later version of this software wrote this index; it is left as it is."""

    reason = "too_new"


class HistoryFull(StoreError):
    """The history takes all that it may, and only what is pinned or in use is left of it."""

    reason = "history_full"
