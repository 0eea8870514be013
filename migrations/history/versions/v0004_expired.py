"""What expired is kept a while longer; ages are trusted time; damaged files are known."""

from __future__ import annotations

from alembic import op

revision = "0004"
down_revision = "0003"

_STATE = """CREATE TABLE store_state (
        id INTEGER NOT NULL,
        is_open BOOLEAN NOT NULL,
        {clock}PRIMARY KEY (id),
        CONSTRAINT store_state_single CHECK (id = 1)
    )"""
_CLOCK = """trusted_s DOUBLE NOT NULL,
        monotonic_s DOUBLE NOT NULL,
        boot_id VARCHAR NOT NULL,
        """
TABLES = (
    """CREATE TABLE expired (
        number INTEGER NOT NULL,
        kind VARCHAR NOT NULL,
        id VARCHAR NOT NULL,
        num_bytes INTEGER NOT NULL,
        last_used_s DOUBLE NOT NULL,
        expired_s DOUBLE NOT NULL,
        PRIMARY KEY (number)
    )""",
    "CREATE INDEX expired_by_id ON expired (kind, id)",
    """CREATE TABLE expired_parts (
        id INTEGER NOT NULL,
        expired_number INTEGER NOT NULL,
        position INTEGER NOT NULL,
        body BLOB NOT NULL,
        PRIMARY KEY (id),
        FOREIGN KEY(expired_number) REFERENCES expired (number) ON DELETE CASCADE
    )""",
    "CREATE UNIQUE INDEX expired_parts_in_order ON expired_parts (expired_number, position)",
    """CREATE TABLE set_aside (
        name VARCHAR NOT NULL,
        at_s DOUBLE NOT NULL,
        found_s DOUBLE NOT NULL,
        num_agents INTEGER NOT NULL,
        num_responses INTEGER NOT NULL,
        is_whole BOOLEAN NOT NULL,
        is_acknowledged BOOLEAN NOT NULL,
        PRIMARY KEY (name)
    )
 WITHOUT ROWID""",
)
_CARRY_ON = """INSERT INTO store_state SELECT 1, is_open, coalesce((SELECT max(last_used_s) FROM (
    SELECT last_used_s FROM agents UNION ALL SELECT last_used_s FROM responses)), 0), 0, ''
    FROM former_state"""
"""Trusted time begins where the newest use is: no older release kept any of its own."""


def upgrade() -> None:
    for statement in TABLES:
        op.execute(statement)
    op.execute("ALTER TABLE store_state RENAME TO former_state")
    op.execute(_STATE.format(clock=_CLOCK))
    op.execute(_CARRY_ON)
    op.execute("DROP TABLE former_state")


def downgrade() -> None:
    op.execute("ALTER TABLE store_state RENAME TO former_state")
    op.execute(_STATE.format(clock=""))
    op.execute("INSERT INTO store_state SELECT 1, is_open FROM former_state")
    op.execute("DROP TABLE former_state")
    for name in ("set_aside", "expired_parts", "expired"):
        op.execute(f"DROP TABLE {name}")
