"""The first schema: agents, their turns, and the sessions whose KV is still to be deleted."""

from __future__ import annotations

from alembic import op

revision = "0001"
down_revision = None

TABLES = (
    """CREATE TABLE agents (
        number INTEGER NOT NULL,
        id VARCHAR NOT NULL,
        session VARCHAR NOT NULL,
        config BLOB NOT NULL,
        created_s DOUBLE NOT NULL,
        last_used_s DOUBLE NOT NULL,
        ttl_s DOUBLE,
        is_pinned BOOLEAN NOT NULL,
        num_turns INTEGER NOT NULL,
        num_bytes INTEGER NOT NULL,
        PRIMARY KEY (number),
        UNIQUE (id),
        UNIQUE (session)
    )""",
    "CREATE INDEX agents_by_use ON agents (last_used_s)",
    """CREATE TABLE left_sessions (
        session VARCHAR NOT NULL,
        left_s DOUBLE NOT NULL,
        PRIMARY KEY (session)
    )
 WITHOUT ROWID""",
    """CREATE TABLE store_state (
        id INTEGER NOT NULL,
        is_open BOOLEAN NOT NULL,
        PRIMARY KEY (id),
        CONSTRAINT store_state_single CHECK (id = 1)
    )""",
    "INSERT INTO store_state VALUES (1, 0)",
    """CREATE TABLE turns (
        id INTEGER NOT NULL,
        agent_number INTEGER NOT NULL,
        number INTEGER NOT NULL,
        request_id VARCHAR NOT NULL,
        model VARCHAR NOT NULL,
        finish_reason VARCHAR NOT NULL,
        num_prompt_tokens INTEGER NOT NULL,
        num_cached_tokens INTEGER NOT NULL,
        num_output_tokens INTEGER NOT NULL,
        num_bytes INTEGER NOT NULL,
        created_s DOUBLE NOT NULL,
        PRIMARY KEY (id),
        FOREIGN KEY(agent_number) REFERENCES agents (number) ON DELETE CASCADE
    )""",
    "CREATE UNIQUE INDEX turns_by_agent ON turns (agent_number, number)",
    """CREATE TABLE turn_messages (
        id INTEGER NOT NULL,
        turn_id INTEGER NOT NULL,
        position INTEGER NOT NULL,
        body BLOB NOT NULL,
        PRIMARY KEY (id),
        FOREIGN KEY(turn_id) REFERENCES turns (id) ON DELETE CASCADE
    )""",
    "CREATE UNIQUE INDEX turn_messages_by_turn ON turn_messages (turn_id, position)",
)
"""Written out, not taken from `store.history.history_tables`: what was released never changes."""

NAMES = ("turn_messages", "turns", "store_state", "left_sessions", "agents")


def upgrade() -> None:
    for statement in TABLES:
        op.execute(statement)


def downgrade() -> None:
    for name in NAMES:
        op.execute(f"DROP TABLE {name}")
