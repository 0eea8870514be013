"""aider as its users install it, with the lines of its page in `docs/clients`."""

from __future__ import annotations

import asyncio
import shlex
import subprocess
from pathlib import Path

import pytest

from tests.clients.conftest import MODEL
from tests.clients.python_clients import environment_with
from tests.documents import ROOT, blocks
from tests.running_server import RunningServer
from tests.waiting import until

pytestmark = [pytest.mark.soak, pytest.mark.timeout(1200)]

AIDER = "aider-chat==0.86.2"


def documented(server: RunningServer) -> str:
    """The commands of its page, with this server and its model in the place of the reader's."""
    page = ROOT / "docs" / "clients" / "aider.md"
    (text,) = (one.text for one in blocks("sh") if one.page == page)
    return text.replace("127.0.0.1:8420", f"127.0.0.1:{server.port}").replace("qwen", MODEL)


def num_answered(server: RunningServer) -> int:
    return server.stderr.count("POST /v1/chat/completions")


@pytest.fixture(scope="module")
def aider(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The program, in an environment of its own."""
    return environment_with(tmp_path_factory.mktemp("aider") / "venv", AIDER) / "aider"


@pytest.mark.parametrize("typed", ["", "Hello!\nAnd once more?\nAnd again.\n/exit\n"])
def test_it_answers_with_the_variables_of_its_page(
    tiny_server: RunningServer, tmp_path: Path, aider: Path, typed: str
) -> None:
    *exports, run = documented(tiny_server).strip().splitlines()
    words = [shlex.split(line, comments=True)[1] for line in exports]
    variables = dict(word.split("=", 1) for word in words)
    flags = "--yes-always --no-git --no-check-update --analytics-disable "
    flags += "--no-fancy-input" if typed else "--message 'Hello!'"
    before = num_answered(tiny_server)
    ended = subprocess.run(
        [aider, *shlex.split(run)[1:], *shlex.split(flags)],
        cwd=tmp_path,
        env={"HOME": str(tmp_path), "PATH": "/usr/bin:/bin", "TERM": "dumb", **variables},
        input=typed,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    num_turns = typed.count("\n") - 1 if typed else 1
    assert ended.stdout.count("Tokens:") == num_turns, ended.stdout
    num_all = before + num_turns
    asyncio.run(until(lambda: num_answered(tiny_server) >= num_all, "a line of each request"))
    assert num_answered(tiny_server) == num_all
