"""What SQLite's result codes mean to the store."""

from __future__ import annotations

import sqlite3
from collections.abc import Generator
from contextlib import contextmanager

from sqlalchemy.exc import DBAPIError

from store.errors import IndexDamaged, StoreError, StoreFailed, StoreFull

_DAMAGED = frozenset({sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB})
_REFUSED = frozenset({sqlite3.SQLITE_CONSTRAINT, sqlite3.SQLITE_MISMATCH})
_PRIMARY_CODE = 0xFF


def store_error(error: sqlite3.Error) -> StoreError:
    """The store's word for what SQLite reports; I/O, read-only, locked and denied are one kind."""
    # Errors that Python's driver raises by itself carry no code.
    code: int = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_MISUSE) & _PRIMARY_CODE
    text = f"SQLite's code {code}: {error}"
    if code == sqlite3.SQLITE_FULL:
        return StoreFull(text)
    if code in _DAMAGED:
        return IndexDamaged(text)
    if code in _REFUSED:
        return StoreError(text)
    return StoreFailed(text)


@contextmanager
def reported() -> Generator[None]:
    """Turn errors of SQLite into `StoreFull`, `StoreFailed`, `IndexDamaged`; constraints into
    `StoreError`.
    """
    try:
        yield
    except sqlite3.Error as error:
        raise store_error(error) from error
    except DBAPIError as error:
        if not isinstance(error.orig, sqlite3.Error):
            raise StoreFailed(str(error)) from error
        raise store_error(error.orig) from error
