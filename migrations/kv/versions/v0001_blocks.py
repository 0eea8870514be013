"""The first schema: models, blocks, and the heads that go through them."""

from __future__ import annotations

from alembic import op

revision = "0001"
down_revision = None

TABLES = (
    """CREATE TABLE models (
        id INTEGER NOT NULL,
        hash BLOB NOT NULL,
        PRIMARY KEY (id),
        UNIQUE (hash)
    )""",
    """CREATE TABLE blocks (
        name BLOB NOT NULL,
        model_id INTEGER NOT NULL,
        above BLOB,
        recompute_ms DOUBLE NOT NULL,
        slot_bytes INTEGER NOT NULL,
        state_bytes INTEGER NOT NULL,
        cold_slot_bytes INTEGER NOT NULL,
        cold_state_bytes INTEGER NOT NULL,
        PRIMARY KEY (name),
        FOREIGN KEY(model_id) REFERENCES models (id)
    )
 WITHOUT ROWID""",
    """CREATE TABLE heads (
        id VARCHAR NOT NULL,
        model_id INTEGER NOT NULL,
        asked BLOB NOT NULL,
        session BLOB NOT NULL,
        root BLOB NOT NULL,
        num_tokens INTEGER NOT NULL,
        continues BLOB NOT NULL,
        turns BLOB NOT NULL,
        ttl_s DOUBLE,
        is_pinned BOOLEAN NOT NULL,
        block_ms DOUBLE NOT NULL,
        last BLOB,
        "end" BLOB NOT NULL,
        num_bytes INTEGER NOT NULL,
        created_s DOUBLE NOT NULL,
        last_used_s DOUBLE NOT NULL,
        hits DOUBLE NOT NULL,
        PRIMARY KEY (id),
        FOREIGN KEY(model_id) REFERENCES models (id)
    )""",
    """CREATE TABLE store_state (
        id INTEGER NOT NULL,
        is_open BOOLEAN NOT NULL,
        trusted_s DOUBLE NOT NULL,
        monotonic_s DOUBLE NOT NULL,
        boot_id VARCHAR NOT NULL,
        PRIMARY KEY (id),
        CONSTRAINT store_state_single CHECK (id = 1)
    )""",
)
"""Written out, not taken from `store.blocks.tables`: what was released never changes."""

NAMES = ("store_state", "heads", "blocks", "models")


def upgrade() -> None:
    for statement in TABLES:
        op.execute(statement)


def downgrade() -> None:
    for name in NAMES:
        op.execute(f"DROP TABLE {name}")
