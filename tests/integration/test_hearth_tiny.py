"""The embedded model over HTTP: what it recalls, calls and thinks shows that the path is whole."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.running_server import CHAT, RunningServer, events_of, running

CODE = "velvet-onyx-41"
READ_THE_FILE = {"role": "user", "content": "Read the file src/kettle/main.py."}


@pytest.fixture(scope="module")
def tiny_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A server that nobody configured."""
    with running(tmp_path_factory.mktemp("bare")) as server:
        yield server


def tool(name: str, description: str, parameter: str) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {parameter: {"type": "string"}}}
    function = {"name": name, "description": description, "parameters": parameters}
    return {"type": "function", "function": function}


TOOLS = [
    tool("get_weather", "Get the current weather for a city.", "city"),
    tool("read_file", "Read a file from disk.", "path"),
]


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def answer(server: RunningServer, messages: list[Any], **changes: Any) -> dict[str, Any]:
    """The choice that the embedded model makes."""
    response = server.post(CHAT, {"messages": messages, **changes})
    assert response.status_code == 200, response.text
    body = response.json()
    assert body["model"] == "hearth-tiny"
    return body["choices"][0]


def streamed(server: RunningServer, messages: list[Any], **changes: Any) -> dict[str, Any]:
    """The same choice, put together from a stream as clients do it."""
    response = server.post(CHAT, {"messages": messages, "stream": True, **changes})
    *events, done = events_of(response.text)
    assert done == "[DONE]"
    message: dict[str, Any] = {}
    reason: str | None = None
    for choice in (choice for event in events for choice in event["choices"]):
        for key, value in choice["delta"].items():
            if key == "tool_calls":
                _join(message.setdefault(key, []), value)
            else:
                message[key] = message.get(key, "") + value
        reason = choice["finish_reason"]
    return {"message": message, "finish_reason": reason}


def _join(calls: list[Any], pieces: list[Any]) -> None:
    """Add pieces of calls to those that were begun; only the first piece of a call has its id."""
    for piece in pieces:
        index = piece.pop("index")
        assert index == len(calls) - ("id" not in piece)
        if "id" in piece:
            calls.append(piece)
        else:
            calls[index]["function"]["arguments"] += piece["function"]["arguments"]


def test_it_is_what_a_server_serves_that_nobody_configured(tiny_server: RunningServer) -> None:
    choice = answer(tiny_server, [user("Hello!")])
    assert "hearth-tiny" in choice["message"]["content"]
    assert choice["finish_reason"] == "stop"


@pytest.mark.parametrize("num_sentences", [1, 60])
def test_it_recalls_a_code_word_over_other_text(
    tiny_server: RunningServer, num_sentences: int
) -> None:
    river = "On day {} the river was calm and the boats stayed in the harbour."
    filler = " ".join(river.format(day) for day in range(num_sentences))
    system = {"role": "system", "content": f"You are helpful. The code word is {CODE}."}
    messages = [system, user(filler), {"role": "assistant", "content": "I see."}]
    choice = answer(tiny_server, [*messages, user("What is the code word?")])
    assert CODE in choice["message"]["content"]


def test_it_calls_the_tool_that_fits_and_answers_from_its_result(
    tiny_server: RunningServer,
) -> None:
    question = user("What is the weather in Zurich?")
    choice = answer(tiny_server, [question], tools=TOOLS)
    (call,) = choice["message"]["tool_calls"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] is None
    assert call["type"] == "function"
    assert call["function"]["name"] == "get_weather"
    assert json.loads(call["function"]["arguments"]) == {"city": "Zurich"}
    result = {"role": "tool", "tool_call_id": call["id"], "content": "Light rain, 9 degrees"}
    choice = answer(tiny_server, [question, choice["message"], result], tools=TOOLS)
    assert "Light rain, 9 degrees" in choice["message"]["content"]
    assert choice["finish_reason"] == "stop"


def test_it_calls_no_tool_when_none_may_be_called(tiny_server: RunningServer) -> None:
    choice = answer(tiny_server, [READ_THE_FILE], tools=TOOLS, tool_choice="none")
    assert "tool_calls" not in choice["message"]


@pytest.mark.parametrize("enable_thinking", [True, False])
def test_a_tool_call_streams_as_it_is_answered_whole(
    tiny_server: RunningServer, enable_thinking: bool
) -> None:
    given = {"tools": TOOLS, "enable_thinking": enable_thinking}
    whole = answer(tiny_server, [READ_THE_FILE], **given)
    parts = streamed(tiny_server, [READ_THE_FILE], **given)
    assert parts["finish_reason"] == whole["finish_reason"] == "tool_calls"
    for choice in (whole, parts):
        (call,) = choice["message"]["tool_calls"]
        assert call.pop("id").startswith("call_")
        assert json.loads(call["function"]["arguments"]) == {"path": "src/kettle/main.py"}
    assert parts["message"].pop("content") == ""
    assert whole["message"].pop("content") is None
    assert parts["message"] == whole["message"]
    assert ("reasoning_content" in whole["message"]) is enable_thinking


def test_it_thinks_when_asked_to_and_keeps_its_thoughts_apart(tiny_server: RunningServer) -> None:
    messages = [user(f"The code word is {CODE}. What is the code word?")]
    thoughtful = answer(tiny_server, messages, enable_thinking=True)["message"]
    assert thoughtful["reasoning_content"]
    assert CODE in thoughtful["content"]
    assert "think>" not in thoughtful["reasoning_content"] + thoughtful["content"]
    by_template = answer(tiny_server, messages, chat_template_kwargs={"enable_thinking": True})
    assert by_template["message"] == thoughtful
    assert streamed(tiny_server, messages, enable_thinking=True)["message"] == thoughtful
    for nothing in ({}, {"enable_thinking": False}, {"reasoning_effort": "none"}):
        assert "reasoning_content" not in answer(tiny_server, messages, **nothing)["message"]
