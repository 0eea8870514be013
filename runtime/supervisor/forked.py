"""`ForkedProcess`: a worker that the zygote forks, seen from the server, whose child it is not.

Nothing is imported here that takes time: the first worker is ordered before the server's imports.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket

from runtime.zygote import NUMBER, STATUS_UNKNOWN

_TELL_S = 3.0
"""So long the zygote has to say how a process ended that has; one that is stopped never does."""


class ForkedProcess:
    """What is used of `asyncio.subprocess.Process`. It belongs to the event loop.

    It is known by a descriptor, which stands for that very process also when its id is another's.
    """

    def __init__(self, report: socket.socket, prints: socket.socket) -> None:
        """Its life is told on `report`, and what it prints arrives on `prints`."""
        self.pid = 0
        self.returncode: int | None = None
        self.stdout = asyncio.StreamReader()
        self._report = report
        self._prints = prints
        self._pidfd = -1
        self._due: asyncio.TimerHandle | None = None
        self._loop = asyncio.get_running_loop()
        self._has_begun = self._loop.create_future()
        self._has_ended = asyncio.Event()
        for one in (report, prints):
            one.setblocking(False)
        self._loop.add_reader(report, self._hear)

    async def begun(self) -> None:
        """Wait until it runs. Raises OSError: the zygote has ended, or could not fork."""
        await asyncio.shield(self._has_begun)
        # uvloop closes a pipe's descriptor twice, and perhaps somebody else's; a socket's once.
        await self._loop.create_connection(lambda: _Output(self.stdout), sock=self._prints)

    async def wait(self) -> int:
        """Its status, once it has ended; `STATUS_UNKNOWN` where nobody can tell it."""
        await self._has_ended.wait()
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Raises ProcessLookupError when it has just ended; nothing happens before it runs."""
        if self.returncode is None and self._pidfd >= 0:
            signal.pidfd_send_signal(self._pidfd, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _hear(self) -> None:
        try:
            message, fds, _, _ = socket.recv_fds(self._report, NUMBER.size, 1)
        except BlockingIOError:
            return
        except OSError:
            message, fds = b"", []
        if message and fds:
            (self.pid,) = NUMBER.unpack(message)
            (self._pidfd,) = fds
            self._loop.add_reader(self._pidfd, self._await_status)
            self._has_begun.set_result(None)
            return
        self._close_report()
        if message:
            self._end(*NUMBER.unpack(message))
        elif self._pidfd >= 0:
            self._loop.add_reader(self._pidfd, self._end, STATUS_UNKNOWN)
        else:
            self._prints.close()
            self._has_begun.set_exception(ConnectionResetError("the zygote did not fork"))
            self._has_begun.exception()  # somebody may ask, or nobody
            self._end(STATUS_UNKNOWN)

    def _await_status(self) -> None:
        """It has ended, of which its descriptor tells nothing else."""
        self._loop.remove_reader(self._pidfd)
        self._due = self._loop.call_later(_TELL_S, self._end, STATUS_UNKNOWN)

    def _close_report(self) -> None:
        if self._report.fileno() >= 0:
            self._loop.remove_reader(self._report)
            self._report.close()

    def _end(self, status: int) -> None:
        self._close_report()
        if self._due is not None:
            self._due.cancel()
        if self._pidfd >= 0:
            self._loop.remove_reader(self._pidfd)
            os.close(self._pidfd)
        self.returncode = status
        self._has_ended.set()


class _Output(asyncio.StreamReaderProtocol):
    """Closes its socket where the other end did, as a pipe's reader does."""

    def eof_received(self) -> bool:
        super().eof_received()
        return False
