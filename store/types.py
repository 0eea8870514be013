"""What the store keeps: slots, and what is remembered of models, conversations and requests.

A *slot* is one immutable file with the KV of the tokens `[start, end)` of a sequence. It names its
parent, the slot that holds the tokens before `start`; where it branches off is `start` itself, at
or before the parent's end. Slots end anywhere: the last, incomplete block of a turn is part of it.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import msgspec

Tier = Literal["warm", "cold"]
TtlClass = Literal["short", "long", "extended", "pinned"]

TTL_S: dict[TtlClass, float] = {"short": 3600.0, "long": 86_400.0, "extended": 604_800.0}
"""How long a slot lives on disk after its last use, in seconds; pinned ones for ever."""


class Struct(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Base of the value types."""


class SlotHeader(Struct, frozen=True):
    """What a slot file says of itself; enough to rebuild the index from files alone.

    Hashes are 16 bytes. `block_hashes` are those of the blocks (of `block_size` tokens, counted
    from the sequence's beginning) that end inside `(start, end]`; `end_hash` identifies the whole
    prefix up to `end`. `layout` is JSON text that only the KV packer reads. `has_state` says that
    the state of layers that cannot be sliced is here, as it was at `end`. `recompute_ms` is what
    prefill of these tokens took. `ttl_s` is None for ever, else seconds after the last use.
    """

    id: str
    model: bytes
    parent: str | None
    start: int
    end: int
    block_size: int
    block_hashes: tuple[bytes, ...]
    end_hash: bytes
    layout: str
    has_state: bool
    recompute_ms: float
    created_s: float
    ttl_class: TtlClass = "long"
    ttl_s: float | None = TTL_S["long"]

    @property
    def num_tokens(self) -> int:
        return self.end - self.start


class SlotRow(Struct, frozen=True):
    """A published slot as the index knows it. `disk_bytes` counts the file's real blocks."""

    header: SlotHeader
    disk_bytes: int
    tier: Tier = "warm"
    last_used_s: float
    hits: float = 0.0
    num_children: int = 0
    is_pinned: bool = False


class TensorData(NamedTuple):
    """One tensor on its way to disk: safetensors' name of its dtype, and its bytes in C order."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: memoryview
