"""The README as a stranger follows it: `python -m ops.bench.readme`.

Every command of its shell blocks is typed as it stands, in their order, in a home that is empty:
first without any package at hand, then with the package cache that this left. Only REPOSITORY is
put in: this checkout, so that the last commit is what is cloned. Each step is timed, and left out
with a reason where it needs what is not here. Writes `readme.json`.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import select
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, NoReturn

import msgspec

from api.bench.machine import Environment, environment
from runtime.embedded import HEARTH_TINY
from tests.documents import ROOT, blocks

PORT = 8420
READY = "Hearth is ready at"
FIRST_ANSWER = "curl "
_REPORT = Path(__file__).parent / "readme.json"
_PATIENCE_S = 900.0
_NOT_HERE = {
    "hearth pull": "needs the Hugging Face hub",
    "--model mlx-community/": "needs the model of the step before",
    "MLX=cuda": "needs an NVIDIA GPU",
}
_SERVES = "make serve"
_PACKAGE_CACHES = ("uv", "pip")
_NOT_A_STRANGERS = (
    *("HEARTH_HOME", "HEARTH_CONFIG", "VIRTUAL_ENV", "PYTHONPATH", "PYTHONDONTWRITEBYTECODE"),
    *("XDG_CACHE_HOME", "XDG_CONFIG_HOME", "LD_LIBRARY_PATH", "MAKEFLAGS", "MAKELEVEL"),
)


class Step(msgspec.Struct):
    """One command of the README; `why` is the reason why it was left out, or what went wrong."""

    command: str
    outcome: Literal["done", "left out", "failed"]
    seconds: float | None = None
    why: str | None = None


class Round(msgspec.Struct):
    """The README once; the first answer is counted from the first command on."""

    package_cache: Literal["empty", "warm"]
    load_before: float
    first_answer_s: float | None
    steps: list[Step]


class Report(msgspec.Struct):
    """Where and how it was followed."""

    environment: Environment
    commit: str
    uv: str
    rounds: list[Round]


class Refused(Exception):
    """A command failed, or its terminal was closed; says what it wrote last."""


class Terminal:
    """A shell in which commands are typed."""

    def __init__(self, home: Path, folder: Path) -> None:
        forgotten = [word for name in _NOT_A_STRANGERS for word in ("-u", name)]
        self._folder = folder
        self._shell = subprocess.Popen(
            ["env", *forgotten, f"HOME={home}", "bash"],
            cwd=folder,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self._num_typed = 0
        self._unread = b""

    def type(self, command: str, until: str | None = None) -> float:
        """Seconds until the command is over, or until it has written a line that begins so.

        Raises:
            Refused: it failed, or ended without that line.
        """
        assert self._shell.stdin is not None
        self._num_typed += 1
        over = f"over-{self._num_typed}:"
        begun_s = time.perf_counter()
        self._shell.stdin.write(f"{command}\nprintf '\\n{over}%s\\n' $?\n".encode())
        self._shell.stdin.flush()
        last: list[str] = []
        for line in self._lines(begun_s + _PATIENCE_S):
            if until is not None and line.startswith(until):
                break
            if line.startswith(over):
                if until is None and line == f"{over}0":
                    break
                raise Refused("\n".join(last[-10:]))
            last.append(line)
        else:
            raise Refused("\n".join(last[-10:]))
        return time.perf_counter() - begun_s

    def _lines(self, deadline_s: float) -> Iterator[str]:
        """What it writes, line by line, until it is silent for good or too long."""
        assert self._shell.stdout is not None
        fd = self._shell.stdout.fileno()
        while True:
            line, is_whole, rest = self._unread.partition(b"\n")
            if is_whole:
                self._unread = rest
                yield line.decode(errors="replace").rpartition("\r")[2]
                continue
            if not select.select([fd], [], [], max(0.0, deadline_s - time.perf_counter()))[0]:
                return
            piece = os.read(fd, 65536)
            if not piece:
                return
            self._unread += piece

    def close(self) -> None:
        """Have what runs in it end as by Ctrl-C, and leave."""
        assert self._shell.stdin is not None
        self._shell.stdin.close()
        try:
            os.killpg(self._shell.pid, signal.SIGINT)  # the shell leads a group of its own
            self._shell.wait(60)
        except (ProcessLookupError, subprocess.TimeoutExpired):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._shell.pid, signal.SIGKILL)
            self._shell.wait()


def commands() -> list[str]:
    """The README's shell blocks, command by command; one that goes on in the next line is one."""
    texts = [block.text for block in blocks("sh") if block.page.name == "README.md"]
    lines = "".join(texts).replace("\\\n", "\0").splitlines()
    return [line.replace("\0", "\\\n") for line in lines if line.strip()]


