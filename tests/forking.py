"""Processes forked from one that has its imports done, which take most of the time of a start.

A nursery is a process that imports and then forks for whoever connects to it. A connection carries
one order and its descriptors there, the new process's id back, and its exit status when it ended.
"""

from __future__ import annotations

import atexit
import gc
import json
import os
import re
import resource
import select
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
FROZEN = ("LD_", "PYTHON", "MALLOC_")
"""What a process reads when it is started, not later."""
_MAX_ORDER = 1 << 17
_MAX_FDS = 8
_LIMITS = [getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_")]


def frozen(env: Mapping[str, str], prefixes: Sequence[str] = FROZEN) -> dict[str, str]:
    """The variables that a process can only be started with; not what OpenCV sets for processes
    that its own starts, once it is imported.
    """
    return {
        name: value
        for name, value in env.items()
        if name.startswith(tuple(prefixes)) and "/cv2/" not in value
    }


def shared(module: str) -> str | None:
    """The address of the run's nursery of this module, if one process has started it for all."""
    return os.environ.get(f"NURSERY_{module}")


class Nursery:
    """A process that forks, seen from outside; `python -m MODULE` is to call `orders()`.

    It is the one that all processes of a run share, or one of our own.
    """

    def __init__(self, module: str, env: Mapping[str, str], *arguments: str) -> None:
        self._module = module
        self.address = shared(module) or self._start(module, env, arguments)

    def _start(self, module: str, env: Mapping[str, str], arguments: Sequence[str]) -> str:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            listener.bind("")  # a name of the kernel's choice, which is no file
            listener.listen(64)
            address = listener.getsockname().hex()
            process = subprocess.Popen(
                [sys.executable, "-m", module, str(listener.fileno()), *arguments],
                stdin=subprocess.PIPE,
                pass_fds=[listener.fileno()],
                cwd=ROOT,
                env=dict(env),
            )
        atexit.register(_close, process)
        return address

    def share(self) -> None:
        """Let the processes that this one starts from now on use it as well."""
        os.environ[f"NURSERY_{self._module}"] = self.address

    def wake(self) -> None:
        """Have it import what it waits with until there is an order."""
        self._order_nothing().close()

    def wait_until_ready(self) -> None:
        """Its imports are done."""
        with self._order_nothing() as connection:
            connection.recv(1)

    def _order_nothing(self) -> socket.socket:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        connection.connect(bytes.fromhex(self.address))
        connection.send(b"")
        return connection


def _close(process: subprocess.Popen[bytes]) -> None:
    assert process.stdin is not None
    process.stdin.close()
    process.wait()


def fork(
    address: str, arguments: Sequence[str], env: Mapping[str, str], fds: Sequence[int]
) -> tuple[int, socket.socket]:
    """Have the nursery there fork, with our working directory and limits and these descriptors,
    the first three as streams; the process's id, and where four bytes of status will arrive.
    """
    connection = ordered(address, arguments, env, fds)
    try:
        answer = connection.recv(64)
    except BaseException:
        connection.close()
        raise
    assert answer, "the process that forks is gone"
    return int(answer), connection


def ordered(
    address: str, arguments: Sequence[str], env: Mapping[str, str], fds: Sequence[int]
) -> socket.socket:
    """Where the answer to such an order will arrive."""
    order = {
        "arguments": list(arguments),
        "env": dict(env),
        "folder": str(Path.cwd()),
        "umask": _umask(),
        "limits": [resource.getrlimit(limit) for limit in _LIMITS],
    }
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        connection.connect(bytes.fromhex(address))
        socket.send_fds(connection, [json.dumps(order).encode()], list(fds))
    except BaseException:
        connection.close()
        raise
    return connection


def status_of(connection: socket.socket) -> int:
    """The exit status that has arrived, as of `subprocess`."""
    written = connection.recv(4)
    assert written, "the process that forks is gone"
    return int(struct.unpack("i", written)[0])


# What runs in a nursery.


class Order:
    """What a forked process is to be; `fds` are what it got beyond its three streams."""

    def __init__(self, content: Mapping[str, Any], fds: Sequence[int]) -> None:
        self.arguments: list[str] = content["arguments"]
        self.fds = list(fds[3:])
        for number, fd in enumerate(fds[:3]):
            os.dup2(fd, number)
            os.close(fd)
        os.environ.clear()
        os.environ.update(content["env"])
        os.chdir(content["folder"])
        os.umask(content["umask"])
        for limit, asked in zip(_LIMITS, content["limits"], strict=True):
            ours = resource.getrlimit(limit)
            least = [min(pair, key=_finite) for pair in zip(asked, ours, strict=True)]
            resource.setrlimit(limit, (least[0], least[1]))
        time.tzset()


def wait_for_an_order(listener_fd: int) -> None:
    """Until there is somebody for whom it is worth while to import anything."""
    select.select([sys.stdin, listener_fd], [], [])


def orders(listener_fd: int) -> Order | None:
    """Fork for every order and report every end, until whoever started us has gone (None).

    It returns in each forked process, with what that is to do.
    """
    gc.collect()
    gc.freeze()
    listener = socket.socket(fileno=listener_fd)
    told: dict[int, socket.socket] = {}
    with _ends() as ended:
        while True:
            ready, _, _ = select.select([sys.stdin, listener, ended], [], [])
            if sys.stdin in ready:
                _kill(told)
                return None
            if ended in ready:
                os.read(ended, 4096)
                _reap(told)
            if listener in ready:
                order = _fork(listener, told)
                if order is not None:
                    return order


def _fork(listener: socket.socket, told: dict[int, socket.socket]) -> Order | None:
    connection, _ = listener.accept()
    content, fds, _, _ = socket.recv_fds(connection, _MAX_ORDER, _MAX_FDS)
    pid = os.fork() if content else None
    if pid == 0:
        for one in (listener, connection, *told.values()):
            one.close()
        return Order(json.loads(content), fds)
    for fd in fds:
        os.close(fd)
    if pid is None:
        connection.close()
    else:
        told[pid] = connection
        _tell(connection, str(pid).encode())
    return None


@contextmanager
def _ends() -> Generator[int]:
    """Where a byte arrives when a forked process has ended; undone in the forked process."""
    reads, writes = os.pipe()
    os.set_blocking(writes, False)
    signal.set_wakeup_fd(writes)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    try:
        yield reads
    finally:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.close(reads)
        os.close(writes)


def _kill(told: dict[int, socket.socket]) -> None:
    """Whoever asked for them is gone, without ending them."""
    for pid in told:
        os.kill(pid, signal.SIGKILL)


def _reap(told: dict[int, socket.socket]) -> None:
    for pid in list(told):
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            with told.pop(pid) as connection:
                _tell(connection, struct.pack("i", os.waitstatus_to_exitcode(status)))


def _tell(connection: socket.socket, answer: bytes) -> None:
    try:
        connection.send(answer)
    except OSError:  # whoever asked for the process is gone
        return


def _umask() -> int:
    """Asking the system call would change it for other threads meanwhile."""
    (line,) = re.findall(r"^Umask:\s+(\d+)$", Path("/proc/self/status").read_text(), re.MULTILINE)
    return int(line, 8)


def _finite(limit: int) -> float:
    return float("inf") if limit == resource.RLIM_INFINITY else limit
