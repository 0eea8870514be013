"""The tables. They hold hashes, counts and times: no tokens, no text, nothing a prompt says.

Slots are known outside by `name`, 32 hex characters; inside by a number that keeps blocks small.
`migrations/` makes these tables; a test holds both to the same schema.
"""

from __future__ import annotations

from sqlalchemy import CheckConstraint, ForeignKey, Index, text
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from store.types import Tier, TtlClass

APPLICATION_ID = 0x48525448
"""What SQLite's header says of the file: `HRTH`."""

SCHEMA_VERSION = 12
"""SQLite's user_version; it goes up with every migration."""


class Table(DeclarativeBase):
    """What all tables hang on."""


class Model(Table):
    """A model by its model hash, with what was measured of it."""

    __tablename__ = "models"

    id: Mapped[int] = mapped_column(primary_key=True)
    hash: Mapped[bytes] = mapped_column(unique=True)
    label: Mapped[str]
    layout: Mapped[str]
    prefill_tokens_per_s: Mapped[float | None]
    restore_bytes_per_s: Mapped[float | None]
    weights_bytes: Mapped[int | None]
    load_ms: Mapped[float | None]
    peak_bytes: Mapped[int | None]
    last_used_s: Mapped[float]
    blindness: Mapped[str | None]
    prefill_slice: Mapped[int | None]
    slice_device: Mapped[str | None]


class FileDigest(Table):
    """The digest of a weights file, as long as nothing about the file has changed."""

    __tablename__ = "file_digests"
    __table_args__ = ({"sqlite_with_rowid": False},)

    device: Mapped[int] = mapped_column(primary_key=True)
    inode: Mapped[int] = mapped_column(primary_key=True)
    size_bytes: Mapped[int] = mapped_column(primary_key=True)
    mtime_ns: Mapped[int] = mapped_column(primary_key=True)
    ctime_ns: Mapped[int] = mapped_column(primary_key=True)
    digest: Mapped[bytes]
    last_used_s: Mapped[float]


class Slot(Table):
    """A published slot. `parent_id` is a slot that has the tokens before `start`, as far as one is
    there: whoever has them is found by `start_hash`. `num_children` counts the rows that name this
    one there.
    """

    __tablename__ = "slots"
    __table_args__ = (
        CheckConstraint("tier IN ('warm', 'cold')", name="slots_tier"),
        CheckConstraint('start >= 0 AND "end" >= start', name="slots_span"),
        Index("slots_by_parent", "parent_id"),
        Index(
            "slots_without_parent",
            "start_hash",
            sqlite_where=text("parent_id IS NULL AND start > 0"),
        ),
        Index("slots_by_end", "model_id", "end_hash"),
        Index("slots_by_layout", "layout_id"),
    )

    id: Mapped[int] = mapped_column(primary_key=True)
    name: Mapped[str] = mapped_column(unique=True)
    model_id: Mapped[int] = mapped_column(ForeignKey("models.id"))
    parent_id: Mapped[int | None] = mapped_column(ForeignKey("slots.id"))
    start: Mapped[int]
    end: Mapped[int]
    block_size: Mapped[int]
    end_hash: Mapped[bytes]
    layout_id: Mapped[int] = mapped_column(ForeignKey("layouts.id"))
    has_state: Mapped[bool]
    recompute_ms: Mapped[float]
    created_s: Mapped[float]
    ttl_class: Mapped[TtlClass]
    ttl_s: Mapped[float | None]
    disk_bytes: Mapped[int]
    tier: Mapped[Tier]
    last_used_s: Mapped[float]
    hits: Mapped[float]
    num_children: Mapped[int] = mapped_column(server_default=text("0"))
    is_pinned: Mapped[bool]
    root: Mapped[bytes | None]
    start_hash: Mapped[bytes] = mapped_column(server_default=text("x''"))


class Layout(Table):
    """The distinct texts of `SlotHeader.layout`, for as long as a slot has them.

    Thousands of slots share one; with states of layers that tell where they stand few do.
    """

    __tablename__ = "layouts"

    id: Mapped[int] = mapped_column(primary_key=True)
    text: Mapped[str] = mapped_column(unique=True)


class Block(Table):
    """The hash of each block that ends inside a slot, in order: `position` counts from 0.

    Kept in the order of slots, not of hashes: written and read in one run of pages.
    """

    __tablename__ = "blocks"
    __table_args__ = ({"sqlite_with_rowid": False},)

    slot_id: Mapped[int] = mapped_column(
        ForeignKey("slots.id", ondelete="CASCADE"), primary_key=True
    )
    position: Mapped[int] = mapped_column(primary_key=True)
    hash: Mapped[bytes]


class Condemned(Table):
    """A slot whose row is gone and whose file must follow: what is deleted stays deleted."""

    __tablename__ = "condemned"
    __table_args__ = ({"sqlite_with_rowid": False},)

    name: Mapped[str] = mapped_column(primary_key=True)
    tier: Mapped[Tier] = mapped_column(primary_key=True)


class PendingCut(Table):
    """A slot of which the end is deleted and the rest is needed; its file must follow.

    What is needed is looked up when it is cut: somebody may continue it further by then.
    """

    __tablename__ = "cuts"

    slot_id: Mapped[int] = mapped_column(
        ForeignKey("slots.id", ondelete="CASCADE"), primary_key=True
    )


