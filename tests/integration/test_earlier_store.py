"""A server that starts on what an earlier release left keeps all but the KV, and says so."""

from __future__ import annotations

import shutil
from pathlib import Path

from tests.agents import Agent
from tests.running_server import COMPLETIONS, running
from tests.tiny_models import write_model
from tests.unit.test_earlier import leave_earlier


def test_it_is_set_aside_and_goes_with_what_is_deleted(tmp_path: Path):
    home, root = tmp_path / "home", tmp_path / "home" / "kv"
    write_model(tmp_path / "models" / "tiny")
    config = f'models_dir = "{tmp_path / "models"}"\ndefault_model = "tiny"\n'
    with running(home, config=config) as server:
        server.wait_for_the_store()
        agent = Agent.made(server, id="before", max_tokens=4)
        agent.say()
        server.stop()
    settings = {path: path.read_bytes() for path in home.iterdir() if path.suffix == ".toml"}
    for path in (*root.glob("index.db*"), root / "slots", root / "heads"):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    leave_earlier(root)
    aside = root / "format-2"

    with running(home, config=config) as server:
        server.wait_for_the_store()
        (line,) = [one for one in server.stderr.splitlines() if "earlier_store_set_aside" in one]
        assert str(aside) in line
        assert "num_bytes" in line
        assert list(aside.rglob("*.safetensors"))
        assert {path: path.read_bytes() for path in settings} == settings
        assert len(Agent(server, "before").turns()) == 1
        assert Agent(server, "before").say().text
        body = {"prompt": "the quick brown fox", "max_tokens": 2}
        for sessions, query in (("one", {"conversation": "one"}), ("two", None)):
            aside.mkdir(exist_ok=True)
            assert server.post(COMPLETIONS, body | {"session_id": sessions}).status_code == 200
            path = "/admin/cache/conversations" if query else "/admin/cache/all"
            answer = server.request("DELETE", path, params=query)
            assert answer.status_code == 200, answer.text
            assert not aside.exists()
