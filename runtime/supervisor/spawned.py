"""A worker process in its first moments, when it imports and nobody speaks to it yet.

Nothing is imported here that takes time: the first worker is spawned before the server's imports.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path

from runtime.environment import worker_environment
from runtime.machine_limits import why_no_worker
from runtime.work_page import WorkPage, new_page

MLX = "0.32.4"
"""The release that this one is made for, as in pyproject.toml."""


class SpawnedProcess:
    """A process, the server's end of its socket, and the page on which it says for whom it works.
    Whoever takes the socket owns them.
    """

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        sock: socket.socket,
        page: WorkPage,
    ) -> None:
        self.process = process
        self.page = page
        self._sock: socket.socket | None = sock

    @classmethod
    async def spawn(cls, cpu_blas: str) -> SpawnedProcess:
        """Start a worker process on a socketpair. Raises OSError."""
        page = new_page()
        try:
            process, sock = await _spawn(cpu_blas, page)
            return cls(process, sock, WorkPage(page))
        finally:
            os.close(page)

    def take(self) -> socket.socket:
        """The socket, once."""
        assert self._sock is not None
        sock, self._sock = self._sock, None
        return sock

    def give_up(self) -> None:
        """End the process at once, unless it was taken: it has nothing to lose."""
        if self._sock is not None:
            self.take().close()
            self.page.close()
            with contextlib.suppress(ProcessLookupError):  # it ends by itself when its socket does
                self.process.kill()


class WorkerSource:
    """Makes worker processes; the first one may be begun ahead, so that it imports beside us."""

    def __init__(self, cpu_blas: str) -> None:
        self._cpu_blas = cpu_blas
        self._ahead: SpawnedProcess | None = None

    async def begin(self) -> SpawnedProcess:
        """Have a process made for whoever is the first to `get` one. Raises OSError."""
        self._ahead = await SpawnedProcess.spawn(self._cpu_blas)
        return self._ahead

    async def get(self) -> SpawnedProcess:
        """A process that imports and then is a worker. Raises OSError."""
        ahead, self._ahead = self._ahead, None
        if ahead is not None and ahead.process.returncode is None:
            return ahead
        if ahead is not None:
            ahead.give_up()
        return await SpawnedProcess.spawn(self._cpu_blas)

    def forget_first(self) -> None:
        """Nobody wants the process that was made ahead."""
        if self._ahead is not None:
            self._ahead.give_up()
            self._ahead = None


async def _spawn(cpu_blas: str, page: int) -> tuple[asyncio.subprocess.Process, socket.socket]:
    """`python -m runtime.worker`, and our end of the socket that it was given. Raises OSError."""
    if (why := why_no_worker()) is not None:
        raise OSError(why)
    ours, theirs = socket.socketpair(socket.AF_UNIX)
    fds = (theirs.fileno(), page)
    named = ("--fd", str(fds[0]), "--page", str(fds[1]))
    command = (sys.executable, "-P", "-m", "runtime.worker", *named)
    try:
        process = await asyncio.create_subprocess_exec(
            *command,
            pass_fds=fds,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,
            env=worker_environment(cpu_blas),
        )
    except OSError:
        ours.close()
        raise
    finally:
        theirs.close()
    ours.setblocking(False)
    return process, ours


def why_no_mlx(find: Callable[[str], ModuleSpec | None] = find_spec) -> str | None:
    """Why no worker could import mlx, and what to type; None where it is complete.

    mlx's package for Linux comes without the library that computes, which is another package.
    """
    spec = find("mlx")
    folders = [Path(one) for one in spec.submodule_search_locations or ()] if spec else []
    if any(list(folder.glob("lib/libmlx.*")) for folder in folders):
        return None
    what = "mlx has no backend" if folders else "mlx is not installed"
    extra = "" if sys.platform == "darwin" else "[cpu]"
    return f"{what}: type {sys.executable} -m pip install --force-reinstall 'mlx{extra}=={MLX}'"
