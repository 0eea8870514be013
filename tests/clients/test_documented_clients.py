"""Clients set up to the letter of their pages in `docs/clients`: one question each."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.clients.conftest import MODEL
from tests.clients.node_clients import installed
from tests.documents import ROOT, blocks
from tests.running_server import RunningServer

pytestmark = [pytest.mark.soak, pytest.mark.timeout(1200)]

PAGES = ROOT / "docs" / "clients"
INSTALL_S = 900.0
AIDER = "aider-chat==0.86.2"


def documented(page: str, kind: str, server: RunningServer) -> str:
    """The block of a page, with this server and its model in the place of the reader's."""
    (text,) = (one.text for one in blocks(kind) if one.page == PAGES / page)
    return text.replace("127.0.0.1:8420", f"127.0.0.1:{server.port}").replace("qwen", MODEL)


def num_answered(server: RunningServer) -> int:
    return server.stderr.count("POST /v1/chat/completions")


def test_opencode_answers_with_the_file_of_its_page(
    tiny_server: RunningServer, tmp_path: Path
) -> None:
    opencode = installed("opencode", "opencode-ai@1.18.33")
    program = next(opencode.folder.glob("node_modules/opencode-*/bin/opencode"))
    config = tmp_path / ".config" / "opencode" / "opencode.json"
    config.parent.mkdir(parents=True)
    config.write_text(documented("opencode.md", "json", tiny_server))
    ended = subprocess.run(
        [program, "run", "--format", "json", "Hello!"],
        cwd=tmp_path,
        env=opencode.environment(tmp_path)
        | {"OPENCODE_DISABLE_MODELS_FETCH": "1", "OPENCODE_DISABLE_AUTOUPDATE": "1"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    events = [json.loads(line) for line in ended.stdout.splitlines() if line.startswith("{")]
    assert [one["part"]["reason"] for one in events if one["type"] == "step_finish"] == ["stop"]
    assert any(one["type"] == "text" for one in events), ended.stdout + ended.stderr


def test_aider_answers_with_the_variables_of_its_page(
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
    *exports, run = documented("aider.md", "sh", tiny_server).strip().splitlines()
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
