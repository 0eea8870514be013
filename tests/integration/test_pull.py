"""`hearth pull` from a hub on this machine: what it fetches, and that it says how far it is."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from typing_extensions import override

from tests.running_server import ROOT, environment

COMMIT = "c" * 40
FILES = {
    "config.json": b'{"model_type": "llama"}',
    "model.safetensors": bytes(1_000_000),
    "modeling.py": b"raise SystemExit",
}


class Hub(BaseHTTPRequestHandler):
    """As much of the Hugging Face hub as its client asks for one repository."""

    @override
    def log_message(self, format: str, *args: object) -> None:
        return None

    def do_GET(self) -> None:
        if self.path.startswith("/api/models/org/tiny/"):
            siblings = [{"rfilename": name, "size": len(FILES[name])} for name in FILES]
            info = {"id": "org/tiny", "modelId": "org/tiny", "sha": COMMIT, "siblings": siblings}
            is_tree = "/tree/" in self.path
            tree = [
                {"type": "file", "path": name, "size": len(body), "oid": oid_of(body)}
                for name, body in FILES.items()
            ]
            self._say(json.dumps(tree if is_tree else info).encode(), "application/json")
        elif (name := self.path.rpartition("/")[2]) in FILES and "org/tiny" in self.path:
            self._say(FILES[name], "application/octet-stream")
        else:
            self.send_error(404)

    do_HEAD = do_GET  # noqa: N815

    def _say(self, body: bytes, kind: str) -> None:
        self.send_response(200)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(body)))
        self.send_header("etag", f'"{oid_of(body)}"')
        self.send_header("x-repo-commit", COMMIT)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)


def oid_of(body: bytes) -> str:
    return hashlib.sha1(body).hexdigest()


@pytest.fixture
def hub() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()


def pull(repo: str, variables: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """In a process of its own: the hub's client reads its settings when it is imported."""
    return subprocess.run(
        [sys.executable, "-m", "api", "pull", repo, "--json"],
        env=environment(variables),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_a_model_is_pulled_with_signs_of_progress_and_without_its_code(hub: str, tmp_path: Path):
    variables = {"HF_ENDPOINT": hub, "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "0"}
    variables |= {"HF_HUB_DISABLE_XET": "1", "no_proxy": "127.0.0.1"}
    done = pull("org/tiny", variables)
    assert done.returncode == 0, done.stderr
    path = Path(json.loads(done.stdout)["path"])
    assert {one.name for one in path.iterdir()} == {"config.json", "model.safetensors"}
    assert (path / "model.safetensors").read_bytes() == FILES["model.safetensors"]
    assert "pull org/tiny: download" in done.stderr
    missing = pull("org/other", variables)
    assert (missing.returncode, missing.stdout) == (1, "")
    assert "cannot be fetched" in missing.stderr


def test_who_has_no_network_reads_what_to_do(tmp_path: Path):
    away = {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "0"}
    for variables in (away, away | {"HF_HUB_OFFLINE": "1"}):
        done = pull("org/tiny", variables)
        assert (done.returncode, done.stdout) == (1, "")
        assert "the hub cannot be reached" in done.stderr
        assert "[models.NAME] path" in done.stderr
