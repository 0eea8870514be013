"""A database's file: how a connection to it is made, whose it is, and moving a bad one aside.

Below SQLite 3.51.3 two connections that write or checkpoint can corrupt a WAL database, so exactly
one connection per file ever may: the one `connect_writer` makes, under the store's lock.
"""

from __future__ import annotations

import os
import sqlite3
import sys
from contextlib import closing
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote

from store.disk import PRIVATE_FILE, disk_bytes, sync_directories
from store.disk import reported as system_reported
from store.errors import IndexDamaged, StoreFailed, StoreTooNew
from store.file_kinds import INDEX, FileKind
from store.sqlite_errors import reported

BUSY_TIMEOUT_MS = 5000
JOURNAL_LIMIT_BYTES = 8 << 20
MIN_LOG_BYTES = 128 << 10
MAX_LOG_BYTES = 4 << 20
_LOG_SHARE = 32
_MAX_FILE_BYTES = 64 << 20
_CACHED_STATEMENTS = 32
"""Of each connection: lists in a statement make another one of each length."""


class Pragma(NamedTuple):
    """A setting and how SQLite reads it back."""

    name: str
    value: str
    expected: int | str


_ON_DARWIN = int(sys.platform == "darwin")
# Every connection keeps so many KiB of pages, which the system's cache has as well.
_CACHE_KIB = 512
_BOTH = (
    Pragma("cache_size", str(-_CACHE_KIB), -_CACHE_KIB),
    Pragma("mmap_size", "0", 0),
    Pragma("trusted_schema", "OFF", 0),
    Pragma("cell_size_check", "ON", 1),
)
_READER = (*_BOTH, Pragma("query_only", "ON", 1))
_WRITER = (
    Pragma("journal_mode", "WAL", "wal"),
    Pragma("foreign_keys", "ON", 1),
    Pragma("wal_autocheckpoint", "500", 500),
    Pragma("journal_size_limit", str(JOURNAL_LIMIT_BYTES), JOURNAL_LIMIT_BYTES),
    Pragma("secure_delete", "ON", 1),
    Pragma("fullfsync", str(_ON_DARWIN), _ON_DARWIN),
    Pragma("checkpoint_fullfsync", str(_ON_DARWIN), _ON_DARWIN),
    *_BOTH,
)


def connect_writer(
    path: Path, busy_timeout_ms: int = BUSY_TIMEOUT_MS, kind: FileKind = INDEX
) -> sqlite3.Connection:
    """The one connection that writes; makes the file (0600) where there is none.

    Raises:
        IndexDamaged: SQLite cannot read the file.
        StoreFull, StoreFailed: the system refuses, or a setting did not take.
    """
    make_private_file(path)
    with reported():
        return _connect(path, "rw", _writer_pragmas(kind), busy_timeout_ms)


def connect_reader(path: Path, busy_timeout_ms: int = BUSY_TIMEOUT_MS) -> sqlite3.Connection:
    """A connection that cannot write. Raises as `connect_writer`."""
    with reported():
        return _connect(path, "ro", _READER, busy_timeout_ms)


def _writer_pragmas(kind: FileKind) -> tuple[Pragma, ...]:
    """The first two shape the file and must come before its first page."""
    return (
        Pragma("auto_vacuum", "INCREMENTAL", 2),
        Pragma("application_id", str(kind.application_id), kind.application_id),
        *_WRITER,
        Pragma("synchronous", "FULL", 2) if kind.is_synced else Pragma("synchronous", "NORMAL", 1),
    )


def _connect(
    path: Path, mode: str, pragmas: tuple[Pragma, ...], busy_timeout_ms: int
) -> sqlite3.Connection:
    connection = sqlite3.connect(
        f"file:{quote(str(path))}?mode={mode}",
        uri=True,
        isolation_level=None,
        check_same_thread=False,
        cached_statements=_CACHED_STATEMENTS,
    )
    timeout = Pragma("busy_timeout", str(busy_timeout_ms), busy_timeout_ms)
    try:
        for pragma in (timeout, *pragmas):
            _set(connection, pragma)
    except (sqlite3.Error, StoreFailed):
        connection.close()
        raise
    return connection


def _set(connection: sqlite3.Connection, pragma: Pragma) -> None:
    connection.execute(f"PRAGMA {pragma.name} = {pragma.value}")
    found = connection.execute(f"PRAGMA {pragma.name}").fetchone()
    if found != (pragma.expected,):
        raise StoreFailed(f"SQLite has {pragma.name} = {found}, not {pragma.value}")


