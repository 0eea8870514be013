"""The SQLite file: settings, schema, groups of writes, and every way it can be bad."""

from __future__ import annotations

import shutil
import sqlite3
import stat
import threading
from contextlib import closing
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import Connection, create_engine

from migrations.run import downgrade, downgrade_history, upgrade, upgrade_history
from store.database import Database
from store.errors import (
    StoreError,
    StoreFailed,
    StoreFull,
    StoreTooNew,
)
from store.file_kinds import HISTORY
from store.index import Index
from store.opening import open_database
from store.records import Records
from store.tables import APPLICATION_ID, SCHEMA_VERSION, Table
from store.types import RunFigures
from tests.slot_samples import MODEL
from tests.store_samples import opened, rows
from tests.waiting import PATIENCE_S


def put_counter(database: Database, name: str):
    text = f"INSERT INTO counters VALUES ('2026-01-01', '{name}', 1.0)"
    return database.submit(lambda connection: connection.exec_driver_sql(text).rowcount)


def asides(root: Path) -> list[str]:
    """What was put aside, and a new one made in its place."""
    return sorted(path.name for path in root.glob("*.aside-[0-9]"))


def names(database: Database) -> set[str]:
    rows = database.read(
        lambda connection: connection.exec_driver_sql("SELECT name FROM counters").all()
    )
    return {name for (name,) in rows}


def fill(root: Path, num_blocks: int = 50) -> None:
    with opened(root) as database:
        Index(database).write_first(rows(1, num_blocks))
        Records(database).measured(MODEL, RunFigures(load_ms=1.0)).result()
        database.checkpoint().result()


def test_every_setting_is_as_it_should_be_and_the_files_are_private(tmp_path: Path):
    with opened(tmp_path) as database:
        put_counter(database, "a").result()
        for path in tmp_path.iterdir():
            assert stat.S_IMODE(path.stat().st_mode) == 0o600
        settings = {
            name: database.submit(
                lambda connection, name=name: connection.exec_driver_sql(f"PRAGMA {name}").scalar()
            ).result()
            for name in ("journal_mode", "synchronous", "foreign_keys", "mmap_size", "auto_vacuum")
        }
        assert settings == {
            "journal_mode": "wal",
            "synchronous": 1,
            "foreign_keys": 1,
            "mmap_size": 0,
            "auto_vacuum": 2,
        }
        with pytest.raises(StoreFailed), database.reading() as connection:
            connection.exec_driver_sql("DELETE FROM counters")


def test_a_setting_that_does_not_take_is_an_error(tmp_path: Path):
    path = tmp_path / "index.db"
    with closing(sqlite3.connect(path)) as other:
        other.execute("CREATE TABLE t (a)")
        other.execute(f"PRAGMA application_id = {APPLICATION_ID}")
    with pytest.raises(StoreFailed, match="auto_vacuum"):
        open_database(path, upgrade)


def test_the_migrations_make_the_tables_that_the_code_knows(tmp_path: Path):
    with opened(tmp_path) as database, database.reading() as connection:
        migrated = MigrationContext.configure(connection, opts={"compare_type": True})
        assert compare_metadata(migrated, Table.metadata) == []
        made = schema(connection)
    engine = create_engine("sqlite://")
    with engine.connect() as connection:
        Table.metadata.create_all(connection)
        known = schema(connection)
    engine.dispose()
    assert {one for one in made if one[0] != "alembic_version"} == known


def schema(connection: Connection) -> set[tuple[str, tuple[str, ...]]]:
    """Every statement, line by line in any order: a migration adds columns at the end."""
    rows = connection.exec_driver_sql(
        "SELECT name, sql FROM sqlite_master WHERE sql NOT NULL AND name NOT LIKE 'sqlite_%'"
    )
    return {(name, tuple(sorted(lines_of("".join(sql.split()))))) for name, sql in rows}


def lines_of(statement: str) -> list[str]:
    """What commas outside of inner brackets divide, with what is before and after the brackets."""
    head, _, rest = statement.partition("(")
    body, _, end = rest.rpartition(")")
    lines, depth = [""], 0
    for letter in body:
        depth += (letter == "(") - (letter == ")")
        if letter == "," and not depth:
            lines.append("")
        else:
            lines[-1] += letter
    return [head, *lines, end]


def test_a_filled_database_goes_down_and_up_again(tmp_path: Path):
    fill(tmp_path)
    with opened(tmp_path) as database:
        before = database.read(schema)
        database.submit(lambda connection: downgrade(connection, 0)).result()
        left = {name for name, _ in database.read(schema)}
        assert left == {"alembic_version"}
        database.submit(upgrade).result()
        assert database.read(schema) == before
        database.submit(
            lambda connection: (
                connection.exec_driver_sql(
                    "INSERT INTO store_state VALUES (1, 1, 0, 0, '')"
                ).rowcount
            )
        ).result()
        Index(database).write_first(rows(2))
        assert len(Index(database).load()[0]) == 1


