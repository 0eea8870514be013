"""Slots can be found by their layout, and layouts that no slot has go."""

from __future__ import annotations

from alembic import op

revision = "0004"
down_revision = "0003"


def upgrade() -> None:
    op.execute("CREATE INDEX slots_by_layout ON slots (layout_id)")
    op.execute("DELETE FROM layouts WHERE id NOT IN (SELECT layout_id FROM slots)")


def downgrade() -> None:
    op.execute("DROP INDEX slots_by_layout")
