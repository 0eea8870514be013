"""`History`: the database of what clients asked the server to keep, and its life in a server.

It belongs to the event loop and never blocks it. Whatever fails, only those who need it are told
(promise P3); it is opened or tried again by itself, and a damaged file is set aside.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Literal, NamedTuple, NoReturn, TypeVar

import structlog
from sqlalchemy import Connection, text

from migrations.run import upgrade_history
from runtime.errors import StoreUnavailable
from store import clock as clocks
from store import ownership
from store.clock import Clock, TrustedClock, now
from store.database import Database
from store.errors import StoreError, StoreLost
from store.file_kinds import HISTORY
from store.history import agent_rows, response_rows, set_aside_rows
from store.history.agent_rows import AgentRow, TurnRow
from store.history.response_rows import ItemRow, ResponseRow
from store.history.salvage import Salvaged, salvage
from store.history.set_aside_rows import SetAsideRow
from store.opening import open_database
from store.records import day_of

T = TypeVar("T")

FILE = "history.sqlite3"
LOCK = "history.lock"

_OPEN_PATIENCE_S = 10.0
_KEEP_S = 600.0
_MIN_PROBE_S = 1.0
_MAX_PROBE_S = 60.0
_PROBE = "@/probe"
"""An id that no client can give: no tenant's name is empty."""

_PROBE_BYTES = 64 << 10
_LOGS = ("-journal", "-wal", "-shm")
_ANYTHING = text("SELECT EXISTS (SELECT 1 FROM agents) OR EXISTS (SELECT 1 FROM responses)")
_OF_THE_SYSTEM = frozenset(
    {"store", "full", "failed", "locked", "lost", "index_damaged", "too_new"}
)

_log = structlog.stdlib.get_logger("hearth.history")


class HistoryStatus(NamedTuple):
    """How the history is; `reason` is machine-readable, `message` for people."""

    state: Literal["opening", "ok", "degraded"]
    reason: str | None = None
    message: str | None = None


class OpenHistory:
    """The database and the lock that makes it ours. Every call blocks."""

    def __init__(self, home: Path, read: Clock = now) -> None:
        """Make or open it; `read` are the system's clocks.

        Raises:
            StoreLocked: another server owns it.
            StoreTooNew, StoreFull, StoreFailed: it cannot be used.
        """
        ownership.make_home(home)
        self._path = home / FILE
        self._lock = ownership.hold(home / LOCK)
        try:
            self.database: Database = open_database(
                self._path, upgrade_history, kind=HISTORY, read=read
            )
            self._identity = _identity(self._path)
            self.unknown = self._take_note()
        except StoreError:
            os.close(self._lock)
            raise

    def check_place(self) -> None:
        """Raises StoreLost when the file was removed or replaced: what is written would be lost."""
        if _identity(self._path) != self._identity:
            raise StoreLost(f"{self._path} was removed or replaced")

    def _take_note(self) -> list[SetAsideRow]:
        """Know of every file that was set aside, and take over what a damaged one held; those that
        the operator does not know of.
        """
        known = {row.name for row in self.database.read(set_aside_rows.listing)}
        for path in sorted(self._path.parent.glob(f"{FILE}.aside-*")):
            if path.name not in known and not path.name.endswith(_LOGS):
                self.database.checkpoint().result()  # its first page is in the file
                self.database.submit(lambda c, path=path: self._noted(c, path)).result()
        rows = self.database.read(set_aside_rows.listing)
        unknown = [row for row in rows if not row.is_acknowledged]
        for row in unknown:
            _log.warning("history_set_aside", **row._asdict())
        return unknown

    def _noted(self, connection: Connection, path: Path) -> None:
        """In the transaction in which what can be read of it is taken over."""
        is_copy = path.name.startswith(f"{FILE}.aside-schema-")
        found = Salvaged()
        if not is_copy and not connection.execute(_ANYTHING).scalar():
            found = salvage(connection, path, self._path)
        row = SetAsideRow(
            path.name, time.time(), self.database.clock.now_s(), *found, is_acknowledged=is_copy
        )
        set_aside_rows.add(connection, row)

    def close(self) -> None:
        """Finish what was submitted and let others own it."""
        try:
            self.database.close()
        finally:
            os.close(self._lock)