def open_history(root: Path) -> Database:
    return open_database(root / "history.sqlite3", upgrade_history, kind=HISTORY)


def leave_old(root: Path) -> Path:
    """A history as an earlier release left it; where its copy comes to lie."""
    database = open_history(root)
    database.submit(lambda connection: downgrade_history(connection, 1)).result()
    database.close()
    return root / "history.sqlite3.aside-schema-1"


def version_of(path: Path) -> int:
    with closing(sqlite3.connect(path)) as other:
        assert other.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        return other.execute("PRAGMA user_version").fetchone()[0]


def test_before_an_upgrade_the_file_is_copied(tmp_path: Path):
    copy = leave_old(tmp_path)
    assert not copy.exists(), "what is not upgraded is not copied"
    open_history(tmp_path).close()
    assert stat.S_IMODE(copy.stat().st_mode) == 0o600
    assert version_of(copy) == 1
    assert version_of(tmp_path / "history.sqlite3") == HISTORY.version > 1
    before = copy.stat()
    open_history(tmp_path).close()
    assert copy.stat() == before
    assert not list(tmp_path.glob("*.new"))


def test_a_file_that_cannot_be_copied_is_not_upgraded(tmp_path: Path):
    copy = leave_old(tmp_path)
    (copy / "something").mkdir(parents=True)
    with pytest.raises(StoreFailed):
        open_history(tmp_path)
    assert version_of(tmp_path / "history.sqlite3") == 1


def test_a_newer_schema_is_never_touched(tmp_path: Path):
    fill(tmp_path)
    path = tmp_path / "index.db"
    with closing(sqlite3.connect(path)) as other:
        other.execute(f"PRAGMA user_version = {SCHEMA_VERSION + 1}")
        other.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    before = path.read_bytes()
    with pytest.raises(StoreTooNew, match=f"schema {SCHEMA_VERSION + 1}"):
        open_database(path, upgrade)
    assert path.read_bytes() == before
    assert not list(tmp_path.glob("*.aside-*"))


def test_what_one_closure_raises_undoes_only_that_one(tmp_path: Path):
    with opened(tmp_path) as database:
        gate = threading.Event()
        first = database.submit(lambda _: gate.wait(PATIENCE_S))

        def half(connection: Connection) -> None:
            connection.exec_driver_sql("INSERT INTO counters VALUES ('d', 'half', 1.0)")
            raise ZeroDivisionError

        good = put_counter(database, "good")
        bad = database.submit(half)
        twice = [put_counter(database, "twice") for _ in range(2)]
        late = put_counter(database, "late")
        gate.set()
        assert (first.result(), good.result(), late.result()) == (True, 1, 1)
        assert isinstance(bad.exception(), ZeroDivisionError)
        assert twice[0].result() == 1
        assert type(twice[1].exception()) is StoreError
        assert names(database) == {"good", "twice", "late"}


def limit_pages(database: Database, num_pages: int) -> None:
    database.submit(
        lambda connection: connection.exec_driver_sql(
            f"PRAGMA max_page_count = {num_pages}"
        ).scalar()
    ).result()


def fill_up(database: Database) -> BaseException | None:
    values = "NULL, hex(randomblob(2000)), '', 0,0,0,0,'','','',0,0,0,0,0,''"
    text = f"INSERT INTO requests SELECT {values}"
    for _ in range(1000):
        future = database.submit(lambda connection: connection.exec_driver_sql(text).rowcount)
        if future.exception():
            return future.exception()
    return None


def test_a_full_disk_is_told_and_survived(tmp_path: Path):
    with opened(tmp_path) as database:
        limit_pages(database, 60)
        assert isinstance(fill_up(database), StoreFull)
        limit_pages(database, 100_000)
        assert put_counter(database, "after").result() == 1


def test_a_full_disk_gets_what_can_be_given_up_and_the_write_is_repeated(tmp_path: Path):
    gave_up: list[bool] = []

    def make_room() -> bool:
        writer = database._writer
        assert writer is not None
        writer.connection.cursor().execute("PRAGMA max_page_count = 100000")
        gave_up.append(True)
        return True

    with opened(tmp_path, make_room=make_room) as database:
        limit_pages(database, 60)
        assert fill_up(database) is None
        assert gave_up == [True]


