"""What the operator sees and asks over HTTP: models loaded and unloaded, requests cancelled."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.canaries import plant
from tests.running_server import CHAT, COMPLETIONS, RunningServer, hearth, running, streaming
from tests.tiny_models import write_model
from tests.waiting import until

SHORT: dict[str, Any] = {"model": "tiny", "prompt": "a kettle", "max_tokens": 2}
USER = {"role": "user", "content": "a kettle"}
LONG: dict[str, Any] = SHORT | {"max_tokens": 3500, "ignore_eos": True}


@pytest.fixture(scope="module")
def operated(tmp_path_factory: pytest.TempPathFactory, models_dir: Path) -> Iterator[RunningServer]:
    """A server with nothing loaded, room for one model, and signs of life all the time."""
    home = tmp_path_factory.mktemp("operated")
    config = f"""
models_dir = "{models_dir}"
preload = []
max_loaded_models = 1
keep_alive_s = 0.2
[models.tiny]
aliases = ["small"]
"""
    with running(home, config=config) as server:
        yield server
        assert "Traceback" not in server.stderr


def act(server: RunningServer, model: str, action: str) -> httpx.Response:
    return server.request("POST", f"/admin/models/{model}/{action}")


def states(server: RunningServer) -> dict[str, str]:
    return {one["id"]: one["state"] for one in server.get("/running").json()["models"]}


def test_a_model_is_loaded_by_an_alias_shown_and_unloaded(operated: RunningServer) -> None:
    loaded = act(operated, "small", "load")
    assert (loaded.status_code, loaded.json()["id"], loaded.json()["state"]) == (
        200,
        "tiny",
        "ready",
    )
    (shown,) = operated.get("/running").json()["models"]
    assert shown["pid"] == operated.worker_pid()
    assert 800 < shown["expires_in_s"] <= 900
    assert shown["reserved_bytes"] > shown["size_bytes"] > 0
    card = operated.get("/v1/models/tiny").json()
    assert (card["state"], card["aliases"]) == ("ready", ["small"])
    assert act(operated, "tiny", "unload").status_code == 200
    assert asyncio.run(until(lambda: states(operated) == {}, "nothing is loaded")) < 10


def test_what_can_be_named_is_listed_with_its_state_and_looking_wakes_nothing(
    operated: RunningServer,
) -> None:
    starts = operated.figure("hearth_worker_starts_total")
    cards = {card["id"]: card for card in operated.get("/v1/models").json()["data"]}
    assert {"tiny", "twin", "hearth-tiny"} <= cards.keys()
    assert all(card["size_bytes"] > 0 and card["context"] > 0 for card in cards.values())
    assert cards["tiny"]["capabilities"] == ["completion", "chat", "tools"]
    for path in ("/health/ready", "/running", "/v1/models/twin", "/metrics"):
        assert operated.get(path).status_code in (200, 503)
    assert operated.figure("hearth_worker_starts_total") == starts


def test_mistakes_are_named(operated: RunningServer) -> None:
    unknown = act(operated, "nobody", "load")
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "model_not_found")
    wrong = act(operated, "tiny", "explode")
    assert wrong.status_code == 400
    assert "load, unload, pin, unpin, restart" in wrong.json()["error"]["message"]
    missing = operated.request("POST", "/admin/requests/nobody/cancel")
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "request_not_found")


CHATS = {
    CHAT: {"messages": [USER]},
    COMPLETIONS: {"prompt": "a kettle"},
    "/v1/messages": {"messages": [USER], "max_tokens": 2},
    "/v1/embeddings": {"input": "a kettle"},
    "/api/chat": {"messages": [USER]},
}


def test_a_directory_that_cannot_be_used_is_listed_with_what_it_lacks(tmp_path: Path) -> None:
    models = tmp_path / "models"
    wrong = {
        "config.json": "cannot be read: No such file",
        "tokenizer.json": "has no tokenizer",
        "model.safetensors": "has no weights",
    }
    for name in wrong:
        (write_model(models / f"no-{name}") / name).unlink()
    (write_model(models / "broken") / "config.json").write_text("{")
    (models / "notes").mkdir()
    (models / "notes" / "README.md").touch()
    settings = f'models_dir = "{models}"\n[models.gone]\nrepo = "some/where"\n'
    with running(tmp_path / "home", config=settings) as server:
        found = {one["id"]: one for one in server.get("/v1/models").json()["refused"]}
        where = {"HEARTH_HOME": str(server.home), "HEARTH_PORT": str(server.port)}
        told = hearth("models", **where).stdout.splitlines()
        asked = server.post(CHAT, CHATS[CHAT] | {"model": "broken"}).json()["error"]
    reasons = {f"no-{name}": why for name, why in wrong.items()}
    reasons |= {"broken": "is not valid JSON", "gone": "hearth pull some/where"}
    assert found.keys() == reasons.keys()
    for name, why in reasons.items():
        assert why in found[name]["reason"]
        assert f"cannot be used: {name}: {found[name]['reason']}" in told
    assert (asked["code"], "is not valid JSON" in asked["message"]) == (
        found["broken"]["code"],
        True,
    )


def test_a_model_with_code_of_its_own_is_listed_as_refused_and_never_run(tmp_path: Path) -> None:
    """Also one that got its code after it was listed."""
    folders = {name: tmp_path / "models" / name for name in ("evil", "turning")}
    for folder in folders.values():
        plant(write_model(folder))
    config = json.loads((folders["evil"] / "config.json").read_text())
    asking = json.dumps(config | {"model_file": "canary.py"})
    (folders["evil"] / "config.json").write_text(asking)
    settings = f'models_dir = "{tmp_path / "models"}"\n[aliases]\nnice = "evil"\n'
    with running(tmp_path / "home", config=settings) as server:
        listed = server.get("/v1/models").json()
        assert {"evil", "nice"}.isdisjoint(card["id"] for card in listed["data"])
        why = "its config.json has it computed by code of its own, 'canary.py'"
        nice = f"it is an alias of evil, which cannot be used: {why}"
        assert listed["refused"] == [
            {"id": "evil", "code": "model_needs_own_code", "reason": why},
            {"id": "nice", "code": "model_needs_own_code", "reason": nice},
        ]
        for path, body in CHATS.items():
            for name in ("evil", "nice"):
                answer = server.post(path, body | {"model": name})
                assert answer.status_code == 404
                assert why in answer.text
        error = server.post(CHAT, CHATS[CHAT] | {"model": "evil"}).json()["error"]
        assert (error["code"], error["param"]) == ("model_needs_own_code", "model")
        (folders["turning"] / "config.json").write_text(asking)
        answer = server.post(CHAT, CHATS[CHAT] | {"model": "turning"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "model_load_failed")
        assert why in answer.json()["error"]["message"]
    assert list(tmp_path.rglob("*.ran")) == []


def test_a_pinned_model_keeps_the_others_out_until_it_is_unpinned(operated: RunningServer) -> None:
    assert act(operated, "tiny", "load").status_code == 200
    assert act(operated, "tiny", "pin").json()["pinned"]
    refused = operated.post(COMPLETIONS, SHORT | {"model": "twin"})
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "no_room")
    assert int(refused.headers["retry-after"]) <= 60
    assert not act(operated, "tiny", "unpin").json()["pinned"]
    assert operated.post(COMPLETIONS, SHORT | {"model": "twin"}).status_code == 200
    assert states(operated) == {"twin": "ready"}


def test_a_restart_replaces_the_process(operated: RunningServer) -> None:
    pid = act(operated, "twin", "load").json()["pid"]
    again = act(operated, "twin", "restart").json()
    assert again["state"] == "ready"
    assert again["pid"] != pid


def expires_in_s(server: RunningServer) -> float | None:
    (shown,) = server.get("/running").json()["models"]
    return shown["expires_in_s"]


def gone(server: RunningServer) -> bool:
    asyncio.run(until(lambda: states(server) == {}, "nothing is loaded"))
    return True


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (COMPLETIONS, SHORT),
        (CHAT, {"model": "tiny", "messages": [USER], "max_tokens": 2}),
        ("/v1/responses", {"model": "tiny", "input": "a kettle", "max_output_tokens": 2}),
        ("/v1/messages", {"model": "tiny", "messages": [USER], "max_tokens": 2}),
        ("/api/chat", {"model": "tiny", "messages": [USER], "options": {"num_predict": 2}}),
        ("/api/generate", {"model": "tiny"}),
    ],
)
def test_a_request_says_how_long_its_model_stays(
    operated: RunningServer, path: str, body: dict[str, Any]
) -> None:
    def ask(keep_alive: float | str) -> None:
        answer = operated.post(path, body | {"stream": False, "keep_alive": keep_alive})
        assert answer.status_code == 200, answer.text

    ask("2h")
    assert 7100 < (expires_in_s(operated) or 0) <= 7200
    ask(-1)
    assert expires_in_s(operated) is None
    ask(0)
    assert gone(operated)


def test_a_model_that_was_let_go_at_once_stays_when_it_is_loaded_again(
    operated: RunningServer,
) -> None:
    assert operated.post(COMPLETIONS, SHORT | {"keep_alive": 0}).status_code == 200
    assert gone(operated)
    assert act(operated, "tiny", "load").json()["state"] == "ready"
    assert 800 < (expires_in_s(operated) or 0) <= 900
    assert act(operated, "tiny", "unload").status_code == 200
    assert gone(operated)


def test_what_is_not_loaded_is_not_loaded_to_be_let_go(operated: RunningServer) -> None:
    starts = operated.figure("hearth_worker_starts_total")
    left = operated.post("/api/generate", {"model": "tiny", "keep_alive": 0})
    assert left.json()["done_reason"] == "unload"
    assert operated.figure("hearth_worker_starts_total") == starts


async def test_a_request_is_cancelled_by_either_of_its_ids(operated: RunningServer) -> None:
    async with streaming(operated, COMPLETIONS, LONG) as stream:
        first = await stream.next_event()
        cancelled = operated.request("POST", f"/admin/requests/{first['id']}/cancel")
        assert cancelled.json() == {"id": first["id"], "num_cancelled": 1}
        assert (await stream.rest())[-1]["error"]["code"] == "cancelled"
    async with operated.client() as client:
        headers = {"x-request-id": "mine"}
        waiting = asyncio.create_task(client.post(COMPLETIONS, json=LONG, headers=headers))
        await until(lambda: operated.figure("hearth_running") == 1, "the request runs")
        assert operated.request("POST", "/admin/requests/mine/cancel").status_code < 300
        answer = await waiting
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "cancelled")
    assert answer.headers["x-should-retry"] == "false"


async def test_a_request_is_cancelled_while_its_model_loads(operated: RunningServer) -> None:
    body = LONG | {"model": operated.cold_model()}
    with operated.slow_loads():
        async with streaming(operated, COMPLETIONS, body) as stream:
            assert await stream.next()  # a comment: it has not begun
            request_id = stream.response.headers["x-request-id"]
            cancelled = operated.request("POST", f"/admin/requests/{request_id}/cancel")
            assert cancelled.status_code < 300
            assert (await stream.rest())[-1]["error"]["code"] == "cancelled"
    assert any("loading" in one or "queued" in one for one in stream.comments)


@contextmanager
def feed(server: RunningServer) -> Generator[Iterator[tuple[str, Any]]]:
    """The events of `/admin/events`, by name."""
    with server.stream("GET", "/admin/events") as response:
        assert response.status_code == 200

        def read() -> Iterator[tuple[str, Any]]:
            name = ""
            for line in response.iter_lines():
                if line.startswith("event: "):
                    name = line.removeprefix("event: ")
                elif line.startswith("data: "):
                    yield name, json.loads(line.removeprefix("data: "))

        yield read()


def test_every_transition_is_told_to_whoever_listens(operated: RunningServer) -> None:
    model = operated.cold_model()
    with feed(operated) as events:
        name, running_models = next(events)
        assert name == "running"
        assert model not in [one["id"] for one in running_models["models"]]
        assert operated.post(COMPLETIONS, SHORT | {"model": model}).status_code == 200
        path = ["cold"]
        while path[-1] != "busy":
            name, step = next(events)
            assert name == "transition"
            if step["model"] == model:
                assert step["before"] == path[-1]
                path.append(step["after"])
    assert path == [
        *("cold", "waiting_for_memory", "spawning", "loading", "warming", "ready", "busy")
    ]


def test_transitions_are_counted(operated: RunningServer) -> None:
    def num_loads() -> float:
        return operated.figure("hearth_model_transitions_total", model="tiny", state="loading")

    before = num_loads()
    assert act(operated, "tiny", "restart").status_code == 200
    assert num_loads() == before + 1


def test_listeners_do_not_keep_a_server_from_leaving(tmp_path: Path, models_dir: Path) -> None:
    config = f'models_dir = "{models_dir}"\npreload = []\nstop_timeout_s = 30\n'
    with running(tmp_path, config=config) as server, feed(server) as events:
        next(events)
        assert server.stop(20) == 0
        assert list(events) == []


def test_the_settings_of_a_tokenizer_are_those_of_its_files(
    server: RunningServer, models_dir: Path
) -> None:
    told = server.get("/tokenizer_info?model=tiny").json()
    files = json.loads((models_dir / "tiny" / "tokenizer_config.json").read_bytes())
    assert told["tokenizer_class"] == files["tokenizer_class"]
    assert told["eos_token"] == files["eos_token"]
    jinja = models_dir / "tiny" / "chat_template.jinja"
    template = jinja.read_text() if jinja.exists() else files["chat_template"]
    assert told["chat_template"] == template
    assert str(models_dir) not in json.dumps(told)
    assert server.get("/tokenizer_info?model=nope").status_code == 404
