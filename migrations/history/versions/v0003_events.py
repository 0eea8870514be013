"""The events of responses that were made in the background, so that they can be taken up again."""

from __future__ import annotations

from alembic import op

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    op.execute(
        """CREATE TABLE response_events (
            response_number INTEGER NOT NULL,
            body BLOB NOT NULL,
            PRIMARY KEY (response_number),
            FOREIGN KEY(response_number) REFERENCES responses (number) ON DELETE CASCADE
        )"""
    )


def downgrade() -> None:
    op.execute("DROP TABLE response_events")
