"""Exchanging KV with stock mlx-lm, in a process of its own: what it is told and what it answers."""

from __future__ import annotations

import msgspec

from runtime.slot_events import SlotStaged
from runtime.types import ModelSpec

NOT_STOCK = (
    "{model} sees and mlx-vlm computes its KV, for which stock mlx-lm has no files; back the whole "
    "store up to carry it elsewhere, or set vision = false for this model and exchange what it "
    "says from then on"
)
"""Why a model's conversations cannot be exchanged, and what to do instead."""


class Export(msgspec.Struct, frozen=True, tag="export"):
    """Write the slots at `paths`, each up to a position, to `file`, for `model` at `model_path`."""

    file: str
    paths: tuple[str, ...]
    leaves: tuple[int, ...]
    model: str
    model_path: str


class Import(msgspec.Struct, frozen=True, tag="import", kw_only=True):
    """Stage what `file` holds as slots of a model in the store at `root`."""

    file: str
    spec: ModelSpec
    model_hash: bytes
    secret: bytes
    root: str
    block_size: int
    kv_bits: int | None = None
    kv_start: int = 0
    prompt: str | None = None
    token_ids: tuple[int, ...] | None = None


Job = Export | Import


class SpaceWanted(msgspec.Struct, frozen=True, tag="space_wanted"):
    """An import is about to write so many bytes; it reads a line, true or false, before it does."""

    num_bytes: int


class Outcome(msgspec.Struct, frozen=True, tag="outcome"):
    """How many tokens were exchanged, the slots that were staged, and why it failed, if it did."""

    num_tokens: int
    slots: tuple[SlotStaged, ...] = ()
    error: str | None = None
