"""Exchanging KV with stock mlx-lm, in a process of its own: what it is told and what it answers."""

from __future__ import annotations

import msgspec

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
    """Stage what `file` holds for a model in the store at `root`: as slots, which are in their
    places at once, and a head.
    """

    file: str
    spec: ModelSpec
    model_hash: bytes
    block_size: int
    secret: bytes = b""
    root: str = ""
    kv_bits: int | None = None
    kv_start: int = 0
    prompt: str | None = None
    token_ids: tuple[int, ...] | None = None

    def of_store(self, secret: bytes, root: str) -> Import:
        """The same for the store at `root` that has this secret."""
        return msgspec.structs.replace(self, secret=secret, root=root)


Job = Export | Import


class SpaceWanted(msgspec.Struct, frozen=True, tag="space_wanted"):
    """An import is about to write so many bytes; it reads a line, true or false, before it does."""

    num_bytes: int


class HeadStaged(msgspec.Struct, frozen=True):
    """A head that is staged at `path`, behind `num_slots` that were not there before. All of it
    took `num_bytes`.
    """

    head_id: str
    path: str
    num_slots: int
    num_bytes: int


class Outcome(msgspec.Struct, frozen=True, tag="outcome"):
    """How many tokens were exchanged, the head that was staged, and why it failed, if
    it did.
    """

    num_tokens: int
    head: HeadStaged | None = None
    error: str | None = None
