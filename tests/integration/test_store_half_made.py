"""A process that is killed while it makes its database leaves one that can be made again."""

from __future__ import annotations

import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

from store.index import Index
from store.tables import APPLICATION_ID
from tests.store_samples import opened, rows


def leave_half_made(path: Path) -> None:
    """A hot journal: what there is until the file keeps a log."""
    alive = path.with_name("alive")
    with closing(sqlite3.connect(alive, isolation_level=None)) as other:
        other.execute("PRAGMA auto_vacuum = INCREMENTAL")
        other.execute(f"PRAGMA application_id = {APPLICATION_ID}")
        other.execute("PRAGMA cache_size = 1")
        other.execute("BEGIN IMMEDIATE")
        other.execute("CREATE TABLE half AS SELECT hex(randomblob(100000)) AS done")
        for suffix in ("", "-journal"):
            shutil.copy(f"{alive}{suffix}", f"{path}{suffix}")


def test_a_file_whose_making_was_killed_is_made_again(tmp_path: Path):
    leave_half_made(tmp_path / "index.db")
    with opened(tmp_path) as database:
        assert not list(tmp_path.glob("*.aside-*"))
        Index(database).write_first(rows(1))
        assert len(Index(database).load()[0]) == 1
    assert not (tmp_path / "index.db-journal").exists()


def test_what_is_moved_aside_takes_its_journal_along(tmp_path: Path):
    path = tmp_path / "index.db"
    with closing(sqlite3.connect(path)) as other:
        other.execute("PRAGMA journal_mode = PERSIST")
        other.execute("CREATE TABLE theirs (a)")
    journal = (tmp_path / "index.db-journal").read_bytes()
    with opened(tmp_path) as database:
        Index(database).write_first(rows(1))
        assert len(Index(database).load()[0]) == 1
    assert not (tmp_path / "index.db-journal").exists()
    assert (tmp_path / "index.db.aside-1-journal").read_bytes() == journal
