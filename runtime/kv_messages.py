"""What the server and a worker say to each other of KV: each thing once.

A turn takes two of them: `Ended`, and `Kept`. Everything else is rare. Names are 16 bytes.
"""

from __future__ import annotations

from runtime.types import Struct
from store.head_file import Owner
from store.keyed_names import NOBODY, Asker, Whom


class Opened(Struct, frozen=True, tag="kv_opened"):
    """The store is open: what names everything in it. It may come more than once.

    The model is known to prefill best in slices of `prefill_slice` tokens on `slice_device`; None:
    nobody knows.
    """

    model_hash: bytes
    secret: bytes
    prefill_slice: int | None = None
    slice_device: str = ""


class Kept(Struct, frozen=True, tag="kv_kept"):
    """A head was published, or with `is_kept` False turned away: it is of what was deleted.

    Of these blocks of it there is no slot, as others' deletions removed them meanwhile.
    """

    head_id: str
    is_kept: bool
    lacking: tuple[bytes, ...] = ()


class Drop(Struct, frozen=True, tag="kv_drop"):
    """Have nothing of these blocks and ends in memory, nor what is behind them; `Dropped` answers.

    They were deleted.
    """

    number: int
    names: tuple[bytes, ...]


class Allowance(Struct, frozen=True, tag="kv_allowance"):
    """So many bytes more may be written."""

    num_bytes: int


class Brought(Struct, frozen=True, tag="kv_brought"):
    """Of the blocks that were wanted from the cold store those of `names` are slots now; the others
    that were asked for with them are not to be had, or not now if `is_away`.
    """

    names: tuple[bytes, ...]
    asked: tuple[bytes, ...]
    is_away: bool = False


class Recall(Struct, frozen=True, tag="kv_recall"):
    """Have the KV of these tokens, of four bytes each, in memory as soon as nothing else is to be
    done. What nobody `wanted` has only its share of the memory.
    """

    token_ids: bytes
    root: bytes = b""
    is_wanted: bool = False


class Awaited(Struct, frozen=True, tag="kv_awaited"):
    """Who said what ends with these names is back in `pause_s` seconds, or with None not at all."""

    names: tuple[bytes, ...]
    pause_s: float | None = None


class MemoryAsked(Struct, frozen=True, tag="kv_memory_asked"):
    """Which of these are in memory now? `InMemory` of the same number answers."""

    number: int
    names: tuple[bytes, ...]


class HotBudget(Struct, frozen=True, tag="hot_budget"):
    """So many bytes of KV may stay in memory from now on, for requests that are to come.

    `pool_bytes` are for these and for running requests together, who come first; `most_bytes` is
    what they might have if no other model were loaded. None is without a limit.
    """

    num_bytes: int
    pool_bytes: int | None = None
    most_bytes: int | None = None


class Forget(Struct, frozen=True, tag="forget"):
    """Forget of a conversation what is not published and stage it no more; `Forgotten` answers.

    `secret` is the store's, by which a key stands for a session id. Deletions are numbered, and of
    what came before that of the number `floor` nothing is in flight any more, or it counts as
    deleted.
    """

    number: int
    whom: Whom
    secret: bytes
    floor: int = 0


class TurnsFound(Struct, frozen=True, tag="turns_found"):
    """The files of heads with what `TurnsWanted` of the same number asked for, the best first."""

    number: int
    paths: tuple[str, ...]


KvNews = (
    Opened
    | Kept
    | Drop
    | Allowance
    | Brought
    | Recall
    | Awaited
    | MemoryAsked
    | HotBudget
    | Forget
    | TurnsFound
)
"""What the server tells a worker."""


class Ended(Struct, frozen=True, tag="kv_ended"):
    """A turn ended, or what is computed of a long prompt is to be kept: its head.

    It is staged at `path`, or is in this worker's memory only and told with its tokens, in four
    bytes each. Its request came when the last deletion had the number `received`. Ends of it may be
    in memory at the positions `ends`. It takes the place of the head of its asker whose end is
    called `continues`. Its slots took `num_bytes` that were allowed. It ended at `ended_s` of the
    monotonic clock, which all processes of a machine share; without one right now.
    """

    head_id: str
    received: int
    asker: Asker = NOBODY
    path: str | None = None
    token_ids: bytes = b""
    tenant: str = ""
    ends: tuple[int, ...] = ()
    continues: bytes = b""
    num_bytes: int = 0
    ended_s: float | None = None


class Want(Struct, frozen=True, tag="kv_want"):
    """A request waits for these blocks, which are no slots and may be in the cold store."""

    names: tuple[bytes, ...]


class Allow(Struct, frozen=True, tag="kv_allow"):
    """So many bytes wait to be written, of what was computed at `made_s` of the monotonic clock;
    `Allowance` answers. What is pinned may be more than is written in a day otherwise.
    """

    num_bytes: int
    made_s: float
    is_pinned: bool = False


class Damaged(Struct, frozen=True, tag="kv_damaged"):
    """These slots were not as they were written; the worker removed them."""

    names: tuple[bytes, ...]


class Trouble(Struct, frozen=True, tag="kv_trouble"):
    """Something could not be written; `reason` is machine-readable."""

    reason: str


class Dropped(Struct, frozen=True, tag="kv_dropped"):
    """The `Drop` of that number is done; so many pieces were in memory."""

    number: int
    num_pieces: int


class InMemory(Struct, frozen=True, tag="kv_in_memory"):
    """Those that are in memory of what `MemoryAsked` named."""

    number: int
    names: tuple[bytes, ...]


class TurnsWanted(Struct, frozen=True, tag="turns_wanted"):
    """Which heads have turns at which a conversation is called like one of `digests`, those that
    matter most first? `owner` asks; `TurnsFound` of the same number answers.
    """

    number: int
    owner: Owner
    digests: tuple[bytes, ...]


class SliceLearned(Struct, frozen=True, tag="slice_learned"):
    """From now on the KV of this model is computed in slices of so many tokens on `device`, as it
    was timed there; and what it was before, in which the KV up to now was computed.
    """

    num_tokens: int
    device: str
    was: int


KvReport = (
    Ended | Want | Allow | Damaged | Trouble | Dropped | InMemory | TurnsWanted | SliceLearned
)
"""What a worker tells the server."""
