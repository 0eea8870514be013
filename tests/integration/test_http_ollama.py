"""Ollama's protocol against a running server."""

from __future__ import annotations

import json
from collections.abc import Generator
from typing import Any

import pytest

from tests.running_server import RunningServer, running

GREEDY = {"temperature": 0}
USER = {"role": "user", "content": "Hello!"}
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the current weather in a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
        },
    },
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Generator[RunningServer]:
    with running(tmp_path_factory.mktemp("home")) as server:
        yield server


def lines(server: RunningServer, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    answer = server.post(path, body)
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("application/x-ndjson")
    return [json.loads(line) for line in answer.text.splitlines() if line]


def whole(server: RunningServer, path: str, body: dict[str, Any]) -> dict[str, Any]:
    answer = server.post(path, body | {"stream": False})
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_the_streamed_answer_is_the_whole_one_in_pieces(server: RunningServer):
    body = {"model": "hearth-tiny:latest", "messages": [USER], "options": GREEDY}
    *pieces, last = lines(server, "/api/chat", body)
    said = whole(server, "/api/chat", body)
    assert said["message"]["role"] == "assistant"
    assert "".join(piece["message"]["content"] for piece in pieces) == said["message"]["content"]
    assert not [piece for piece in pieces if piece["done"]]
    for end in (last, said):
        assert (end["done"], end["done_reason"], end["model"]) == (True, "stop", body["model"])
        assert end["prompt_eval_count"] > 0 < end["eval_count"]
        assert end["total_duration"] >= end["prompt_eval_duration"] > 0
    assert said["hearth"]["cache"]["cached_tokens"] > 0


def test_a_tool_call_comes_whole_with_its_arguments_as_an_object(server: RunningServer):
    question = {"role": "user", "content": "What is the weather in Paris?"}
    body = {
        "model": "hearth-tiny",
        "messages": [question],
        "tools": [TOOL],
        "think": False,
        "options": GREEDY,
    }
    calls = [
        call
        for piece in lines(server, "/api/chat", body)
        for call in piece["message"].get("tool_calls", ())
    ]
    assert [call["function"] for call in calls] == [
        {"name": "get_weather", "arguments": {"city": "Paris"}}
    ]
    assert (
        whole(server, "/api/chat", body)["message"]["tool_calls"][0]["function"]
        == calls[0]["function"]
    )


def test_one_prompt_is_answered_with_thinking_apart(server: RunningServer):
    body = {"model": "hearth-tiny", "prompt": "Hello!", "think": True, "options": GREEDY}
    said = whole(server, "/api/generate", body)
    assert said["response"]
    assert said["thinking"]
    pieces = lines(server, "/api/generate", body)
    assert "".join(piece.get("thinking", "") for piece in pieces) == said["thinking"]
    assert "".join(piece["response"] for piece in pieces) == said["response"]


def test_an_empty_request_loads_a_model(server: RunningServer):
    body = {"model": "hearth-tiny", "messages": []}
    assert whole(server, "/api/chat", body)["done_reason"] == "load"
    (loaded,) = server.get("/api/ps").json()["models"]
    assert loaded["name"] == "hearth-tiny"
    assert loaded["context_length"] > 1000


def test_a_model_that_is_to_stay_longer_than_there_are_dates_is_listed(server: RunningServer):
    body = {"model": "hearth-tiny", "messages": [], "keep_alive": 10**12}
    assert whole(server, "/api/chat", body)["done_reason"] == "load"
    (loaded,) = server.get("/api/ps").json()["models"]
    assert loaded["expires_at"] > "2030"


def test_models_are_listed_and_shown(server: RunningServer):
    names = [model["name"] for model in server.get("/api/tags").json()["models"]]
    assert "hearth-tiny" in names
    shown = server.post("/api/show", {"model": "hearth-tiny"}).json()
    assert "completion" in shown["capabilities"]
    assert shown["details"]["format"] == "mlx"
    assert server.get("/api/version").json()["version"]


def test_refusals_are_in_ollamas_words(server: RunningServer):
    for path, body, status in (
        ("/api/chat", {"model": "nobody", "messages": [USER]}, 404),
        ("/api/chat", {"model": "hearth-tiny", "messages": [USER], "keep_alive": "soon"}, 400),
        ("/api/generate", {"model": "hearth-tiny", "prompt": 7}, 400),
        ("/api/show", {}, 400),
        ("/api/nothing", {}, 404),
    ):
        answer = server.post(path, body)
        assert answer.status_code == status, (path, body, answer.text)
        assert list(answer.json()) == ["error"]
        assert isinstance(answer.json()["error"], str)


@pytest.mark.parametrize("path", ["/api/chat", "/api/generate"])
def test_what_has_no_effect_is_named_in_the_answer(path: str, server: RunningServer):
    body = {"model": "hearth-tiny", "messages": [USER]} if "chat" in path else {"prompt": "Hello!"}
    options = GREEDY | {"num_ctx": 8192, "num_gpu": 99}
    body |= {"model": "hearth-tiny", "options": options, "truncate": True}
    expected = ["truncate", "options.num_ctx", "options.num_gpu"]
    assert whole(server, path, body)["hearth"]["ignored"] == expected
    assert lines(server, path, body)[-1]["hearth"]["ignored"] == expected
    assert (
        "ignored"
        not in whole(server, path, {**body, "options": GREEDY, "truncate": None})["hearth"]
    )
