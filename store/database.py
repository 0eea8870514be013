"""The SQLite database of a store: one thread that writes, in groups, and readers that cannot.

Work is a function of a connection. What is queued while a transaction runs shares the next one, so
a burst of writes costs one sync. A future is done only after its transaction is committed.
"""

from __future__ import annotations

import queue
import sqlite3
import threading
from collections.abc import Callable, Generator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

import structlog
from sqlalchemy import Connection, Engine, create_engine, event
from sqlalchemy.engine.interfaces import DBAPIConnection
from sqlalchemy.pool import QueuePool, StaticPool

from store import clock as clocks
from store.clock import Trusted, TrustedClock
from store.database_file import connect_reader, log_limit
from store.disk import disk_bytes
from store.errors import IndexDamaged, StoreError, StoreFailed, StoreFull, StoreLocked
from store.sqlite_errors import reported

T = TypeVar("T")

MAX_GROUP = 256
"""Pieces of work in one transaction at most."""

MAX_WAITING = 16_384
"""Pieces of work in the queue at most: beyond, the disk does not keep up and work is refused."""

log = structlog.stdlib.get_logger("store.database")


@dataclass(slots=True)
class _Work:
    """A closure and its future; `is_alone` keeps it out of any transaction, `is_last` ends all."""

    run: Callable[[Connection], object]
    future: Future[Any]
    is_alone: bool = False
    is_last: bool = False


def refuse_more_room() -> bool:
    """There is nothing to give up for a full disk."""
    return False


class Database:
    """An open index. Without a `writer` it is read-only: another server owns the store.

    `clock` is what its rows age by. `make_room` is called in the writer's thread when the disk is
    full, and says whether it freed anything.
    """

    def __init__(
        self,
        path: Path,
        writer: Connection | None = None,
        make_room: Callable[[], bool] = refuse_more_room,
        *,
        clock: TrustedClock | None = None,
    ) -> None:
        self.path = path
        self.clock = clock or TrustedClock(Trusted())
        self.is_damaged = False
        self._cap_bytes: int | None = None
        self._log_bytes = 0
        self._writer = writer
        self._make_room = make_room
        self._readers = engine_of(lambda: connect_reader(path), "BEGIN")
        self._queue: queue.Queue[_Work] = queue.Queue(MAX_WAITING)
        self._is_closed = writer is None
        self._thread = threading.Thread(target=self._write, name="store-writer", daemon=True)
        if writer is not None:
            self._thread.start()

    def keep_log_within(self, cap_bytes: int | None) -> None:
        """Of a store that may take so much, the log is cut after each transaction that exceeds
        `log_limit`.
        """
        self._cap_bytes = cap_bytes

    @property
    def log_limit_bytes(self) -> int:
        """As `index_file.log_limit`. Raises StoreFailed."""
        return log_limit(self.path, self._cap_bytes)

    def submit(self, run: Callable[[Connection], T]) -> Future[T]:
        """Run a closure in the writer's next transaction, after all submitted before.

        What it raises undoes what it did and nothing else, and is its future's exception. It may
        run twice when the disk was full. Futures fail with StoreFull, StoreFailed, IndexDamaged;
        then nothing of the group is stored.

        Raises:
            StoreLocked: another server owns the store.
            StoreFailed: closed, or too much is waiting.
        """
        return self._put(run, is_alone=False)

    def read(self, run: Callable[[Connection], T]) -> T:
        """Run a closure on a consistent, read-only view, in the caller's thread.

        Raises:
            StoreFailed, IndexDamaged: it cannot be read.
        """
        with self.reading() as connection:
            return run(connection)

    @contextmanager
    def reading(self) -> Generator[Connection]:
        """A consistent, read-only view. Raises as `read`."""
        try:
            with reported(), self._readers.connect() as connection, connection.begin():
                yield connection
        except IndexDamaged:
            self.is_damaged = True
            raise

    def checkpoint(self) -> Future[bool]:
        """Move the WAL into the file, cut it, and give free pages back to the system.

        The result is False where a reader held on to it; the next time will do.
        """
        return self._put(_checkpoint, is_alone=True)

    def keep_time(self) -> Future[None]:
        """Keep the trusted time on disk: from there it goes on after a power loss."""
        return self.submit(lambda connection: clocks.save(connection, self.clock.instant()))

    def check(self) -> bool:
        """Read the whole index: whether SQLite finds it sound. Blocks; for a thread of its own."""
        try:
            return self.read(is_sound)
        except IndexDamaged:
            return False

    def close(self) -> None:
        """Finish what was submitted and close; marks the file as properly closed."""
        if not self._is_closed:
            self._is_closed = True
            self._readers.dispose()
            self._queue.put(_Work(self._mark_closed, Future(), is_last=True))
            self._thread.join()
            self._refuse_the_rest()
        self._readers.dispose()

    def _put(self, run: Callable[[Connection], T], *, is_alone: bool) -> Future[T]:
        if self._writer is None:
            raise StoreLocked("another server owns this store; it is open for reading only")
        if self._is_closed:
            raise StoreFailed("the store is closed")
        future: Future[T] = Future()
        self._enqueue(_Work(run, future, is_alone))
        return future

    def _enqueue(self, work: _Work) -> None:
        try:
            self._queue.put_nowait(work)
        except queue.Full:
            raise StoreFailed("too many writes wait for the disk") from None

    def _refuse_the_rest(self) -> None:
        """What another thread submitted while this one closed must not wait for ever."""
        while not self._queue.empty():
            work = self._queue.get_nowait()
            if work.future.set_running_or_notify_cancel():
                work.future.set_exception(StoreFailed("the store is closed"))

    def _write(self) -> None:
        writer = cast("Connection", self._writer)
        carried: _Work | None = None
        is_last = False
        while not is_last:
            group, carried = self._group(carried or self._queue.get())
            if group[0].is_alone:
                _run_alone(writer, group[0])
            else:
                self._commit(writer, group)
            is_last = group[-1].is_last
            if not is_last:
                self._keep_log_short(writer)
        with reported():
            writer.close()
            writer.engine.dispose()

    def _keep_log_short(self, writer: Connection) -> None:
        """Where a reader holds on to it, not again before it has grown by as much."""
        with suppress(StoreError), reported():
            log_bytes = disk_bytes(self.path.with_name(f"{self.path.name}-wal"))
            limit_bytes = self.log_limit_bytes
            self._log_bytes = min(self._log_bytes, log_bytes)
            if log_bytes - self._log_bytes > limit_bytes:
                self._log_bytes = 0 if _cut_log(writer) else log_bytes

    def _group(self, first: _Work) -> tuple[list[_Work], _Work | None]:
        """What shares a transaction with `first`, and what was taken from the queue too early."""
        group = [first]
        while not (first.is_alone or group[-1].is_last or len(group) == MAX_GROUP):
            try:
                following = self._queue.get_nowait()
            except queue.Empty:
                break
            if following.is_alone:
                return group, following
            group.append(following)
        return group, None

    def _mark_closed(self, connection: Connection) -> None:
        if not self.is_damaged:
            connection.exec_driver_sql("UPDATE store_state SET is_open = 0")
            clocks.save(connection, self.clock.instant())

    def _commit(self, writer: Connection, group: list[_Work]) -> None:
        """Run a group in one transaction; its futures are done after it, never before."""
        group = [work for work in group if work.future.set_running_or_notify_cancel()]
        try:
            outcomes = _transact(writer, group)
        except StoreFull as error:
            outcomes = self._commit_after_full(writer, group, error)
        except StoreError as error:
            self.is_damaged |= isinstance(error, IndexDamaged)
            log.warning("writes_failed", reason=error.reason, error=str(error), num=len(group))
            outcomes = [error] * len(group)
        for work, outcome in zip(group, outcomes, strict=True):
            _finish(work, outcome)

    def _commit_after_full(
        self, writer: Connection, group: list[_Work], full: StoreFull
    ) -> list[object]:
        """Try once more when something could be given up for it: deleting needs room as well."""
        try:
            if self._make_room():
                return _transact(writer, group)
        except StoreError as error:
            return [error] * len(group)
        return [full] * len(group)


