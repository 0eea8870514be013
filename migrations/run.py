"""Bring a database to a version, inside the transaction of its connection."""

from __future__ import annotations

from pathlib import Path

from alembic import command
from alembic.config import Config
from sqlalchemy import Connection

from store.tables import SCHEMA_VERSION


def upgrade(connection: Connection) -> None:
    """Bring the database to this release's schema; nothing happens where it is there already."""
    command.upgrade(_config(connection), "head")
    connection.exec_driver_sql(f"PRAGMA user_version = {SCHEMA_VERSION}")


def downgrade(connection: Connection, version: int) -> None:
    """Bring the database back to an older schema `version`; 0 is the empty database."""
    command.downgrade(_config(connection), f"{version:04d}" if version else "base")
    connection.exec_driver_sql(f"PRAGMA user_version = {version}")


def _config(connection: Connection) -> Config:
    config = Config(attributes={"connection": connection})
    config.set_main_option("script_location", str(Path(__file__).parent).replace("%", "%%"))
    return config
