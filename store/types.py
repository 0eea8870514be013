"""What the store keeps: slots, and what is remembered of models, conversations and requests.

A *slot* is one immutable file with the KV of the tokens `[start, end)` of a sequence. It names no
other file: `start_hash` says which tokens come before `start`, whoever has them. Slots end
anywhere: the last, incomplete block of a turn is part of it.
"""

from __future__ import annotations

import os
from hashlib import blake2b
from typing import Literal, NamedTuple, Protocol

import msgspec

Tier = Literal["warm", "cold"]
TtlClass = Literal["short", "long", "extended", "pinned"]

TTL_S: dict[TtlClass, float] = {"short": 3600.0, "long": 86_400.0, "extended": 1_209_600.0}
"""How long a slot lives on disk after its last use, in seconds; pinned ones for ever."""

DEFAULT_TTL_S = 1_209_600.0
"""The same where nobody says, two weeks; before that the caps on the disk decide."""

_MAX_INTEGER = 2**63 - 1
TOKEN_BYTES = 4
_DIGEST_BYTES = 16

HIT_HALF_LIFE_S = 6 * 3600.0
"""After this long without use a hit counts half, in the index and in eviction."""


class Struct(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Base of the value types."""


def class_of(ttl_s: float) -> TtlClass:
    """The class whose life on disk is the shortest that is not shorter than `ttl_s`."""
    if ttl_s <= TTL_S["short"]:
        return "short"
    return "long" if ttl_s <= TTL_S["long"] else "extended"


def decayed_hits(hits: float, age_s: float) -> float:
    """What `hits`, counted `age_s` seconds ago, are worth now."""
    return hits * 2.0 ** (-max(age_s, 0.0) / HIT_HALF_LIFE_S)


class PromptHead(Struct, frozen=True):
    """Tools and system prompt of a prompt, by its first tokens; without any they are not known.

    `digest` is that of the tokens in four bytes each.
    """

    num_tokens: int = 0
    digest: bytes = b""

    @staticmethod
    def of(token_ids: bytes, num_tokens: int) -> PromptHead:
        """The first tokens of these, in four bytes each."""
        if not num_tokens:
            return UNKNOWN_HEAD
        digest = blake2b(token_ids[: num_tokens * TOKEN_BYTES], digest_size=_DIGEST_BYTES)
        return PromptHead(num_tokens=num_tokens, digest=digest.digest())

    def begins(self, token_ids: bytes) -> bool:
        """Whether these tokens, in four bytes each, begin with it."""
        return self == PromptHead.of(token_ids, self.num_tokens)


UNKNOWN_HEAD = PromptHead()


class MediaSpan(NamedTuple):
    """The tokens `[start, end)` of a sequence are a picture with this digest.

    It counts pixels, their shape and how the model takes them in. `grid` is frames, rows and
    columns of its tokens, empty where the model gives them no positions of their own.
    """

    start: int
    end: int
    digest: bytes
    grid: tuple[int, ...] = ()


class SlotHeader(Struct, frozen=True):
    """What a slot file says of itself; enough to rebuild the index from files alone.

    Hashes are 16 bytes. `block_hashes` are those of the blocks (of `block_size` tokens, counted
    from the sequence's beginning) that end inside `(start, end]`; `end_hash` identifies the whole
    prefix up to `end`, and `start_hash` that up to `start`, empty where that is 0. `layout` is JSON
    text that only the KV packer reads. `has_state` says that the state of layers that cannot be
    sliced is here, as it was at `end`. `recompute_ms` is what prefill of these tokens took. `ttl_s`
    is None for ever, else seconds after the last use. `root` is the hash that its tenant's prefixes
    begin with, empty for those without a tenant. `media` are the pictures of which some tokens are
    here; the model's position after `end` tokens is `rope_delta` further on.
    """

    id: str
    model: bytes
    start_hash: bytes
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
    ttl_s: float | None = DEFAULT_TTL_S
    root: bytes = b""
    media: tuple[MediaSpan, ...] = ()
    rope_delta: int = 0

    @property
    def num_tokens(self) -> int:
        return self.end - self.start


class PartHashes(NamedTuple):
    """What names a part of a slot, as in `SlotHeader`."""

    start_hash: bytes
    block_hashes: tuple[bytes, ...]
    end_hash: bytes


class Hashed(Protocol):
    """Tokens `[start, end)` with their hashes: a slot, or a run in memory."""

    @property
    def start(self) -> int: ...
    @property
    def end(self) -> int: ...
    @property
    def start_hash(self) -> bytes: ...
    @property
    def block_hashes(self) -> tuple[bytes, ...]: ...
    @property
    def end_hash(self) -> bytes: ...


def part_hashes(whole: Hashed, start: int, end: int, block_size: int) -> PartHashes:
    """Those of `[start, end)`: both are where a block ends, or where the whole begins or ends."""
    first = whole.start // block_size

    def number(position: int) -> int:
        return position // block_size - first

    return PartHashes(
        whole.start_hash if start == whole.start else whole.block_hashes[number(start) - 1],
        whole.block_hashes[number(start) : number(end)],
        whole.end_hash if end == whole.end else whole.block_hashes[number(end) - 1],
    )


class SlotRow(Struct, frozen=True):
    """A published slot as the index knows it. `disk_bytes` counts the file's real blocks.

    `parent` is a slot that has the tokens before `start`, None where `start` is 0 or no slot has
    them now. On the way into the index it is where to look for them.
    """

    header: SlotHeader
    disk_bytes: int
    last_used_s: float
    parent: str | None = None
    tier: Tier = "warm"
    hits: float = 0.0
    is_pinned: bool = False


class Candidate(Struct, frozen=True):
    """What eviction weighs: a slot, or a piece of memory. `hits` is as it was at `last_used_s`.

    `num_children` counts all children, also those that are not candidates. Who used it is
    expected back until `awaited_s`, or with `is_released` not any more.
    """

    id: str
    parent: str | None
    num_children: int
    size_bytes: int
    recompute_ms: float
    last_used_s: float
    hits: float = 0.0
    ttl_class: TtlClass = "long"
    awaited_s: float = 0.0
    is_released: bool = False


class SlotPlace(NamedTuple):
    """Where a slot's file is: enough to remove it."""

    id: str
    tier: Tier


class RunFigures(Struct, frozen=True):
    """What one run of a model showed. None is what it did not.

    `load_ms` is what it took to have the model ready, from the decision on; `peak_bytes` the most
    memory that it used, weights included, the hot tier not; `blindness` why the model was found
    not to see, and empty where nothing was found against it; `prefill_slice` the tokens in which
    it is prefilled fastest on `slice_device`.
    """

    load_ms: float | None = None
    peak_bytes: int | None = None
    blindness: str | None = None
    prefill_slice: int | None = None
    slice_device: str | None = None


class ModelRow(Struct, frozen=True):
    """What is remembered of a model, by its model hash, of its `RunFigures`. None means never."""

    hash: bytes
    label: str
    weights_bytes: int | None = None
    load_ms: float | None = None
    peak_bytes: int | None = None
    last_used_s: float = 0.0
    blindness: str | None = None
    prefill_slice: int | None = None
    slice_device: str | None = None


class FileStamp(NamedTuple):
    """What tells that a file on this machine is still as it was read; `ctime_ns` nobody sets."""

    device: int
    inode: int
    size_bytes: int
    mtime_ns: int
    ctime_ns: int

    @staticmethod
    def of(status: os.stat_result) -> FileStamp:
        """As the system says it; SQLite has no numbers of 64 bits without a sign."""
        return FileStamp(
            status.st_dev & _MAX_INTEGER,
            status.st_ino & _MAX_INTEGER,
            status.st_size,
            status.st_mtime_ns,
            status.st_ctime_ns,
        )


NAMELESS = b""
"""The key of what was asked without a session id, all of one name together."""


class ConversationRow(Struct, frozen=True):
    """A conversation: the keyed hash of its session id, the name that was asked, where it stands.

    `num_tokens` is the length of its latest turn; `leaf` the slot that holds its end, None when
    nothing of it is on disk any more.
    """

    key: bytes
    model: bytes
    leaf: str | None
    num_tokens: int
    last_used_s: float
    created_s: float
    num_turns: int = 1
    ttl_s: float | None = None
    name: str = ""


class PrefixPiece(NamedTuple):
    """A block by its hash, or how the tokens up to the position `end` are known.

    Where `end` is inside a block, `hash` is that of the block's tokens up to there after the block
    hash `above`. Blocks have neither, but for one at whose end a slot ends.
    """

    hash: bytes
    above: bytes = b""
    end: int = 0


class UnpublishedRow(Struct, frozen=True):
    """What a slot is to hold that is queued and not on disk yet, and whose it is."""

    slot: str
    key: bytes
    name: str
    pieces: tuple[PrefixPiece, ...]
    start: int = 0
    ttl_s: float | None = None


class LostRow(Struct, frozen=True):
    """What of a conversation was computed and never came to the disk."""

    key: bytes
    name: str
    pieces: tuple[PrefixPiece, ...]


class RequestRow(Struct, frozen=True):
    """One finished request: counts and times, never its text.

    `tier` is where its cached tokens came from, `reason` says why not more were reused. `rewrites`
    are the rules that changed the prompt, each with the number of places: `late_system=1`.
    """

    id: str
    model: str
    finished_s: float
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    tier: str
    reason: str
    finish_reason: str
    queue_ms: float = 0.0
    restore_ms: float = 0.0
    prefill_ms: float = 0.0
    decode_ms: float = 0.0
    rewrites: str = ""


class PinRow(NamedTuple):
    """A prefix of a model that must stay, and who wants it, of the model by that name."""

    model: bytes
    end_hash: bytes
    source: str
    name: str = ""


class TierTotal(NamedTuple):
    """What one model holds in one tier."""

    model: bytes
    tier: Tier
    num_slots: int
    num_tokens: int
    disk_bytes: int


class Instant(NamedTuple):
    """One moment on both clocks: wall time may jump, `monotonic_s` counts on within `boot_id`."""

    wall_s: float
    monotonic_s: float
    boot_id: str


class TensorData(NamedTuple):
    """One tensor on its way to disk: safetensors' name of its dtype, and its bytes in C order."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: memoryview
