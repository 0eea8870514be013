"""One server under test as processes: started, asked whether it is there, stopped, killed."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import NamedTuple

import psutil

from api.bench.ask import AskFailed, Target, ask
from api.bench.recipes import Recipe, RecipeError, fill, fill_all
from api.bench.texts import short_question
from runtime.environment import blas_environment

_READY_S = 180.0
_STOP_S = 60.0
_POLL_S = 0.05
_LOG_TAIL = 800
_FIRST, _SECOND = "first", "second"


class Models(NamedTuple):
    """What is loaded: a folder with `first` and `second` in it, or repositories by name."""

    folder: Path
    first: str
    second: str

    def values(self) -> dict[str, str]:
        """What recipes say for them."""
        one, other = (self._path(word) for word in (self.first, self.second))
        names = {"name": self.first, "second_name": self.second}
        return names | {"models": str(self.folder), "model": one, "second": other}

    def _path(self, word: str) -> str:
        path = self.folder / word
        return str(path) if path.exists() else word


def lay_out(folder: Path, model: str, second: str | None) -> Models:
    """Put both models under a name of their own; without a second one it is a copy of the first.

    A link to the first would be the same model to a server that looks where its files are, and
    nothing would be swapped.
    """
    first = _link(folder / _FIRST, model)
    if second is None and first != model:
        shutil.copytree(folder / _FIRST, folder / _SECOND, copy_function=_copy)
        return Models(folder, first, _SECOND)
    return Models(folder, first, _link(folder / _SECOND, second or model))


def _copy(source: str, target: str) -> None:
    """The same file twice where the disk can do that; weights are large."""
    try:
        os.link(os.path.realpath(source), target)
    except OSError:
        shutil.copy2(source, target)


def _link(place: Path, model: str) -> str:
    directory = Path(model).expanduser()
    if not (directory / "config.json").is_file():
        return model
    place.symlink_to(directory.resolve())
    return place.name


class Peer:
    """A server of a recipe. Start it before anything else."""

    def __init__(self, recipe: Recipe, models: Models, home: Path, venvs: Path) -> None:
        self.recipe = recipe
        self._home = home
        self._values = models.values() | {
            "home": str(home),
            "python": sys.executable,
            "venv": str(venvs / recipe.name),
        }
        self._process: subprocess.Popen[bytes] | None = None
        self._cpu_s: dict[int, float] = {}

    @property
    def log(self) -> Path:
        """What it prints."""
        return self._home / "log.txt"

    @property
    def can_restart(self) -> bool:
        return bool(self.recipe.start)

    @property
    def pid(self) -> int | None:
        """Its first process, while there is one that was started here."""
        process = self._process
        return None if process is None else process.pid

    @property
    def target(self) -> Target:
        return self._target(self.recipe.model)

    @property
    def second(self) -> Target | None:
        return None if self.recipe.second is None else self._target(self.recipe.second)

    def _target(self, model: str) -> Target:
        url = fill(self.recipe.url, self._values)
        return Target(url, fill(model, self._values), self.recipe.body, self.recipe.key)

    def start(self) -> float:
        """Start it and wait until it answers; seconds. Raises RecipeError or AskFailed."""
        begun = time.perf_counter()
        if self.can_restart:
            self._launch()
        self._wait_until_ready()
        ask(self.target, short_question(0).messages, 4)
        return time.perf_counter() - begun

    def _launch(self) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self._values["port"] = str(free.getsockname()[1])
        self._home.mkdir(parents=True, exist_ok=True)
        for name, text in self.recipe.files.items():
            (self._home / name).write_text(fill(text, self._values))
        own = {name: fill(text, self._values) for name, text in self.recipe.env.items()}
        environ = dict(os.environ) | blas_environment("auto", os.environ) | own
        command = fill_all(self.recipe.start, self._values)
        try:
            with self.log.open("ab") as log:
                self._process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env=environ,
                    start_new_session=True,
                )
        except OSError as error:
            hint = " --install installs it." if self.recipe.install else ""
            why = f"{command[0]} cannot be started: {error.strerror}.{hint}"
            raise RecipeError(why) from error

    def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + _READY_S
        while time.monotonic() < deadline:
            if self._process is not None and self._process.poll() is not None:
                raise RecipeError(f"{self.recipe.name} ended: {self._log_tail()}")
            if self._is_ready():
                return
            time.sleep(_POLL_S)
        raise RecipeError(f"{self.recipe.name} was not ready after {_READY_S:.0f} s.")

    def _is_ready(self) -> bool:
        if self.recipe.ready is None:
            try:
                ask(self.target, short_question(0).messages, 1)
            except AskFailed:
                return False
            return True
        url = fill(self.recipe.ready, self._values)
        try:
            with urllib.request.urlopen(url, timeout=5) as answer:  # noqa: S310
                return answer.status == 200
        except urllib.error.HTTPError as refusal:
            refusal.close()
        except OSError:
            pass
        return False

    def stop(self) -> None:
        """Ask it to leave, and see that nothing of it stays."""
        if self._process is not None:
            self._end(signal.SIGTERM)

    def kill(self) -> None:
        """`kill -9`, to all of it at once."""
        if self._process is not None:
            self._end(signal.SIGKILL)

    def _end(self, how: signal.Signals) -> None:
        assert self._process is not None
        family = self._family()
        if how is signal.SIGTERM:
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_STOP_S)
        for one in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                one.kill()
        self._process.wait()
        psutil.wait_procs(family, timeout=10)
        self._process = None

    def cpu_s(self) -> float:
        """User and system seconds of all its processes so far, as far as they were seen alive."""
        for one in self._family():
            with contextlib.suppress(psutil.Error):
                times = one.cpu_times()
                self._cpu_s[one.pid] = times.user + times.system
        return sum(self._cpu_s.values())

    def resident_bytes(self) -> int:
        """Memory of all its processes; what they share counts in each."""
        total = 0
        for one in self._family():
            with contextlib.suppress(psutil.Error):
                total += one.memory_info().rss
        return total

    def written_bytes(self) -> int | None:
        """What its processes had the system write to disks so far, since this start of it.

        Ended processes count in the one that waited for them. None where the system does not tell.
        """
        if sys.platform != "linux":
            return None
        total = 0
        for one in self._family():
            with contextlib.suppress(psutil.Error):
                total += one.io_counters().write_bytes
        return total

    def _family(self) -> list[psutil.Process]:
        pid = self.pid
        if pid is None:
            return []
        try:
            parent = psutil.Process(pid)
            return [parent, *parent.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def _log_tail(self) -> str:
        return self.log.read_text(errors="replace")[-_LOG_TAIL:]

    def install(self) -> None:
        """Make its environment, unless it is there, whole or not at all. Raises RecipeError."""
        venv = Path(self._values["venv"])
        if not self.recipe.install or venv.exists():
            return
        with contextlib.ExitStack() as unless_whole:
            unless_whole.callback(shutil.rmtree, venv, ignore_errors=True)
            for command in self.recipe.install:
                self._do(fill_all(command, self._values))
            unless_whole.pop_all()

    def _do(self, words: list[str]) -> None:
        try:
            ended = subprocess.run(words, capture_output=True, text=True, check=False)
        except OSError as error:
            why = f"{words[0]} cannot be run: {error.strerror}"
            raise RecipeError(f"{self.recipe.name} cannot be installed: {why}") from error
        if ended.returncode:
            message = ended.stderr[-_LOG_TAIL:]
            raise RecipeError(f"{self.recipe.name} cannot be installed: {message}")
