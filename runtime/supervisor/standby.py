"""A spare worker: a process with its imports done and no model, so that a swap pays for weights.

Importing mlx, mlx-lm and what they import costs seconds of CPU; the spare has that behind it. A
worker whose model has left is the next one.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Callable

import psutil
import structlog

from runtime.config.settings import Settings
from runtime.memory import available_bytes
from runtime.supervisor.spawn import Child
from runtime.supervisor.spawned import WorkerSource
from runtime.timeouts import term_grace_s
from runtime.types import ModelSpec
from runtime.wire import Prepare

_log = structlog.get_logger("hearth.spare")
PAUSE_S = 1.0
_RETRY_S = 60.0
_IMPORT_S = 60.0
_TEND_S = 5.0
_TIGHT_BYTES = 1 << 30
_TIGHT_SHARE = 0.05
_ENOUGH_CORES = 4


def has_room() -> bool:
    """Whether the machine can spare the memory of a process that only waits: about 150 MB, and
    64 more where it had models before.
    """
    total = psutil.virtual_memory().total
    return available_bytes() >= max(_TIGHT_BYTES, total * _TIGHT_SHARE)


class StandbyPool:
    """At most one process that waits, and for a moment another one whose model has just left;
    belongs to the event loop.

    `take()` before a start, `rest()` after it. Where none waits, the next spare is begun as soon as
    no start is going on, so that it takes nothing from a load; with processors enough for both it
    imports beside the load. One that was lost is replaced after `pause_s` seconds.
    """

    def __init__(
        self,
        settings: Settings,
        source: WorkerSource,
        *,
        pause_s: float = PAUSE_S,
        has_room: Callable[[], bool] = has_room,
        num_cores: int | None = None,
    ) -> None:
        self._settings = settings
        self._source = source
        self._pause_s = pause_s
        self._has_room = has_room
        self._num_cores = num_cores or os.cpu_count() or 1
        self._child: Child | None = None
        self._next: Child | None = None
        """Waits as well, until the first one is taken or some seconds have passed."""
        self._next_until_s = 0.0
        self._follows: ModelSpec | None = None
        self._prepares: ModelSpec | None = None
        """What the process that waits was told to prepare."""
        self.num_taken = 0
        """How many processes were taken to load a model with."""
        self._num_starting = 0
        self._not_before_s = 0.0
        self._wake = asyncio.Event()
        self._tending: asyncio.Task[None] | None = None
        self._ending: set[asyncio.Task[None]] = set()
        self._is_over = False

    @property
    def pid(self) -> int | None:
        """The process that waits, if there is one."""
        return self._child.pid if self._child is not None else None

    @property
    def is_waiting(self) -> bool:
        """There is a process that has its imports done."""
        return self._child is not None and self._child.hello is not None and self._is_fit()

    @property
    def is_wanted(self) -> bool:
        """Processes may wait here."""
        return self._settings.spare_worker and not self._is_over

    @property
    def has_place(self) -> bool:
        """A process whose model has left may stay."""
        return self.is_wanted and self._has_room()

    def give_back(self, child: Child) -> None:
        """A model has left this process, which has nothing of it any more."""
        child.renew()
        if not self._is_fit():
            self._drop()
        self._drop_next()
        there, after = self._child, child
        if there is None or there.hello is None:
            self._keep(child)
            after = there
        if after is not None:
            self._next, self._next_until_s = after, time.monotonic() + _TEND_S
            after.listen(lambda _: None, self._wake.set)
        self._wake.set()

    def prepare(self, spec: ModelSpec) -> None:
        """Have the process that waits, or the next one, read all of this model but its weights.

        Not of one that sees, whose parts upstream does not tell apart, or that ranks share.
        """
        if not spec.is_vision and self._settings.model(spec.id).together is None:
            self._follows = spec
            self._tell()

    def _tell(self) -> None:
        child, spec = self._child, self._follows
        if child is not None and child.hello is not None and spec not in (None, self._prepares):
            self._prepares = spec
            child.send(Prepare(spec))

    async def take(self) -> tuple[Child, bool]:
        """A process to load a model with, and whether it had been waiting. Raises OSError."""
        self._num_starting += 1
        self.num_taken += 1
        self._follows = None
        while (child := self._pop()) is not None:
            if self._fits(child):
                self._not_before_s = time.monotonic()
                self._wake.set()
                return child, child.hello is not None
            self._give_up(child)
        return await Child.adopt(await self._source.get()), False

    def rest(self) -> None:
        """A start that took a process is over, however it ended. What is asked next comes before
        the imports of the next spare.
        """
        self._num_starting -= 1
        self._not_before_s = max(self._not_before_s, time.monotonic() + self._pause_s)
        self.want()

    def want(self) -> None:
        """Have a spare soon; call it when nothing more is to be loaded at boot."""
        self._wake.set()
        if not self._settings.spare_worker:
            self._source.forget_first()
            self._drop()
        elif self._tending is None and not self._is_over:
            self._tending = asyncio.create_task(self._tend())

    async def stop(self) -> None:
        """End it; none is started any more."""
        self._is_over = True
        self._wake.set()
        if self._tending is not None:  # cancelled while it spawns a process it would lose that
            await asyncio.wait([self._tending])
        if self._child is not None:
            self._end(self._child)
            self._child = None
        self._drop_next()
        if self._ending:
            await asyncio.wait(self._ending)

    def kill(self) -> None:
        """End it at once; none is started any more."""
        self._is_over = True
        for child in (self._child, self._next):
            if child is not None:
                child.signal(signal.SIGKILL)

    async def _tend(self) -> None:
        """Look after it: replace one that died or went silent, give it up when memory is tight."""
        while not self._is_over:
            self._wake.clear()
            if self._child is not None and not (self._is_fit() and self._has_room()):
                self._drop()
            if self._next is not None and self._is_next_over:
                self._drop_next()
            may_import = self._num_starting == 0 or self._imports_beside_loads
            is_due = self._child is None and time.monotonic() >= self._not_before_s
            if may_import and is_due and self._has_room():
                await self._start()
            pause_s = min(_TEND_S, self._settings.heartbeat_timeout_s)
            due_s = self._not_before_s - time.monotonic()
            if self._child is None and self._num_starting == 0 and due_s > 0:
                pause_s = min(pause_s, due_s)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await self._wake.wait()

    @property
    def _is_next_over(self) -> bool:
        has_passed = time.monotonic() >= self._next_until_s and self._num_starting == 0
        return has_passed or self._next is None or not self._fits(self._next)

    @property
    def _imports_beside_loads(self) -> bool:
        return self._num_cores >= _ENOUGH_CORES

    async def _start(self) -> None:
        self._not_before_s = time.monotonic() + _RETRY_S  # should its imports fail
        try:
            child = await Child.adopt(await self._source.get())
        except OSError as error:
            _log.warning("no spare worker", why=str(error))
            return
        if self._is_over or self._child is not None:  # a model has left its process meanwhile
            self._end(child)
            return
        self._keep(child)
        _log.debug("spare worker started", pid=child.pid)

    def _keep(self, child: Child) -> None:
        self._child, self._prepares = child, None
        child.listen(lambda _: self._tell(), self._wake.set)

    def _pop(self) -> Child | None:
        """The process that waits, which does no longer; the next one does."""
        child, after = self._child, self._next
        self._child = self._next = self._prepares = None
        if after is not None:
            self._keep(after)
        return child

    def _drop(self) -> None:
        if (child := self._pop()) is not None:
            self._give_up(child)

    def _drop_next(self) -> None:
        child, self._next = self._next, None
        if child is not None:
            self._end(child)

    def _give_up(self, child: Child) -> None:
        _log.debug("spare worker given up", pid=child.pid)
        if child.hello is not None:
            self._not_before_s = time.monotonic() + self._pause_s
        self._end(child)

    def _is_fit(self) -> bool:
        return self._child is not None and self._fits(self._child)

    def _fits(self, child: Child) -> bool:
        """Imports hold the interpreter, so until they are done silence means little."""
        settings = self._settings
        return child.is_fit(settings.heartbeat_timeout_s if child.hello else _IMPORT_S)

    def _end(self, child: Child) -> None:
        task = asyncio.create_task(self._reap(child))
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)

    async def _reap(self, child: Child) -> None:
        """It has nothing to lose; its end of file is enough, if it hears it."""
        child.close()
        await child.end(term_grace_s(self._settings.stop_timeout_s))
        await child.hear_out()
        child.page.close()
