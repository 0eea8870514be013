"""As much of the Hugging Face hub as its client asks for one repository, on this machine."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from typing_extensions import override

COMMIT = "c" * 40
REPO = "org/tiny"
GATED = "org/gated"


class Hub(ThreadingHTTPServer):
    """Serves these files as `org/tiny`; weights only while `gives_weights` is set. `org/gated` is
    there for those only who accepted its terms.
    """

    daemon_threads = True

    def __init__(self, files: Mapping[str, bytes]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.files = files
        self.gives_weights = threading.Event()
        self.gives_weights.set()

    def variables(self, hf_home: Path) -> dict[str, str]:
        """The environment of a process that takes this for the hub."""
        return {
            "HF_ENDPOINT": f"http://127.0.0.1:{self.server_address[1]}",
            "HF_HOME": str(hf_home),
            "HF_HUB_OFFLINE": "0",
            "HF_HUB_DISABLE_XET": "1",
            "no_proxy": "127.0.0.1",
        }


class _Handler(BaseHTTPRequestHandler):
    server: Hub  # pyright: ignore[reportIncompatibleVariableOverride]

    @override
    def log_message(self, format: str, *args: object) -> None:
        return None

    def do_GET(self) -> None:
        files = self.server.files
        if self.path.startswith(f"/api/models/{REPO}/"):
            siblings = [{"rfilename": name, "size": len(files[name])} for name in files]
            info = {"id": REPO, "modelId": REPO, "sha": COMMIT, "siblings": siblings}
            is_tree = "/tree/" in self.path
            tree = [
                {"type": "file", "path": name, "size": len(body), "oid": _oid_of(body)}
                for name, body in files.items()
            ]
            self._say(json.dumps(tree if is_tree else info).encode(), "application/json")
        elif (name := self.path.rpartition("/")[2]) in files and REPO in self.path:
            if self.command == "GET" and name.endswith(".safetensors"):
                self.server.gives_weights.wait()
            self._say(files[name], "application/octet-stream")
        elif REPO in self.path:
            self.send_error(404)
        else:
            is_gated = GATED in self.path
            self.send_response(403 if is_gated else 401)
            self.send_header("x-error-code", "GatedRepo" if is_gated else "RepoNotFound")
            self.send_header("content-length", "0")
            self.end_headers()

    do_HEAD = do_GET  # noqa: N815

    def _say(self, body: bytes, kind: str) -> None:
        self.send_response(200)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(body)))
        self.send_header("etag", f'"{_oid_of(body)}"')
        self.send_header("x-repo-commit", COMMIT)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)


def _oid_of(body: bytes) -> str:
    return hashlib.sha1(body).hexdigest()


@contextmanager
def hub_of(files: Mapping[str, bytes]) -> Generator[Hub]:
    """A hub that has these files, until the block ends."""
    hub = Hub(files)
    thread = threading.Thread(target=hub.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        hub.gives_weights.set()
        hub.shutdown()
        hub.server_close()
