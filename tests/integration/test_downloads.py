"""Models of the settings that are not on this machine, downloaded where `allow_download` is on."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from runtime.embedded import HEARTH_TINY
from tests.hub import REPO, Hub, hub_of
from tests.running_server import CHAT, RunningServer, hearth, started
from tests.waiting import PATIENCE_S, until

FILES = {path.name: path.read_bytes() for path in HEARTH_TINY.iterdir() if path.is_file()}
CONFIG = f'allow_download = true\n[models.far]\nrepo = "{REPO}"\naliases = ["away"]\n'


@pytest.fixture
def hub() -> Generator[Hub]:
    with hub_of(FILES) as hub:
        yield hub


@contextmanager
def serving(home: Path, config: str, variables: Mapping[str, str]) -> Generator[RunningServer]:
    """In a process of its own: where the hub's cache is, is read at import."""
    with started(home, config=config, is_fresh=True, **variables) as server:
        server.wait_until_ready()
        yield server


def ask(server: RunningServer, model: str | None) -> Any:
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}
    return server.post(CHAT, body | ({"model": model} if model else {}))


def code_of(answer: Any) -> str:
    return answer.json()["error"]["code"]


def states_of(server: RunningServer) -> dict[str, str]:
    return {one["id"]: one["state"] for one in server.get("/v1/models").json()["data"]}


def downloads_of(server: RunningServer) -> list[psutil.Process]:
    found: list[psutil.Process] = []
    for one in psutil.Process(server.process.pid).children():
        with suppress(psutil.Error):
            found += [one] if "runtime.models.download" in one.cmdline() else []
    return found


async def test_a_model_of_the_settings_is_downloaded_when_a_request_names_it(
    hub: Hub, tmp_path: Path
):
    hub.gives_weights.clear()
    config = f"preload = []\n{CONFIG}"
    with serving(tmp_path / "home", config, hub.variables(tmp_path / "hf")) as server:
        assert f"; far is not here yet: {REPO} is downloaded when" in server.ready_line
        assert not downloads_of(server), "nobody asked for it"
        for name in ("far", "away", REPO):
            refused = ask(server, name)
            assert refused.status_code == 503
            assert code_of(refused) == "model_downloading"
            assert 5 <= int(refused.headers["retry-after"]) <= 60
        assert len(downloads_of(server)) == 1
        listed = {one["id"]: one["code"] for one in server.get("/v1/models").json()["refused"]}
        assert listed["far"] == "model_downloading"
        hub.gives_weights.set()
        await until(lambda: ask(server, "far").status_code == 200, "the model")
        assert ask(server, "away").json()["choices"][0]["message"]["content"]
        assert "model downloaded" in server.stderr


@pytest.mark.parametrize(
    ("config", "name"),
    [(CONFIG, "far"), (f'allow_download = true\ndefault_model = "{REPO}"\n', REPO)],
    ids=["first", "named"],
)
async def test_the_default_model_is_downloaded_and_loaded_without_a_request(
    config: str, name: str, hub: Hub, tmp_path: Path
):
    with serving(tmp_path / "home", config, hub.variables(tmp_path / "hf")) as server:
        await until(lambda: states_of(server).get(name) == "ready", "the model")
        assert states_of(server)["hearth-tiny"] == "cold"


async def test_a_download_that_fails_is_told_and_tried_again_later(tmp_path: Path):
    away = {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "0"}
    with serving(tmp_path / "home", f"preload = []\n{CONFIG}", away) as server:
        await until(lambda: code_of(ask(server, "far")) == "download_failed", "the failure")
        refused = ask(server, "far")
        assert refused.status_code == 503
        assert "the hub cannot be reached" in refused.json()["error"]["message"]
        assert 1 <= int(refused.headers["retry-after"]) <= 60
        assert ask(server, "hearth-tiny").status_code == 200


async def test_a_server_that_stops_ends_its_downloads(hub: Hub, tmp_path: Path):
    hub.gives_weights.clear()
    with serving(tmp_path / "home", CONFIG, hub.variables(tmp_path / "hf")) as server:
        await until(lambda: downloads_of(server), "the download")
        (download,) = downloads_of(server)
        assert server.stop() == 0
        assert not download.is_running()


async def test_a_download_ends_with_a_server_that_was_killed(hub: Hub, tmp_path: Path):
    hub.gives_weights.clear()
    with serving(tmp_path / "home", CONFIG, hub.variables(tmp_path / "hf")) as server:
        await until(lambda: downloads_of(server), "the download")
        (download,) = downloads_of(server)
        server.process.kill()
        download.wait(PATIENCE_S)


def test_what_may_be_downloaded_is_no_mistake(tmp_path: Path):
    (tmp_path / "hearth.toml").write_text(f'default_model = "far"\n{CONFIG}')
    done = hearth("config", "check", HEARTH_HOME=str(tmp_path), HF_HOME=str(tmp_path / "hf"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"far: {REPO} is downloaded when a request names it" in done.stdout
