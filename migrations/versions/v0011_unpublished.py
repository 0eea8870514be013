"""What was computed and is not on disk yet is noted: a crash that loses it can be told later."""

from __future__ import annotations

from alembic import op

revision = "0011"
down_revision = "0010"


def upgrade() -> None:
    op.execute("""CREATE TABLE unpublished (
        number INTEGER NOT NULL,
        slot VARCHAR NOT NULL,
        model_id INTEGER NOT NULL,
        "key" BLOB NOT NULL,
        name VARCHAR NOT NULL,
        hash BLOB NOT NULL,
        above BLOB NOT NULL,
        "end" INTEGER NOT NULL,
        start INTEGER NOT NULL,
        is_lost BOOLEAN NOT NULL,
        until_s DOUBLE NOT NULL,
        PRIMARY KEY (number),
        FOREIGN KEY(model_id) REFERENCES models (id)
    )""")
    op.execute("CREATE INDEX unpublished_by_hash ON unpublished (hash)")
    op.execute("CREATE INDEX unpublished_by_slot ON unpublished (slot)")
    op.execute('CREATE INDEX unpublished_by_key ON unpublished ("key", model_id, name)')


def downgrade() -> None:
    op.execute("DROP TABLE unpublished")
