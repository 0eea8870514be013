"""`WorkerSource`: where worker processes come from.

A worker's imports take one or two seconds. On Linux one process, the zygote, has them behind it and
forks; elsewhere, and whenever that cannot be had, a process is spawned that imports for itself.
Nothing is imported here that takes time, as the first process is begun before the server's imports.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import sys
import time
from collections import deque

from runtime import nvidia
from runtime.supervisor.forked import ForkedProcess
from runtime.supervisor.spawned import SpawnedProcess, spawn_worker
from runtime.work_page import WorkPage, new_page
from runtime.zygote import EXIT_UNFIT, ORDER, READY

_IMPORT_S = 60.0
_FORK_S = 10.0
"""Far more than a fork takes on a busy machine."""
_RETRY_S = 60.0
_LAST_WORDS_S = 1.0
_OUTPUT_LINES = 50


class Zygote:
    """The process that forks, and our end of its socket. It belongs to the event loop."""

    def __init__(self, process: asyncio.subprocess.Process, control: socket.socket) -> None:
        self.pid = process.pid
        self.is_ready = False
        """Its imports are done."""
        self.output: deque[str] = deque(maxlen=_OUTPUT_LINES)
        self._process = process
        self._control = control
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(control, self._hear)
        self._reading = asyncio.create_task(self._read_output())

    @classmethod
    async def start(cls, cpu_blas: str) -> Zygote:
        """Raises OSError."""
        return cls(*await spawn_worker(cpu_blas, socket.SOCK_SEQPACKET))

    @property
    def returncode(self) -> int | None:
        """As of `subprocess`; None while it runs."""
        return self._process.returncode

    def order(self) -> SpawnedProcess:
        """A worker, which runs once it has `begun()`. Raises OSError."""
        pairs = [socket.socketpair(socket.AF_UNIX, kind) for kind in _KINDS]
        (sock, prints, report), theirs = zip(*pairs, strict=True)
        try:
            page_fd = new_page()
            try:
                page = WorkPage(page_fd)
                fds = [*(one.fileno() for one in theirs), page_fd]
                socket.send_fds(self._control, [ORDER], fds)
            finally:
                os.close(page_fd)
        except OSError:
            for one in (sock, prints, report):
                one.close()
            raise
        finally:
            for one in theirs:
                one.close()
        sock.setblocking(False)
        return SpawnedProcess(ForkedProcess(report, prints), sock, page)

    async def end(self) -> None:
        """It has nothing to lose. How its workers end is not told any more."""
        if self._control.fileno() >= 0:
            self._loop.remove_reader(self._control)
            self._control.close()
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        await self._process.wait()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LAST_WORDS_S):
                await self._reading

    def _hear(self) -> None:
        try:
            said = self._control.recv(1)
        except BlockingIOError:
            return
        except OSError:
            said = b""
        if said == READY:
            self.is_ready = True
        else:
            self._loop.remove_reader(self._control)

    async def _read_output(self) -> None:
        stdout = self._process.stdout
        assert stdout is not None
        while True:
            try:
                line = await stdout.readline()
            except ValueError:  # longer than the reader's buffer, which dropped it
                continue
            if not line:
                return
            self.output.append(line.decode(errors="replace").rstrip())


_KINDS = (socket.SOCK_STREAM, socket.SOCK_STREAM, socket.SOCK_SEQPACKET)
"""Of the worker's socket, of what it prints to, and of where its life is told."""


class WorkerSource:
    """Makes worker processes; one owner for the zygote. It belongs to the event loop."""

    def __init__(self, cpu_blas: str, *, forks: bool = True) -> None:
        """`forks` is False where no process may wait: then each one imports for itself.

        So it does where imports open the device: a zygote would do them only to refuse.
        """
        self._cpu_blas = cpu_blas
        self._forks = forks and sys.platform == "linux" and not nvidia.is_used()
        self._zygote: Zygote | None = None
        self._not_before_s = 0.0
        self._ahead: SpawnedProcess | None = None
        self._ending: set[asyncio.Task[None]] = set()

    @property
    def forks(self) -> bool:
        """A process with its imports done is had by a fork."""
        return self._forks

    @property
    def zygote(self) -> Zygote | None:
        """The process that forks, while it lives."""
        zygote = self._zygote
        return zygote if zygote is not None and zygote.returncode is None else None

    async def begin(self) -> SpawnedProcess:
        """Have a process made for whoever is the first to `get` one. Raises OSError."""
        await self.prepare()
        if self._zygote is not None:
            self._ahead = self._zygote.order()
        else:
            self._ahead = await SpawnedProcess.spawn(self._cpu_blas)
        return self._ahead

    async def prepare(self) -> str:
        """See to it that there is a zygote, if there can be; why the one before ended, or nothing.

        One that must not fork here is the last one. Raises OSError.
        """
        if not self._forks or self.zygote is not None:
            return ""
        why = await self._bury()
        if self._forks and time.monotonic() >= self._not_before_s:
            self._not_before_s = time.monotonic() + _RETRY_S  # should its imports fail
            self._zygote = await Zygote.start(self._cpu_blas)
        return why

    async def get(self) -> SpawnedProcess:
        """A process that is a worker, or imports and then is one. Raises OSError."""
        with contextlib.suppress(OSError):
            spawned = self._begun()
            if spawned is not None and await self._runs(spawned):
                return spawned
        return await SpawnedProcess.spawn(self._cpu_blas)

    def forget_first(self) -> None:
        """Nobody wants the process that was made ahead."""
        if self._ahead is not None:
            self._ahead.give_up()
            self._ahead = None

    async def close(self) -> None:
        """End what it has. How its workers end is not told any more."""
        self._forks = False
        self.forget_first()
        if self._zygote is not None:
            self._end(self._zygote)
        if self._ending:
            await asyncio.wait(self._ending)

    def _begun(self) -> SpawnedProcess | None:
        """The process made ahead, or one ordered now. Raises OSError."""
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            return ahead
        zygote = self.zygote
        return zygote.order() if zygote is not None else None

    async def _runs(self, spawned: SpawnedProcess) -> bool:
        """Whether it lives, forked in time; a zygote that does not get to it is ended."""
        process, zygote = spawned.process, self._zygote
        if process.returncode is not None:
            spawned.give_up()
        if not isinstance(process, ForkedProcess):
            return process.returncode is None
        limit_s = _FORK_S if zygote is not None and zygote.is_ready else _IMPORT_S
        try:
            async with asyncio.timeout(limit_s):
                await process.begun()
        except OSError as error:  # which a timeout is one of
            spawned.give_up()
            if isinstance(error, TimeoutError) and zygote is not None and zygote is self._zygote:
                self._end(zygote)
            return False
        self._not_before_s = 0.0
        return True

    async def _bury(self) -> str:
        """Let go of a zygote that has ended; why it has, if there was one."""
        zygote, self._zygote = self._zygote, None
        if zygote is None:
            return ""
        await zygote.end()
        self._forks = self._forks and zygote.returncode != EXIT_UNFIT
        last = zygote.output[-1] if zygote.output else ""
        return f"exit status {zygote.returncode}, after {last!r}"

    def _end(self, zygote: Zygote) -> None:
        self._zygote = None
        task = asyncio.create_task(zygote.end())
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)
