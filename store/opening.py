"""Opening a database: whose file it is, whether it is sound, and its schema."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import structlog
from sqlalchemy import Connection

from store import clock as clocks
from store.clock import Clock, TrustedClock
from store.database import Database, engine_of, is_sound, refuse_more_room
from store.database_file import (
    BUSY_TIMEOUT_MS,
    back_up_before_upgrade,
    check_identity,
    connect_writer,
    move_aside,
    undo_unfinished,
)
from store.errors import IndexDamaged, StoreError
from store.file_kinds import INDEX, FileKind
from store.sqlite_errors import reported

Migrate = Callable[[Connection], None]
"""Brings the schema up to date, inside the transaction of the connection."""

log = structlog.stdlib.get_logger("store.opening")


def open_database(
    path: Path,
    migrate: Migrate,
    make_room: Callable[[], bool] = refuse_more_room,
    busy_timeout_ms: int = BUSY_TIMEOUT_MS,
    kind: FileKind = INDEX,
    read: Clock = clocks.now,
) -> Database:
    """Open a database for writing, and bring it to this release's schema by `migrate`.

    A damaged or foreign file is moved aside and a new one made. The caller holds the store's lock.
    `make_room` is called in the writer's thread when the disk is full, and says whether it freed
    anything. `read` is the system's clocks.

    Raises:
        StoreTooNew: a later release wrote it; it stays as it is.
        StoreFull, StoreFailed: the system refuses.
    """
    try:
        writer = _open_writer(path, migrate, busy_timeout_ms, kind)
    except IndexDamaged as error:
        moved = move_aside(path)
        log.warning("database_set_aside", path=str(path), error=str(error), moved_to=moved.name)
        writer = _open_writer(path, migrate, busy_timeout_ms, kind)
    clock = _started_clock(writer, read)
    return Database(path, writer, make_room, clock=clock)


def _open_writer(path: Path, migrate: Migrate, busy_timeout_ms: int, kind: FileKind) -> Connection:
    undo_unfinished(path)
    check_identity(path, kind)
    if (copy := back_up_before_upgrade(path, kind)) is not None:
        log.info("database_copied_before_upgrade", path=str(path), copy=copy.name)
    engine = engine_of(
        lambda: connect_writer(path, busy_timeout_ms, kind), "BEGIN IMMEDIATE", is_one=True
    )
    with reported():
        writer = engine.connect()
    try:
        with reported(), writer.begin():
            if _was_left_open(writer) and not is_sound(writer):
                raise IndexDamaged("the check after an unclean stop found damage")
            migrate(writer)
            _mark_open(writer)
    except StoreError:
        writer.close()
        engine.dispose()
        raise
    return writer


def _started_clock(writer: Connection, read: Clock) -> TrustedClock:
    """What the rows age by goes on from where the file says it was."""
    with reported(), writer.begin():
        clock = TrustedClock(clocks.load(writer), read)
        clocks.save(writer, clock.instant())
    return clock


def _was_left_open(connection: Connection) -> bool:
    table = "SELECT 1 FROM sqlite_master WHERE name = 'store_state'"
    if connection.exec_driver_sql(table).first() is None:
        return False
    state = connection.exec_driver_sql("SELECT is_open FROM store_state").first()
    return state is not None and bool(state[0])


def _mark_open(connection: Connection) -> None:
    """The history's migration makes the row; the index's has more to say and comes without."""
    if connection.exec_driver_sql("UPDATE store_state SET is_open = 1").rowcount:
        return
    connection.exec_driver_sql(
        "INSERT INTO store_state (id, is_open, trusted_s, monotonic_s, boot_id)"
        " VALUES (1, 1, 0.0, 0.0, '')"
    )
