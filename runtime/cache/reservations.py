"""Room on the disk for what workers write: asked for, given or refused, and given back."""

from __future__ import annotations

from contextlib import suppress

from runtime.cache.channel import KvChannel
from runtime.cache.lifecycle import StoreLife
from runtime.cache.owned import OpenStore
from runtime.slot_events import RoomWanted
from store.errors import StoreError
from store.slot_file import is_slot_id
from store.slots import remove, slot_path


class Reservations:
    """Between the workers and the store's `DiskBudget`. It belongs to the event loop."""

    def __init__(self, life: StoreLife[OpenStore]) -> None:
        self._life = life
        self._asked: dict[str, KvChannel] = {}
        """By what is written, who writes it."""

    def wanted(self, channel: KvChannel, wanted: RoomWanted) -> None:
        """A worker is about to write a file."""
        self._asked[wanted.key] = channel
        self._life.spawn(self._give(channel, wanted))

    def left(self, key: str) -> None:
        """What room was given for is not written, or is a small file and written."""
        self._asked.pop(key, None)
        self._life.spawn(self._life.attempt(lambda store: _dropped(store, key), "room"))

    def staged(self, slot_id: str) -> None:
        """A file is whole: it is the store's to publish or to remove."""
        self._asked.pop(slot_id, None)
        self._life.spawn(self._life.attempt(lambda store: store.disk.note_staged(slot_id), "room"))

    def leave(self, channel: KvChannel) -> None:
        """A worker is gone, and what it has not staged goes."""
        for key in [key for key, one in self._asked.items() if one is channel]:
            self.left(key)

    async def _give(self, channel: KvChannel, wanted: RoomWanted) -> None:
        is_given = await self._life.attempt(lambda store: _reserved(store, wanted), "room")
        channel.tell_room(wanted.key, is_given=bool(is_given))


def _reserved(store: OpenStore, wanted: RoomWanted) -> bool:
    is_small = not is_slot_id(wanted.key)
    is_given = store.disk.reserve(
        wanted.key, wanted.num_bytes, parent=wanted.parent, is_small=is_small
    )
    store.counts["refused_cap"] += not is_given
    return is_given


def _dropped(store: OpenStore, key: str) -> None:
    """Without what its writer may have left of it."""
    if is_slot_id(key):
        for path in slot_path(store.root, key).parent.glob(f".tmp-*-{key}.*"):
            with suppress(StoreError):
                remove(path)
    store.disk.release(key)
