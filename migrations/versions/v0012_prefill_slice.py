"""What was learned of a model's prefill: in which slices a device computes it fastest."""

from __future__ import annotations

from alembic import op

revision = "0012"
down_revision = "0011"


def upgrade() -> None:
    op.execute("ALTER TABLE models ADD COLUMN prefill_slice INTEGER")
    op.execute("ALTER TABLE models ADD COLUMN slice_device VARCHAR")


def downgrade() -> None:
    op.execute("ALTER TABLE models DROP COLUMN slice_device")
    op.execute("ALTER TABLE models DROP COLUMN prefill_slice")
