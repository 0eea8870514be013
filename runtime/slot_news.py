"""What workers are told of the slots on disk of their model."""

from __future__ import annotations

from runtime.types import MissReason, Struct
from store.types import LostRow, Tier, TtlClass


class KnownSlot(Struct, frozen=True, array_like=True):
    """A slot on disk, as the index knows it. Hashes are 16 bytes; `root` is as in its header.

    `parent` is a slot that has the tokens before it, where the index knows one.
    """

    id: str
    parent: str | None
    start_hash: bytes
    start: int
    end: int
    block_hashes: tuple[bytes, ...]
    end_hash: bytes
    has_state: bool
    tier: Tier
    disk_bytes: int
    recompute_ms: float
    last_used_s: float
    hits: float
    ttl_class: TtlClass
    ttl_s: float | None
    root: bytes = b""


class Attach(Struct, frozen=True, tag="attach"):
    """The store is open: what names everything there, `model_hash` and `secret`.

    May come at any time and more than once. `Slots` follow, and then `Told`.
    """

    model_hash: bytes
    secret: bytes


class Told(Struct, frozen=True, tag="told"):
    """All that is on disk was told: what is in memory only can be written, if need be again."""


class Slots(Struct, frozen=True, tag="slots"):
    """What is on disk of this model, parents before children; some of it at a time."""

    slots: tuple[KnownSlot, ...]


class Lost(Struct, frozen=True, tag="lost"):
    """What former workers computed of this model and left neither on disk nor anywhere else."""

    rows: tuple[LostRow, ...]


class SlotsSaved(Struct, frozen=True, tag="saved"):
    """Staged slots that are published now: durable."""

    ids: tuple[str, ...]


class SlotsPromoted(Struct, frozen=True, tag="promoted"):
    """Cold slots that can be read now."""

    ids: tuple[str, ...]


class SlotsAway(Struct, frozen=True, tag="away"):
    """Cold slots that were asked for and cannot be read now; they are kept."""

    ids: tuple[str, ...]


class SlotsDemoted(Struct, frozen=True, tag="demoted"):
    """Slots that are in the cold store now."""

    ids: tuple[str, ...]


class SlotsGone(Struct, frozen=True, tag="gone"):
    """Slots that are no longer on disk, or were refused."""

    ids: tuple[str, ...]
    reason: MissReason


class SlotsMerged(Struct, frozen=True, tag="merged"):
    """The slots `ids`, a chain to its end, are `slots` now; their files leave a while later."""

    ids: tuple[str, ...]
    slots: tuple[KnownSlot, ...]


class WritesPaused(Struct, frozen=True, tag="paused"):
    """Enough was written today: only pinned KV goes to disk in the next `seconds`."""

    seconds: float
