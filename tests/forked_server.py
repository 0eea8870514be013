"""Servers forked from a process that has imported everything: a third of a second, not three.

What runs is `api.__main__.run` in a process of its own, as `python -m api` would run it; only the
imports, which take most of a server's start, are made once for all tests of a test process.
"""

from __future__ import annotations

import functools
import importlib
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO

from tests import forked_worker
from tests.forking import FROZEN, Nursery, fork, orders, status_of, wait_for_an_order

_MODULES = (
    *("api.app", "api.serve", "api.cli.serve", "api.cli.cache"),
    *("alembic.command", "alembic.context", "anyio._backends._asyncio"),
)
"""What a server imports, and what it waits with until it makes databases and is first asked."""


class ForkedProcess:
    """What the tests use of `subprocess.Popen`, for a process whose parent is the nursery."""

    def __init__(
        self, arguments: Sequence[str], env: Mapping[str, str], streams: Sequence[int]
    ) -> None:
        """`hearth` with these arguments, environment and three streams."""
        self.pid, self._connection = fork(_ready(), arguments, env, streams)
        self.stdout: IO[bytes] | None = None
        self.returncode: int | None = None
        self._taking = threading.Lock()

    def poll(self) -> int | None:
        return self._take(0.0)

    def wait(self, timeout: float | None = None) -> int:
        if self._take(timeout) is None:
            raise subprocess.TimeoutExpired("hearth serve", timeout or 0.0)
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int) -> None:
        """As `Popen`: it may have ended while nobody has said so yet."""
        if self.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _take(self, timeout: float | None) -> int | None:
        """The exit status, once it is there: one thread at a time hears of it."""
        if self._taking.acquire(timeout=-1.0 if timeout is None else timeout):
            try:
                if (
                    self.returncode is None
                    and select.select([self._connection], [], [], timeout)[0]
                ):
                    self.returncode = status_of(self._connection)
                    self._connection.close()
            finally:
                self._taking.release()
        return self.returncode


def serve(arguments: Sequence[str], env: Mapping[str, str], stderr: IO[bytes]) -> ForkedProcess:
    """A server; what it prints comes through a pipe."""
    reads, writes = os.pipe()
    with Path(os.devnull).open("rb") as nothing:
        process = ForkedProcess(arguments, env, (nothing.fileno(), writes, stderr.fileno()))
    os.close(writes)
    process.stdout = os.fdopen(reads, "rb")
    return process


def run(
    arguments: Sequence[str], env: Mapping[str, str], stdin: str, timeout_s: float
) -> subprocess.CompletedProcess[str]:
    """A command, when it has ended."""
    with TemporaryFile() as given, TemporaryFile() as said, TemporaryFile() as complained:
        given.write(stdin.encode())
        given.seek(0)
        streams = (given.fileno(), said.fileno(), complained.fileno())
        process = ForkedProcess(arguments, env, streams)
        try:
            code = process.wait(timeout_s)
        finally:
            process.kill()
        said.seek(0)
        complained.seek(0)
        output, errors = said.read().decode(), complained.read().decode()
    return subprocess.CompletedProcess(["hearth", *arguments], code, output, errors)


def can_fork(variables: Iterable[str]) -> bool:
    """Fork and these settings go together. Off Linux, fork after imports may end a process."""
    return sys.platform == "linux" and not any(name.startswith(FROZEN) for name in variables)


@functools.cache
def nursery() -> Nursery:
    """The one nursery for servers; their workers are forked as well."""
    return Nursery(__name__, os.environ, forked_worker.nursery().address)


@functools.cache
def _ready() -> str:
    """The nursery's address, when workers can be forked at once."""
    servers = nursery()
    servers.wake()
    forked_worker.nursery().wait_until_ready()
    return servers.address


def _main() -> None:
    wait_for_an_order(int(sys.argv[1]))
    program = importlib.import_module("api.__main__")
    for name in _MODULES:
        importlib.import_module(name)
    listener_fd, workers = sys.argv[1:]
    forked_worker.fork_workers(workers)
    order = orders(int(listener_fd))
    if order is not None:
        sys.argv = ["hearth", *order.arguments]
        program.run(order.arguments)


if __name__ == "__main__":
    _main()