class History:
    """Opened after `start`, tried again while it is degraded, until `close`."""

    def __init__(self, home: Path, grace_s: float = 7 * 86_400.0, read: Clock = now) -> None:
        self.grace_s = grace_s
        self._read = read
        self.status = HistoryStatus("opening")
        self._home = home
        self._kept_s = 0.0
        self._pause_s = _MIN_PROBE_S
        self._set_aside: list[SetAsideRow] = []
        """What the operator does not know of yet."""
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
            written = await asyncio.wrap_future(history.database.submit(work))
        except StoreError as error:
            self._fail(error)
        self._pause_s = _MIN_PROBE_S
        return written

    @property
    def health(self) -> HistoryStatus:
        """The status, and of one that works, whether something was lost that nobody knows of."""
        if self.status.state != "ok" or not self._set_aside:
            return self.status
        return HistoryStatus("degraded", "set_aside", _told(self._set_aside))

    @property
    def note(self) -> str:
        """What is to be said to whoever does not find what they look for; empty for nothing."""
        lost = [row for row in self._set_aside if not row.is_whole]
        if not lost:
            return ""
        return (
            f" A damaged history was set aside on {day_of(lost[0].at_s)} and not all that it held "
            "could be taken over: `hearth history` tells the operator more."
        )

    async def acknowledge(self) -> int:
        """The operator knows of what was set aside; how many files were new to him.

        Raises StoreUnavailable.
        """
        num_new = await self.write(set_aside_rows.acknowledge)
        self._set_aside = []
        return num_new

    async def drop_asides(self, ttl_s: float) -> int:
        """Delete files that were set aside so long ago and are acknowledged; how many.

        Raises StoreUnavailable.
        """
        oldest_s = self.now_s() - ttl_s
        known = await self.read(set_aside_rows.listing)
        old = [row.name for row in known if row.is_acknowledged and row.found_s < oldest_s]
        for name in old:
            await asyncio.to_thread(_unlink, self._home / name)
            await self.write(lambda c, name=name: set_aside_rows.forget(c, name))
        return len(old)

    def now_s(self) -> float:
        """The trusted time, by which what is kept ages. Raises StoreUnavailable."""
        return self.clock().now_s()

    def wall_s(self, trusted_s: float) -> float:
        """The same for people, as `TrustedClock.wall_s`. Raises StoreUnavailable."""
        return self.clock().wall_s(trusted_s)

    def keep_time(self, connection: Connection) -> None:
        """Keep the trusted time in a transaction, now and then: after a power loss it goes on."""
        instant = self.clock().instant()
        if instant.trusted_s - self._kept_s > _KEEP_S:
            clocks.save(connection, instant)
            self._kept_s = instant.trusted_s

    def clock(self) -> TrustedClock:
        """What is kept ages by it. Raises StoreUnavailable."""
        if self._open is None:
            raise StoreUnavailable(f"The history cannot be used: {self.status.message}.")
        return self._open.database.clock

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
            self._open = await asyncio.to_thread(OpenHistory, self._home, self._read)
        except StoreError as error:
            self._degrade(error)
            return
        finally:
            self._settled.set()
        self._set_aside = self._open.unknown
        self.status = HistoryStatus("ok")

    def _degrade(self, error: StoreError) -> None:
        if self.status.reason != error.reason:
            _log.warning("history_degraded", reason=error.reason, message=str(error))
        self.status = HistoryStatus("degraded", error.reason, str(error))
        if not self._stopping.is_set() and (self._mender is None or self._mender.done()):
            self._mender = self._spawn(self._mend())

    async def _mend(self) -> None:
        """Try now and then whether it works again, more and more seldom.

        Where the trials succeed and what clients ask does not, it is more and more seldom as well.
        """
        while self.status.state == "degraded":
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._pause_s):
                    await self._stopping.wait()
            if self._stopping.is_set():
                return
            self._pause_s = min(self._pause_s * 2, _MAX_PROBE_S)
            await self._try_again()
        _log.info("history_works_again")

    async def _try_again(self) -> None:
        if self._open is None or self.status.reason in ("lost", "index_damaged"):
            await self._shut()
            await self._begin()
            return
        try:
            self._open.check_place()
            await asyncio.wrap_future(self._open.database.submit(_probe))
        except StoreError as error:
            _log.info("history_still_degraded", reason=error.reason, message=str(error))
            self._degrade(error)
        else:
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


def _identity(path: Path) -> tuple[int, int]:
    """Device and inode; zeros when there is nothing."""
    try:
        found = path.stat()
    except OSError:
        return 0, 0
    return found.st_dev, found.st_ino


def _unlink(path: Path) -> None:
    for suffix in ("", *_LOGS):
        with contextlib.suppress(OSError):
            path.with_name(path.name + suffix).unlink(missing_ok=True)


def _told(rows: Sequence[SetAsideRow]) -> str:
    """What was set aside, in words."""
    files = ", ".join(row.name for row in rows)
    num_agents = sum(row.num_agents for row in rows)
    num_responses = sum(row.num_responses for row in rows)
    is_whole = all(row.is_whole for row in rows)
    return (
        f"the history was damaged and set aside as {files}; {num_agents} agents and "
        f"{num_responses} stored responses were taken over"
        f"{'' if is_whole else ', which may not be all that it held'}. "
        "`hearth history acknowledge` says that you know."
    )


def _probe(connection: Connection) -> None:
    """What clients ask for, in every table, and none of it stays."""
    turn = TurnRow(1, "", "", "stop", 0, 0, 0, 0.0, (bytes(_PROBE_BYTES),))
    connection.exec_driver_sql("UPDATE store_state SET is_open = 1")
    agent_rows.create(connection, AgentRow(_PROBE, _PROBE, b"{}", 0.0, 0.0))
    agent_rows.append(connection, _PROBE, turn, 0.0)
    response = ResponseRow(_PROBE, None, b"{}", 0.0)
    response_rows.put(connection, response, [ItemRow(_PROBE, b"{}", is_output=False)], 0.0)
    response_rows.put_events(connection, _PROBE, b"")
    agent_rows.remove(connection, _PROBE, 0.0)
    agent_rows.forget_left(connection, [_PROBE])
    response_rows.remove(connection, _PROBE, 0.0)
