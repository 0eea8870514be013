"""Requests say by which rules their prompt was changed."""

from __future__ import annotations

from alembic import op

revision = "0008"
down_revision = "0007"


def upgrade() -> None:
    op.execute("ALTER TABLE requests ADD COLUMN rewrites VARCHAR DEFAULT '' NOT NULL")


def downgrade() -> None:
    op.execute("ALTER TABLE requests DROP COLUMN rewrites")
