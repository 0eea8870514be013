"""A damaged slot becomes slots of what is whole of it: damage costs the blocks that it is in.

The file itself is kept in quarantine for a day. Every call blocks.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from runtime.cache.owned import Merged, OpenStore
from runtime.cache.slot_pieces import cut, is_of_ranks, put, rewriting, stateless, tensors_of
from runtime.slot_events import SlotPart, SlotsGone
from store import upkeep
from store.disk import opened
from store.errors import SlotMissing, StoreError
from store.slot_file import SLICED, whole_spans
from store.slots import CheckedSlot, check, read_contents, slot_path
from store.types import SlotHeader, SlotRow, TensorData, part_hashes


def repair(
    store: OpenStore, slot_id: str, parts: Sequence[SlotPart] = (), end: int | None = None
) -> SlotsGone | Merged:
    """Put what is whole of a damaged slot in its place, or drop it where nothing is.

    `parts` are what a worker found whole of it, and calls it. Of what comes after position `end`
    nothing is kept. What became of the slot: `SlotsGone` of none if it is not damaged at all, or
    not there.

    Raises:
        StoreError: the store as a whole fails.
    """
    path = slot_path(store.root, slot_id)
    with suppress(StoreError), rewriting(store) as rows:
        slot = check(path)
        spans = _spans(slot, end)
        wanted = parts or [SlotPart(os.urandom(16).hex(), *span) for span in spans]
        fitting = [one for one in wanted if _is_within(one, spans)]
        if slot.damage and fitting:
            for part in fitting:
                rows.append(_written(store, path, slot, part))
            with store.replacing:
                places = store.index.divide(slot_id, rows).result()
                if not places:
                    raise SlotMissing(f"{slot_id} was deleted meanwhile")
                _set_aside(store, path)
            store.unlink(places)
            store.counts["repaired"] += 1
            left = {place.id for place in places}
            kept = tuple(row for row in rows if row.header.id not in left)
            if not kept:
                return SlotsGone((slot_id,), "damaged")
            return Merged.of([slot_id], kept)
    return SlotsGone(store.drop_bad(slot_id), "damaged")


def _spans(slot: CheckedSlot, end: int | None) -> list[tuple[int, int]]:
    """What can be taken out of a damaged slot, in whole blocks up to `end`."""
    header = slot.header
    if header.media or is_of_ranks(header.layout):
        return []
    spans = whole_spans(header, slot.damage)
    if end is None:
        return spans
    end -= end % header.block_size
    return [(start, min(stop, end)) for start, stop in spans if start < end]


def _is_within(part: SlotPart, spans: Sequence[tuple[int, int]]) -> bool:
    return any(start <= part.start < part.end <= end for start, end in spans)


def _written(store: OpenStore, path: Path, slot: CheckedSlot, part: SlotPart) -> SlotRow:
    """Publish a part of a slot."""
    whole = slot.header
    has_state = whole.has_state and part.end == whole.end and not slot.damage.tensors
    start_hash, block_hashes, end_hash = part_hashes(whole, part.start, part.end, whole.block_size)
    header = msgspec.structs.replace(
        whole,
        id=part.id,
        start_hash=start_hash,
        start=part.start,
        end=part.end,
        block_hashes=block_hashes,
        end_hash=end_hash,
        layout=whole.layout if has_state else stateless(whole.layout),
        has_state=has_state,
        recompute_ms=whole.recompute_ms * (part.end - part.start) / whole.num_tokens,
    )
    with opened(path) as fd:
        tensors = tensors_of(fd, read_contents(fd))
    size = put(store, header, *_taken(whole, header, slot.token_ids, tensors))
    return SlotRow(header=header, disk_bytes=size, last_used_s=store.clock.now_s())


def _taken(
    whole: SlotHeader, part: SlotHeader, token_ids: array[int], tensors: Sequence[TensorData]
) -> tuple[array[int], list[TensorData]]:
    """The token ids and tensors of a part."""
    start, end = part.start - whole.start, part.end - whole.start
    slices = [cut(one, end, start) for one in tensors if one.name.startswith(SLICED)]
    state = [one for one in tensors if not one.name.startswith(SLICED)] if part.has_state else []
    return token_ids[start:end], slices + state


def _set_aside(store: OpenStore, path: Path) -> None:
    with suppress(StoreError):
        upkeep.quarantine(store.root, path)
        store.counts["quarantined"] += 1
