"""Tools of a model whose template has none, through every API: called, answered, taken up again."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest

from tests.running_server import CHAT, RunningServer, running
from tests.templates import GEMMA
from tests.tiny_models import write_model, write_tokenizer

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"at": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["at"],
}
LOOK: dict[str, Any] = {"name": "look", "description": "Look out.", "parameters": SCHEMA}
FUNCTION = {"type": "function", "function": LOOK}
SYSTEM, RESULT = "Be brief.", "rain falls"
NUM_TURNS = 3


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A server with a model whose roles must alternate, and whose vocabulary has no marks."""
    home = tmp_path_factory.mktemp("generic")
    folder = write_model(home / "models" / "gemma")
    words = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    write_tokenizer(folder, special_tokens=words, template=GEMMA)
    config = f'models_dir = "{home / "models"}"\ndefault_model = "gemma"\n'
    with running(home, config=config) as server:
        yield server
        assert "Traceback" not in server.stderr


class Said(NamedTuple):
    """What one answer called with, what it read of which so much was known, and what it said."""

    arguments: dict[str, Any]
    num_prompt: int
    num_cached: int
    num_output: int
    rules: set[str]


def rules_of(answer: dict[str, Any]) -> set[str]:
    return {one["rule"] for one in answer["hearth"]["prompt"]}


def asked(server: RunningServer, path: str, body: dict[str, Any]) -> dict[str, Any]:
    response = server.post(path, {"model": "gemma"} | body)
    assert response.status_code in (200, 201), response.text
    return response.json()


def chat(server: RunningServer) -> Iterator[Said]:
    messages: list[Any] = [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": "What, asks chat, do you see?"},
    ]
    while True:
        body = {"messages": messages, "tools": [FUNCTION], "tool_choice": "required"}
        answer = asked(server, CHAT, body)
        (choice,), usage = answer["choices"], answer["usage"]
        assert choice["finish_reason"] == "tool_calls"
        (call,) = choice["message"]["tool_calls"]
        yield Said(
            json.loads(call["function"]["arguments"]),
            usage["prompt_tokens"],
            usage["prompt_tokens_details"]["cached_tokens"],
            usage["completion_tokens"],
            rules_of(answer),
        )
        result = {"role": "tool", "tool_call_id": call["id"], "content": RESULT}
        messages += [choice["message"], result]


def responses(server: RunningServer) -> Iterator[Said]:
    items: list[Any] = [{"role": "user", "content": "Responses ask: what is it?"}]
    while True:
        body: dict[str, Any] = {"instructions": SYSTEM, "input": items, "store": False}
        body |= {"tools": [{"type": "function"} | LOOK], "tool_choice": "required"}
        answer = asked(server, "/v1/responses", body)
        (call,), usage = answer["output"], answer["usage"]
        yield Said(
            json.loads(call["arguments"]),
            usage["input_tokens"],
            usage["input_tokens_details"]["cached_tokens"],
            usage["output_tokens"],
            rules_of(answer),
        )
        result = {"type": "function_call_output", "call_id": call["call_id"], "output": RESULT}
        items += [call, result]


def messages_api(server: RunningServer) -> Iterator[Said]:
    messages: list[Any] = [{"role": "user", "content": "Messages wonder."}]
    tool = {"name": "look", "description": "Look out.", "input_schema": SCHEMA}
    while True:
        body: dict[str, Any] = {"system": SYSTEM, "messages": messages, "max_tokens": 100}
        body |= {"tools": [tool], "tool_choice": {"type": "any"}}
        answer = asked(server, "/v1/messages", body)
        (call,), usage = answer["content"], answer["usage"]
        num_cached = usage["cache_read_input_tokens"]
        num_new = usage["input_tokens"] + (usage["cache_creation_input_tokens"] or 0)
        yield Said(
            call["input"],
            num_new + num_cached,
            num_cached,
            usage["output_tokens"],
            rules_of(answer),
        )
        result = {"type": "tool_result", "tool_use_id": call["id"], "content": RESULT}
        messages += [
            {"role": "assistant", "content": answer["content"]},
            {"role": "user", "content": [result]},
        ]


