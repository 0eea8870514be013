"""Bring a database to a version, inside the transaction of its connection."""

from __future__ import annotations

import threading
from pathlib import Path

from alembic import command
from alembic.config import Config
from sqlalchemy import Connection

from store import history_tables
from store.tables import SCHEMA_VERSION

_INDEX = Path(__file__).parent
_HISTORY = _INDEX / "history"

_one_at_a_time = threading.Lock()
"""Alembic keeps what it runs in a global: two databases must not be opened in it at once."""


def upgrade(connection: Connection) -> None:
    """Bring the index to this release's schema; nothing happens where it is there already."""
    with _one_at_a_time:
        command.upgrade(_config(connection, _INDEX), "head")
    connection.exec_driver_sql(f"PRAGMA user_version = {SCHEMA_VERSION}")


def downgrade(connection: Connection, version: int) -> None:
    """Bring the index back to an older schema `version`; 0 is the empty database."""
    _downgrade(connection, _INDEX, version)


def upgrade_history(connection: Connection) -> None:
    """Bring the history to this release's schema; nothing happens where it is there already."""
    with _one_at_a_time:
        command.upgrade(_config(connection, _HISTORY), "head")
    connection.exec_driver_sql(f"PRAGMA user_version = {history_tables.SCHEMA_VERSION}")


def downgrade_history(connection: Connection, version: int) -> None:
    """Bring the history back to an older schema `version`; 0 is the empty database."""
    _downgrade(connection, _HISTORY, version)


def _downgrade(connection: Connection, scripts: Path, version: int) -> None:
    with _one_at_a_time:
        command.downgrade(_config(connection, scripts), f"{version:04d}" if version else "base")
    connection.exec_driver_sql(f"PRAGMA user_version = {version}")


def _config(connection: Connection, scripts: Path) -> Config:
    config = Config(attributes={"connection": connection})
    config.set_main_option("script_location", str(scripts).replace("%", "%%"))
    return config
