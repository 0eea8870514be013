"""Thoughts whose block closes and never opened: reasoning, and taken up by the next turn."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI

from tests.calm_model import END, saying
from tests.running_server import CHAT, RunningServer, events_of

SAID = "let me</think>see"
DONE = "response.completed"
NEXT = {"role": "user", "content": "And now?"}


def chat(server: RunningServer, messages: list[Any], **fields: Any) -> Any:
    response = server.post(CHAT, {"model": "calm", "messages": messages} | fields)
    assert response.status_code == 200, response.text
    return response


def num_cached(server: RunningServer, messages: list[Any], **fields: Any) -> int:
    usage = chat(server, messages, max_tokens=1, **fields).json()["usage"]
    return usage["prompt_tokens_details"]["cached_tokens"]


def known(usage: Any) -> int:
    return usage["prompt_tokens"] + usage["completion_tokens"] - 1


def test_a_whole_answer_tells_them_apart_and_however_they_come_back_they_are_known(
    calm_server: RunningServer, calm: Path
) -> None:
    question = {"role": "user", "content": "Whole?"}
    answer = chat(calm_server, [question], **saying(calm, SAID + END)).json()
    (choice,) = answer["choices"]
    assert choice["message"]["content"] == "see"
    assert choice["message"]["reasoning_content"] == "let me"
    assert answer["hearth"]["notes"] == ["orphan_think_end"]
    usage = answer["usage"]
    num_reasoning = usage["completion_tokens_details"]["reasoning_tokens"]
    assert 0 < num_reasoning < usage["completion_tokens"]
    for given in (
        {"content": "see"},
        {"content": "see", "reasoning_content": "let me"},
        {"content": "<think>\nlet me\n</think>\n\nsee"},
        {"content": SAID},
    ):
        turn = {"role": "assistant"} | given
        assert num_cached(calm_server, [question, turn, NEXT]) >= known(usage)
    edited = {"role": "assistant", "content": "let him</think>see"}
    assert num_cached(calm_server, [question, edited, NEXT]) < known(usage)


def test_a_stream_has_them_to_the_letter_and_what_it_told_is_known(
    calm_server: RunningServer, calm: Path
) -> None:
    question = {"role": "user", "content": "Streamed?"}
    wish: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}
    *events, done = events_of(
        chat(calm_server, [question], **saying(calm, SAID + END), **wish).text
    )
    assert done == "[DONE]"
    deltas = [one["delta"] for event in events for one in event["choices"]]
    assert "".join(one.get("content", "") for one in deltas) == SAID
    assert not [one for one in deltas if "reasoning_content" in one]
    assert events[-1]["hearth"]["notes"] == ["orphan_think_end"]
    for said in (SAID, "see"):
        turn = {"role": "assistant", "content": said}
        assert num_cached(calm_server, [question, turn, NEXT]) >= known(events[-1]["usage"])


def test_a_response_has_an_item_of_them(calm_client: OpenAI, calm: Path) -> None:
    create: Any = calm_client.responses.create
    made = create(model="calm", input="Response?", extra_body=saying(calm, SAID + END))
    assert [one.type for one in made.output] == ["reasoning", "message"]
    assert made.output_text == "see"
    after = create(model="calm", input="And now?", previous_response_id=made.id)
    assert after.usage.input_tokens_details.cached_tokens >= made.usage.total_tokens - 1


@pytest.mark.parametrize("stream", [False, True])
def test_an_agents_history_tells_them_apart_also_where_they_were_streamed(
    calm_server: RunningServer, calm: Path, stream: bool
) -> None:
    agent = calm_server.post("/v1/agents", {"model": "calm"}).json()["id"]
    path = f"/v1/agents/{agent}"
    body = {"messages": [{"role": "user", "content": f"Agent? {stream}"}], "stream": stream}
    first = calm_server.post(f"{path}/generate", body | saying(calm, SAID + END))
    assert first.status_code == 200, first.text
    (turn,) = calm_server.get(f"{path}/history").json()["data"]
    assert turn["messages"][-1] == {
        "role": "assistant",
        "content": "see",
        "reasoning_content": "let me",
    }
    after = calm_server.post(f"{path}/generate", {"messages": [NEXT], "max_tokens": 1}).json()
    cached = after["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached >= known(turn["usage"])


def streamed(server: RunningServer, messages: list[Any], **fields: Any) -> tuple[str, str, Any]:
    """A stream's reasoning and content, and its last event."""
    wish: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}
    *events, _ = events_of(chat(server, messages, **wish, **fields).text)
    deltas = [one["delta"] for event in events for one in event["choices"]]
    reasoning, content = (
        "".join(one.get(name) or "" for one in deltas) for name in ("reasoning_content", "content")
    )
    return reasoning, content, events[-1]


