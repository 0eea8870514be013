"""Runs to slot tensors and back: names, dtypes, and what a slot file says of its layers."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, cast
from weakref import WeakSet

import mlx.core as mx
import msgspec

from runtime.kv.layers import KvLayout, State
from store.errors import SlotDamaged
from store.kv_file import Tensor

_DTYPES: dict[mx.Dtype, str] = {
    mx.bool_: "BOOL",
    mx.uint8: "U8",
    mx.int8: "I8",
    mx.uint16: "U16",
    mx.int16: "I16",
    mx.float16: "F16",
    mx.bfloat16: "BF16",
    mx.uint32: "U32",
    mx.int32: "I32",
    mx.float32: "F32",
    mx.uint64: "U64",
    mx.int64: "I64",
}


DTYPES = {name: dtype for dtype, name in _DTYPES.items()}
"""By their names in slot files."""


@dataclass(eq=False, slots=True, weakref_slot=True)
class Slab:
    """Arrays that were cut for a few blocks at once, whose slices are views of them.

    They stay in memory for as long as one of the blocks does. So when some leave, those that stay
    get arrays of their own.
    """

    slices: list[mx.array]
    pieces: WeakSet[Any] = field(default_factory=WeakSet[Any])
    """What in memory has a block of it."""

    host: list[memoryview] = field(default_factory=list["memoryview"])
    """The bytes of `slices` once they were asked for."""

    @property
    def num_tokens(self) -> int:
        return self.slices[0].shape[0] if self.slices else 0

    def host_bytes(self, start: int, end: int) -> list[memoryview]:
        """Those of so many tokens. One view of each array is taken, not one for each block."""
        self.host = self.host or [host_bytes(one) for one in self.slices]
        rows = [len(one) // max(self.num_tokens, 1) for one in self.host]
        return [one[start * row : end * row] for one, row in zip(self.host, rows, strict=True)]


class RunKv(NamedTuple):
    """The KV of one run in memory: slices `[tokens, heads, dim]` and, at its end, a checkpoint.

    As long as somebody has `share`, other ranks keep their parts of it. The slices begin at the
    token `slab_at` of `slab`, if they are views.
    """

    slices: list[mx.array]
    state: State | None
    share: object = None
    slab: Slab | None = None
    slab_at: int = 0

    @property
    def arrays(self) -> list[mx.array]:
        return self.slices + (self.state.arrays if self.state is not None else [])

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.arrays)


class PackedLayout(msgspec.Struct, frozen=True):
    """The `layout` of a file: the leaves, how many slices there are, the checkpoint's skeleton."""

    layout: KvLayout
    num_slices: int
    skeleton: str | None


class RankLayout(msgspec.Struct, frozen=True):
    """The layout of what one of several ranks has: how the model was split, and `PackedLayout`."""

    split: str
    rank: int
    num_ranks: int
    layout: str


def is_of_ranks(layout: str) -> bool:
    """Whether a file with this layout has the part of one of several ranks."""
    try:
        msgspec.json.decode(layout, type=RankLayout)
    except msgspec.MsgspecError:
        return False
    return True


Which = Literal["all", "slices", "state"]
"""What of a run is packed."""


class PackedKv(NamedTuple):
    """KV as host bytes, and what it says of its layout. Each of `num_parts` ranks of this machine
    writes as much; the others know by `share` what theirs is.
    """

    layout: str
    tensors: list[Tensor]
    num_parts: int = 1
    share: object = None

    @property
    def nbytes(self) -> int:
        return self.num_parts * sum(memoryview(one.data).nbytes for one in self.tensors)


def pack(kv: RunKv) -> list[Tensor]:
    """The run's evaluated arrays as host bytes, without a copy. Belongs to the mlx thread."""
    state = kv.state.arrays if kv.state is not None else []
    if kv.slab is not None and kv.slices:
        end = kv.slab_at + kv.slices[0].shape[0]
        views = kv.slab.host_bytes(kv.slab_at, end)
    else:
        views = [host_bytes(one) for one in kv.slices]
    named = [(f"kv.{i}", *both) for i, both in enumerate(zip(kv.slices, views, strict=True))]
    named += [(f"state.{i}", array, host_bytes(array)) for i, array in enumerate(state)]
    return [Tensor(name, _DTYPES[a.dtype], tuple(a.shape), data) for name, a, data in named]


def pack_layout(layout: KvLayout, kv: RunKv) -> str:
    """What `unpack` needs beside the tensors, as JSON text."""
    skeleton = kv.state.skeleton if kv.state is not None else None
    packed = PackedLayout(layout, len(kv.slices), skeleton)
    return msgspec.json.encode(packed).decode()


def unpack(text: str, tensors: Mapping[str, mx.array], layout: KvLayout, num_tokens: int) -> RunKv:
    """The KV of a slot's tensors.

    Raises:
        SlotDamaged: it was written for other layers, or tensors are missing or misshapen.
    """
    try:
        packed = msgspec.json.decode(text, type=PackedLayout)
        slices = [tensors[f"kv.{i}"] for i in range(packed.num_slices)]
        num_state = sum(name.startswith("state.") for name in tensors)
        arrays = [tensors[f"state.{i}"] for i in range(num_state)]
    except (msgspec.MsgspecError, KeyError) as error:
        raise SlotDamaged(f"its layout cannot be read: {error}") from error
    if packed.layout != layout:
        raise SlotDamaged("it was written for other layers")
    if any(array.shape[:1] != (num_tokens,) for array in slices):
        raise SlotDamaged(f"its tensors do not hold {num_tokens} tokens")
    return RunKv(slices, State(arrays, packed.skeleton) if packed.skeleton is not None else None)


def host_bytes(array: mx.array) -> memoryview:
    """The bytes of an evaluated array, where they are."""
    if not array.size:
        return memoryview(b"")
    # The buffer protocol knows no bfloat16; bytes are bytes.
    return memoryview(cast("bytes", array.reshape(-1).view(mx.uint8))).cast("B")
