"""Blocks in the cold store: demoted when they rest or have to make way, and brought back.

The row says that a file is there before it is put and until it is removed, so a deletion misses
none: what could not be removed has a row without heads (`Heads.left_cold`) and is removed later.
Names are content, so a file that is put twice is the same. All of this blocks, for as long as a
network does, and belongs to one thread; `Heads` is held only between the contacts.
"""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2b

from store.cold import ColdStore
from store.cold_codec import UnpackedBytes, pack
from store.disk import Reserve, keep_going, new_file
from store.errors import ColdAway, OverCap, SlotDamaged, SlotMissing, StoreError
from store.heads import BlockFile, Heads
from store.kv_file import open_file, unpack_front
from store.slots import SLOT, STATE, BlockKey
from store.tree import Sizes


def cold_id(key: BlockKey, *, is_state: bool) -> str:
    """What the packed slot of a block, or its packed states, are called."""
    name = blake2b(key.name, digest_size=16, person=b"state").digest() if is_state else key.name
    return name.hex()


class ColdBlocks:
    """What the blocks of `heads` have in a cold store."""

    def __init__(self, heads: Heads, store: ColdStore) -> None:
        self._heads = heads
        self._store = store
        has_rows = bool(heads.kept.cold_bytes or heads.left_cold)
        self._is_known = has_rows and not heads.were_rows_wrong
        """Whether the rows say what is there; else they are new or old, and it is listed first."""

    def demote(self, file: BlockFile) -> bool:
        """Move a file there; False where either store, or the index, refuses. One of which several
        ranks have a part only leaves.

        Raises StoreFailed where the file here does not go.
        """
        key, is_slot = file
        try:
            self._know()
            with self._heads.lock:
                block = self._heads.kept.blocks.get(key)
                if block is None:
                    return True
                if self._heads.slots.is_shared(key):
                    self._heads.remove_files([file])
                    return True
                sizes = block.sizes
                slot = sizes.slot if is_slot else 0
                cold = Sizes(0, 0, slot or sizes.cold_slot, sizes.state or sizes.cold_state)
                self._heads.set_cold(key, cold, is_first=True)
            state = (sizes.state and self._put(key, is_state=True)) or sizes.cold_state
            slot = (slot and self._put(key, is_state=False)) or sizes.cold_slot
        except StoreError:
            return False
        with self._heads.lock:
            if key in self._heads.kept.blocks:
                self._heads.set_cold(key, Sizes(0, 0, slot, state))
                self._heads.remove_files([file])
        return True

    def bring(self, keys: Iterable[BlockKey], reserve: Reserve) -> list[BlockKey]:
        """Have these blocks on the fast disk, each with its states, in this order until one cannot
        be had; those that are there. `reserve` is asked for the bytes of each file.

        Raises:
            StoreFailed, StoreFull: the fast disk refuses.
        """
        there: list[BlockKey] = []
        for key in keys:
            block = self._heads.kept.blocks.get(key)
            if block is None:
                break
            try:
                if not block.sizes.slot and not self._fetch(key, reserve, is_state=False):
                    break
                if block.sizes.cold_state and not block.sizes.state:
                    self._fetch(key, reserve, is_state=True)
            except (ColdAway, OverCap):
                break
            there.append(key)
        return there

    def read(self, key: BlockKey, *, is_state: bool) -> int:
        """The bytes of a file there, all of which is unpacked.

        Raises:
            SlotMissing, SlotDamaged: it is not to be had.
            ColdAway: the store is away.
        """
        with self._store.get(cold_id(key, is_state=is_state)) as source:
            unpacked = UnpackedBytes(source)
            front = unpack_front(STATE if is_state else SLOT, unpacked.front)
            for entry in front.entries:
                for _ in unpacked.tensor(entry):
                    pass
            unpacked.end()
        return front.file_bytes

    def remove(self, key: BlockKey) -> bool:
        """Have nothing of a block there; False where the store is away."""
        try:
            for is_state in (False, True):
                self._store.delete(cold_id(key, is_state=is_state))
        except ColdAway:
            return False
        self._heads.removed_cold(key)
        return True

    def finish(self) -> bool:
        """Remove what blocks have there that no head goes through; whether all of it is gone."""
        try:
            self._know()
        except ColdAway:
            return False
        return all(self.remove(key) for key in list(self._heads.left_cold))

    def _know(self) -> None:
        """Where there are no rows of it, as after an index was lost, or those of an older one, have
        them of what is there, and remove what no head goes through. Raises ColdAway.
        """
        if self._is_known:
            return
        found = {one.id: one.num_bytes for one in self._store.slots()}
        kept: dict[BlockKey, Sizes] = {}
        for key in list(self._heads.kept.blocks):
            slot = found.pop(cold_id(key, is_state=False), 0)
            state = found.pop(cold_id(key, is_state=True), 0)
            kept[key] = Sizes(0, 0, slot, state)
        for one in found:
            self._store.delete(one)
        self._heads.set_all_cold(kept)  # at once: who has some rows takes them for all
        self._is_known = True

    def _put(self, key: BlockKey, *, is_state: bool) -> int:
        """Bytes of a file that is packed and durable there; 0 where there is none to be had."""
        slots = self._heads.slots
        path, kind = (slots.state_path(key), STATE) if is_state else (slots.path(key), SLOT)
        try:
            with open_file(path, kind) as file:
                file.check()
                front = file.front
                chunks = pack(file.fd, front.payload_start, front.entries, keep_going)
                return self._store.put(cold_id(key, is_state=is_state), chunks).num_bytes
        except (SlotDamaged, SlotMissing):
            return 0

    def _fetch(self, key: BlockKey, reserve: Reserve, *, is_state: bool) -> bool:
        """Have a file of a block here; what cannot be unpacked there is forgotten."""
        heads, slots = self._heads, self._heads.slots
        path = slots.state_path(key) if is_state else slots.path(key)
        staged = slots.staging_path(path)
        try:
            with self._store.get(cold_id(key, is_state=is_state)) as source:
                unpacked = UnpackedBytes(source)
                front = unpack_front(STATE if is_state else SLOT, unpacked.front)
                reserve(front.file_bytes)
                with new_file(staged, front.file_bytes) as file:
                    file.write(unpacked.front)
                    for entry in front.entries:
                        for chunk in unpacked.tensor(entry):
                            file.write(chunk)
                    unpacked.end()
            with heads.lock:
                is_there = key in heads.kept.blocks and slots.take(key, staged, is_state=is_state)
                heads.note([key])
        except (SlotDamaged, SlotMissing):
            is_there = False
        finally:
            staged.unlink(missing_ok=True)
        if not is_there:
            self.lose(key, is_state=is_state)
        return is_there

    def lose(self, key: BlockKey, *, is_state: bool) -> None:
        """Have no file of a block there that is of no use. Raises ColdAway."""
        self._store.delete(cold_id(key, is_state=is_state))
        with self._heads.lock:
            if (block := self._heads.kept.blocks.get(key)) is not None:
                gone = {"cold_state" if is_state else "cold_slot": 0}
                self._heads.set_cold(key, block.sizes._replace(**gone))