def make_private_file(path: Path) -> None:
    """Make an empty file of mode 0600, or give an existing one that mode."""
    with system_reported(path):
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = os.open(path, flags, PRIVATE_FILE)
        try:
            os.fchmod(fd, PRIVATE_FILE)
        finally:
            os.close(fd)


def undo_unfinished(path: Path) -> None:
    """Undo what a killed process left half written before its new file kept a log.

    Only a connection that may write can: without this none that only reads could open the file.

    Raises:
        IndexDamaged, StoreFull, StoreFailed: it cannot be undone.
    """
    with system_reported(path):
        if not path.exists() or not path.with_name(f"{path.name}-journal").exists():
            return
    uri = f"file:{quote(str(path))}?mode=rw"
    with reported(), closing(sqlite3.connect(uri, uri=True)) as connection:
        connection.execute("SELECT count(*) FROM sqlite_master").fetchone()


def check_identity(path: Path, kind: FileKind = INDEX) -> None:
    """Look, without changing a byte, whether this release may open the file.

    Raises:
        IndexDamaged: it is no SQLite database, or not one of ours.
        StoreTooNew: a later release has changed its schema.
        StoreFailed: the system refuses.
    """
    with system_reported(path):
        if not path.exists() or path.stat().st_size == 0:
            return
    with reported(), closing(connect_reader(path)) as connection:
        application_id = connection.execute("PRAGMA application_id").fetchone()[0]
        version = connection.execute("PRAGMA user_version").fetchone()[0]
        num_tables = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
    if application_id != kind.application_id and num_tables:
        raise IndexDamaged(f"{path.name} belongs to another program")
    if version > kind.version:
        raise StoreTooNew(
            f"{path} has schema {version}; this release knows {kind.version}. "
            "Start the release that wrote it, or name another directory."
        )


def check_whole(path: Path, kind: FileKind = INDEX) -> int:
    """Read all of a database and change nothing, also while a server uses it; its schema.

    Raises:
        IndexDamaged, StoreTooNew, StoreFailed: as `check_identity`, or SQLite finds damage.
    """
    check_identity(path, kind)
    with reported(), closing(connect_reader(path)) as connection:
        version: int = connection.execute("PRAGMA user_version").fetchone()[0]
        found: str = connection.execute("PRAGMA quick_check(1)").fetchone()[0]
    if found != "ok":
        raise IndexDamaged(f"SQLite finds damage: {found.splitlines()[-1]}")
    return version


def back_up_before_upgrade(path: Path, kind: FileKind) -> Path | None:
    """Copy a database whose schema is older than ours to `….aside-schema-N`; None if it is not.

    Raises:
        IndexDamaged, StoreFull, StoreFailed: there is no copy, so it must not be changed.
    """
    with system_reported(path):
        if not path.exists() or path.stat().st_size == 0:
            return None
    with reported(), closing(connect_reader(path)) as connection:
        version = connection.execute("PRAGMA user_version").fetchone()[0]
        if not 0 < version < kind.version:
            return None
        copy = path.with_name(f"{path.name}.aside-schema-{version}")
        unfinished = copy.with_name(f"{copy.name}.new")
        with system_reported(path):
            unfinished.unlink(missing_ok=True)
        make_private_file(unfinished)
        with closing(sqlite3.connect(unfinished)) as target:
            connection.backup(target)
    with system_reported(path):
        unfinished.rename(copy)
    sync_directories([path.parent])
    return copy


def move_aside(path: Path) -> Path:
    """Rename the file and what belongs to it to `….aside-N`, never deleting. Returns that name."""
    number = 1
    while (aside := path.with_name(f"{path.name}.aside-{number}")).exists():
        number += 1
    with system_reported(path):
        for suffix in ("", "-journal", "-wal", "-shm"):
            part = path.with_name(path.name + suffix)
            if part.exists():
                part.rename(aside.with_name(aside.name + suffix))
    sync_directories([path.parent])
    return aside


def log_limit(path: Path, cap_bytes: int | None) -> int:
    """How large the log of a database may be between two transactions, where a store has a cap.

    No smaller than the file unless that is very large: one transaction writes each page once.
    Raises StoreFailed.
    """
    share = MAX_LOG_BYTES if cap_bytes is None else cap_bytes // _LOG_SHARE
    usual = min(max(share, MIN_LOG_BYTES), MAX_LOG_BYTES)
    return max(usual, min(disk_bytes(path), _MAX_FILE_BYTES))
