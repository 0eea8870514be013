"""What may be deleted ages by trusted time; files that may go are known since they were seen."""

from __future__ import annotations

from alembic import op

revision = "0006"
down_revision = "0005"


def upgrade() -> None:
    op.execute("ALTER TABLE store_state RENAME COLUMN wall_s TO trusted_s")
    op.execute(
        "UPDATE store_state SET trusted_s = coalesce((SELECT max(last_used_s) FROM slots), 0)"
        " WHERE boot_id = ''"
    )
    op.execute("ALTER TABLE requests ADD COLUMN kept_s DOUBLE DEFAULT 0 NOT NULL")
    op.execute("UPDATE requests SET kept_s = coalesce((SELECT trusted_s FROM store_state), 0)")
    op.execute(
        """CREATE TABLE sightings (
            path VARCHAR NOT NULL,
            mtime_ns INTEGER NOT NULL,
            since_s DOUBLE NOT NULL,
            PRIMARY KEY (path)
        )
 WITHOUT ROWID"""
    )


def downgrade() -> None:
    op.execute("DROP TABLE sightings")
    op.execute("ALTER TABLE requests DROP COLUMN kept_s")
    op.execute("ALTER TABLE store_state RENAME COLUMN trusted_s TO wall_s")