def test_another_writer_delays_and_fails_only_writes(tmp_path: Path):
    with opened(tmp_path, busy_timeout_ms=50) as database:
        put_counter(database, "before").result()
        with closing(sqlite3.connect(tmp_path / "index.db", isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            assert isinstance(put_counter(database, "during").exception(), StoreFailed)
            assert names(database) == {"before"}
            other.execute("ROLLBACK")
        put_counter(database, "after").result()
        assert names(database) == {"before", "after"}


@pytest.mark.parametrize(
    "content", [b"not a database at all" * 500, b"SQLite format 3\x00" + b"\xff" * 8000]
)
def test_a_file_that_is_no_database_is_moved_aside(tmp_path: Path, content: bytes):
    path = tmp_path / "index.db"
    path.write_bytes(content)
    with opened(tmp_path) as database:
        assert asides(tmp_path) == ["index.db.aside-1"]
        assert names(database) == set()
        put_counter(database, "a").result()
    assert (tmp_path / "index.db.aside-1").read_bytes() == content
    with opened(tmp_path) as database:
        assert asides(tmp_path) == ["index.db.aside-1"]
        assert names(database) == {"a"}


def test_another_programs_database_is_moved_aside(tmp_path: Path):
    path = tmp_path / "index.db"
    with closing(sqlite3.connect(path)) as other:
        other.execute("CREATE TABLE holidays (day)")
    for number in (1, 2):
        with opened(tmp_path) as database:
            assert asides(tmp_path)[-1] == f"index.db.aside-{number}"
            assert names(database) == set()
        (tmp_path / f"index.db.aside-{number}").replace(path)
        (tmp_path / f"index.db.aside-{number}").touch()


def leave_open(root: Path) -> None:
    """As a killed server leaves it."""
    with closing(sqlite3.connect(root / "index.db")) as other:
        other.execute("UPDATE store_state SET is_open = 1")
        other.commit()
        other.execute("PRAGMA wal_checkpoint(TRUNCATE)")


def test_after_an_unclean_stop_damage_is_found_at_the_start(tmp_path: Path):
    fill(tmp_path, num_blocks=2000)
    leave_open(tmp_path)
    path = tmp_path / "index.db"
    data = bytearray(path.read_bytes())
    middle = len(data) // 4096 // 2 * 4096
    data[middle : middle + 4096] = bytes(4096)
    path.write_bytes(data)
    with opened(tmp_path) as database:
        assert asides(tmp_path) == ["index.db.aside-1"]
        assert Index(database).load() == ([], {})
    assert (tmp_path / "index.db.aside-1").read_bytes()[4096:] == data[4096:]


def test_damage_that_is_met_later_is_named_and_found_at_the_next_start(tmp_path: Path):
    fill(tmp_path, num_blocks=2000)
    path = tmp_path / "index.db"
    with closing(sqlite3.connect(path)) as other:
        query = "SELECT rootpage FROM sqlite_master WHERE name = 'blocks'"
        start = (other.execute(query).fetchone()[0] - 1) * 4096
    data = bytearray(path.read_bytes())
    data[start : start + 4096] = bytes(4096)
    path.write_bytes(data)
    with opened(tmp_path) as database:
        assert not asides(tmp_path)
        assert Index(database).load() == ([], {})
        assert not database.check()
    with opened(tmp_path) as database:
        assert asides(tmp_path) == ["index.db.aside-1"]
        assert Index(database).load() == ([], {})


def test_without_its_log_or_at_all_the_index_is_still_sound(tmp_path: Path):
    fill(tmp_path)
    leave_open(tmp_path)
    (tmp_path / "index.db-wal").unlink(missing_ok=True)
    with opened(tmp_path) as database:
        assert database.check()
    (tmp_path / "index.db").unlink()
    with opened(tmp_path) as database:
        assert not asides(tmp_path)
        assert Index(database).load() == ([], {})


def test_a_closed_database_refuses_and_closing_twice_is_nothing(tmp_path: Path):
    with opened(tmp_path) as database:
        database.close()
        with pytest.raises(StoreFailed, match="closed"):
            put_counter(database, "a")


def test_a_directory_that_is_taken_away_fails_calls_and_hangs_nothing(tmp_path: Path):
    root = tmp_path / "store"
    root.mkdir()
    with opened(root) as database:
        put_counter(database, "a").result()
        (root / "index.db").rename(tmp_path / "gone.db")
        shutil.rmtree(root)
        error = put_counter(database, "b").exception(timeout=30)
        assert error is None or isinstance(error, StoreError)
        database._readers.dispose()
        with pytest.raises(StoreFailed):
            names(database)
    root.mkdir()
    with opened(root) as database:
        assert names(database) == set()
