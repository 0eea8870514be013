"""`Child`: a worker process and the server's end of its socket, whoever it works for."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections import deque
from collections.abc import Callable

import psutil
import structlog

from runtime.last_words import kept
from runtime.newborn import Newborn
from runtime.wire import Command, Event, Hello
from runtime.worker_link import Link, connect

_log = structlog.get_logger("hearth.worker")
_OUTPUT_LINES = 400
_LAST_WORDS_S = 5.0


def _ignore(_: Event) -> None:
    return None


def _ignore_end() -> None:
    return None


class Child:
    """It belongs to the event loop. Until `listen()` it keeps its `Hello` for whoever takes it."""

    def __init__(self) -> None:
        self.hello: Hello | None = None
        self.spawned_s = time.monotonic()
        self.heard_s = self.spawned_s
        self.model: str | None = None
        """Whom it works for, as its lines in the log say."""
        self.was_ended = False
        """It was sent a signal that ends it."""
        self._process: asyncio.subprocess.Process | None = None
        self._link: Link | None = None
        self._on_event = _ignore
        self._on_end = _ignore_end
        self._output: deque[str] = deque(maxlen=_OUTPUT_LINES)
        self._reading: asyncio.Task[None] | None = None

    @classmethod
    async def start(cls, cpu_blas: str) -> Child:
        """Spawn the process. Raises OSError."""
        return await cls.adopt(await Newborn.spawn(cpu_blas))

    @classmethod
    async def adopt(cls, newborn: Newborn) -> Child:
        """Begin to listen to a process that was spawned."""
        child = cls()
        child._process = newborn.process
        child._link = await connect(newborn.take(), child._hear, child._lost)
        child._reading = asyncio.create_task(child._read_output(newborn.process))
        return child

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    @property
    def returncode(self) -> int | None:
        """As of `subprocess`; None while it runs."""
        return self._process.returncode if self._process is not None else None

    @property
    def has_failed(self) -> bool:
        """It has ended, neither as it should nor because it was told to."""
        code = self.returncode
        return bool(code) and code != -signal.SIGTERM and not self.was_ended

    @property
    def output(self) -> list[str]:
        """The last lines it printed, stacks of a wedged worker among them."""
        return list(self._output)

    def is_fit(self, silent_s: float) -> bool:
        """It can be given work: it runs, is not stopped, and was heard within `silent_s`."""
        if self._process is None or self._link is None or self._process.returncode is not None:
            return False
        if self._link.closed.is_set() or time.monotonic() - self.heard_s > silent_s:
            return False
        try:
            return psutil.Process(self._process.pid).status() != psutil.STATUS_STOPPED
        except psutil.Error:
            return False

    def listen(self, on_event: Callable[[Event], None], on_end: Callable[[], None]) -> None:
        """From now on events go there, a `Hello` of earlier first."""
        self._on_event, self._on_end = on_event, on_end
        if self.hello is not None:
            on_event(self.hello)
        if self._link is not None and self._link.closed.is_set():
            on_end()

    def send(self, command: Command) -> None:
        """Queue a command; nothing happens when the worker is gone."""
        if self._link is not None:
            self._link.send(command)

    def signal(self, number: signal.Signals) -> None:
        """Nothing happens when it is gone."""
        if self._process is not None and self._process.returncode is None:
            self.was_ended |= number in (signal.SIGTERM, signal.SIGKILL)
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)

    def terminate(self) -> None:
        """SIGTERM, which a stopped process takes once it runs on."""
        self.signal(signal.SIGTERM)
        self.signal(signal.SIGCONT)

    async def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until the process has ended; False when it has not within the time."""
        assert self._process is not None
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

    async def hear_out(self) -> None:
        """Read what it sent and printed before it ended: slots that it wrote last, above all."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LAST_WORDS_S):
                if self._link is not None:
                    await self._link.closed.wait()
                if self._reading is not None:
                    await asyncio.shield(self._reading)

    def ignore(self) -> None:
        """Listen no more, without its noticing yet."""
        if self._link is not None:
            self._link.ignore()

    def close(self) -> None:
        """Neither send nor listen any more."""
        if self._link is not None:
            self._link.close()

    def _hear(self, event: Event) -> None:
        self.heard_s = time.monotonic()
        if isinstance(event, Hello):
            self.hello = event
        self._on_event(event)

    def _lost(self) -> None:
        self._on_end()

    async def _read_output(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        while True:
            try:
                line = await process.stdout.readline()
            except ValueError:  # a line longer than the reader's buffer, which dropped it
                continue
            if not line:
                return
            text = line.decode(errors="replace").rstrip()
            self._output.append(text)
            if (line := kept(text)) is not None:
                _log.debug("worker says", model=self.model, pid=process.pid, line=line)
