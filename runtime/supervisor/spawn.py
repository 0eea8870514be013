"""`Child`: a worker process that was spawned, whoever it works for."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections import deque

import psutil
import structlog

from runtime.supervisor.last_words import kept
from runtime.supervisor.running_time import running_s
from runtime.supervisor.spawned import SpawnedProcess
from runtime.supervisor.worker_link import WorkerConnection
from runtime.work_page import WorkPage

_log = structlog.get_logger("hearth.worker")
_OUTPUT_LINES = 400
_LAST_WORDS_S = 5.0


class Child(WorkerConnection):
    """A process that was spawned, and the connection to it. It belongs to the event loop."""

    def __init__(self, process: asyncio.subprocess.Process, page: WorkPage) -> None:
        super().__init__()
        self.page = page
        """On which it says for whom it works."""
        self.spawned_s = time.monotonic()
        self.model: str | None = None
        """Whom it works for, as its lines in the log say."""
        self.was_ended = False
        """It was sent a signal that ends it."""
        self._process = process
        self._output: deque[str] = deque(maxlen=_OUTPUT_LINES)
        self._reading: asyncio.Task[None] | None = None

    @classmethod
    async def start(cls, cpu_blas: str) -> Child:
        """Spawn the process. Raises OSError."""
        return await cls.adopt(await SpawnedProcess.spawn(cpu_blas))

    @classmethod
    async def adopt(cls, spawned: SpawnedProcess) -> Child:
        """Begin to listen to a process that was spawned."""
        child = cls(spawned.process, spawned.page)
        await asyncio.get_running_loop().create_connection(lambda: child, sock=spawned.take())
        child._reading = asyncio.create_task(child._read_output())
        return child

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """As of `subprocess`; None while it runs."""
        return self._process.returncode

    @property
    def has_failed(self) -> bool:
        """It has ended, neither as it should nor because it was told to."""
        code = self.returncode
        return code not in (None, 0, -signal.SIGTERM) and not self.was_ended

    @property
    def output(self) -> list[str]:
        """The last lines it printed, stacks of a wedged worker among them."""
        return list(self._output)

    def is_fit(self, silent_s: float) -> bool:
        """It can be given work: it runs, is not stopped, and was heard within `silent_s`."""
        if self._process.returncode is not None or self.closed.is_set():
            return False
        if running_s() - self.heard_s > silent_s:
            return False
        return not self.is_stopped

    @property
    def cpu_s(self) -> float:
        """How long it has computed for, on all cores."""
        try:
            times = psutil.Process(self._process.pid).cpu_times()
        except psutil.Error:
            return 0.0
        return times.user + times.system

    @property
    def is_stopped(self) -> bool:
        """Somebody stopped it (SIGSTOP, a debugger), so that it can be continued."""
        try:
            return psutil.Process(self._process.pid).status() == psutil.STATUS_STOPPED
        except psutil.Error:
            return False

    def signal(self, number: signal.Signals) -> None:
        """Nothing happens when it is gone."""
        if self._process.returncode is None:
            self.was_ended |= number in (signal.SIGTERM, signal.SIGKILL)
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)

    def renew(self) -> None:
        """Its model has left: what it printed, and how old it is, is of the next one."""
        self.model, self.spawned_s = None, time.monotonic()
        self._output.clear()

    def terminate(self) -> None:
        """SIGTERM, which a stopped process takes once it runs on."""
        self.signal(signal.SIGTERM)
        self.signal(signal.SIGCONT)

    async def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until the process has ended; False when it has not within the time."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._process.wait()
        except TimeoutError:
            return False
        return True

    async def end(self, grace_s: float) -> None:
        """SIGTERM, and after `grace_s` seconds SIGKILL; returns when the process is gone."""
        self.terminate()
        if not await self.wait(grace_s):
            _log.warning("worker killed", model=self.model, pid=self.pid)
            self.signal(signal.SIGKILL)
            await self.wait()

    async def hear_out(self, limit_s: float = _LAST_WORDS_S) -> None:
        """Read what it sent and printed before it ended: slots that it wrote last, above all."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                await self.closed.wait()
                if self._reading is not None:
                    await asyncio.shield(self._reading)

    async def _read_output(self) -> None:
        stdout = self._process.stdout
        assert stdout is not None
        while True:
            try:
                line = await stdout.readline()
            except ValueError:  # a line longer than the reader's buffer, which dropped it
                continue
            if not line:
                return
            text = line.decode(errors="replace").rstrip()
            self._output.append(text)
            if (line := kept(text)) is not None:
                _log.debug("worker says", model=self.model, pid=self.pid, line=line)
