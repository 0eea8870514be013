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
from collections.abc import Generator
from pathlib import Path

import pytest

from api.version import VERSION
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


@pytest.fixture
def answering(installed: Path, outside: dict[str, str], tmp_path: Path) -> Generator[str]:
    """The address of `hearth serve` in that environment, started in an empty directory."""
    port = free_port()
    server = subprocess.Popen(
        [str(installed / "hearth"), "serve", "--port", str(port)],
        cwd=tmp_path,
        env=outside,
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


def test_a_wheel_serves_without_the_repository_and_beside_our_namesakes(answering: str) -> None:
    request = urllib.request.Request(f"{answering}/v1/chat/completions", json.dumps(HELLO).encode())
    request.add_header("content-type", "application/json")
    with urllib.request.urlopen(request, timeout=START_S) as answer:
        said = json.load(answer)
    assert said["choices"][0]["message"]["content"]


def test_a_wheel_brings_one_package_and_puts_nothing_beside_it(installed: Path) -> None:
    (record,) = installed.parent.glob("lib/python*/site-packages/hearth-*.dist-info/RECORD")
    tops = {line.split("/")[0] for line in record.read_text().splitlines()}
    assert tops == {"hearth", f"hearth-{VERSION}.dist-info", ".."}  # the last is bin/hearth
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
