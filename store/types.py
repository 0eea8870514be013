"""What the store remembers of models and requests, and what eviction weighs."""

from __future__ import annotations

import os
from typing import Literal, NamedTuple

import msgspec

Tier = Literal["warm", "cold"]
TtlClass = Literal["short", "long", "extended", "pinned"]

TTL_S: dict[TtlClass, float] = {"short": 3600.0, "long": 86_400.0, "extended": 1_209_600.0}
"""How long a slot lives on disk after its last use, in seconds; pinned ones for ever."""

DEFAULT_TTL_S = 1_209_600.0
"""The same where nobody says, two weeks; before that the caps on the disk decide."""

_MAX_INTEGER = 2**63 - 1

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


class MediaSpan(NamedTuple):
    """The tokens `[start, end)` of a sequence are a picture with this digest.

    It counts pixels, their shape and how the model takes them in. `grid` is frames, rows and
    columns of its tokens, empty where the model gives them no positions of their own.
    """

    start: int
    end: int
    digest: bytes
    grid: tuple[int, ...] = ()


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


class Instant(NamedTuple):
    """One moment on both clocks: wall time may jump, `monotonic_s` counts on within `boot_id`."""

    wall_s: float
    monotonic_s: float
    boot_id: str
