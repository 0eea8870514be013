"""Pieces of slots become slots: what is taken out of files, and published as another one.

Every call blocks.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from functools import partial

import msgspec

from runtime.cache.owned import OpenStore
from store.disk import disk_bytes
from store.errors import SlotDamaged, StoreFailed
from store.slot_file import SlotContents
from store.slots import publish_or_remove, slot_path, stage
from store.types import SlotHeader, SlotPlace, SlotRow, TensorData


@contextmanager
def rewriting(store: OpenStore) -> Generator[list[SlotRow]]:
    """Slots are made of others: the files of those that are listed go again if that fails.

    Whoever deletes waits for the end of it: what is read and written here may have what goes.
    """
    rows: list[SlotRow] = []
    is_done = False
    with store.under_way.rewriting:
        try:
            yield rows
            is_done = True
        finally:
            if not is_done:
                store.unlink([SlotPlace(row.header.id, "warm") for row in rows])


def put(
    store: OpenStore, header: SlotHeader, token_ids: array[int], tensors: Sequence[TensorData]
) -> int:
    """Publish a slot that is made of others, and is to get its row; the bytes that it takes."""
    reserve = partial(store.disk.reserve_spare, header.id)
    try:
        staged = stage(store.root, header, token_ids, tensors, reserve=reserve)
        # Until its row is there, it is nobody's: what it is made of may be deleted meanwhile.
        store.index.condemn(SlotPlace(header.id, "warm")).result()
        publish_or_remove(staged)
    finally:
        store.disk.release(header.id)
    now_s = store.clock.now_s()
    store.counts["written_bytes"] += staged.num_bytes
    store.write_budget.add(staged.num_bytes, now_s)
    store.records.count({"written_bytes": staged.num_bytes}, now_s)
    return disk_bytes(slot_path(store.root, header.id))


def cut(tensor: TensorData, end: int, start: int = 0) -> TensorData:
    """The tokens `[start, end)` of a slice: tokens come first, so their bytes lie together."""
    row_bytes = len(tensor.data) // max(tensor.shape[0], 1)
    shape = (end - start, *tensor.shape[1:])
    return tensor._replace(shape=shape, data=tensor.data[start * row_bytes : end * row_bytes])


def tensors_of(fd: int, contents: SlotContents) -> list[TensorData]:
    """Every tensor but the token ids, in memory."""
    found: list[TensorData] = []
    for entry in contents.tensors[1:]:
        data = os.pread(fd, entry.num_bytes, contents.payload_start + entry.start)
        if len(data) != entry.num_bytes:
            raise StoreFailed(f"{contents.header.id} became shorter while it was read")
        found.append(TensorData(entry.name, entry.dtype, entry.shape, memoryview(data)))
    return found


class _Packed(msgspec.Struct):
    """What the packer says of a slot's tensors; of several ranks, what it says of each."""

    layout: msgspec.Raw = msgspec.Raw()
    num_slices: int = 0
    skeleton: str | None = None


class _Ranks(msgspec.Struct):
    split: str
    ranks: tuple[str, ...]


def is_of_ranks(layout: str) -> bool:
    """A slot with this layout has the parts of several ranks."""
    try:
        msgspec.json.decode(layout, type=_Ranks)
    except msgspec.MsgspecError:
        return False
    return True


def form_of(layout: str) -> str:
    """What slots in a row have in common that can become one, by `SlotHeader.layout`."""
    with suppress(SlotDamaged):
        return stateless(layout)
    return layout


def stateless(layout: str) -> str:
    """`SlotHeader.layout` of the same slot without the state at its end. Raises SlotDamaged."""
    try:
        found = msgspec.json.decode(layout, type=_Ranks)
    except msgspec.MsgspecError:
        pass
    else:
        ranks = tuple(map(stateless, found.ranks))
        return msgspec.json.encode(_Ranks(found.split, ranks)).decode()
    try:
        packed = msgspec.json.decode(layout, type=_Packed)
    except msgspec.MsgspecError as error:
        raise SlotDamaged(f"its layout cannot be read: {error}") from error
    return msgspec.json.encode(msgspec.structs.replace(packed, skeleton=None)).decode()