class Pin(Table):
    """A prefix that must stay, whether a slot ends there now or not. `source` says who wants it.

    `name` is the model's that was asked for it, empty where nobody knows.
    """

    __tablename__ = "pins"
    __table_args__ = ({"sqlite_with_rowid": False},)

    model_id: Mapped[int] = mapped_column(ForeignKey("models.id"), primary_key=True)
    end_hash: Mapped[bytes] = mapped_column(primary_key=True)
    source: Mapped[str] = mapped_column(primary_key=True)
    name: Mapped[str] = mapped_column(primary_key=True, server_default=text("''"))


class Conversation(Table):
    """A conversation under the keyed hash of its session id, with one model, asked by one name.

    The empty key has the slots of all that was asked by that name without a session id.
    """

    __tablename__ = "conversations"
    __table_args__ = (
        Index("conversations_by_key", "key", "model_id", "name", unique=True),
        Index("conversations_by_leaf", "leaf_id"),
    )

    id: Mapped[int] = mapped_column(primary_key=True)
    key: Mapped[bytes]
    model_id: Mapped[int] = mapped_column(ForeignKey("models.id"))
    leaf_id: Mapped[int | None] = mapped_column(ForeignKey("slots.id", ondelete="SET NULL"))
    num_tokens: Mapped[int]
    num_turns: Mapped[int]
    ttl_s: Mapped[float | None]
    created_s: Mapped[float]
    last_used_s: Mapped[float]
    name: Mapped[str] = mapped_column(server_default=text("''"))


class ConversationSlot(Table):
    """Every slot that a conversation was ever part of: what to delete, and what others share.

    It has the slot's tokens up to the position `reach`.
    """

    __tablename__ = "conversation_slots"
    __table_args__ = (
        Index("conversation_slots_by_slot", "slot_id"),
        {"sqlite_with_rowid": False},
    )

    conversation_id: Mapped[int] = mapped_column(
        ForeignKey("conversations.id", ondelete="CASCADE"), primary_key=True
    )
    slot_id: Mapped[int] = mapped_column(
        ForeignKey("slots.id", ondelete="CASCADE"), primary_key=True
    )
    reach: Mapped[int] = mapped_column(server_default=text("0"))


class Unpublished(Table):
    """A block, or the end of a slot, that is computed and not on disk yet; with `is_lost` whoever
    had it in memory is gone.

    `slot` is what it is queued as, which begins at `start`; `key` and `name` are those of the
    conversation it is written for. The end of a slot has its position `end`; where that is inside a
    block its `hash` is that of the tokens since the block hash `above`, which is empty for blocks.
    """

    __tablename__ = "unpublished"
    __table_args__ = (
        Index("unpublished_by_hash", "hash"),
        Index("unpublished_by_slot", "slot"),
        Index("unpublished_by_key", "key", "model_id", "name"),
    )

    number: Mapped[int] = mapped_column(primary_key=True)
    slot: Mapped[str]
    model_id: Mapped[int] = mapped_column(ForeignKey("models.id"))
    key: Mapped[bytes]
    name: Mapped[str]
    hash: Mapped[bytes]
    above: Mapped[bytes]
    end: Mapped[int]
    start: Mapped[int]
    is_lost: Mapped[bool]
    until_s: Mapped[float]


class Request(Table):
    """One finished request: counts, times and reasons. `kept_s` is trusted time."""

    __tablename__ = "requests"
    __table_args__ = (Index("requests_by_time", "finished_s"),)

    number: Mapped[int] = mapped_column(primary_key=True)
    id: Mapped[str] = mapped_column(unique=True)
    model: Mapped[str]
    finished_s: Mapped[float]
    num_prompt_tokens: Mapped[int]
    num_cached_tokens: Mapped[int]
    num_output_tokens: Mapped[int]
    tier: Mapped[str]
    reason: Mapped[str]
    finish_reason: Mapped[str]
    queue_ms: Mapped[float]
    restore_ms: Mapped[float]
    prefill_ms: Mapped[float]
    decode_ms: Mapped[float]
    kept_s: Mapped[float] = mapped_column(server_default=text("0"))
    rewrites: Mapped[str] = mapped_column(server_default=text("''"))


class Sighting(Table):
    """A file that may go when it has lain untouched for long, and since when it was seen to."""

    __tablename__ = "sightings"
    __table_args__ = ({"sqlite_with_rowid": False},)

    path: Mapped[str] = mapped_column(primary_key=True)
    mtime_ns: Mapped[int]
    since_s: Mapped[float]


class Counter(Table):
    """A sum per day; `day` is `YYYY-MM-DD` in UTC."""

    __tablename__ = "counters"
    __table_args__ = ({"sqlite_with_rowid": False},)

    day: Mapped[str] = mapped_column(primary_key=True)
    name: Mapped[str] = mapped_column(primary_key=True)
    value: Mapped[float]


class StoreState(Table):
    """One row: whether a server has this file open, and the last trusted instant.

    `agreed_boot` is the machine's boot in which recovery found or made rows and files agree.
    """

    __tablename__ = "store_state"
    __table_args__ = (CheckConstraint("id = 1", name="store_state_single"),)

    id: Mapped[int] = mapped_column(primary_key=True)
    is_open: Mapped[bool]
    trusted_s: Mapped[float]
    monotonic_s: Mapped[float]
    boot_id: Mapped[str]
    agreed_boot: Mapped[str] = mapped_column(server_default=text("''"))
