"""Stored responses and the items that went into and came out of each."""

from __future__ import annotations

from alembic import op

revision = "0002"
down_revision = "0001"

TABLES = (
    """CREATE TABLE responses (
        number INTEGER NOT NULL,
        id VARCHAR NOT NULL,
        previous_id VARCHAR,
        body BLOB NOT NULL,
        created_s DOUBLE NOT NULL,
        last_used_s DOUBLE NOT NULL,
        PRIMARY KEY (number),
        UNIQUE (id)
    )""",
    "CREATE INDEX responses_by_use ON responses (last_used_s)",
    """CREATE TABLE response_items (
        number INTEGER NOT NULL,
        response_number INTEGER NOT NULL,
        position INTEGER NOT NULL,
        id VARCHAR NOT NULL,
        is_output BOOLEAN NOT NULL,
        body BLOB NOT NULL,
        PRIMARY KEY (number),
        FOREIGN KEY(response_number) REFERENCES responses (number) ON DELETE CASCADE
    )""",
    "CREATE INDEX response_items_by_id ON response_items (id)",
    "CREATE UNIQUE INDEX response_items_by_response ON response_items (response_number, position)",
)
"""Written out, not taken from `store.history.history_tables`: what was released never changes."""

NAMES = ("response_items", "responses")


def upgrade() -> None:
    for statement in TABLES:
        op.execute(statement)


def downgrade() -> None:
    for name in NAMES:
        op.execute(f"DROP TABLE {name}")
