"""What unit tests share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from migrations.run import upgrade_history
from store.database import Database
from store.file_kinds import HISTORY
from store.opening import open_database


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Database]:
    """The history's, empty."""
    tmp_path.chmod(0o700)
    path = tmp_path / "history.sqlite3"
    with closing(open_database(path, upgrade_history, kind=HISTORY)) as database:
        yield database
