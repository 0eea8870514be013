"""The first schema: blocks, the heads that go through them, and what is remembered besides."""

from __future__ import annotations

from alembic import op

revision = "0001"
down_revision = None

TABLES = (
    """CREATE TABLE models (
        id INTEGER NOT NULL,
        hash BLOB NOT NULL,
        label VARCHAR NOT NULL,
        layout VARCHAR NOT NULL,
        prefill_tokens_per_s DOUBLE,
        restore_bytes_per_s DOUBLE,
        weights_bytes INTEGER,
        load_ms DOUBLE,
        peak_bytes INTEGER,
        last_used_s DOUBLE NOT NULL,
        blindness VARCHAR,
        prefill_slice INTEGER,
        slice_device VARCHAR,
        PRIMARY KEY (id),
        UNIQUE (hash)
    )""",
    """CREATE TABLE file_digests (
        device INTEGER NOT NULL,
        inode INTEGER NOT NULL,
        size_bytes INTEGER NOT NULL,
        mtime_ns INTEGER NOT NULL,
        ctime_ns INTEGER NOT NULL,
        digest BLOB NOT NULL,
        last_used_s DOUBLE NOT NULL,
        PRIMARY KEY (device, inode, size_bytes, mtime_ns, ctime_ns)
    )
 WITHOUT ROWID""",
    """CREATE TABLE requests (
        number INTEGER NOT NULL,
        id VARCHAR NOT NULL,
        model VARCHAR NOT NULL,
        finished_s DOUBLE NOT NULL,
        num_prompt_tokens INTEGER NOT NULL,
        num_cached_tokens INTEGER NOT NULL,
        num_output_tokens INTEGER NOT NULL,
        tier VARCHAR NOT NULL,
        reason VARCHAR NOT NULL,
        finish_reason VARCHAR NOT NULL,
        queue_ms DOUBLE NOT NULL,
        restore_ms DOUBLE NOT NULL,
        prefill_ms DOUBLE NOT NULL,
        decode_ms DOUBLE NOT NULL,
        kept_s DOUBLE DEFAULT 0 NOT NULL,
        rewrites VARCHAR DEFAULT '' NOT NULL,
        PRIMARY KEY (number),
        UNIQUE (id)
    )""",
    "CREATE INDEX requests_by_time ON requests (finished_s)",
    """CREATE TABLE counters (
        day VARCHAR NOT NULL,
        name VARCHAR NOT NULL,
        value DOUBLE NOT NULL,
        PRIMARY KEY (day, name)
    )
 WITHOUT ROWID""",
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
        name VARCHAR NOT NULL,
        continues BLOB NOT NULL,
        ttl_s DOUBLE,
        pins BLOB NOT NULL,
        block_ms DOUBLE NOT NULL,
        last BLOB,
        "end" BLOB NOT NULL,
        num_bytes INTEGER NOT NULL,
        end_bytes INTEGER NOT NULL,
        created_s DOUBLE NOT NULL,
        last_used_s DOUBLE NOT NULL,
        hits DOUBLE NOT NULL,
        digests BLOB NOT NULL,
        num_turns INTEGER NOT NULL,
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
"""Written out, not taken from `store.tables`: what was released never changes."""

NAMES = ("store_state", "heads", "blocks", "counters", "requests", "file_digests", "models")


def upgrade() -> None:
    for statement in TABLES:
        op.execute(statement)


def downgrade() -> None:
    for name in NAMES:
        op.execute(f"DROP TABLE {name}")
