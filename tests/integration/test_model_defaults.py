"""What a model's settings say where a request does not, and what a request says in other words."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from runtime.keys import digest_of
from tests.running_server import CHAT, COMPLETIONS, RunningServer, running
from tests.tiny_models import CHAT_TEMPLATE

SAID = "{% if preserve_thinking %}KEPT {% endif %}"
KEPT = "/admin/cache/conversations"
ASKED: list[dict[str, Any]] = [{"role": "user", "content": "hi"}]
COUNTS = {"messages": ASKED, "model": "own"}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, models_dir: Path) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("models")
    shutil.copytree(models_dir / "tiny", folder / "own")
    (folder / "own" / "chat_template.jinja").write_text(SAID + CHAT_TEMPLATE)
    config = (
        f'models_dir = "{folder}"\ndefault_model = "own"\n[models.own]\nmax_tokens = 5\n'
        "[models.own.template]\npreserve_thinking = true\n"
    )
    with running(tmp_path_factory.mktemp("home"), config=config) as server:
        yield server


def text_of(server: RunningServer, **fields: Any) -> str:
    """What the model reads."""
    answer = server.post("/admin/prompt/explain", COUNTS | fields).json()
    return "".join(part["text"] for part in answer["parts"])


def test_a_template_has_its_models_arguments_and_a_request_has_the_last_word(
    server: RunningServer,
):
    assert "KEPT" in text_of(server)
    assert "KEPT" in text_of(server, chat_template_kwargs={"other": 1})
    assert "KEPT" not in text_of(server, chat_template_kwargs={"preserve_thinking": False})


@pytest.mark.parametrize(
    ("path", "body", "at"),
    [
        (CHAT, {"messages": ASKED, "ignore_eos": True}, ("usage", "completion_tokens")),
        (COMPLETIONS, {"prompt": "a fox", "ignore_eos": True}, ("usage", "completion_tokens")),
        ("/v1/responses", {"input": "a fox", "ignore_eos": True}, ("usage", "output_tokens")),
        ("/api/chat", {"messages": ASKED, "stream": False}, ("eval_count",)),
    ],
)
def test_an_answer_is_as_long_as_its_model_has_them_unless_it_is_said(
    server: RunningServer, path: str, body: dict[str, Any], at: tuple[str, ...]
):
    found: Any = server.post(path, {"model": "own"} | body).json()
    for key in at:
        found = found[key]
    assert found == 5


def test_an_agents_id_names_a_chats_conversation(server: RunningServer):
    for name, named in {
        "planner": {"agent_id": "planner"},
        "writer": {"extra_body": {"agent_id": "writer"}},
    }.items():
        asked = [{"role": "user", "content": f"{name}: the quick brown fox. " * 30}]
        server.post(CHAT, {"messages": asked, "max_tokens": 1} | named)
        for status in (200, 404):
            gone = server.request("DELETE", KEPT, params={"conversation": name})
            assert gone.status_code == status


def test_an_agent_is_spelled_in_one_way_everywhere(server: RunningServer):
    made = server.post("/v1/agents", {"agent_id": "one", "model": "own"}).json()
    assert "hearth" not in made
    listed = server.get("/v1/agents").json()
    for one in (made, *listed["data"], *listed["agents"]):
        assert one["id"] == one["agent_id"] == "one"
        assert one["tokens"] == one["context_tokens"]
        assert one["last_used_at"] is not None
        assert one["last_accessed"].endswith("Z")


def test_health_tells_what_readiness_does(server: RunningServer):
    health, ready = server.get("/health").json(), server.get("/health/ready").json()
    assert health["status"] == "live"
    for name in ("models", "agents", "pools"):
        assert health[name] == ready[name]
    assert server.get("/health/live").json() == {"status": "live"}


def test_health_tells_nobody_without_a_key_more_than_that_it_lives(tmp_path: Path):
    config = f'[api_keys]\nann = "{digest_of("hearth-ann")}"\n'
    with running(tmp_path, config=config) as server:
        assert server.get("/health").json() == {"status": "live"}
        headers = {"authorization": "Bearer hearth-ann"}
        assert server.request("GET", "/health", headers=headers).json()["models"]


def test_a_clock_that_makes_thoughts_unknown_is_told_of(server: RunningServer):
    def asked(clock: str, *more: dict[str, Any]) -> dict[str, Any]:
        system = {"role": "system", "content": f"It is {clock}. You are brief."}
        body = {"model": "hearth-tiny", "session_id": "clock", "enable_thinking": True}
        messages = [system, {"role": "user", "content": "What is the kettle?"}, *more]
        return server.post(CHAT, body | {"messages": messages, "max_tokens": 60}).json()

    said = asked("10:23")["choices"][0]["message"]
    assert said["reasoning_content"]
    given_back = {"role": "assistant", "content": said["content"]}
    again = {"role": "user", "content": "And now?"}
    assert "notes" not in asked("10:23", given_back, again)["hearth"]
    assert asked("10:24", given_back, again)["hearth"]["notes"] == ["earlier_thoughts_unknown"]
