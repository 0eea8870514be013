"""What another program computed becomes slots and a staged head, as a worker writes its own.

A process of its own does that: no worker's memory is touched, and a worker finds the slots by their
names.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple
from uuid import uuid4

from runtime.kv import pack
from runtime.kv.layers import KvLayout
from runtime.kv.pack import PackedKv, RunKv
from runtime.kv.tiers import folders
from runtime.kv.writer import BlockJob
from runtime.mlx_lm_exchange import HeadStaged, Import
from store.block_names import HashChain
from store.head_file import Head, Owner, head_bytes, write_head
from store.keyed_names import keyed_hash
from store.kv_file import Tensor
from store.slots import BlockKey, SlotAbout, Slots, slot_bytes
from store.temp_names import temp_name
from store.types import TTL_S

_FILE_BYTES = 8192
"""What a file may take on disk beyond its size."""


class TakenIn(NamedTuple):
    """A conversation that is to be written: its blocks, the states at their ends, and its head,
    with what comes behind the last whole block.
    """

    blocks: list[BlockJob]
    head: Head
    token_ids: array[int]
    end: PackedKv | None

    @property
    def tensors(self) -> Sequence[Tensor]:
        return self.end.tensors if self.end is not None else ()


def taken_in(
    job: Import, layout: KvLayout, runs: Sequence[RunKv], token_ids: Sequence[int], token_ms: float
) -> TakenIn:
    """A conversation of nobody's session. `runs` are its blocks, and what comes behind the last
    whole one; the last has the state at its end. Each token took `token_ms` to compute.
    """
    size, ids = job.block_size, array("I", token_ids)
    chain = HashChain(job.secret, job.model_hash, block_size=size)
    names, block_ms = chain.block_hashes(ids), token_ms * size
    blocks: list[BlockJob] = []
    for number, (name, run) in enumerate(zip(names, runs, strict=False)):
        key = BlockKey(job.model_hash, name)
        own = ids[number * size : (number + 1) * size]
        blocks.append(BlockJob(key, own, _packed(layout, run._replace(state=None)), block_ms))
        if run.state is not None:
            state = _packed(layout, RunKv([], run.state))
            blocks.append(BlockJob(key, array("I"), state, block_ms, is_state=True))
    end: PackedKv | None = None
    if len(runs) > len(names):
        end = _packed(layout, runs[-1])
    elif runs and runs[-1].state is not None:
        end = _packed(layout, RunKv([], runs[-1].state))
    asked = keyed_hash(job.secret, "model", job.spec.id.encode())
    head = Head(
        id=uuid4().hex,
        model=job.model_hash,
        owner=Owner(asked, b"", b""),
        num_tokens=len(ids),
        name=job.spec.id,
        ttl_s=TTL_S["extended"],
        layout=end.layout if end is not None else "",
        block_ms=block_ms,
    )
    return TakenIn(blocks, head, ids, end)


def write(
    root: Path,
    taken: TakenIn,
    want_room: Callable[[int], None],
    on_write: Callable[[int, int], None],
) -> HeadStaged:
    """Have its slots, and its head staged. `want_room` is asked for what that takes at the most
    before anything is written, and `on_write` is told how many files are written, of how many.

    Raises:
        StoreFull, StoreFailed: the system has no room, or refuses.
    """
    folder, heads = folders(root)
    slots = Slots(folder)
    lacking = [one for one in taken.blocks if not _is_there(slots, one)]
    head_size = head_bytes(taken.head, taken.token_ids, taken.tensors)
    want_room(sum(map(_bytes_of, lacking)) + head_size + (len(lacking) + 1) * _FILE_BYTES)
    num_slots, num_bytes = 0, 0
    for number, one in enumerate(taken.blocks):  # one that was there may have left for the others
        on_write(number, len(taken.blocks))
        if one.is_state:
            written = slots.put_state(_about(one), one.packed.tensors)
        else:
            written = slots.put(_about(one), one.token_ids, one.packed.tensors)
            num_slots += written is not None
        num_bytes += written or 0
    if taken.blocks:
        slots.sync([taken.head.model])
    path = heads / temp_name(taken.head.id)
    num_bytes += write_head(path, taken.head, taken.token_ids, taken.tensors)
    return HeadStaged(taken.head.id, str(path), num_slots, num_bytes)


def _is_there(slots: Slots, job: BlockJob) -> bool:
    return slots.has_state(job.key) if job.is_state else slots.has(job.key)


def _about(job: BlockJob) -> SlotAbout:
    return SlotAbout(job.key.model, job.key.name, job.packed.layout, job.recompute_ms)


def _bytes_of(job: BlockJob) -> int:
    return slot_bytes(_about(job), None if job.is_state else job.token_ids, job.packed.tensors)


def _packed(layout: KvLayout, run: RunKv) -> PackedKv:
    tensors = [Tensor(one.name, one.dtype, one.shape, one.data) for one in pack.pack(run)]
    return PackedKv(pack.pack_layout(layout, run), tensors)
