"""The commands in the documentation, run as they stand against a server."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.documents import Block, blocks
from tests.running_server import RunningServer, environment, running

BLOCKS = [block for block in blocks("sh") if block.is_run]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A server that nobody configured."""
    with running(tmp_path_factory.mktemp("home")) as server:
        yield server


@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_what_the_pages_say_can_be_run(block: Block, server: RunningServer, tmp_path: Path) -> None:
    text = block.text
    for address in ("127.0.0.1:8420", "localhost:8420"):
        text = text.replace(address, f"127.0.0.1:{server.port}")
    (tmp_path / ".curlrc").write_text("fail\nno-progress-meter\n")
    own = {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "HOME": str(tmp_path),
        "HEARTH_HOME": str(server.home),
        "HEARTH_PORT": str(server.port),
    }
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", text],
        cwd=tmp_path,
        env=environment(own),
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