class Stranger:
    """Somebody who has the README, a terminal to serve in and another one to ask in."""

    def __init__(self, home: Path, repository: Path) -> None:
        self._home = home
        self._clone = home / "hearth"
        self._repository = repository
        self._serving = Terminal(home, home)
        self._asking: Terminal | None = None

    def do(self, command: str) -> Step:
        """Type one command where somebody would."""
        why = next((why for word, why in _NOT_HERE.items() if word in command), None)
        if why is not None:
            return Step(command, "left out", why=why)
        try:
            return Step(command, "done", round(self._type(command), 2))
        except Refused as error:
            return Step(command, "failed", why=str(error))

    def _type(self, command: str) -> float:
        typed = command.replace("REPOSITORY", shlex.quote(str(self._repository)), 1)
        if typed.startswith(_SERVES):
            if self._asking is not None:
                self._restart()
            return self._serving.type(typed, until=READY)
        if not self._clone.exists():
            return self._serving.type(typed)
        if self._asking is None:
            self._asking = Terminal(self._home, self._clone)
        return self._asking.type(typed)

    def _restart(self) -> None:
        self._serving.close()
        self._serving = Terminal(self._home, self._clone)
        models = self._home / "models"
        if not models.exists():
            shutil.copytree(HEARTH_TINY, models / "a-model-of-mine")

    def leave(self) -> None:
        """Stop the server and close both terminals."""
        for terminal in (self._asking, self._serving):
            if terminal is not None:
                terminal.close()


def follow(home: Path, repository: Path, load: float) -> Round:
    """The README from its beginning to its end in this home, or until a step fails."""
    is_warm = (home / ".cache").exists()
    stranger, steps = Stranger(home, repository), list[Step]()
    try:
        for command in commands():
            steps.append(stranger.do(command))
            step = steps[-1]
            seconds = "" if step.seconds is None else f"{step.seconds:.1f} s"
            print(f"{step.outcome:>8} {seconds:>8}  {step.command.splitlines()[0]}", flush=True)
            if step.outcome == "failed":
                print(step.why)
                break
    finally:
        stranger.leave()
    return Round("warm" if is_warm else "empty", load, first_answer_s(steps), steps)


def first_answer_s(steps: list[Step]) -> float | None:
    """Seconds of all steps up to the first request, if that one was answered."""
    asked = [at for at, step in enumerate(steps) if step.command.startswith(FIRST_ANSWER)]
    if not asked or steps[asked[0]].outcome != "done":
        return None
    return round(sum(step.seconds or 0.0 for step in steps[: asked[0] + 1]), 2)


def tidy(home: Path) -> None:
    """Leave nothing in it but what the installers keep of packages."""
    cache = home / ".cache"
    others = (one for one in home.iterdir() if one != cache)
    kept = [cache / name for name in _PACKAGE_CACHES]
    for one in (*others, *(inside for inside in cache.iterdir() if inside not in kept)):
        shutil.rmtree(one) if one.is_dir() and not one.is_symlink() else one.unlink()


def is_free() -> bool:
    """Whether nothing listens where the README's commands ask."""
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", PORT)) != 0


def _leave(*_: object) -> NoReturn:
    sys.exit(1)


def main() -> None:
    """Follow the README as often as told, and write the report."""
    parser = argparse.ArgumentParser(prog="python -m ops.bench.readme", description=__doc__)
    parser.add_argument("--warm", type=int, default=3, help="rounds with a warm package cache")
    parser.add_argument("--json", type=Path, default=_REPORT)
    arguments = parser.parse_args()
    if not is_free():
        sys.exit(f"something listens on port {PORT}, where the README's commands ask: stop it")
    signal.signal(signal.SIGTERM, _leave)
    git = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(git, check=True, capture_output=True, text=True).stdout.strip()
    uv = "found on the path" if shutil.which("uv") else "fetched with pip"
    report = Report(environment(), commit, uv, [])
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        for _ in range(1 + arguments.warm):
            load = environment().load_before[0]
            report.rounds.append(follow(home, ROOT, load))
            print(f"first answer after {report.rounds[-1].first_answer_s} s, load {load}\n")
            tidy(home)
    arguments.json.write_bytes(msgspec.json.format(msgspec.json.encode(report)) + b"\n")
    sys.exit(any(step.outcome == "failed" for one in report.rounds for step in one.steps))


if __name__ == "__main__":
    main()
