"""The index knows in which boot of the machine it last agreed with the files."""

from __future__ import annotations

from alembic import op

revision = "0010"
down_revision = "0009"


def upgrade() -> None:
    op.execute("ALTER TABLE store_state ADD COLUMN agreed_boot VARCHAR DEFAULT '' NOT NULL")


def downgrade() -> None:
    op.execute("ALTER TABLE store_state DROP COLUMN agreed_boot")