def agents(server: RunningServer) -> Iterator[Said]:
    own = {"system": SYSTEM, "tools": [FUNCTION], "tool_choice": "required"}
    agent = asked(server, "/v1/agents", own)["id"]
    messages: list[Any] = [{"role": "user", "content": "An agent looks."}]
    while True:
        answer = asked(server, f"/v1/agents/{agent}/generate", {"messages": messages})
        (call,) = answer["choices"][0]["message"]["tool_calls"]
        usage = answer["usage"]
        yield Said(
            json.loads(call["function"]["arguments"]),
            usage["prompt_tokens"],
            usage["prompt_tokens_details"]["cached_tokens"],
            usage["completion_tokens"],
            rules_of(answer),
        )
        messages = [{"role": "tool", "tool_call_id": call["id"], "content": RESULT}]


@pytest.mark.parametrize("protocol", [chat, responses, messages_api, agents])
def test_turn_after_turn_of_forced_calls_is_taken_up_to_the_token(
    gemma: RunningServer, protocol: Callable[[RunningServer], Iterator[Said]]
) -> None:
    turns = protocol(gemma)
    before: Said | None = None
    for number in range(NUM_TURNS):
        said = next(turns)
        assert said.arguments.keys() == {"at"}
        assert said.rules >= {"generic_tools"} | ({"generic_calls"} if number else set())
        if before is not None:
            assert said.num_cached == before.num_prompt + before.num_output, number
        before = said


def test_history_with_calls_is_shown_through_ollama(gemma: RunningServer) -> None:
    call = {"function": {"name": "look", "arguments": {"at": 7}}}
    messages = [
        {"role": "user", "content": "What is outside?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_name": "look", "content": RESULT},
    ]
    options = {"num_predict": 2}
    answer = asked(
        gemma,
        "/api/chat",
        {"messages": messages, "tools": [FUNCTION], "stream": False, "options": options},
    )
    assert rules_of(answer) >= {"generic_tools", "generic_calls"}
    body = {"model": "gemma", "messages": messages, "tools": [FUNCTION]}
    explained = gemma.post("/admin/prompt/explain", body).json()
    text = "".join(part["text"] for part in explained["parts"])
    assert '<tool_call>\n{"name": "look", "arguments": {"at": 7}}\n</tool_call>' in text
    assert f"<tool_response>\n{RESULT}\n</tool_response>" in text
    rules = [rule for part in explained["parts"] for rule in part["rules"]]
    assert {"generic_tools", "generic_calls"} <= set(rules)


def test_how_a_model_is_shown_tools_is_said(gemma: RunningServer) -> None:
    cards = {card["id"]: card for card in gemma.get("/v1/models").json()["data"]}
    assert (cards["gemma"]["tools"], cards["hearth-tiny"]["tools"]) == ("generic", "native")
    assert cards["gemma"]["capabilities"] == ["completion", "chat", "tools"]
    shown = gemma.post("/api/show", {"model": "gemma"}).json()
    assert (shown["tools"], "tools" in shown["capabilities"]) == ("generic", True)


THINKS: list[tuple[str, dict[str, Any], list[str]]] = [
    (CHAT, {"reasoning_effort": "high"}, ["reasoning_effort"]),
    (CHAT, {"reasoning": {"level": "high"}}, ["reasoning"]),
    (CHAT, {"metadata": {"reasoning": {"level": "high"}}}, ["metadata.reasoning"]),
    (CHAT, {"enable_thinking": False}, []),
    ("/v1/messages", {"thinking": {"type": "enabled", "budget_tokens": 1024}}, ["thinking"]),
    ("/v1/messages", {}, []),
    ("/api/chat", {"think": True, "stream": False}, ["think"]),
]


@pytest.mark.parametrize(("path", "changes", "ignored"), THINKS)
def test_a_wish_for_thinking_that_a_model_cannot_have_is_named(
    gemma: RunningServer, path: str, changes: dict[str, Any], ignored: list[str]
) -> None:
    body = {"messages": [{"role": "user", "content": "Hm?"}]} | changes
    body |= {"options": {"num_predict": 2}} if path == "/api/chat" else {"max_tokens": 2000}
    body |= {"max_tokens": 2} if path == CHAT else {}
    assert asked(gemma, path, body)["hearth"].get("ignored", []) == ignored
