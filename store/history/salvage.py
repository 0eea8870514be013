"""A damaged history: what of it can still be read goes into the new one; the file itself stays.

Rows are read one by one around what SQLite cannot read. Of an agent the turns up to the first that
is not whole are taken over, of the rest what is whole: nobody is shown half of what was said.
"""

from __future__ import annotations

import shutil
import sqlite3
import tempfile
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import msgspec
import structlog
from sqlalchemy import Connection, text

from store.database_file import connect_reader
from store.errors import StoreError

_PAGE_BYTES = 4096
_MAX_FAILURES = 2_000
_MAX_STRIDE = 64

log = structlog.stdlib.get_logger("store.history.salvage")


class _Table(NamedTuple):
    """`key` is the row's number; a row without its parent is of no use."""

    name: str
    key: str
    parent: tuple[str, str, str] | None = None
    has_json: bool = False


_TABLES = (
    _Table("agents", "number"),
    _Table("turns", "id", ("agent_number", "agents", "number")),
    _Table("turn_messages", "id", ("turn_id", "turns", "id"), has_json=True),
    _Table("responses", "number", has_json=True),
    _Table("response_items", "number", ("response_number", "responses", "number"), has_json=True),
    _Table("response_events", "response_number", ("response_number", "responses", "number")),
    _Table("expired", "number"),
    _Table("expired_parts", "id", ("expired_number", "expired", "number")),
)
_DROP_WHAT_IS_NOT_WHOLE = (
    # A turn whose messages are not all there, and then all turns after a gap.
    """DELETE FROM turns WHERE num_bytes != (SELECT coalesce(sum(length(body)), 0)
       FROM turn_messages WHERE turn_id = turns.id)""",
    """DELETE FROM turns WHERE number > (SELECT count(*) FROM turns AS other
       WHERE other.agent_number = turns.agent_number AND other.number <= turns.number)""",
    """UPDATE agents SET
       num_turns = (SELECT count(*) FROM turns WHERE agent_number = agents.number),
       num_bytes = (SELECT coalesce(sum(num_bytes), 0) FROM turns
                    WHERE agent_number = agents.number)""",
    """DELETE FROM responses WHERE (SELECT coalesce(max(position) + 1, 0) FROM response_items
       WHERE response_number = responses.number) != (SELECT count(*) FROM response_items
       WHERE response_number = responses.number)""",
    """DELETE FROM expired WHERE num_bytes != (SELECT coalesce(sum(length(body)), 0)
       FROM expired_parts WHERE expired_number = expired.number)""",
)
_PLACES = """SELECT name, tbl_name, rootpage, sql FROM sqlite_master
    WHERE type = 'table' AND name IN (SELECT value FROM json_each(?))"""
_NUMBERS = """SELECT (SELECT count(*) FROM agents), (SELECT count(*) FROM responses),
    (SELECT count(*) FROM turns), (SELECT count(*) FROM expired)"""


class Salvaged(NamedTuple):
    """What was taken over. `is_whole` says that nothing that should be there was found missing."""

    num_agents: int = 0
    num_responses: int = 0
    is_whole: bool = False


def salvage(connection: Connection, damaged: Path, fresh: Path) -> Salvaged:
    """Take over what can be read of a damaged history into an empty one, in its transaction.

    `fresh` is the new one's file, whose tables lie where those of the damaged one did.
    Raises StoreFull, StoreFailed when the new one cannot be written.
    """
    try:
        with _readable(damaged, fresh) as source:
            are_whole = [_copy(source, connection, table) for table in _TABLES]
    except (sqlite3.Error, StoreError, OSError) as error:
        log.warning("nothing_salvaged", path=str(damaged), why=str(error))
        return Salvaged()
    before = connection.exec_driver_sql(_NUMBERS).one()
    for statement in _DROP_WHAT_IS_NOT_WHOLE:
        connection.exec_driver_sql(statement)
    after = connection.exec_driver_sql(_NUMBERS).one()
    return Salvaged(after[0], after[1], all(are_whole) and before == after)