def _transact(writer: Connection, group: list[_Work]) -> list[object]:
    """The result of each closure, or what it raised. Raises StoreError when nothing is stored."""
    with reported(), writer.begin():
        return [_attempt(writer, work) for work in group]


def _attempt(writer: Connection, work: _Work) -> object:
    """Run one closure between savepoints, so that it fails alone."""
    writer.exec_driver_sql("SAVEPOINT work")
    try:
        with reported():
            result = work.run(writer)
    except (StoreFull, StoreFailed, IndexDamaged):
        raise
    except Exception as error:
        writer.exec_driver_sql("ROLLBACK TO work")
        writer.exec_driver_sql("RELEASE work")
        return error
    writer.exec_driver_sql("RELEASE work")
    return result


def _run_alone(writer: Connection, work: _Work) -> None:
    if not work.future.set_running_or_notify_cancel():
        return
    try:
        with reported():
            outcome = work.run(writer)
    except StoreError as error:
        outcome = error
    _finish(work, outcome)


def _finish(work: _Work, outcome: object) -> None:
    if isinstance(outcome, Exception):
        work.future.set_exception(outcome)
    else:
        work.future.set_result(outcome)


def engine_of(
    connect: Callable[[], sqlite3.Connection], begin: str, *, is_one: bool = False
) -> Engine:
    """An engine over connections of our own making, whose transactions start with `begin`.

    With `is_one` there is a single connection for everybody.
    """
    creator = cast("Callable[[], DBAPIConnection]", connect)
    # The last that came back goes first: only as many keep pages as read at a time.
    pool = StaticPool(creator) if is_one else QueuePool(creator, use_lifo=True)
    engine = create_engine("sqlite://", pool=pool)

    def emit_begin(connection: Connection) -> None:
        connection.exec_driver_sql(begin)

    event.listen(engine, "begin", emit_begin)
    return engine


def is_sound(connection: Connection) -> bool:
    """Whether SQLite finds nothing wrong in the whole file."""
    return connection.exec_driver_sql("PRAGMA quick_check(1)").scalar() == "ok"


def _checkpoint(connection: Connection) -> bool:
    """Outside any transaction of SQLAlchemy's: SQLite refuses to checkpoint inside one."""
    raw = _raw(connection)
    raw.execute("PRAGMA optimize")
    raw.execute("PRAGMA incremental_vacuum").fetchall()
    return _cut_log(connection)


def _cut_log(connection: Connection) -> bool:
    """Move the WAL into the file and cut it; False where a reader held on to it."""
    busy, _, _ = _raw(connection).execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
    return not busy


def _raw(connection: Connection) -> sqlite3.Connection:
    return cast("sqlite3.Connection", connection.connection.dbapi_connection)
