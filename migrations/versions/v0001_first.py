"""The first schema: models, slots and their blocks, conversations, pins, requests, counters."""

from __future__ import annotations

from alembic import op

revision = "0001"
down_revision = None

TABLES = (
    """CREATE TABLE condemned (
        name VARCHAR NOT NULL,
        tier VARCHAR(4) NOT NULL,
        PRIMARY KEY (name, tier)
    )
 WITHOUT ROWID""",
    """CREATE TABLE counters (
        day VARCHAR NOT NULL,
        name VARCHAR NOT NULL,
        value DOUBLE NOT NULL,
        PRIMARY KEY (day, name)
    )
 WITHOUT ROWID""",
    """CREATE TABLE file_digests (
        device INTEGER NOT NULL,
        inode INTEGER NOT NULL,
        size_bytes INTEGER NOT NULL,
        mtime_ns INTEGER NOT NULL,
        digest BLOB NOT NULL,
        last_used_s DOUBLE NOT NULL,
        PRIMARY KEY (device, inode, size_bytes, mtime_ns)
    )
 WITHOUT ROWID""",
    """CREATE TABLE layouts (
        id INTEGER NOT NULL,
        text VARCHAR NOT NULL,
        PRIMARY KEY (id),
        UNIQUE (text)
    )""",
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
        PRIMARY KEY (id),
        UNIQUE (hash)
    )""",
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
        PRIMARY KEY (number),
        UNIQUE (id)
    )""",
    "CREATE INDEX requests_by_time ON requests (finished_s)",
    """CREATE TABLE store_state (
        id INTEGER NOT NULL,
        is_open BOOLEAN NOT NULL,
        wall_s DOUBLE NOT NULL,
        monotonic_s DOUBLE NOT NULL,
        boot_id VARCHAR NOT NULL,
        PRIMARY KEY (id),
        CONSTRAINT store_state_single CHECK (id = 1)
    )""",
    """CREATE TABLE pins (
        model_id INTEGER NOT NULL,
        end_hash BLOB NOT NULL,
        source VARCHAR NOT NULL,
        PRIMARY KEY (model_id, end_hash, source),
        FOREIGN KEY(model_id) REFERENCES models (id)
    )
 WITHOUT ROWID""",
    """CREATE TABLE slots (
        id INTEGER NOT NULL,
        name VARCHAR NOT NULL,
        model_id INTEGER NOT NULL,
        parent_id INTEGER,
        start INTEGER NOT NULL,
        "end" INTEGER NOT NULL,
        block_size INTEGER NOT NULL,
        end_hash BLOB NOT NULL,
        layout_id INTEGER NOT NULL,
        has_state BOOLEAN NOT NULL,
        recompute_ms DOUBLE NOT NULL,
        created_s DOUBLE NOT NULL,
        ttl_class VARCHAR(8) NOT NULL,
        ttl_s DOUBLE,
        disk_bytes INTEGER NOT NULL,
        tier VARCHAR(4) NOT NULL,
        last_used_s DOUBLE NOT NULL,
        hits DOUBLE NOT NULL,
        num_children INTEGER DEFAULT 0 NOT NULL,
        is_pinned BOOLEAN NOT NULL,
        PRIMARY KEY (id),
        CONSTRAINT slots_tier CHECK (tier IN ('warm', 'cold')),
        CONSTRAINT slots_span CHECK (start >= 0 AND "end" >= start),
        UNIQUE (name),
        FOREIGN KEY(model_id) REFERENCES models (id),
        FOREIGN KEY(parent_id) REFERENCES slots (id),
        FOREIGN KEY(layout_id) REFERENCES layouts (id)
    )""",
    "CREATE INDEX slots_by_end ON slots (model_id, end_hash)",
    "CREATE INDEX slots_by_parent ON slots (parent_id)",
    """CREATE TABLE blocks (
        slot_id INTEGER NOT NULL,
        position INTEGER NOT NULL,
        hash BLOB NOT NULL,
        PRIMARY KEY (slot_id, position),
        FOREIGN KEY(slot_id) REFERENCES slots (id) ON DELETE CASCADE
    )
 WITHOUT ROWID""",
    """CREATE TABLE conversations (
        id INTEGER NOT NULL,
        "key" BLOB NOT NULL,
        model_id INTEGER NOT NULL,
        leaf_id INTEGER,
        num_tokens INTEGER NOT NULL,
        num_turns INTEGER NOT NULL,
        ttl_s DOUBLE,
        created_s DOUBLE NOT NULL,
        last_used_s DOUBLE NOT NULL,
        PRIMARY KEY (id),
        FOREIGN KEY(model_id) REFERENCES models (id),
        FOREIGN KEY(leaf_id) REFERENCES slots (id) ON DELETE SET NULL
    )""",
    'CREATE UNIQUE INDEX conversations_by_key ON conversations ("key", model_id)',
    "CREATE INDEX conversations_by_leaf ON conversations (leaf_id)",
    """CREATE TABLE conversation_slots (
        conversation_id INTEGER NOT NULL,
        slot_id INTEGER NOT NULL,
        PRIMARY KEY (conversation_id, slot_id),
        FOREIGN KEY(conversation_id) REFERENCES conversations (id) ON DELETE CASCADE,
        FOREIGN KEY(slot_id) REFERENCES slots (id) ON DELETE CASCADE
    )
 WITHOUT ROWID""",
    "CREATE INDEX conversation_slots_by_slot ON conversation_slots (slot_id)",
)
"""Written out, not taken from `store.tables`: what was released never changes."""

NAMES = (
    "conversation_slots",
    "conversations",
    "blocks",
    "slots",
    "pins",
    "store_state",
    "requests",
    "models",
    "layouts",
    "file_digests",
    "counters",
    "condemned",
)


def upgrade() -> None:
    for statement in TABLES:
        op.execute(statement)


def downgrade() -> None:
    for name in NAMES:
        op.execute(f"DROP TABLE {name}")
