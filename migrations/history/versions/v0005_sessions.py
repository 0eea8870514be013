"""Stored turns say whose KV is theirs, and what goes on from a turn is found by it."""

from __future__ import annotations

from alembic import op

revision = "0005"
down_revision = "0004"


def upgrade() -> None:
    op.execute("ALTER TABLE responses ADD COLUMN session VARCHAR DEFAULT '' NOT NULL")
    op.execute("CREATE INDEX responses_by_previous ON responses (previous_id)")
    op.execute("CREATE INDEX responses_by_session ON responses (session)")


def downgrade() -> None:
    op.execute("DROP INDEX responses_by_session")
    op.execute("DROP INDEX responses_by_previous")
    op.execute("ALTER TABLE responses DROP COLUMN session")
