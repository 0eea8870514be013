"""The wheel, installed as a stranger does it: without the repository, beside our namesakes."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import sysconfig
import urllib.request
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from runtime.version import VERSION
from tests.running_server import ROOT, START_S, environment, free_port

OURS = ("api", "runtime", "store", "migrations")
HELLO = {"model": "hearth-tiny", "messages": [{"role": "user", "content": "Hello!"}]}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(command, check=True, cwd=ROOT, capture_output=True)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The `bin` of an environment with the wheel, what it depends on, and four namesakes.

    What it depends on is found where this test finds it; a path file's packages come last, and
    path files in it are not read, so that no checkout is on the path.
    """
    folder = tmp_path_factory.mktemp("environment") / "venv"
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "--no-deps", "--no-index"]
    subprocess.run([*pip, "--quiet", str(wheel)], check=True)
    (site,) = folder.glob("lib/python*/site-packages")
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    for name in OURS:
        (site / name).mkdir()
        (site / name / "__init__.py").write_text(f"raise ImportError('another {name} was found')\n")
    return folder / "bin"


@pytest.fixture
def outside(tmp_path: Path) -> dict[str, str]:
    """The environment of a user with an empty home, in whose path nothing of ours is."""
    kept = environment({"HOME": str(tmp_path), "HEARTH_HOME": str(tmp_path / "home")})
    return {name: value for name, value in kept.items() if name != "PYTHONPATH"}


@contextmanager
def serving(command: Sequence[str], env: Mapping[str, str], folder: Path) -> Generator[str]:
    """The address of `hearth serve`, started by that command in this directory."""
    port = free_port()
    server = subprocess.Popen(
        [*command, "serve", "--port", str(port)],
        cwd=folder,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    assert server.stdout is not None
    try:
        assert select.select([server.stdout], [], [], START_S)[0]
        assert b"hearth-tiny" in server.stdout.readline()
        yield f"http://127.0.0.1:{port}"
        server.send_signal(signal.SIGTERM)
        assert server.wait(START_S) == 0
    finally:
        server.kill()
        server.wait()
        server.stdout.close()


def answer_of(url: str) -> str:
    """What the embedded model says to a greeting."""
    request = urllib.request.Request(f"{url}/v1/chat/completions", json.dumps(HELLO).encode())
    request.add_header("content-type", "application/json")
    with urllib.request.urlopen(request, timeout=START_S) as answer:
        return json.load(answer)["choices"][0]["message"]["content"]


def test_a_wheel_serves_without_the_repository_and_beside_our_namesakes(
    installed: Path, outside: dict[str, str], tmp_path: Path
) -> None:
    with serving([str(installed / "hearth")], outside, tmp_path) as url:
        assert answer_of(url)


def test_a_wheel_brings_one_package_and_puts_nothing_beside_it(installed: Path) -> None:
    (record,) = installed.parent.glob("lib/python*/site-packages/hearth-*.dist-info/RECORD")
    files = [line.split(",")[0] for line in record.read_text().splitlines()]
    tops = {file.split("/")[0] for file in files}
    assert tops == {"hearth", f"hearth-{VERSION}.dist-info", ".."}  # the last is bin/hearth
    rooms = {file.split("/")[2] for file in files if file.startswith("hearth/app/")}
    assert rooms == {"api", "runtime", "store", "migrations"}
    files = {line.split(",")[0] for line in record.read_text().splitlines()}
    assert "hearth/py.typed" in files
    assert f"hearth-{VERSION}.dist-info/licenses/LICENSE" in files


def test_the_installed_command_tells_its_version(installed: Path, outside: dict[str, str]) -> None:
    done = subprocess.run(
        [str(installed / "hearth"), "--version"],
        env=outside,
        cwd=os.sep,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == f"hearth {VERSION}\n"


class Stranger:
    """Somebody with an empty home, Python, and the wheel; a package index brings the rest."""

    def __init__(self, wheel: Path, folder: Path, env: Mapping[str, str]) -> None:
        self.wheel = str(wheel)
        self.folder = folder
        self.env = dict(env) | {"PATH": f"{folder / 'tools' / 'bin'}:{env['PATH']}"}

    def run(self, *command: str) -> None:
        """Do it where nothing of ours is."""
        done = subprocess.run(
            command, env=self.env, cwd=self.folder, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr

    def has_index(self) -> bool:
        """Whether a package can be had here."""
        place = ("-d", str(self.folder / "probe"))
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "-q", *place, "idna"]
        return subprocess.run(command, env=self.env, cwd=self.folder, check=False).returncode == 0

    def get(self, tool: str) -> None:
        """Have `uv` or `pipx` in an environment of its own."""
        self.run(sys.executable, "-m", "venv", "tools")
        self.run("tools/bin/python", "-m", "pip", "install", "-q", tool)

    def by_pip(self) -> list[str]:
        """The command of a venv into which pip installed the wheel."""
        self.run(sys.executable, "-m", "venv", "venv")
        self.run("venv/bin/python", "-m", "pip", "install", "-q", self.wheel)
        return ["venv/bin/hearth"]

    def by_uv(self) -> list[str]:
        """That of one into which uv did."""
        self.get("uv")
        self.run("uv", "venv", "-q", "venv", "--python", sys.executable)
        self.run("uv", "pip", "install", "-q", "--python", "venv/bin/python", self.wheel)
        return ["venv/bin/hearth"]

    def by_uvx(self) -> list[str]:
        """Without installing it."""
        self.get("uv")
        return ["uvx", "--python", sys.executable, "--from", self.wheel, "hearth"]

    def by_pipx(self) -> list[str]:
        """The same."""
        self.get("pipx")
        return ["pipx", "run", "--spec", self.wheel, "hearth"]


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("way", ["pip", "uv", "uvx", "pipx"])
def test_a_wheel_with_what_it_depends_on_serves_from_an_empty_home(
    way: str, wheel: Path, outside: dict[str, str], tmp_path: Path
) -> None:
    stranger = Stranger(wheel, tmp_path, outside)
    if not stranger.has_index():
        pytest.skip("no package index can be reached")
    by: dict[str, Callable[[], list[str]]] = {
        "pip": stranger.by_pip,
        "uv": stranger.by_uv,
        "uvx": stranger.by_uvx,
        "pipx": stranger.by_pipx,
    }
    command = by[way]()
    stranger.run(*command, "--version")  # uvx and pipx install it with that
    with serving(command, stranger.env, tmp_path) as url:
        assert answer_of(url)
