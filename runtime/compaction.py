"""Compaction: the many small slots at the end of a long chain become one.

Tensors lie token by token, so those of a chain are the bytes of its slots one after the other; no
mlx is needed. The new slot is durable before rows change places, old files go last. Only chains of
models without a worker are merged: a worker holds the ids of what it has in memory.
"""

from __future__ import annotations

import os
from array import array
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence

import msgspec
import structlog

from runtime.housekeeping import News
from runtime.open_store import Gone, OpenStore
from runtime.progress import Progress, Watch, unwatched
from store.disk import disk_bytes, opened
from store.errors import SlotDamaged, SlotMissing, StoreFailed
from store.slot_format import SlotContents
from store.slots import publish, read_contents, slot_path, stage, verify
from store.types import SlotHeader, SlotRow, TensorData

MAX_CHAIN = 16
"""More slots than these in a row, all small, are merged."""

SMALL_TOKENS = 2048
MAX_LOST_TOKENS = 64
"""An end that its only child left may be cut off if it is that short."""

MAX_MERGED_BYTES = 256 << 20

_log = structlog.stdlib.get_logger("hearth.store")


def chains(rows: Sequence[SlotRow]) -> Iterator[list[SlotRow]]:
    """The chains of small slots that end in a leaf and are too long; `rows` has parents first.

    Pure. Nothing else continues what is in a chain, and no state but the leaf's would be lost.
    """
    by_id = {row.header.id: row for row in rows}
    num_children = Counter(row.header.parent for row in rows)
    for leaf in rows:
        if num_children[leaf.header.id] or not _is_small(leaf):
            continue
        chain, num_bytes = [leaf], leaf.disk_bytes
        while parent := by_id.get(chain[-1].header.parent or ""):
            num_bytes += parent.disk_bytes
            is_only = num_children[parent.header.id] == 1 and _is_plain(parent)
            num_lost = parent.header.end - chain[-1].header.start
            if not is_only or num_lost > MAX_LOST_TOKENS or num_bytes > MAX_MERGED_BYTES:
                break
            chain.append(parent)
        if len(chain) > MAX_CHAIN:
            yield chain[::-1]


def compact(
    store: OpenStore,
    loaded: Collection[bytes],
    should_stop: Callable[[], bool],
    watch: Watch = unwatched,
) -> Iterator[News]:
    """Merge what is too long, chain by chain, of models that are not `loaded`."""
    for model in store.records.models():
        if model.hash in loaded:
            continue
        long = list(chains(store.index.slots_of(model.hash)))
        for number, chain in enumerate(long):
            watch(Progress(step="merge", num_done=number, num_total=len(long)))
            if should_stop():
                return
            try:
                yield merge(store, chain)
            except (SlotDamaged, SlotMissing) as error:
                _log.warning("chain_not_merged", leaf=chain[-1].header.id, why=str(error))


def merge(store: OpenStore, chain: Sequence[SlotRow]) -> Gone:
    """Put one slot in the place of a chain.

    Raises:
        SlotDamaged, SlotMissing: one of them cannot be read, or they do not fit together.
        StoreError: the store fails, or the chain was continued meanwhile.
    """
    ends = [row.header.start for row in chain[1:]] + [chain[-1].header.end]
    token_ids, tensors, headers = _joined(store, chain, ends)
    header = msgspec.structs.replace(
        chain[-1].header,
        id=os.urandom(16).hex(),
        parent=chain[0].header.parent,
        start=chain[0].header.start,
        block_hashes=tuple(
            one
            for row, end in zip(chain, ends, strict=True)
            for one in row.header.block_hashes[: _num_blocks(row, end)]
        ),
        # Only files know their pictures: the index has no need of them.
        media=tuple(
            span
            for one, end in zip(headers, ends, strict=True)
            for span in one.media
            if span.start < end
        ),
        rope_delta=headers[-1].rope_delta,
        recompute_ms=sum(row.header.recompute_ms for row in chain),
        created_s=store.clock().wall_s,
    )
    staged = stage(store.root, header, token_ids, tensors)
    path = publish(staged)
    merged = msgspec.structs.replace(chain[-1], header=header, disk_bytes=disk_bytes(path))
    old = [row.header.id for row in chain]
    places = store.index.replace(merged, old).result()
    store.unlink(places)
    store.counts["compacted"] += len(chain)
    store.counts["written_bytes"] += staged.num_bytes
    store.wear.add(staged.num_bytes, header.created_s)
    store.records.count({"written_bytes": staged.num_bytes}, header.created_s)
    return Gone(tuple(old), "evicted")


def _num_blocks(row: SlotRow, end: int) -> int:
    """How many blocks end inside `(start, end]`."""
    size = row.header.block_size
    return end // size - row.header.start // size


def _joined(
    store: OpenStore, chain: Sequence[SlotRow], ends: Sequence[int]
) -> tuple[array[int], list[TensorData], list[SlotHeader]]:
    """Token ids and slices one after the other, each up to its end, and the last slot's state.

    And what the files say of themselves.
    """
    token_ids: array[int] = array("I")
    headers: list[SlotHeader] = []
    parts: list[list[TensorData]] = []
    slices: list[list[TensorData]] = []
    for row, end in zip(chain, ends, strict=True):
        path = slot_path(store.root, row.header.id)
        num_tokens = end - row.header.start
        slot = verify(path)
        headers.append(slot.header)
        token_ids += slot.token_ids[:num_tokens]
        with opened(path) as fd:
            parts.append(_tensors(fd, read_contents(fd)))
        slices.append([_cut(one, num_tokens) for one in parts[-1] if one.name.startswith("kv.")])
    if len({tuple((one.name, one.dtype, one.shape[1:]) for one in part) for part in slices}) != 1:
        raise SlotDamaged("the slots of a chain do not have the same tensors")
    state = [one for one in parts[-1] if not one.name.startswith("kv.")]
    tensors = [_concatenated(column) for column in zip(*slices, strict=True)]
    return token_ids, tensors + state, headers


def _cut(tensor: TensorData, num_tokens: int) -> TensorData:
    """The first tokens of a slice: tokens come first, so they are its first bytes."""
    num_bytes = len(tensor.data) // max(tensor.shape[0], 1) * num_tokens
    shape = (num_tokens, *tensor.shape[1:])
    return tensor._replace(shape=shape, data=tensor.data[:num_bytes])


def _concatenated(column: Sequence[TensorData]) -> TensorData:
    first = column[0]
    data = b"".join(one.data for one in column)
    num_tokens = sum(one.shape[0] for one in column)
    return TensorData(first.name, first.dtype, (num_tokens, *first.shape[1:]), memoryview(data))


def _tensors(fd: int, contents: SlotContents) -> list[TensorData]:
    """Every tensor but the token ids, in memory."""
    found: list[TensorData] = []
    for entry in contents.tensors[1:]:
        data = os.pread(fd, entry.num_bytes, contents.payload_start + entry.start)
        if len(data) != entry.num_bytes:
            raise StoreFailed(f"{contents.header.id} became shorter while it was read")
        found.append(TensorData(entry.name, entry.dtype, entry.shape, memoryview(data)))
    return found


def _is_plain(row: SlotRow) -> bool:
    return _is_small(row) and not row.is_pinned and not row.header.has_state


def _is_small(row: SlotRow) -> bool:
    return row.tier == "warm" and row.header.num_tokens <= SMALL_TOKENS
