"""aider as its users install it, with the lines of its page in `docs/clients`."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.clients.conftest import MODEL
from tests.documents import ROOT, blocks
from tests.running_server import RunningServer

pytestmark = [pytest.mark.soak, pytest.mark.timeout(1200)]

INSTALL_S = 900.0
AIDER = "aider-chat==0.86.2"


def documented(server: RunningServer) -> str:
    """The commands of its page, with this server and its model in the place of the reader's."""
    page = ROOT / "docs" / "clients" / "aider.md"
    (text,) = (one.text for one in blocks("sh") if one.page == page)
    return text.replace("127.0.0.1:8420", f"127.0.0.1:{server.port}").replace("qwen", MODEL)


def num_answered(server: RunningServer) -> int:
    return server.stderr.count("POST /v1/chat/completions")


def test_it_answers_with_the_variables_of_its_page(
    tiny_server: RunningServer, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    uv = Path(sys.executable).parent / "uv"
    folder = tmp_path_factory.mktemp("aider") / "venv"
    for command in (
        [uv, "venv", "--quiet", "--python", sys.executable, folder],
        [
            uv,
            "pip",
            "install",
            "--quiet",
            "--python",
            folder / "bin" / "python",
            "aider-chat==0.86.2",
        ],
    ):
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=INSTALL_S, check=False
        )
        if done.returncode:
            pytest.skip(f"aider cannot be installed: {done.stderr[-300:]}")
    *exports, run = documented(tiny_server).strip().splitlines()
    words = [shlex.split(line, comments=True)[1] for line in exports]
    variables = dict(word.split("=", 1) for word in words)
    flags = "--message 'Hello!' --yes-always --no-git --no-check-update --analytics-disable"
    before = num_answered(tiny_server)
    ended = subprocess.run(
        [folder / "bin" / "aider", *shlex.split(run)[1:], *shlex.split(flags)],
        cwd=tmp_path,
        env={"HOME": str(tmp_path), "PATH": "/usr/bin:/bin", "TERM": "dumb", **variables},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "Tokens:" in ended.stdout, ended.stdout
    assert num_answered(tiny_server) > before
