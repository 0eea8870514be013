"""What Alembic runs: the versions, on the connection and in the transaction of the caller."""

from __future__ import annotations

from typing import cast

from alembic import context
from sqlalchemy import Connection

from store.blocks.tables import KvTable

connection = cast("Connection", context.config.attributes["connection"])
context.configure(connection=connection, target_metadata=KvTable.metadata)
context.run_migrations()