@contextmanager
def _readable(damaged: Path, fresh: Path) -> Generator[sqlite3.Connection]:
    """A connection that reads the file, or else a copy that got the first page of a fresh one.

    That page says where each table begins, which is the same in every history.
    """
    if _has_tables(damaged):
        with closing(connect_reader(damaged)) as source:
            yield source
        return
    with tempfile.TemporaryDirectory(dir=damaged.parent) as folder:
        copy = Path(folder) / "copy"
        shutil.copyfile(damaged, copy)
        _replace_first_page(copy, fresh)
        with closing(connect_reader(copy)) as source:
            yield source


def _has_tables(damaged: Path) -> bool:
    with suppress(StoreError, sqlite3.Error), closing(connect_reader(damaged)) as source:
        return bool(source.execute("SELECT count(*) FROM sqlite_master").fetchone())
    return False


def _replace_first_page(copy: Path, fresh: Path) -> None:
    """Make a page that names our tables where the fresh history has them, and put it in front."""
    with closing(connect_reader(fresh)) as known:
        rows = known.execute(_PLACES, (msgspec.json.encode([t.name for t in _TABLES]),)).fetchall()
    made = copy.with_name("page")
    with closing(sqlite3.connect(made, isolation_level=None)) as maker:
        maker.execute(f"PRAGMA page_size = {_PAGE_BYTES}")
        maker.execute("PRAGMA auto_vacuum = INCREMENTAL")
        maker.execute("PRAGMA writable_schema = ON")
        maker.executemany("INSERT INTO sqlite_master VALUES ('table', ?, ?, ?, ?)", rows)
    with fresh.open("rb") as file:
        former = file.read(_PAGE_BYTES)
    page = bytearray(made.read_bytes()[:_PAGE_BYTES])
    page[28:32] = (copy.stat().st_size // _PAGE_BYTES).to_bytes(4, "big")
    page[52:56] = former[52:56]  # up to which page tables and indexes begin
    page[92:96] = page[24:28]  # the number of pages is as valid as the last change
    with copy.open("r+b") as file:
        file.write(page)


def _copy(source: sqlite3.Connection, target: Connection, table: _Table) -> bool:
    """Copy what can be read of a table; whether that was all of it."""
    known = _columns(target.connection.cursor().execute(f"PRAGMA table_info({table.name})"))
    there = _columns(source.execute(f"PRAGMA table_info({table.name})"))
    columns = [one for one in known if one in there]
    if table.key not in columns:
        return not there  # a release that had no such table
    names = ", ".join(columns)
    marks = ", ".join(f":{one}" for one in columns)
    insertion = f"INSERT OR IGNORE INTO {table.name} ({names}) SELECT {marks}"
    if table.parent is not None:
        column, parent, key = table.parent
        insertion += f" WHERE EXISTS (SELECT 1 FROM {parent} WHERE {key} = :{column})"  # noqa: S608
    statement, is_whole = text(insertion), True
    for row in _rows(source, table, columns):
        if row is None or (table.has_json and not _is_json(row[columns.index("body")])):
            is_whole = False
            continue
        added = target.execute(statement, dict(zip(columns, row, strict=True)))
        is_whole &= bool(added.rowcount)
    return is_whole


def _columns(rows: sqlite3.Cursor) -> list[str]:
    return [row[1] for row in rows]


def _rows(
    source: sqlite3.Connection, table: _Table, columns: Sequence[str]
) -> Iterator[tuple[object, ...] | None]:
    """The rows that can be read, in order; None for each place where some cannot."""
    at = columns.index(table.key)
    query = f"SELECT {', '.join(columns)} FROM {table.name} WHERE {table.key} > ?"  # noqa: S608
    last, stride, num_failures = 0, 1, 0
    while num_failures < _MAX_FAILURES:
        try:
            for row in source.execute(f"{query} ORDER BY {table.key}", (last,)):
                yield row
                last, stride = int(row[at]), 1
        except (sqlite3.Error, OverflowError):
            yield None
            num_failures += 1
            last, stride = last + stride, min(stride * 2, _MAX_STRIDE)
        else:
            return


def _is_json(body: object) -> bool:
    try:
        msgspec.json.decode(body if isinstance(body, bytes) else b"")
    except msgspec.MsgspecError:
        return False
    return True
