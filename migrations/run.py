"""Bring a database to a version, inside the transaction of its connection."""

from __future__ import annotations

import threading
from pathlib import Path

from sqlalchemy import Connection

from store.history import history_tables
from store.tables import SCHEMA_VERSION

_INDEX = Path(__file__).parent
_HISTORY = _INDEX / "history"

_one_at_a_time = threading.Lock()
"""Alembic keeps what it runs in a global: two databases must not be opened in it at once."""


def upgrade(connection: Connection) -> None:
    """Bring the index to this release's schema; nothing happens where it is there already."""
    _migrate(connection, _INDEX, SCHEMA_VERSION)


def downgrade(connection: Connection, version: int) -> None:
    """Bring the index back to an older schema `version`; 0 is the empty database."""
    _migrate(connection, _INDEX, version)


def upgrade_history(connection: Connection) -> None:
    """Bring the history to this release's schema; nothing happens where it is there already."""
    _migrate(connection, _HISTORY, history_tables.SCHEMA_VERSION)


def downgrade_history(connection: Connection, version: int) -> None:
    """Bring the history back to an older schema `version`; 0 is the empty database."""
    _migrate(connection, _HISTORY, version)


def _migrate(connection: Connection, scripts: Path, version: int) -> None:
    found = connection.exec_driver_sql("PRAGMA user_version").scalar_one()
    if found == version:
        return
    from alembic import command  # noqa: PLC0415 - a tenth of a start, and few have to migrate
    from alembic.config import Config  # noqa: PLC0415

    config = Config(attributes={"connection": connection})
    config.set_main_option("script_location", str(scripts).replace("%", "%%"))
    go = command.upgrade if version > found else command.downgrade
    with _one_at_a_time:
        go(config, f"{version:04d}" if version else "base")
    connection.exec_driver_sql(f"PRAGMA user_version = {version}")
