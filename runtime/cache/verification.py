"""Reading what lies in a store by blocks, file by file: what is not as it was written goes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

from runtime.cache.opened import BlockStore
from store.disk import disk_bytes
from store.errors import SlotDamaged, SlotForeign, SlotMissing, StoreError
from store.head_file import read_end, read_head
from store.kv_file import open_file
from store.slots import SLOT, STATE, BlockKey

Kind = Literal["slot", "state", "cold_slot", "cold_state", "head"]
Found = Literal["whole", "damaged", "unread"]


class StoredFile(NamedTuple):
    """A file of a block, here or in the cold store, or a head by its id."""

    kind: Kind
    key: BlockKey | None = None
    head_id: str = ""


class Verified(NamedTuple):
    """What came of reading a file, its bytes if it is whole, and the names that leave with it."""

    found: Found
    num_bytes: int = 0
    gone: Sequence[BlockKey] = ()


def files_of(store: BlockStore) -> list[StoredFile]:
    """All that there are."""
    with store.heads.lock:
        heads = [StoredFile("head", None, i) for i, one in store.heads.known.items() if one.path]
        blocks = [(key, block.sizes) for key, block in store.heads.kept.blocks.items()]
    files: list[StoredFile] = []
    for key, sizes in blocks:
        kinds: list[tuple[Kind, int]] = [
            ("slot", sizes.slot),
            ("state", sizes.state),
            ("cold_slot", sizes.cold_slot),
            ("cold_state", sizes.cold_state),
        ]
        files += [StoredFile(kind, key) for kind, num_bytes in kinds if num_bytes]
    return [*files, *heads]


def verify(store: BlockStore, file: StoredFile) -> Verified:
    """Read all of a file; one that is damaged or gone is not counted on any more.

    It touches the cold store, so that it has to be called by the thread that does.
    """
    try:
        return Verified("whole", _read(store, file))
    except (SlotDamaged, SlotMissing):
        gone = _drop(store, file)
        return Verified("unread" if gone is None else "damaged", gone=gone or ())
    except (SlotForeign, StoreError):
        return Verified("unread")


def _read(store: BlockStore, file: StoredFile) -> int:
    """The bytes of a file that is whole. Raises StoreError."""
    if file.key is None:
        return _read_head(store, file.head_id)
    is_state = file.kind in ("state", "cold_state")
    if file.kind in ("cold_slot", "cold_state"):
        return store.read_cold(file.key, is_state=is_state)
    slots = store.slots
    path = slots.state_path(file.key) if is_state else slots.path(file.key)
    with open_file(path, STATE if is_state else SLOT) as opened:
        opened.check()
    return disk_bytes(path)


def _read_head(store: BlockStore, head_id: str) -> int:
    with store.heads.lock:
        known = store.heads.known.get(head_id)
        if known is None or known.path is None:  # it left meanwhile
            return 0
        read_head(known.path)
        read_end(known.path)
        return known.num_bytes


def _drop(store: BlockStore, file: StoredFile) -> list[BlockKey] | None:
    """The names that leave with it; None where it was not counted on any more.

    Raises StoreError.
    """
    heads, key = store.heads, file.key
    with heads.lock:
        if key is None:
            return heads.forget(file.head_id) if file.head_id in heads.known else None
        block = heads.kept.blocks.get(key)
        if block is None:
            return None
        if file.kind not in ("slot", "state"):
            return []  # the cold store forgot it while it was read
        if not (block.sizes.slot if file.kind == "slot" else block.sizes.state):
            return None  # it made way meanwhile
        (store.slots.remove if file.kind == "slot" else store.slots.remove_state)(key)
        store.note_damaged([key])
        return []
