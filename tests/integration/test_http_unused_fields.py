"""Every route that takes a body names what of it nobody knows, at every depth."""

from __future__ import annotations

import random
from collections.abc import Generator
from typing import Any

import pytest

from tests.integration.test_http_embeddings import write_pooling
from tests.running_server import RunningServer, running
from tests.tiny_models import write_model
from tests.whole_bodies import ANTHROPIC, BODIES, CHAT, RESPONSES, places, with_fields

ROUTES = [
    ("POST", "/v1/chat/completions", "chat"),
    ("POST", "/v1/completions", "completions"),
    ("POST", "/v1/responses", "responses"),
    ("POST", "/v1/responses/input_tokens", "responses"),
    ("POST", "/v1/responses/compact", "responses"),
    ("POST", "/v1/conversations", "conversation"),
    ("POST", "/v1/conversations/one", "conversation_change"),
    ("POST", "/v1/conversations/one/items", "conversation_items"),
    ("POST", "/v1/messages", "messages"),
    ("POST", "/v1/messages/count_tokens", "messages"),
    ("POST", "/v1/embeddings", "embeddings"),
    ("POST", "/tokenize", "tokenize"),
    ("POST", "/detokenize", "detokenize"),
    ("POST", "/api/chat", "ollama_chat"),
    ("POST", "/api/generate", "ollama_generate"),
    ("POST", "/v1/agents", "agent"),
    ("PATCH", "/v1/agents/one", "agent"),
    ("POST", "/v1/agents/one/fork", "fork"),
    ("POST", "/v1/agents/one/generate", "agent_generate"),
    ("POST", "/v1/cache/hints", "hints"),
    ("POST", "/v1/prewarm", "chat"),
    ("POST", "/v1/prewarm", "responses"),
    ("POST", "/v1/prewarm", "messages"),
    ("POST", "/admin/prompt/explain", "chat"),
    ("POST", "/admin/prompt/explain", "messages"),
]
WITHOUT_BODY = frozenset(
    {
        *("/admin/cache/gc", "/admin/cache/verify", "/admin/history/acknowledge"),
        *("/admin/dashboard/conversations/prewarm", "/admin/dashboard/sign-out"),
        *("/admin/models/{target}", "/admin/requests/{request_id}/cancel"),
        *("/v1/agents/{agent_id}/reset", "/v1/responses/{response_id}/cancel"),
        *("/responses/{response_id}/cancel", "/admin/cache/pin"),
    }
)
"""They read none: what is sent there is told by the path."""
FOR_OPERATORS = frozenset(
    {"/admin/cache/import", "/admin/history/restore", "/admin/dashboard/sign-in", "/api/show"}
)
"""Their bodies have one field or two, and their answers no `hearth`."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Generator[RunningServer]:
    folder = tmp_path_factory.mktemp("models")
    path = write_model(folder / "mean", seed=3)
    write_pooling(path, {"pooling_mode_mean_tokens": True}, is_normalised=False)
    with running(tmp_path_factory.mktemp("home"), HEARTH_MODELS_DIR=str(folder)) as server:
        assert server.post("/v1/agents", {"id": "one", "model": "hearth-tiny"}).status_code == 201
        yield server


def ignored_by(server: RunningServer, method: str, path: str, body: dict[str, Any]) -> set[str]:
    model = "mean" if "embeddings" in path else "hearth-tiny"
    if path.startswith("/v1/conversations/one"):
        path = path.replace("one", server.post("/v1/conversations", {}).json()["id"])
    response = server.request(method, path, json={"model": model, **body})
    assert response.status_code < 300, response.text
    return set(response.json().get("hearth", {}).get("ignored", []))


@pytest.mark.parametrize(("method", "path", "name"), ROUTES)
def test_every_route_names_every_unknown_field_at_every_depth(
    server: RunningServer, method: str, path: str, name: str
) -> None:
    body = BODIES[name].body
    usual = ignored_by(server, method, path, body)
    ways = random.Random(path).sample(places(body), k=min(30 - len(usual), len(places(body))))
    changed, expected = with_fields(
        body, {(way, "glow"): number for number, way in enumerate(ways)}
    )
    assert ignored_by(server, method, path, changed) - usual == expected


def test_no_route_that_takes_a_body_is_left_out(server: RunningServer) -> None:
    def plain(path: str) -> str:
        path = path.replace("{agent_id}", "one").replace("{conversation_id}", "one")
        return path.removeprefix("/v1")

    paths: dict[str, Any] = server.get("/schema/openapi.json").json()["paths"]
    taking = {path for path, kinds in paths.items() if kinds.keys() & {"post", "put", "patch"}}
    walked = {plain(path) for _, path, _ in ROUTES}
    walked |= {plain("/v1/agents/one/chat/completions")}
    left = {path for path in taking if plain(path) not in walked}
    assert left - WITHOUT_BODY - FOR_OPERATORS == set()


@pytest.mark.parametrize(
    ("path", "body"),
    [("/v1/chat/completions", CHAT), ("/v1/messages", ANTHROPIC), ("/v1/responses", RESPONSES)],
)
def test_a_stream_names_them_as_well_and_counts_what_is_too_much(
    server: RunningServer, path: str, body: dict[str, Any]
) -> None:
    many = {f"glow{number:02}": number for number in range(50)}
    asked = {"model": "hearth-tiny", **body, **many, "stream": True}
    text = server.request("POST", path, json=asked).text
    assert '"glow31"' in text
    assert '"glow32"' not in text
    assert '"18 more"' in text
