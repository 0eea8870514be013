"""The tables of the index of blocks and heads. They hold hashes, counts and times: no tokens, no
text, nothing a prompt says. `migrations/kv/` makes them; a test holds both to the same schema.
"""

from __future__ import annotations

from sqlalchemy import CheckConstraint, ForeignKey
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from store.tables import Counter, FileDigest, Model, Request

APPLICATION_ID = 0x48525442
"""What SQLite's header says of the file: `HRTB`."""

SCHEMA_VERSION = 1
"""SQLite's user_version; it goes up with every migration."""


class KvTable(DeclarativeBase):
    """What all tables of the index hang on."""


for _one in (Model, FileDigest, Request, Counter):
    _one.metadata.tables[_one.__tablename__].to_metadata(KvTable.metadata)


class BlockRow(KvTable):
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


class HeadRow(KvTable):
    """A head with a file. `last` is its last whole block, `end` the name of its end, and `turns`
    and `pins` are packed; times are trusted time.
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
    turns: Mapped[bytes]
    ttl_s: Mapped[float | None]
    pins: Mapped[bytes]
    block_ms: Mapped[float]
    last: Mapped[bytes | None]
    end: Mapped[bytes]
    num_bytes: Mapped[int]
    created_s: Mapped[float]
    last_used_s: Mapped[float]
    hits: Mapped[float]


class StoreState(KvTable):
    """One row: whether a server has this file open, and the last trusted instant."""

    __tablename__ = "store_state"
    __table_args__ = (CheckConstraint("id = 1", name="store_state_single"),)

    id: Mapped[int] = mapped_column(primary_key=True)
    is_open: Mapped[bool]
    trusted_s: Mapped[float]
    monotonic_s: Mapped[float]
    boot_id: Mapped[str]
