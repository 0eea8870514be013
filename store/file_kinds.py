"""The databases there are: how SQLite's header names each, and how hard its commits are synced."""

from __future__ import annotations

from typing import NamedTuple

from store import tables
from store.history import history_tables


class FileKind(NamedTuple):
    """A kind of database file. `is_synced` says that a commit is on disk when it is done.

    Without that a power loss costs the commits since the last checkpoint.
    """

    application_id: int
    version: int
    is_synced: bool


INDEX = FileKind(tables.APPLICATION_ID, tables.SCHEMA_VERSION, is_synced=False)
"""Its rows can be made again from the files of heads and slots."""

HISTORY = FileKind(history_tables.APPLICATION_ID, history_tables.SCHEMA_VERSION, is_synced=True)
"""Nothing else holds what it says."""
