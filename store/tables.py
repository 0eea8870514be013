"""The tables of the index of blocks and heads. They hold hashes, counts and times: no tokens, no
text, nothing a prompt says. `migrations/` makes them; a test holds both to the same schema.
"""

from __future__ import annotations

from sqlalchemy import CheckConstraint, ForeignKey, Index, text
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

APPLICATION_ID = 0x48525442
"""What SQLite's header says of the file: `HRTB`."""

SCHEMA_VERSION = 1
"""SQLite's user_version; it goes up with every migration."""


class Table(DeclarativeBase):
    """What all tables of the index hang on."""


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


class Counter(Table):
    """A sum per day; `day` is `YYYY-MM-DD` in UTC."""

    __tablename__ = "counters"
    __table_args__ = ({"sqlite_with_rowid": False},)

    day: Mapped[str] = mapped_column(primary_key=True)
    name: Mapped[str] = mapped_column(primary_key=True)
    value: Mapped[float]


class BlockRow(Table):
    """A block that a head goes through, behind the block `above`, and the bytes of its files.

    Without a head only what is in the cold store is still there, and is to be removed.
    """

    __tablename__ = "blocks"
    __table_args__ = ({"sqlite_with_rowid": False},)

    name: Mapped[bytes] = mapped_column(primary_key=True)
    model_id: Mapped[int] = mapped_column(ForeignKey("models.id"))
    above: Mapped[bytes | None]
    recompute_ms: Mapped[float]
    slot_bytes: Mapped[int]
    state_bytes: Mapped[int]
    cold_slot_bytes: Mapped[int]
    cold_state_bytes: Mapped[int]


class HeadRow(Table):
    """A head with a file. `last` is its last whole block, `end` the name of its end, `end_bytes`
    what of `num_bytes` is behind `last`, `pins` are packed; times are trusted time. Its `num_turns`
    turns are found by `digests`, of 16 bytes each.
    """

    __tablename__ = "heads"

    id: Mapped[str] = mapped_column(primary_key=True)
    model_id: Mapped[int] = mapped_column(ForeignKey("models.id"))
    asked: Mapped[bytes]
    session: Mapped[bytes]
    root: Mapped[bytes]
    num_tokens: Mapped[int]
    name: Mapped[str]
    continues: Mapped[bytes]
    ttl_s: Mapped[float | None]
    pins: Mapped[bytes]
    block_ms: Mapped[float]
    last: Mapped[bytes | None]
    end: Mapped[bytes]
    num_bytes: Mapped[int]
    end_bytes: Mapped[int]
    created_s: Mapped[float]
    last_used_s: Mapped[float]
    hits: Mapped[float]
    digests: Mapped[bytes]
    num_turns: Mapped[int]


class StoreState(Table):
    """One row: whether a server has this file open, and the last trusted instant."""

    __tablename__ = "store_state"
    __table_args__ = (CheckConstraint("id = 1", name="store_state_single"),)

    id: Mapped[int] = mapped_column(primary_key=True)
    is_open: Mapped[bool]
    trusted_s: Mapped[float]
    monotonic_s: Mapped[float]
    boot_id: Mapped[str]
