"""Arrays that files of KV are read into, one for the same tensor of several blocks.

They are in memory that this process writes in place: what is compared with the checksums is what is
used. Not for CUDA, where the CPU reaches arrays in slower memory only.
"""

# pyright: reportUnknownMemberType=false

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache, cached_property
from mmap import PAGESIZE, mmap
from typing import NamedTuple, cast

import mlx.core as mx

from runtime.kv.pack import DTYPES, Slab
from store.errors import SlotDamaged, StoreFailed
from store.kv_file import TensorEntry


class BlockArrays(NamedTuple):
    """The arrays of one block by their names. They are views of `slab` from the token `slab_at` on,
    if there is one.
    """

    tensors: Mapping[str, mx.array]
    slab: Slab | None = None
    slab_at: int = 0


class Pages:
    """Room for the tensors `entries` of so many blocks, each of which has them alike.

    Raises:
        SlotDamaged: a tensor is of a dtype that mlx does not have.
        StoreFailed: there is no memory for them.
    """

    def __init__(self, entries: Sequence[TensorEntry], num_blocks: int) -> None:
        self._entries = entries
        self._num_blocks = num_blocks
        for one in entries:
            if one.dtype not in DTYPES:
                raise SlotDamaged(f"the tensor {one.name} cannot be loaded: it is of {one.dtype}")
        try:
            room = [_room(num_blocks * one.num_bytes) for one in entries]
        except (RuntimeError, OSError) as error:
            raise StoreFailed(f"there is no memory for what is read: {error}") from error
        self._bytes = [array for array, _ in room]
        self._places = {one.name: place for one, (_, place) in zip(entries, room, strict=True)}

    def fits(self, entries: Sequence[TensorEntry]) -> bool:
        """Whether a block that has these tensors may be read into them."""
        kinds = [(one.name, one.dtype, one.shape) for one in entries]
        return kinds == [(one.name, one.dtype, one.shape) for one in self._entries]

    def place(self, entry: TensorEntry, number: int) -> memoryview:
        """Where the bytes of a tensor of this block belong."""
        start = number * entry.num_bytes
        return self._places[entry.name][start : start + entry.num_bytes]

    def block(self, number: int) -> BlockArrays:
        """The arrays of one block, evaluated, once all are read."""
        return self._blocks[number]

    @cached_property
    def _blocks(self) -> list[BlockArrays]:
        num, entries = self._num_blocks, self._entries
        names = [one.name for one in entries]
        with mx.stream(mx.cpu):
            arrays = [_typed(*one, num) for one in zip(entries, self._bytes, strict=True)]
            columns = [mx.split(one, num) for one in arrays] if num > 1 else []
            mx.eval(arrays, columns)
        if num == 1:
            return [BlockArrays(dict(zip(names, arrays, strict=True)))]
        slab, num_tokens = Slab(arrays), entries[0].shape[0] if entries else 0
        by_block = (
            (dict(zip(names, one, strict=True)), n)
            for n, one in enumerate(zip(*columns, strict=True))
        )
        return [BlockArrays(tensors, slab, n * num_tokens) for tensors, n in by_block]


@cache
def _adopts_pages() -> bool:
    """Whether mlx takes memory of this process for an array as it is: on Metal, not on a CPU."""
    try:
        mx.asarray(memoryview(mmap(-1, PAGESIZE)), copy=False)
    except ValueError:
        return False
    return True


def _room(num_bytes: int) -> tuple[mx.array, memoryview]:
    """An array of so many bytes, and where they are; pages that are new need not become zeros."""
    if not num_bytes:
        return mx.zeros((0,), mx.uint8), memoryview(b"")
    if _adopts_pages():
        pages = memoryview(mmap(-1, num_bytes))
        return mx.asarray(pages, copy=False), pages
    array = mx.zeros((num_bytes,), mx.uint8, stream=mx.cpu)
    mx.eval(array)
    return array, memoryview(cast("bytes", array)).cast("B")


def _typed(entry: TensorEntry, data: mx.array, num_blocks: int) -> mx.array:
    dtype = DTYPES[entry.dtype]
    first, *rest = entry.shape or (1,)
    if not entry.num_bytes:
        return mx.zeros((num_blocks * first, *rest), dtype)
    typed = data.view(dtype)
    return typed.reshape((num_blocks * first, *rest) if entry.shape else ())
