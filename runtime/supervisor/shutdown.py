"""`WorkerShutdown`: how a worker process is brought to its end, softly first, within bounds."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time

import structlog

from runtime.supervisor.crashes import split_stacks
from runtime.supervisor.running_time import running_s
from runtime.supervisor.spawn import Child
from runtime.supervisor.worker_clock import WorkerClock
from runtime.timeouts import MARGIN_S, flush_budget_s, term_grace_s
from runtime.wire import Flushed, Flushing, Stop

_log = structlog.get_logger("hearth.worker")
_STACKS_S = 0.2
_STACKS_LOOKS = 5
"""The second signal may crash what only was slow to hear the first, as a process without CPU is."""
_SOFT_S = 5.0


class WorkerShutdown:
    """Belongs to the event loop."""

    def __init__(self, child: Child, clock: WorkerClock, stop_timeout_s: float) -> None:
        self._child = child
        self._clock = clock
        self._stop_timeout_s = stop_timeout_s
        self._due_s = 0.0

    def ask(self, waited_s: float = 0.0, *, stays: bool = False) -> None:
        """Ask it to leave, as a process that `stays` for the next model if it can; from now on each
        phase of its end has its time.

        All together have no more than if nobody had waited for so long to ask.
        """
        self._stop_timeout_s = max(self._stop_timeout_s - waited_s, 0.0)
        self._clock.asked_to_leave(time.monotonic())
        self._due_s = running_s() + self._stop_timeout_s + MARGIN_S
        self._child.send(Stop(exit_s=self._stop_timeout_s, stays=stays))

    def on_event(self, event: Flushing | Flushed) -> None:
        """It writes what is left, or has done so."""
        if isinstance(event, Flushing):
            if not self._clock.is_flushing:
                self._due_s = running_s() + flush_budget_s(event.num_bytes) + MARGIN_S
                self._clock.began_flush(time.monotonic())
            return
        self._clock.flushed(time.monotonic())
        self._due_s = running_s() + self._stop_timeout_s + MARGIN_S
        if event.num_unwritten_bytes:
            child, lost = self._child, event.num_unwritten_bytes
            _log.warning("KV left unwritten", model=child.model, pid=child.pid, num_bytes=lost)

    async def leave(self, has_left: asyncio.Event) -> None:
        """Wait until it has left as long as the phases may take, which it tells; then end it."""
        while (left_s := self._due_s - running_s()) > 0:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(left_s, 1.0)):
                    await has_left.wait()
                    return
        await self.finish()

    async def put_down(self, *, is_silent: bool) -> None:
        """Ask for its stacks, then end it: its socket is closed, which asks it to leave.

        One that is silent is not waited for. While threads leave, their stacks cannot be told.
        """
        try:
            await self._hear_stacks()
        finally:
            self._child.close()
        if not await self._child.wait(0.0 if is_silent else min(_SOFT_S, self._stop_timeout_s)):
            await self.finish()

    async def _hear_stacks(self) -> None:
        """By the second signal it tells them whatever it does; the first is safer."""
        for number in (signal.SIGUSR1, signal.SIGUSR2):
            self._child.signal(number)
            self._child.signal(signal.SIGCONT)
            for _ in range(_STACKS_LOOKS):
                await asyncio.sleep(_STACKS_S)
                if split_stacks(self._child.output)[0]:
                    return

    async def finish(self) -> None:
        """SIGTERM, and after its grace SIGKILL."""
        await self._child.end(term_grace_s(self._stop_timeout_s))
