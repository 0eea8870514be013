"""The life of the store in a server: opening, failing, mending, closing; never on the event loop.

Files and rows are touched by one thread, cold slots are fetched by a second, a third makes room for
what is to be written, long chores run in a fourth. Whatever fails, requests are answered, only
slower (promise P3); `status` says so.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal, NamedTuple, Protocol, TypeVar

import structlog

from runtime.cache.opened import BlockStore
from store.cold_gate import Reach
from store.errors import StoreError

T = TypeVar("T")


State = Literal["off", "opening", "ok", "degraded"]
StoreThread = Literal["write", "promote", "room", "chore"]

_MIN_PROBE_S = 1.0
_MAX_PROBE_S = 60.0
_REOPEN = frozenset({"locked", "lost", "index_damaged"})

_log = structlog.stdlib.get_logger("hearth.store")


ColdState = Literal["off", "ok", "away", "foreign", "full"]


class KvStatus(NamedTuple):
    """How the store is; `reason` is machine-readable, `message` for people."""

    state: State
    reason: str | None = None
    message: str | None = None


class ColdStatus(NamedTuple):
    """How the cold store is, and for people why. What it has is not to be had while it is `away`,
    or `foreign`: another Hearth's. It is `full` since it had no room for what was to go there.
    """

    state: ColdState = "off"
    message: str | None = None


class StoreListener(Protocol):
    """Who uses the store. All calls come from the event loop."""

    def open(self, secret: bytes | None) -> BlockStore:
        """Make or open the store, in a thread; the secret is that of the one before, if any.

        Raises StoreError.
        """
        ...

    def on_opening(self, store: BlockStore) -> None:
        """This store is opened, and is going to be `StoreLife.store`."""
        ...

    def on_opened(self) -> None:
        """The store was opened, perhaps anew, and perhaps another one."""
        ...

    def on_full(self) -> None:
        """There is no room on the disk."""
        ...

    def on_probed(self) -> None:
        """What failed may work again: write what is in memory only, and report what fails."""
        ...


class StoreLife:
    """Opens the store after `start`, tries again while it is degraded, until `close`."""

    def __init__(self, listener: StoreListener, *, has_disk: bool) -> None:
        self.store: BlockStore | None = None
        self.status = KvStatus("opening" if has_disk else "off")
        self.settled = asyncio.Event()
        self.stopping = asyncio.Event()
        self._has_disk = has_disk
        self._listener = listener
        self._secret: bytes | None = None
        self._num_failures = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._mender: asyncio.Task[None] | None = None
        self._prober: asyncio.Task[None] | None = None
        self._threads: dict[StoreThread, ThreadPoolExecutor] = {
            "write": ThreadPoolExecutor(1, "store"),
            "promote": ThreadPoolExecutor(1, "store-promote"),
            "room": ThreadPoolExecutor(1, "store-room"),
            "chore": ThreadPoolExecutor(1, "store-chore"),
        }

    def start(self) -> None:
        """Begin to open the store; returns at once."""
        if self._has_disk:
            self.spawn(self._open())
        else:
            self.settled.set()

    async def close(self) -> None:
        """Finish what is under way, then close the store properly."""
        self.stopping.set()
        while self._tasks:
            await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._close()
        for executor in self._threads.values():
            executor.shutdown(wait=False)

    @property
    def reach(self) -> Reach:
        """Whether the cold store is away; one that there is not is not."""
        store = self.store
        return store.cold.reach if store is not None and store.cold is not None else Reach()

    @property
    def cold(self) -> ColdStatus:
        """The cold store's state, as it is shown."""
        if self.store is None or self.store.cold is None:
            return ColdStatus()
        reach = self.reach
        if reach.is_away:
            return ColdStatus("foreign" if reach.is_foreign else "away", reach.why)
        return ColdStatus("full", reach.why) if reach.is_full else ColdStatus("ok")

    @property
    def secret(self) -> bytes:
        """What keys names in the store; empty as long as that was never open."""
        return self._secret or b""

    async def attempt(
        self, work: Callable[[BlockStore], T], thread: StoreThread = "write"
    ) -> T | None:
        """The result of `work`; None when there is no store or it fails, as `status` then says."""
        store = self.store
        if store is None:
            return None
        try:
            return await self._in(thread, lambda: work(store))
        except StoreError as error:
            self.fail(error.reason, str(error))
            return None
        finally:
            self._look_at_cold()

    def fail(self, reason: str, message: str) -> None:
        """Something that the store is for did not work: say so, and try again later."""
        self._num_failures += 1
        if self.status.state != "degraded" or self.status.reason != reason:
            _log.warning("store_degraded", reason=reason, message=message)
        self.status = KvStatus("degraded", reason, message)
        if reason == "full":
            self._listener.on_full()
        if not self.stopping.is_set() and (self._mender is None or self._mender.done()):
            self._mender = self.spawn(self._mend())

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run something that `close` waits for."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def pause(self, seconds: float) -> bool:
        """Wait, but not when the server stops; whether it does."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self.stopping.wait()
        return self.stopping.is_set()

    async def _in(self, thread: StoreThread, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads[thread], work)

    # Opening

    async def _open(self) -> None:
        secret = self._secret
        try:
            store = await self._in("write", lambda: self._listener.open(secret))
        except StoreError as error:
            self.fail(error.reason, str(error))
            return
        except OSError as error:
            self.fail("failed", str(error))
            return
        finally:
            self.settled.set()
        self._listener.on_opening(store)
        self.store, self._secret = store, store.secret
        self.status = KvStatus("ok")
        self._listener.on_opened()

    async def _close(self) -> None:
        store, self.store = self.store, None
        if store is not None:
            with contextlib.suppress(StoreError):
                await self._in("write", store.close)

    # Mending

    async def _mend(self) -> None:
        """Try now and then whether the store works again, more and more seldom.

        A probe that passes is no proof, as it writes somewhere else than what failed: all that is
        in memory only is written then, and if nothing has failed until the next probe, the store
        works.
        """
        pause_s, num_failures = _MIN_PROBE_S, -1
        while self.status.state == "degraded":
            if await self.pause(pause_s):
                return
            pause_s = min(pause_s * 2, _MAX_PROBE_S)
            store = self.store
            if store is None or self.status.reason in _REOPEN:
                await self._close()
                await self._open()
            elif await self._probe(store):
                if num_failures == self._num_failures:
                    self.status = KvStatus("ok")
                else:
                    num_failures = self._num_failures
                    self._listener.on_probed()
        _log.info("store_works_again")

    async def _probe(self, store: BlockStore) -> bool:
        try:
            await self._in("write", store.probe)
        except StoreError as error:
            self.fail(error.reason, str(error))
            return False
        return True

    def _look_at_cold(self) -> None:
        """Whoever found the cold store away: one asks from now on whether it is back."""
        is_asked = self._prober is not None and not self._prober.done()
        if self.reach.is_away and not is_asked and not self.stopping.is_set():
            _log.warning("cold_store_away", why=self.reach.why)
            self._prober = self.spawn(self._probe_cold())

    async def _probe_cold(self) -> None:
        while (store := self.store) is not None and store.cold is not None and self.reach.is_away:
            if await self.pause(self.reach.pause_s):
                return
            await self._in("promote", store.cold.probe)
        _log.info("cold_store_back")
