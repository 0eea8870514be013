"""A machine that gives little, and one with other people on it: bounded, and on loopback only."""

from __future__ import annotations

import os
import resource
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Generator, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.running_server import running, started

NOBODY = 65534
FEW_FILES = 256  # what a shell of macOS lets a program open
NUM_STRANGERS = 400
ASK = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root may become somebody else")


@contextmanager
def few_files() -> Generator[None]:
    """What is started meanwhile may open few files."""
    before, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (FEW_FILES, most))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (before, most))


def config_of(models_dir: Path) -> str:
    return f'models_dir = "{models_dir}"\ndefault_model = "tiny"\n'


def test_more_connections_than_files_may_be_open_keep_nobody_out(tmp_path: Path, models_dir: Path):
    with ExitStack() as stack:
        with few_files():
            config = config_of(models_dir)
            server = stack.enter_context(started(tmp_path, config=config, is_fresh=True))
            server.wait_until_ready()
        strangers = [stack.enter_context(socket.socket()) for _ in range(NUM_STRANGERS)]
        for number, one in enumerate(strangers):
            one.settimeout(10)
            one.connect(("127.0.0.1", server.port))
            one.sendall(b"GET / HTTP/1.1\r\nHost: loc" if number % 2 else b"")
        assert server.get("/health/live").status_code == 200
        assert server.post("/v1/chat/completions", ASK).status_code == 200
        assert server.get("/health/ready").json()["cache"] == "ok"
        for one in strangers:
            one.close()
        assert server.post("/v1/chat/completions", ASK).status_code == 200
        assert server.stop() == 0
        assert "Traceback" not in server.stderr


@pytest.fixture
def open_place() -> Iterator[Path]:
    """A directory that everybody may enter, as the parents of a home are."""
    place = Path(tempfile.mkdtemp(prefix="hearth-"))
    place.chmod(0o755)
    yield place
    shutil.rmtree(place)


def found_by_nobody(home: Path) -> list[str]:
    """What another account of the machine can read or enter below a home."""
    finding = ["find", str(home), "-readable", "-o", "-type", "d", "-executable"]
    them: dict[str, Any] = {"user": NOBODY, "group": NOBODY, "extra_groups": ()}
    found = subprocess.run(finding, check=False, capture_output=True, text=True, **them)
    return found.stdout.splitlines()


@as_root
def test_another_account_of_the_machine_reads_nothing_of_a_home(open_place: Path, models_dir: Path):
    """Not even in one that its owner lets everybody enter, but for what he put there himself."""
    home = open_place / "home"
    home.mkdir()
    ours = {str(home), str(home / "hearth.toml"), str(home / "stderr.txt")}
    with running(home, config=config_of(models_dir)) as server:
        assert server.post("/v1/chat/completions", ASK).status_code == 200
        assert server.post("/v1/agents", {"id": "kept", "model": "tiny"}).status_code < 300
        body = {"model": "tiny", "input": "hi", "max_output_tokens": 4}
        assert server.post("/v1/responses", body).status_code == 200
        assert (home / "admin.token").exists()
        assert set(found_by_nobody(home)) == ours
    assert set(found_by_nobody(home)) == ours


@as_root
def test_a_home_that_is_made_is_its_owners_alone(open_place: Path, models_dir: Path):
    home = open_place / "home"
    with running(open_place, config=config_of(models_dir), HEARTH_HOME=str(home)):
        assert (home / "admin.token").exists()
        assert found_by_nobody(home) == []
