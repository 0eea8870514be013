"""Digests of weights are of every byte and one state of a file; what was sampled is forgotten."""

from __future__ import annotations

from alembic import op

revision = "0005"
down_revision = "0004"

_BEFORE = ("device", "inode", "size_bytes", "mtime_ns")


def upgrade() -> None:
    _make((*_BEFORE, "ctime_ns"))


def downgrade() -> None:
    _make(_BEFORE)


def _make(keys: tuple[str, ...]) -> None:
    columns = "".join(f"{key} INTEGER NOT NULL, " for key in keys)
    op.execute("DROP TABLE file_digests")
    op.execute(
        f"CREATE TABLE file_digests ({columns}digest BLOB NOT NULL, last_used_s DOUBLE NOT NULL, "
        f"PRIMARY KEY ({', '.join(keys)})) WITHOUT ROWID"
    )
