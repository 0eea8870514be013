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
from runtime.supervisor.forked import ForkedProcess
from runtime.work_page import WorkPage, new_page

MLX = "0.32.4"
"""The release that this one is made for, as in pyproject.toml."""


class SpawnedProcess:
    """A process, the server's end of its socket, and the page on which it says for whom it works.
    Whoever takes the socket owns them.
    """

    def __init__(
        self,
        process: asyncio.subprocess.Process | ForkedProcess,
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
            process, sock = await spawn_worker(cpu_blas, socket.SOCK_STREAM, page)
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


async def spawn_worker(
    cpu_blas: str, kind: socket.SocketKind, page: int | None = None
) -> tuple[asyncio.subprocess.Process, socket.socket]:
    """`python -m runtime.worker`, and our end of the socket that it was given. Without a `page` it
    forks into workers. Raises OSError.
    """
    if (why := why_no_worker()) is not None:
        raise OSError(why)
    ours, theirs = socket.socketpair(socket.AF_UNIX, kind)
    flags = ["--forks"] if page is None else ["--page", str(page)]
    command = (sys.executable, "-P", "-m", "runtime.worker", "--fd", str(theirs.fileno()), *flags)
    try:
        process = await asyncio.create_subprocess_exec(
            *command,
            pass_fds=[theirs.fileno(), *([] if page is None else [page])],
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
