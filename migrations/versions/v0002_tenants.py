"""Slots say whose they are: what is shared between requests stays within one tenant."""

from __future__ import annotations

from alembic import op

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    op.execute("ALTER TABLE slots ADD COLUMN root BLOB")


def downgrade() -> None:
    op.execute("DELETE FROM slots WHERE root IS NOT NULL")
    op.execute("ALTER TABLE slots DROP COLUMN root")
