"""What is announced, named in the configuration or often asked for is warm before it is asked."""

from __future__ import annotations

import json
import shutil
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.agents import Agent
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


def test_only_so_many_prompts_can_be_announced(narrow_server: RunningServer):
    body = question("many " + SYSTEM, model=narrow_server.cold_model())
    views = [narrow_server.post("/v1/prewarm", body) for _ in range(5)]
    assert [one.status_code for one in views] == [202, 202, 202, 202, 429]
    assert "max_queue" in views[-1].json()["error"]["message"]
    cancel(narrow_server, views[:-1])
    again = narrow_server.post("/v1/prewarm", body)
    assert again.status_code == 202
    cancel(narrow_server, [again])


def cancel(server: RunningServer, views: Sequence[Any]) -> None:
    for one in views:
        path = f"/v1/prewarm/{one.json()['id']}"
        assert server.request("DELETE", path).status_code == 204


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


def reload(server: RunningServer) -> None:
    """Only what is on disk is left; nothing but what is pinned comes back by itself."""
    for action in ("unload", "load"):
        assert server.post(f"/admin/models/tiny/{action}", {}).status_code == 200


async def test_what_an_agent_or_a_response_goes_on_from_is_warm_before_it_goes_on(
    server: RunningServer,
):
    agent = Agent.made(server, system="agent " + SYSTEM, max_tokens=2)
    said = agent.say("Hello?")
    body = {"instructions": "response " + SYSTEM, "input": "Hello?", "max_output_tokens": 2}
    first = server.post("/v1/responses", body).json()
    reload(server)
    views: list[Any] = []

    def is_announced() -> bool:
        views.append(server.post("/v1/prewarm", {"agent_id": agent.id}).json())
        return views[-1]["prompt_tokens"] >= said.num_prompt_tokens - 1

    await until(is_announced, "the whole turn is on disk")
    assert views[-1]["status"] == "queued", views
    await until(lambda: agent.view()["status"] == "hot", "it is in memory")
    goes_on = {"instructions": body["instructions"], "previous_response_id": first["id"]}
    warm = await warmed(server, goes_on)
    assert warm["status"] == "completed", warm
    assert warm["prompt_tokens"] >= first["usage"]["input_tokens"]
    second = server.post("/v1/responses", body | goes_on | {"input": "And now?"}).json()
    cached = second["usage"]["input_tokens_details"]["cached_tokens"]
    assert cached >= first["usage"]["input_tokens"] - 1
    assert second["hearth"]["cache"]["tier"] == "hot"
    before = server.figure("hearth_cache_requests_total", tier="hot")
    again = agent.say("And now?")
    assert again.num_cached_tokens >= said.num_prompt_tokens - 1
    assert server.figure("hearth_cache_requests_total", tier="hot") == before + 1
    missing = server.post("/v1/prewarm", {"agent_id": "nobody"})
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "agent_not_found")


async def test_what_is_pinned_comes_back_with_its_model_until_the_pin_is_deleted(
    server: RunningServer,
):
    systems = {name: f"{name} pin " + SYSTEM for name in ("kept", "dropped")}
    views = {
        name: await warmed(server, {"messages": question(text)["messages"][:1], "pinned": True})
        for name, text in systems.items()
    }
    assert all(view["pinned"] for view in views.values())
    path = f"/v1/prewarm/{views['dropped']['id']}"
    assert server.request("DELETE", path).status_code == 204
    reload(server)
    await until(lambda: server.figure("hearth_kv_hot_bytes") > 0, "what is pinned is hot")
    assert asked(server, question(systems["dropped"]))[1] == "warm"
    cached, tier = asked(server, question(systems["kept"]))
    assert tier == "hot"
    assert cached > views["kept"]["prompt_tokens"] - 30
    path = f"/v1/prewarm/{views['kept']['id']}"
    assert server.request("DELETE", path).status_code == 204
    assert server.request("DELETE", "/v1/prewarm/unknown").status_code == 404


async def test_what_is_warmed_at_this_moment_can_be_cancelled_and_is_not_pinned(
    server: RunningServer,
):
    body = question("long " + SYSTEM * 2)
    view = server.post("/v1/prewarm", {"messages": body["messages"], "pinned": True}).json()
    path = f"/v1/prewarm/{view['id']}"
    await until(lambda: server.get(path).json()["status"] != "queued", "it has begun")
    assert server.request("DELETE", path).status_code == 204
    assert server.get(path).json()["status"] in ("cancelled", "completed")
    asked(server, body)  # whatever the worker did of it, it has told by now
    listing = server.get("/admin/cache").json()["conversations"]
    assert not any(one["is_pinned"] for one in listing)


async def test_what_cannot_be_warmed_is_counted_and_harms_nobody(server: RunningServer):
    before = server.figure("hearth_prewarm_total", outcome="failed")
    view = await warmed(server, {"messages": question(SYSTEM * 20)["messages"][:1]})
    assert view["status"] == "failed"
    assert server.figure("hearth_prewarm_total", outcome="failed") == before + 1
    assert asked(server, question("Hi"))[0] >= 0


async def test_what_is_asked_within_its_time_is_kept_alive(tmp_path: Path, models_dir: Path):
    config = CONFIG + "kv_ttl_s = 2.5\n"
    with running(tmp_path, "--models-dir", str(models_dir), config=config) as server:

        def is_kept_alive() -> bool:
            asked(server, question(SYSTEM))
            return server.figure("hearth_prewarm_total", source="kept") > 0

        await until(is_kept_alive, "a sweep", 30)


async def test_memory_only_kv_of_a_conversation_can_be_deleted(server: RunningServer):
    body = question("secret " + SYSTEM, session_id="memory-only", ttl=0)
    asked(server, body)
    assert asked(server, body)[1] == "hot"
    path = "/admin/cache/conversations?conversation=memory-only"
    assert server.request("DELETE", path).status_code == 200
    assert asked(server, body | {"cache_mode": "off"})[0] == 0
    again = server.post(CHAT, body).json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert again < 40


async def test_models_that_are_gone_or_too_large_keep_nothing_else_from_being_warmed(
    tmp_path: Path, models_dir: Path
):
    for name in ("tiny", "twin", "gone", "large"):
        shutil.copytree(models_dir / "tiny", tmp_path / "models" / name)
    config = CONFIG + "preload = []\nmax_queue = 2\n[models.large]\ncontext = 100_000_000_000\n"
    body = {"messages": [{"role": "system", "content": SYSTEM}]}
    with running(tmp_path, config=config) as server:
        for _ in range(3):  # none of them is remembered, or they would soon be too many
            refused = server.post("/v1/prewarm", body | {"model": "large", "load": True})
            assert refused.json()["error"]["code"] == "model_too_large"
        assert server.post("/v1/prewarm", body | {"model": "gone"}).status_code == 202
        shutil.rmtree(tmp_path / "models" / "gone")
        await until(lambda: "gone" not in names(server), "it is seen to be gone")
        await until_warm(server, server.post("/v1/prewarm", body | {"model": "twin"}).json())


def names(server: RunningServer) -> set[str]:
    """All models; the disk is looked at again for a name that nobody knows."""
    assert server.get("/v1/models/nobody").status_code == 404
    return {card["id"] for card in server.get("/v1/models").json()["data"]}


async def until_warm(server: RunningServer, view: dict[str, Any]) -> None:
    """Nobody loads its model for it; a request does."""
    assert view["status"] == "waiting"
    assert server.post(CHAT, question("", model=view["model"])).status_code == 200
    path = f"/v1/prewarm/{view['id']}"
    await until(lambda: server.get(path).json()["status"] == "completed", "it is warm")
