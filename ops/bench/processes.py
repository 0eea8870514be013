"""Hearth and its opponent as processes, and the environment that both ran in."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import AsyncGenerator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import psutil

from runtime.environment import blas_environment

_READY_S = 600.0
"""Real weights are hashed and read before a server is ready, on machines with other work too."""


def worker_environment() -> dict[str, str]:
    """The environment that Hearth gives its workers, for the opponent too."""
    return dict(os.environ) | blas_environment("auto", os.environ)


def give(variables: Mapping[str, str]) -> None:
    """Put these into the environment of what is started from now on."""
    os.environ.update(variables)


class ProcessUse(NamedTuple):
    """What a process computed, read and gave the disk, with all its threads, from its start."""

    cpu_ms: float
    read_bytes: int
    written_bytes: int


def uses_of(server_pid: int) -> list[ProcessUse]:
    """Those of a server, which comes first, and of its workers that live. Linux only."""
    root, found = psutil.Process(server_pid), list[ProcessUse]()
    for process in (root, *root.children(recursive=True)):
        with contextlib.suppress(OSError, psutil.Error):
            folder, cpu_ns = Path("/proc") / str(process.pid), 0
            for thread in (folder / "task").iterdir():
                with contextlib.suppress(OSError):
                    cpu_ns += int((thread / "schedstat").read_text().split()[0])
            said = dict(line.split(": ") for line in (folder / "io").read_text().splitlines())
            found.append(ProcessUse(cpu_ns / 1e6, int(said["rchar"]), int(said["write_bytes"])))
    return found


def workers_of(server_pid: int) -> list[psutil.Process]:
    """The workers of a server that live, spares among them."""
    found: list[psutil.Process] = []
    for one in psutil.Process(server_pid).children(recursive=True):
        with contextlib.suppress(psutil.Error, ProcessLookupError):  # it has just ended
            if os.getpgid(one.pid) == one.pid:
                found.append(one)
    return found


class Bare:
    """The bare loop in its own process."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    async def run(self, prompts: list[list[int]], max_tokens: int) -> dict[str, list[float]]:
        """Seconds from `insert` to each row's first and last token."""
        return await self._ask({"prompts": prompts, "max_tokens": max_tokens})

    async def resume(self, prompt: list[int], suffix: list[int]) -> float:
        """Seconds to the first token after `suffix`, on a cache that already holds `prompt`."""
        times = await self._ask({"resident": prompt, "suffix": suffix})
        return times["first"][0]

    async def _ask(self, job: dict[str, object]) -> dict[str, list[float]]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(job).encode() + b"\n")
        return json.loads(await self._process.stdout.readline())


@contextlib.asynccontextmanager
async def bare(model: Path, *options: str) -> AsyncGenerator[Bare]:
    """Start the opponent and wait until its model is loaded."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "ops.bench.bare", str(model), *options),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env=worker_environment(),
        limit=1 << 24,
    )
    assert process.stdout is not None
    await process.stdout.readline()
    try:
        yield Bare(process)
    finally:
        process.kill()
        await process.wait()


class Hearth:
    """A running server."""

    def __init__(self, port: int, process: psutil.Process, started_s: float) -> None:
        self.port = port
        self._process = process
        self.started_s = started_s
        """Seconds from exec to a model that is ready."""

    @property
    def pid(self) -> int:
        return self._process.pid

    def cpu_s(self) -> float:
        """User and system seconds of the server process, without its workers."""
        times = self._process.cpu_times()
        return times.user + times.system


@contextlib.asynccontextmanager
async def hearth(
    model: Path,
    home: Path | None = None,
    others: Mapping[str, Path] | None = None,
    checkout: Path | None = None,
    *,
    key: str = "",
    **settings: float | str | Sequence[str],
) -> AsyncGenerator[Hearth]:
    """Start `hearth serve` on a free port with `model`, and wait until it is ready.

    With a `home` of its own it finds what an earlier one left there. The model is named `bench`;
    `others` can be named as well. `checkout` is where its code lies, this one unless told; `key`
    is one of those in its settings, if it has any.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as temporary:
        folder = home or Path(temporary)
        lines = [f"{key} = {json.dumps(value)}" for key, value in settings.items()]
        lines += ['default_model = "bench"']
        for name, path in {"bench": model, **(others or {})}.items():
            lines += [f"[models.{name}]", f'path = "{path}"']
        (folder / "hearth.toml").write_text("\n".join(lines) + "\n")
        start = time.perf_counter()
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "api", "serve", "--port", str(port), "--home", str(folder)),
            cwd=checkout,
            env=os.environ | ({"PYTHONPATH": _path_of(checkout)} if checkout else {}),
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
        )
        try:
            await _ready(port, key)
            yield Hearth(port, psutil.Process(process.pid), time.perf_counter() - start)
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGTERM)
            await process.wait()


def _path_of(checkout: Path) -> str:
    """Where packages are looked for: there before what was said."""
    return os.pathsep.join([str(checkout), *filter(None, [os.environ.get("PYTHONPATH")])])


async def _ready(port: int, key: str) -> None:
    deadline = time.monotonic() + _READY_S
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError):
            if await asyncio.to_thread(_is_ready, port, key):
                return
        await asyncio.sleep(0.05)
    raise TimeoutError(f"the server did not become ready within {_READY_S:g} s")


def _is_ready(port: int, key: str) -> bool:
    url = f"http://127.0.0.1:{port}/health/ready"
    asking = urllib.request.Request(url, headers={"x-api-key": key} if key else {})
    try:
        with urllib.request.urlopen(asking, timeout=5) as answer:  # noqa: S310
            return answer.status == 200
    except urllib.error.HTTPError as refusal:
        refusal.close()
        return False
