"""Servers forked from a process that has imported everything: a third of a second, not three.

What runs is `api.__main__.main` in a process of its own, as `python -m api` would run it; only the
imports, which take most of a server's start, are made once for all tests of a test process.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO

ROOT = Path(__file__).parent.parent
_MAX_ORDER = 1 << 20
_FROZEN = ("LD_", "PYTHON", "MALLOC_")
"""What a process reads when it is started, not later."""


class ForkedProcess:
    """What the tests use of `subprocess.Popen`, for a process whose parent is the nursery.

    Its exit status comes through a pipe that the nursery writes when it has reaped it.
    """

    def __init__(self, pid: int, status: int) -> None:
        self.pid = pid
        self.stdout: IO[bytes] | None = None
        self.returncode: int | None = None
        self._status = status

    def poll(self) -> int | None:
        return self._take(0.0)

    def wait(self, timeout: float | None = None) -> int:
        if self._take(timeout) is None:
            raise subprocess.TimeoutExpired("hearth serve", timeout or 0.0)
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _take(self, timeout: float | None) -> int | None:
        if self.returncode is None and select.select([self._status], [], [], timeout)[0]:
            written = os.read(self._status, 4)
            assert written, "the process that forks the servers is gone"
            (self.returncode,) = struct.unpack("i", written)
            os.close(self._status)
        return self.returncode


class Nursery:
    """The process that forks servers, seen from the tests."""

    def __init__(self) -> None:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.forked_server", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                cwd=ROOT,
            )

    def fork(
        self, arguments: Sequence[str], env: Mapping[str, str], streams: Sequence[int]
    ) -> ForkedProcess:
        """Run `hearth` with these arguments, environment and three streams."""
        status, told = os.pipe()
        order = json.dumps({"arguments": list(arguments), "env": dict(env)}).encode()
        assert len(order) < _MAX_ORDER
        socket.send_fds(self._control, [order], [*streams, told])
        os.close(told)
        return ForkedProcess(int(self._control.recv(64)), status)

    def serve(
        self, arguments: Sequence[str], env: Mapping[str, str], stderr: IO[bytes]
    ) -> ForkedProcess:
        """A server; what it prints comes through a pipe."""
        reads, writes = os.pipe()
        with Path(os.devnull).open("rb") as nothing:
            process = self.fork(arguments, env, (nothing.fileno(), writes, stderr.fileno()))
        os.close(writes)
        process.stdout = os.fdopen(reads, "rb")
        return process

    def run(
        self, arguments: Sequence[str], env: Mapping[str, str], stdin: str, timeout_s: float
    ) -> subprocess.CompletedProcess[str]:
        """A command, when it has ended."""
        with TemporaryFile() as given, TemporaryFile() as said, TemporaryFile() as complained:
            given.write(stdin.encode())
            given.seek(0)
            streams = (given.fileno(), said.fileno(), complained.fileno())
            process = self.fork(arguments, env, streams)
            try:
                code = process.wait(timeout_s)
            finally:
                process.kill()
            said.seek(0)
            complained.seek(0)
            output, errors = said.read().decode(), complained.read().decode()
        return subprocess.CompletedProcess(["hearth", *arguments], code, output, errors)

    def close(self) -> None:
        self._control.close()
        self._process.wait()


_nurseries: list[Nursery] = []


def can_fork(variables: Iterable[str]) -> bool:
    """Fork and these settings go together. Off Linux, fork after imports may end a process."""
    return sys.platform == "linux" and not any(name.startswith(_FROZEN) for name in variables)


def nursery() -> Nursery:
    """The one nursery of this test process, started when first asked for."""
    if not _nurseries:
        _nurseries.append(Nursery())
        atexit.register(_nurseries[0].close)
    return _nurseries[0]


# What runs in the nursery.


def _serve_orders(control: socket.socket) -> list[str] | None:
    """Fork for every order, report every end; in a child, the arguments it is to run with."""
    wakeup, wakes = os.pipe()
    os.set_blocking(wakes, False)
    signal.set_wakeup_fd(wakes)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    told: dict[int, int] = {}
    while True:
        ready, _, _ = select.select([control, wakeup], [], [])
        if wakeup in ready:
            os.read(wakeup, 4096)
            _reap(told)
        if control not in ready:
            continue
        order, fds, _, _ = socket.recv_fds(control, _MAX_ORDER, 4)
        if not order:
            return None
        *streams, status = fds
        pid = os.fork()
        if pid == 0:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for fd in (wakeup, wakes, status, *told.values()):
                os.close(fd)
            control.close()
            return _become(json.loads(order), streams)
        told[pid] = status
        for fd in streams:
            os.close(fd)
        control.send(str(pid).encode())


def _become(order: dict[str, object], streams: list[int]) -> list[str]:
    for number, fd in enumerate(streams):
        os.dup2(fd, number)
        os.close(fd)
    env, arguments = order["env"], order["arguments"]
    assert isinstance(env, dict)
    assert isinstance(arguments, list)
    os.environ.clear()
    os.environ.update(env)
    return arguments


def _reap(told: dict[int, int]) -> None:
    for pid in list(told):
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            fd = told.pop(pid)
            os.write(fd, struct.pack("i", os.waitstatus_to_exitcode(status)))
            os.close(fd)


def _main() -> int:
    program = importlib.import_module("api.__main__")
    for name in ("api.app", "api.cli.serving", "api.cache_cli"):
        importlib.import_module(name)
    gc.collect()
    gc.freeze()
    arguments = _serve_orders(socket.socket(fileno=int(sys.argv[1])))
    if arguments is None:
        return 0
    time.tzset()
    sys.argv = ["hearth", *arguments]
    return int(program.main(arguments))


if __name__ == "__main__":
    sys.exit(_main())
