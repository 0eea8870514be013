"""The zygote: a worker that has its imports done and forks into workers instead of being one.

Forking it takes hundredths of a second where importing takes one or two. What it has must not be in
use when it forks: it runs one thread and has not touched the device, or it refuses to be a zygote.
"""

from __future__ import annotations

import gc
import os
import select
import signal
import socket
import sys
import threading
from contextlib import suppress
from pathlib import Path

from runtime.zygote import NUM_ORDERED, NUMBER, READY

_DEVICES = ("/dev/nvidia", "/dev/dxg", "/dev/kfd")


class Zygote:
    """Forks for each order on `control`, one thread for all; Linux only."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._told: dict[int, tuple[int, socket.socket]] = {}
        """By the descriptor of each worker that lives: its process, and where its end is told."""

    def run(self) -> tuple[socket.socket, int] | None:
        """Fork until the server is gone (None). In each forked process: the socket it works on, and
        the descriptor of its work page.
        """
        for number in (signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        _close_copies_of_streams()
        with suppress(OSError):  # the server is gone, which it reads next
            self._control.send(READY)
        ends = select.poll()
        ends.register(self._control, select.POLLIN)
        is_tidy = False  # the first order waits already, and tidying up takes a tenth of a second
        while True:
            for fd, _ in ends.poll(None if is_tidy else 0):
                if fd in self._told:
                    ends.unregister(fd)
                    self._bury(fd)
                    continue
                message, fds, _, _ = socket.recv_fds(self._control, 1, NUM_ORDERED)
                if not message:
                    return None
                worker = self._obey(fds, ends)
                if worker is not None:
                    return worker
            if not is_tidy:
                gc.collect()
                gc.freeze()
                is_tidy = True

    def _obey(self, fds: list[int], ends: select.poll) -> tuple[socket.socket, int] | None:
        """Fork for one order; in the new process its socket and its work page.

        Where there is no room for it, the order's descriptors are closed, and the server knows.
        """
        sockets = [socket.socket(fileno=fd) for fd in fds[: NUM_ORDERED - 1]]
        pages = fds[NUM_ORDERED - 1 :]
        if pages:
            worker, out, report = sockets
            try:
                pidfd = self._fork(report)
            except OSError as error:
                print(f"no worker forked: {error}", file=sys.stderr, flush=True)  # noqa: T201
            else:
                if pidfd is None:
                    return self._become(worker, out), pages[0]
                ends.register(pidfd, select.POLLIN)
                sockets.remove(report)
        for one in sockets:
            one.close()
        for fd in pages:
            os.close(fd)
        return None

    def _fork(self, report: socket.socket) -> int | None:
        """The descriptor of a new process, which is told with its id; None in that process."""
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if pid == 0:
            report.close()
            return None
        pidfd = os.pidfd_open(pid)
        self._told[pidfd] = pid, report
        with suppress(OSError):  # whoever ordered it is gone, and so is the other end of its socket
            socket.send_fds(report, [NUMBER.pack(pid)], [pidfd])
        return pidfd

    def _bury(self, pidfd: int) -> None:
        pid, report = self._told.pop(pidfd)
        _, status = os.waitpid(pid, 0)
        os.close(pidfd)
        with report, suppress(OSError):
            report.send(NUMBER.pack(os.waitstatus_to_exitcode(status)))

    def _become(self, worker: socket.socket, out: socket.socket) -> socket.socket:
        """Hold nothing of the zygote's or of other workers: ends are told by closing."""
        os.setsid()
        self._control.close()
        for pidfd, (_, report) in self._told.items():
            os.close(pidfd)
            report.close()
        for fd in (1, 2):
            os.dup2(out.fileno(), fd)
        out.close()
        return worker


def why_unfit() -> str | None:
    """Why this process must not fork into workers; None when it may."""
    if sys.platform != "linux":
        return "only on Linux is a fork without exec safe with what a worker imports"
    if threading.active_count() > 1:
        return "something that was imported runs a thread"
    try:
        os.close(os.pidfd_open(os.getpid()))
        mapped = Path("/proc/self/maps").read_text()
        opened = [str(one.resolve()) for one in _descriptors()]
    except OSError as error:
        return f"the kernel does not tell what is needed: {error}"
    if any(device in text for text in (mapped, *opened) for device in _DEVICES):
        return "importing mlx has opened the device"
    return None


def _close_copies_of_streams() -> None:
    """Uvloop leaves some in a process that it starts; workers would keep these streams open."""
    ours = [os.fstat(fd) for fd in (1, 2)]
    for fd in [int(one.name) for one in _descriptors()]:
        with suppress(OSError):  # the one that listed them
            if fd > 2 and any(os.path.samestat(os.fstat(fd), one) for one in ours):
                os.close(fd)


def _descriptors() -> list[Path]:
    return [one for one in Path("/proc/self/fd").iterdir() if one.is_symlink()]
