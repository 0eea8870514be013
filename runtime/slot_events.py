"""What happens to slots, as the store, the workers and all between them say it: each thing once.

`KvNews` goes from the store to the workers, `KvReport` from a worker to the store. `runtime.wire`
packs both.
"""

from __future__ import annotations

import msgspec

from runtime.types import MissReason, Struct
from store.keyed_names import NOBODY, Asker, Whom
from store.types import LostRow, PrefixPiece, SlotHeader, SlotRow, Tier, TtlClass


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

    @staticmethod
    def of(row: SlotRow) -> KnownSlot:
        """A row as a worker sees it."""
        header = row.header
        return KnownSlot(
            id=header.id,
            parent=row.parent,
            start_hash=header.start_hash,
            start=header.start,
            end=header.end,
            block_hashes=header.block_hashes,
            end_hash=header.end_hash,
            has_state=header.has_state,
            tier=row.tier,
            disk_bytes=row.disk_bytes,
            recompute_ms=header.recompute_ms,
            last_used_s=row.last_used_s,
            hits=row.hits,
            ttl_class=header.ttl_class,
            ttl_s=header.ttl_s,
            root=header.root,
        )


class Attach(Struct, frozen=True, tag="attach"):
    """The store is open: what names everything there, `model_hash` and `secret`.

    May come at any time and more than once. `Slots` follow, and then `AllSlotsTold`. The model is
    known to prefill best in slices of `prefill_slice` tokens on `slice_device`; None: nobody knows.
    """

    model_hash: bytes
    secret: bytes
    prefill_slice: int | None = None
    slice_device: str = ""


class AllSlotsTold(Struct, frozen=True, tag="told"):
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


class HotAsked(Struct, frozen=True, tag="hot_asked"):
    """Which of these slots are in memory now, and what of the conversations with these session ids?
    `HotNow` of the same number answers.
    """

    number: int
    ids: tuple[str, ...] = ()
    sessions: tuple[str, ...] = ()


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


class Hint(Struct, frozen=True, tag="hint"):
    """A conversation goes on in `pause_s` seconds, or with `is_over` not at all."""

    whom: Whom
    secret: bytes
    pause_s: float | None = None
    is_over: bool = False


class Bring(Struct, frozen=True, tag="bring"):
    """Have what ends with these slots in memory, as soon as nothing else is to be done."""

    ids: tuple[str, ...]


class RoomGiven(Struct, frozen=True, tag="room_given"):
    """Whether a file may be written; where not, the store takes as much of the disk as it may."""

    key: str
    is_given: bool


KvNews = (
    Attach
    | Slots
    | Lost
    | AllSlotsTold
    | SlotsSaved
    | SlotsPromoted
    | SlotsAway
    | SlotsDemoted
    | SlotsGone
    | SlotsMerged
    | WritesPaused
    | HotAsked
    | HotBudget
    | Forget
    | Hint
    | Bring
)
"""What the store tells a worker; besides it answers `RoomWanted`."""


class SlotStaged(Struct, frozen=True, tag="staged"):
    """A slot file is synced at `path`, `num_bytes` long; with `ends_turn` the last of an answer.

    Writing it took `write_ms`, pauses for running requests included. `parent` is the slot that has
    the tokens before it, where there are any.
    """

    header: SlotHeader
    path: str
    num_bytes: int
    asker: Asker = NOBODY
    ends_turn: bool = False
    write_ms: float = 0.0
    parent: str | None = None


class SlotQueued(Struct, frozen=True, tag="queued"):
    """A slot is to be written: until it is published, or left, a crash loses these pieces.

    Told again when it is another conversation's.
    """

    id: str
    asker: Asker
    pieces: tuple[PrefixPiece, ...]
    start: int = 0
    ttl_s: float | None = None


class SlotsLeft(Struct, frozen=True, tag="left"):
    """Slots that were queued and are in memory no longer; nothing of them came to the disk."""

    ids: tuple[str, ...]


class TurnEnded(Struct, frozen=True, tag="turn"):
    """An answer ended with tokens that are all on disk already, the last of them in this slot.

    With `num_turns` 0 it goes on with others that are not there yet.
    """

    asker: Asker
    slot_id: str
    num_tokens: int
    ttl_s: float | None = None
    num_turns: int = 1


class SlotPart(Struct, frozen=True, array_like=True):
    """The tokens `[start, end)` of a slot, which are to be the slot `id`."""

    id: str
    start: int
    end: int


class SlotBad(Struct, frozen=True, tag="bad"):
    """A slot cannot be used: its file is damaged, missing or unreadable.

    Of a damaged one `parts` are as they were written, and to be slots of their own.
    """

    id: str
    reason: str
    message: str
    parts: tuple[SlotPart, ...] = ()


class SlotsUsed(Struct, frozen=True, tag="used"):
    """A request reused these slots; those in `longer` it wants to live for so many seconds."""

    ids: tuple[str, ...]
    longer: dict[str, float] = msgspec.field(default_factory=dict[str, float])


class SlotsWanted(Struct, frozen=True, tag="wanted"):
    """A request waits for these slots, which are in the cold store."""

    ids: tuple[str, ...]


class HotNow(Struct, frozen=True, tag="hot_now"):
    """These of the slots that were asked for are in memory, to their end, and of conversations so
    many of their first tokens, on disk or not.
    """

    number: int
    ids: tuple[str, ...] = ()
    sessions: tuple[tuple[Asker, int], ...] = ()


class Forgotten(Struct, frozen=True, tag="forgotten"):
    """So many pieces were forgotten, for the `Forget` of that number."""

    number: int
    num_forgotten: int


class PinWanted(Struct, frozen=True, tag="pin"):
    """The prefix that ends with this hash is to stay, whatever else leaves the disk.

    `model` is the name that was asked for it.
    """

    end_hash: bytes
    source: str
    model: str = ""
    num_bytes: int = 0
    """What it takes, with all that comes before it."""


class RoomWanted(Struct, frozen=True, tag="room"):
    """A file of `num_bytes` is to be written: `RoomGiven` answers. The key of a slot is its id,
    `parent` what it continues.
    """

    key: str
    num_bytes: int
    parent: str | None = None


class RoomLeft(Struct, frozen=True, tag="room_left"):
    """What room was given for is written and no slot, or is not written."""

    key: str


class StoreTrouble(Struct, frozen=True, tag="trouble"):
    """A slot could not be written; `reason` is machine-readable."""

    reason: str


class SliceLearned(Struct, frozen=True, tag="slice_learned"):
    """From now on the KV of this model is computed in slices of so many tokens on `device`, as it
    was timed there; and what it was before, in which the KV up to now was computed.
    """

    num_tokens: int
    device: str
    was: int


KvReport = (
    SlotQueued
    | SlotsLeft
    | SlotStaged
    | SlotBad
    | TurnEnded
    | SlotsUsed
    | SlotsWanted
    | HotNow
    | Forgotten
    | PinWanted
    | RoomWanted
    | RoomLeft
    | SliceLearned
    | StoreTrouble
)
"""What a worker tells the store; `HotNow` and `Forgotten` answer questions."""
