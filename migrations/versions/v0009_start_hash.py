"""Slots say which tokens come before them by a hash, and name no other slot.

Those of before named a file, and went with it. Their rows go, and recovery puts their files aside:
what they hold is computed again when it is asked for.
"""

from __future__ import annotations

from alembic import op

revision = "0009"
down_revision = "0008"


def upgrade() -> None:
    _forget_slots()
    op.execute("ALTER TABLE slots ADD COLUMN start_hash BLOB DEFAULT (x'') NOT NULL")
    op.execute(
        "CREATE INDEX slots_without_parent ON slots (start_hash)"
        " WHERE parent_id IS NULL AND start > 0"
    )


def downgrade() -> None:
    _forget_slots()
    op.execute("DROP INDEX slots_without_parent")
    op.execute("ALTER TABLE slots DROP COLUMN start_hash")


def _forget_slots() -> None:
    op.execute("UPDATE conversations SET leaf_id = NULL")
    for table in ("cuts", "conversation_slots", "blocks"):
        op.execute(f"DELETE FROM {table}")  # noqa: S608 - of the constant above
    op.execute("UPDATE slots SET parent_id = NULL")
    op.execute("DELETE FROM slots")
    op.execute("DELETE FROM layouts")
