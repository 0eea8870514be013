"""Workers forked from a process that has imported mlx and all: fifty milliseconds, not two seconds.

What runs is `runtime.worker.__main__`, as `python -m runtime.worker` would run it. What a worker
costs otherwise is, but for a fortieth, the same imports every time. Workers whose loader or
interpreter is told something else are started as ever, and so are all with `started_as_ever()`.
"""

from __future__ import annotations

import asyncio
import ctypes
import functools
import importlib
import os
import runpy
import signal
import socket
import sys
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, cast

import psutil
from typing_extensions import override

from runtime.environment import worker_environment
from tests.forking import FROZEN, Nursery, fork, frozen, orders, status_of, wait_for_an_order

_COMMAND = (sys.executable, "-P", "-m", "runtime.worker", "--fd")
_FROZEN = (*FROZEN, "OPENBLAS_", "OMP_", "MKL_", "MLX_", "HF_", "HOME", "XDG_")
"""What mlx, transformers and what they import read when they are imported, too."""
_MODULES = (
    *("runtime.worker.__main__", "mlx_lm.models.qwen3", "mlx_lm.tool_parsers.json_tools"),
    "transformers.models.qwen3",
)
_ROOM_BYTES = 4096
SLOW_LOADS = "slow-loads"
"""A file in a server's home: while it lies there, no worker is forked."""
_start = asyncio.create_subprocess_exec


class ForkedWorker:
    """What `Child` uses of `asyncio.subprocess.Process`, for a process with another parent."""

    def __init__(self, pid: int, connection: socket.socket, stdout: asyncio.StreamReader) -> None:
        self.pid = pid
        self.stdout = stdout
        self.returncode: int | None = None
        self._connection = connection
        self._has_ended = asyncio.Event()
        asyncio.get_running_loop().add_reader(connection, self._end)

    async def wait(self) -> int:
        await self._has_ended.wait()
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.returncode is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _end(self) -> None:
        asyncio.get_running_loop().remove_reader(self._connection)
        with self._connection:
            self.returncode = status_of(self._connection)
        self._has_ended.set()


class _Output(asyncio.StreamReaderProtocol):
    """Closes its socket where the other end did, as a pipe's reader does."""

    @override
    def eof_received(self) -> bool:
        super().eof_received()
        return False


def fork_workers(address: str | None = None) -> None:
    """From now on this process has its workers forked, by the nursery there or by its own.

    Those are started as ever whose environment does not fit what it is now.
    """
    if sys.platform != "linux":
        return
    fitting = frozen(worker_environment("auto"), _FROZEN)

    async def start(*command: str, **options: Any) -> asyncio.subprocess.Process:
        env = options.get("env", {})
        place = command[: len(_COMMAND)]
        if place != _COMMAND or frozen(env, _FROZEN) != fitting or _is_slow(env):
            return await _start(*command, **options)
        fds = tuple(options["pass_fds"])
        words = [str(os.getpid())]
        worker = await _fork(address or nursery().address, words, fds, env)
        return cast("asyncio.subprocess.Process", worker)

    asyncio.create_subprocess_exec = start


@contextmanager
def started_as_ever() -> Generator[None]:
    """Workers of this process are not forked meanwhile."""
    forks, asyncio.create_subprocess_exec = asyncio.create_subprocess_exec, _start
    try:
        yield
    finally:
        asyncio.create_subprocess_exec = forks


def own_workers() -> list[psutil.Process]:
    """The workers that this process has started, forked or not; none of servers in others."""
    found: dict[int, psutil.Process] = {}
    for process in psutil.process_iter():
        with suppress(psutil.Error, ProcessLookupError):  # it has just ended
            words = process.cmdline()
            is_own = process.ppid() in (os.getpid(), *found) or f"for {os.getpid()}" in words
            is_sandbox = os.getpgid(process.pid) != process.pid
            if is_own and "runtime.worker" in words and not is_sandbox:
                found[process.pid] = process
    return [*found.values()]


@functools.cache
def nursery() -> Nursery:
    """The one nursery for workers."""
    env = worker_environment("auto") | {"ROOM": " " * _ROOM_BYTES}
    return Nursery("tests.forked_worker", env, " " * _ROOM_BYTES)


def _is_slow(env: Mapping[str, str]) -> bool:
    return Path(env.get("HEARTH_HOME", "/"), SLOW_LOADS).exists()


async def _fork(
    address: str, words: Sequence[str], passed: Sequence[int], env: Mapping[str, str]
) -> ForkedWorker:
    pid, connection, prints = _ordered(address, words, passed, env)
    reader = asyncio.StreamReader()
    # uvloop closes a pipe's descriptor twice, and perhaps somebody else's; a socket's once.
    await asyncio.get_running_loop().create_connection(lambda: _Output(reader), sock=prints)
    return ForkedWorker(pid, connection, reader)


def _ordered(
    address: str, words: Sequence[str], passed: Sequence[int], env: Mapping[str, str]
) -> tuple[int, socket.socket, socket.socket]:
    """A new worker: its process id, where its end is told, and where what it prints is read."""
    ours, theirs = socket.socketpair()
    with theirs, Path(os.devnull).open("rb") as nothing:
        fds = (nothing.fileno(), theirs.fileno(), theirs.fileno(), *passed)
        pid, connection = fork(address, words, env, fds)
    ours.setblocking(False)
    return pid, connection, ours


# What runs in the nursery.


def _main() -> None:
    """In each forked process, the worker; it ends by `os._exit`."""
    wait_for_an_order(int(sys.argv[1]))
    for name in _MODULES:
        importlib.import_module(name)
    del sys.modules["runtime.worker.__main__"]  # it is run anew, as the program
    order = orders(int(sys.argv[1]))
    if order is None:
        return
    os.setsid()
    (server,) = order.arguments
    command = [*_COMMAND, str(order.fds[0]), "--page", str(order.fds[1])]
    _show([*command, f"for {server}"], os.environ)
    sys.argv = ["runtime.worker", *command[4:]]
    runpy.run_module("runtime.worker", run_name="__main__", alter_sys=True)


def _show(words: Sequence[str], env: Mapping[str, str]) -> None:
    """Have other processes see this command line and environment, where the kernel put them."""
    stat = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    shown = (words, [f"{name}={value}" for name, value in env.items()])
    for start, end, texts in zip(stat[45:48:2], stat[46:49:2], shown, strict=True):
        room, content = int(end) - int(start), "\0".join(texts).encode()
        assert len(content) < room
        ctypes.memmove(int(start), content.ljust(room, b"\0"), room)


if __name__ == "__main__":
    _main()
