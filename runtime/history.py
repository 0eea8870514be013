"""`History`: the database of what clients asked the server to keep, and its life in a server.

It belongs to the event loop and never blocks it. Whatever fails, only those who need it are told
(promise P3); it is opened or tried again by itself, and a damaged file is set aside.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Literal, NamedTuple, NoReturn, TypeVar

import structlog
from sqlalchemy import Connection

from migrations.run import upgrade_history
from runtime.errors import StoreUnavailable
from store import ownership
from store.database import Database
from store.errors import StoreError, StoreLost
from store.file_kinds import HISTORY
from store.opening import open_database

T = TypeVar("T")

FILE = "history.sqlite3"
LOCK = "history.lock"

_OPEN_PATIENCE_S = 10.0
_MIN_PROBE_S = 1.0
_MAX_PROBE_S = 60.0
_OF_THE_SYSTEM = frozenset({"full", "failed", "locked", "lost", "index_damaged", "too_new"})

_log = structlog.stdlib.get_logger("hearth.history")


class HistoryStatus(NamedTuple):
    """How the history is; `reason` is machine-readable, `message` for people."""

    state: Literal["opening", "ok", "degraded"]
    reason: str | None = None
    message: str | None = None


class OpenHistory:
    """The database and the lock that makes it ours. Every call blocks."""

    def __init__(self, home: Path) -> None:
        """Make or open it.

        Raises:
            StoreLocked: another server owns it.
            StoreTooNew, StoreFull, StoreFailed: it cannot be used.
        """
        ownership.make_home(home)
        self._path = home / FILE
        self._lock = ownership.hold(home / LOCK)
        try:
            self.database: Database = open_database(self._path, upgrade_history, kind=HISTORY)
            self._identity = _identity(self._path)
        except StoreError:
            os.close(self._lock)
            raise

    def check_place(self) -> None:
        """Raises StoreLost when the file was removed or replaced: what is written would be lost."""
        if _identity(self._path) != self._identity:
            raise StoreLost(f"{self._path} was removed or replaced")

    def close(self) -> None:
        """Finish what was submitted and let others own it."""
        try:
            self.database.close()
        finally:
            os.close(self._lock)


class History:
    """Opened after `start`, tried again while it is degraded, until `close`."""

    def __init__(self, home: Path) -> None:
        self.status = HistoryStatus("opening")
        self._home = home
        self._open: OpenHistory | None = None
        self._settled = asyncio.Event()
        self._stopping = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._mender: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to open it; returns at once."""
        self._spawn(self._begin())

    async def close(self) -> None:
        """Finish what is under way, then close it properly."""
        self._stopping.set()
        while self._tasks:
            await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._shut()

    async def read(self, work: Callable[[Connection], T]) -> T:
        """The result of `work` on a consistent, read-only view.

        Raises:
            StoreUnavailable: the history cannot be read now.
        """
        history = await self._opened()
        try:
            return await asyncio.to_thread(history.database.read, work)
        except StoreError as error:
            self._fail(error)

    async def write(self, work: Callable[[Connection], T]) -> T:
        """The result of `work` in a transaction, once that is on disk.

        What `work` raises undoes it and is raised here. Once begun it is not undone when the
        caller is cancelled.

        Raises:
            StoreUnavailable: nothing of it was stored.
        """
        history = await self._opened()
        try:
            history.check_place()
            return await asyncio.wrap_future(history.database.submit(work))
        except StoreError as error:
            self._fail(error)

    async def drop_old_asides(self, older_than_s: float) -> int:
        """Delete damaged files that were set aside so long ago; how many."""
        return await asyncio.to_thread(_drop_old_asides, self._home, older_than_s)

    async def tidy(self) -> None:
        """Leave no byte of what was deleted in the file or its log."""
        history = await self._opened()
        try:
            await asyncio.wrap_future(history.database.checkpoint())
        except StoreError as error:
            self._fail(error)

    def _fail(self, error: StoreError) -> NoReturn:
        """Say so, and try again later where the whole is affected. Raises StoreUnavailable."""
        if error.reason in _OF_THE_SYSTEM:
            self._degrade(error)
        raise StoreUnavailable(f"The history cannot be used: {error}.") from error

    async def _opened(self) -> OpenHistory:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_OPEN_PATIENCE_S):
                await self._settled.wait()
        if self._open is None:
            why = self.status.message or "it is still being opened"
            raise StoreUnavailable(f"The history cannot be used: {why}.")
        return self._open

    # Opening and mending

    async def _begin(self) -> None:
        try:
            self._open = await asyncio.to_thread(OpenHistory, self._home)
        except StoreError as error:
            self._degrade(error)
        else:
            self.status = HistoryStatus("ok")
        finally:
            self._settled.set()

    def _degrade(self, error: StoreError) -> None:
        if self.status.reason != error.reason:
            _log.warning("history_degraded", reason=error.reason, message=str(error))
        self.status = HistoryStatus("degraded", error.reason, str(error))
        if not self._stopping.is_set() and (self._mender is None or self._mender.done()):
            self._mender = self._spawn(self._mend())

    async def _mend(self) -> None:
        """Try now and then whether it works again, more and more seldom."""
        pause_s = _MIN_PROBE_S
        while self.status.state == "degraded":
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await self._stopping.wait()
            if self._stopping.is_set():
                return
            pause_s = min(pause_s * 2, _MAX_PROBE_S)
            await self._try_again()
        _log.info("history_mended")

    async def _try_again(self) -> None:
        if self._open is None or self.status.reason in ("lost", "index_damaged"):
            await self._shut()
            await self._begin()
            return
        with contextlib.suppress(StoreUnavailable):
            await self.write(_probe)
            self.status = HistoryStatus("ok")

    async def _shut(self) -> None:
        history, self._open = self._open, None
        if history is not None:
            with contextlib.suppress(StoreError):
                await asyncio.to_thread(history.close)

    def _spawn(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


def _drop_old_asides(home: Path, older_than_s: float) -> int:
    num_dropped = 0
    for path in home.glob(f"{FILE}.aside-*"):
        with contextlib.suppress(OSError):
            if time.time() - path.stat().st_mtime > older_than_s:
                path.unlink()
                num_dropped += 1
    return num_dropped


def _identity(path: Path) -> tuple[int, int]:
    """Device and inode; zeros when there is nothing."""
    try:
        found = path.stat()
    except OSError:
        return 0, 0
    return found.st_dev, found.st_ino


def _probe(connection: Connection) -> None:
    connection.exec_driver_sql("UPDATE store_state SET is_open = 1")
