"""Models say whether they were found to see, once they were loaded."""

from __future__ import annotations

from alembic import op

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    op.execute("ALTER TABLE models ADD COLUMN blindness VARCHAR")


def downgrade() -> None:
    op.execute("ALTER TABLE models DROP COLUMN blindness")
