"""What is announced, named in the configuration or often asked for is warm before it is asked."""

from __future__ import annotations

import json
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from tests.running_server import CHAT, RunningServer, running
from tests.waiting import until

SYSTEM = " ".join(f"Rule {number}: be kind to boat number {number}." for number in range(60))
OTHER = " ".join(f"Law {number}: never sell the lamp number {number}." for number in range(60))
TOOL = {"name": "row", "description": "Row a boat.", "input_schema": {"type": "object"}}
CONFIG = 'default_model = "tiny"\nprewarm_share = 0\nblock_size = 16\n'


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, models_dir: Path) -> Generator[RunningServer]:
    home = tmp_path_factory.mktemp("prewarm")
    with running(home, "--models-dir", str(models_dir), config=CONFIG) as server:
        yield server


def question(system: str, text: str = "Hello?", **fields: Any) -> dict[str, Any]:
    messages = [{"role": "system", "content": system}, {"role": "user", "content": text}]
    return {"messages": messages, "max_tokens": 2, "temperature": 0} | fields


def asked(server: RunningServer, body: dict[str, Any]) -> tuple[int, str]:
    """How many tokens were cached, and where."""
    response = server.post(CHAT, body)
    assert response.status_code == 200, response.text
    answer = response.json()
    cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    return cached, answer["hearth"]["cache"]["tier"]


async def warmed(server: RunningServer, body: dict[str, Any], path: str = "/v1/prewarm") -> Any:
    response = server.post(path, body)
    assert response.status_code == 202, response.text
    view = response.json()

    def is_over() -> bool:
        state = server.get(f"/v1/prewarm/{view['id']}").json()
        view.update(state)
        return state["status"] in ("completed", "failed")

    await until(is_over, "it is warm")
    return view


async def test_an_announced_system_prompt_is_warm_for_its_first_request(server: RunningServer):
    system = "announced " + SYSTEM
    view = await warmed(server, {"messages": [{"role": "system", "content": system}]})
    assert (view["status"], view["tier"], view["cached_tokens"]) == ("completed", "none", 0)
    cached, tier = asked(server, question(system))
    assert tier == "hot"
    assert cached > view["prompt_tokens"] - 30


async def test_messages_are_warm_to_their_end(server: RunningServer):
    body = question("whole " + SYSTEM, "A long question about boats. " * 20)
    view = await warmed(server, body)
    cached, _ = asked(server, body)
    assert cached == view["prompt_tokens"] - 1


async def test_anthropics_shape_is_known(server: RunningServer):
    view = await warmed(server, {"system": "claude " + SYSTEM, "tools": [TOOL]})
    assert view["status"] == "completed"
    body = {
        "max_tokens": 2,
        "system": "claude " + SYSTEM,
        "tools": [TOOL],
        "messages": [{"role": "user", "content": "Hello?"}],
    }
    usage = server.post("/v1/messages", body).json()["usage"]
    assert usage["cache_read_input_tokens"] > view["prompt_tokens"] - 30


async def test_and_that_of_responses(server: RunningServer):
    body = {"instructions": "codex " + SYSTEM, "input": "Hello?"}
    view = await warmed(server, body)
    usage = server.post("/v1/responses", body | {"max_output_tokens": 2}).json()["usage"]
    assert usage["input_tokens_details"]["cached_tokens"] == view["prompt_tokens"] - 1


def test_what_cannot_be_warmed_is_refused_by_its_field(server: RunningServer):
    response = server.post("/v1/prewarm", {})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "messages"
    body = question(SYSTEM, pinned=True, ttl=60)
    assert server.post("/v1/prewarm", body).json()["error"]["param"] == "ttl"
    assert server.get("/v1/prewarm/unknown").status_code == 404


async def test_a_cold_model_is_not_woken_unless_that_is_asked(server: RunningServer):
    body = question(SYSTEM, model="twin")
    view = server.post("/v1/prewarm", body).json()
    assert view["status"] == "waiting"
    states = {card["id"]: card["state"] for card in server.get("/v1/models").json()["data"]}
    assert states["twin"] == "cold"
    loaded = await warmed(server, body | {"load": True})
    assert loaded["status"] == "completed"
    await until(
        lambda: server.get(f"/v1/prewarm/{view['id']}").json()["status"] == "completed",
        "what waited is warm as well",
    )


def prefix_files(server: RunningServer) -> list[Path]:
    return [path for path in (server.home / "kv" / "prefixes").glob("*/*") if path.is_file()]


async def test_what_is_often_asked_is_warm_after_a_restart_and_gone_when_deleted(
    tmp_path: Path, models_dir: Path
):
    flags = ("--models-dir", str(models_dir))
    with running(tmp_path, *flags, config=CONFIG) as server:
        for number in range(3):
            body = question(OTHER, f"Question {number}?", session_id="lamps")
            asked(server, body)
    with running(tmp_path, *flags, config=CONFIG) as server:
        (path,) = prefix_files(server)
        assert path.stat().st_mode & 0o777 == 0o600
        assert path.parent.stat().st_mode & 0o777 == 0o700
        await until(
            lambda: server.figure("hearth_prewarm_total", source="learned") == 1, "it is learned"
        )
        cached, tier = asked(server, question(OTHER, "Something new?"))
        assert tier == "hot"
        assert cached > 500
        assert server.figure("hearth_prewarm_hits_total") == 1
        assert b"never sell the lamp" not in (tmp_path / "kv" / "index.db").read_bytes()
        assert "never sell the lamp" not in server.stderr
        response = server.request("DELETE", "/admin/cache/models?model=tiny")
        assert response.status_code == 200, response.text
        assert prefix_files(server) == []
    with running(tmp_path, *flags, config=CONFIG) as server:
        assert prefix_files(server) == []
        assert server.figure("hearth_prewarm_total") == 0


async def test_prefixes_of_the_configuration_are_warm_and_pinned(tmp_path: Path, models_dir: Path):
    body = {"system": SYSTEM, "tools": [TOOL]}
    (tmp_path / "agent.json").write_text(json.dumps(body))
    prewarm = f'["agent.json", "missing.json", {{ system = "inline {SYSTEM}" }}]'
    config = CONFIG + f"[models.tiny]\nprewarm = {prewarm}\n"
    with running(tmp_path, "--models-dir", str(models_dir), config=config) as server:
        await until(
            lambda: server.figure("hearth_prewarm_total", source="config") == 2, "they are warm"
        )
        assert "prewarm_file_unusable" in server.stderr

        def is_pinned() -> bool:
            listing = server.get("/admin/cache").json()["conversations"]
            return any(one["is_pinned"] for one in listing)

        await until(is_pinned, "its slots are pinned")
        assert asked(server, question("inline " + SYSTEM))[1] == "hot"


async def test_memory_only_kv_of_a_conversation_can_be_deleted(server: RunningServer):
    body = question("secret " + SYSTEM, session_id="memory-only", ttl=0)
    asked(server, body)
    assert asked(server, body)[1] == "hot"
    path = "/admin/cache/conversations?conversation=memory-only"
    assert server.request("DELETE", path).status_code == 200
    assert asked(server, body | {"cache_mode": "off"})[0] == 0
    again = server.post(CHAT, body).json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert again < 40