THINKING: list[tuple[str, dict[str, Any]]] = [
    ("qwen3", {}),
    ("qwen3", {"reasoning_effort": "high"}),
    ("unswitched", {"enable_thinking": True}),
    ("unswitched", {"enable_thinking": True, "reasoning_effort": "high"}),
    ("unswitched", {"thinking": {"type": "enabled", "budget_tokens": 500}}),
]
"""Models whose prompts open no thoughts, and requests by which they think."""


@pytest.mark.parametrize(("model", "wish"), THINKING)
def test_a_stream_begins_in_reasoning_where_the_model_is_known_to_think(
    calm_server: RunningServer, calm: Path, model: str, wish: dict[str, Any]
) -> None:
    question = {"role": "user", "content": "Thinking?"}
    asked = saying(calm, SAID + END) | {"model": model} | wish
    whole = chat(calm_server, [question], **asked).json()
    message = whole["choices"][0]["message"]
    reasoning, content, last = streamed(calm_server, [question], **asked)
    assert (reasoning, content) == ("let me", "see")
    assert (message["reasoning_content"], message["content"]) == (reasoning, content)
    assert last["usage"]["completion_tokens_details"] == whole["usage"]["completion_tokens_details"]
    assert "notes" not in last["hearth"]
    for given in ({"content": "see"}, {"content": "see", "reasoning_content": "let me"}):
        turn = {"role": "assistant"} | given
        num_known = num_cached(calm_server, [question, turn, NEXT], model=model, **wish)
        assert num_known >= known(last["usage"])


@pytest.mark.parametrize(("model", "wish"), THINKING)
@pytest.mark.parametrize("end", ["stop", "length"])
def test_an_answer_without_the_thoughts_that_were_expected_is_told_as_content_in_the_end(
    calm_server: RunningServer, calm: Path, model: str, wish: dict[str, Any], end: str
) -> None:
    question = {"role": "user", "content": f"Thoughtless {end}?"}
    asked = saying(calm, "let me see" + END) | {"model": model} | wish
    if end == "length":
        asked["max_tokens"] = 2
    whole = chat(calm_server, [question], **asked).json()
    choice = whole["choices"][0]
    assert choice["finish_reason"] == end
    assert "reasoning_content" not in choice["message"]
    reasoning, content, last = streamed(calm_server, [question], **asked)
    assert content == choice["message"]["content"] != ""
    assert reasoning == content
    assert last["hearth"]["notes"] == whole["hearth"]["notes"] == ["no_thoughts"]
    assert last["usage"]["completion_tokens_details"]["reasoning_tokens"] == 0
    for given in ({}, {"reasoning_content": reasoning}):
        turn = {"role": "assistant", "content": content} | given
        num_known = num_cached(calm_server, [question, turn, NEXT], model=model, **wish)
        assert num_known >= known(last["usage"])


@pytest.mark.parametrize(
    ("model", "wish"),
    [
        ("qwen3", {"enable_thinking": False}),
        ("unswitched", {}),
        # No word on what the model does: agents send an effort to any.
        ("unswitched", {"reasoning_effort": "high"}),
        ("unswitched", {"thinking": {"type": "adaptive"}}),
    ],
)
def test_where_the_model_is_not_known_to_think_a_stream_begins_with_its_answer(
    calm_server: RunningServer, calm: Path, model: str, wish: dict[str, Any]
) -> None:
    question = {"role": "user", "content": "Answer?"}
    asked = saying(calm, "let me see" + END) | {"model": model} | wish
    reasoning, content, last = streamed(calm_server, [question], **asked)
    assert (reasoning, content) == ("", "let me see")
    assert "notes" not in last["hearth"]


@pytest.mark.parametrize(
    ("said", "kinds"), [(SAID, ["reasoning", "message"]), ("let me see", ["message"])]
)
def test_a_streamed_response_has_the_text_of_the_whole_one(
    calm_client: OpenAI, calm: Path, said: str, kinds: list[str]
) -> None:
    create: Any = calm_client.responses.create
    asked = {"model": "qwen3", "input": f"Which? {said}", "extra_body": saying(calm, said + END)}
    whole = create(**asked)
    streamed = next(event.response for event in create(**asked, stream=True) if event.type == DONE)
    assert [one.type for one in whole.output] == kinds
    assert streamed.output_text == whole.output_text != ""
    assert streamed.output[0].type == "reasoning"


def test_inside_of_code_the_mark_is_text(calm_server: RunningServer, calm: Path) -> None:
    question = [{"role": "user", "content": "Code?"}]
    answer = chat(calm_server, question, **saying(calm, f"the `</think>see{END}")).json()
    message = answer["choices"][0]["message"]
    assert (message["content"], "reasoning_content" in message) == ("the `</think>see", False)
    assert "notes" not in answer["hearth"]
