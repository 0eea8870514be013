"""Every answer of OpenAI's routes to the last field, as OpenAI's own client types it, strictly."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from openai.types import Completion, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from pydantic import BaseModel

from tests.calm_model import END, saying
from tests.running_server import CHAT, COMPLETIONS, RunningServer, events_of
from tests.tiny_models import TOOL_CALL

OUR_FIELDS = {"hearth", "reasoning_content"}
"""Ours, and the name by which all servers give reasoning."""
MODEL_FIELDS = {
    *("state", "context", "max_model_len", "size_bytes", "aliases", "capabilities", "pinned"),
    *("tools", "template", "vision", "vision_reason"),
}
QUESTION: Any = [{"role": "user", "content": "What do you see?"}]
LOOK: Any = {"name": "look", "parameters": {"type": "object"}}
LOGPROBS: Any = {"logprobs": True, "top_logprobs": 2}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "text": ("let me see", {}),
    "cut": ("let me see", {"max_tokens": 2}),
    "choices": ("let me see", {"n": 2}),
    "logprobs": ("let me see", LOGPROBS),
    "reasoning": ("let me</think>see", {"enable_thinking": True}),
    "call": (
        f"let me see<tool_call>{TOOL_CALL}</tool_call>",
        {"tools": [{"type": "function", "function": LOOK}]},
    ),
    "older call": (f"let me see<tool_call>{TOOL_CALL}</tool_call>", {"functions": [LOOK]}),
    "object": ("let me see", {"response_format": {"type": "json_object"}, "max_tokens": 30}),
}


def check(kind: type[BaseModel], value: Any, own: set[str] = OUR_FIELDS) -> Any:
    """It is of this type, strictly, and has nothing unknown but fields of ours."""
    checked = kind.model_validate_json(json.dumps(value), strict=True)
    _check_known(checked, own)
    return checked


def _check_known(model: BaseModel, own: set[str]) -> None:
    assert set(model.model_extra or ()) <= own, model
    for value in model.__dict__.values():
        for one in value if isinstance(value, list) else [value]:
            if isinstance(one, BaseModel):
                _check_known(one, own)


def asked(server: RunningServer, path: str, body: dict[str, Any]) -> Any:
    response = server.post(path, {"model": "calm"} | body)
    assert response.status_code == 200, response.text
    if not body.get("stream"):
        return response.json()
    *events, end = events_of(response.text)
    assert end == "[DONE]"
    return events


@pytest.mark.parametrize("case", CASES)
def test_a_whole_chat_answer_is_of_its_type(
    calm_server: RunningServer, calm: Path, case: str
) -> None:
    text, changes = CASES[case]
    body = {"messages": QUESTION} | saying(calm, text + END) | changes
    answer = check(ChatCompletion, asked(calm_server, CHAT, body))
    assert len(answer.choices) == changes.get("n", 1)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("has_usage", [True, False])
def test_a_streamed_chat_answer_is_of_its_type_and_in_order(
    calm_server: RunningServer, calm: Path, case: str, has_usage: bool
) -> None:
    text, changes = CASES[case]
    body = {"messages": QUESTION} | saying(calm, text + END) | changes
    body |= {"stream": True, "stream_options": {"include_usage": has_usage}}
    chunks = [check(ChatCompletionChunk, one) for one in asked(calm_server, CHAT, body)]
    if has_usage:
        *chunks, last = chunks
        assert (last.choices, last.usage is not None) == ([], True)
    for index in range(changes.get("n", 1)):
        mine = [one.choices[0] for one in chunks if one.choices[0].index == index]
        assert [one.delta.role for one in mine] == ["assistant"] + [None] * (len(mine) - 1)
        assert [one.finish_reason is not None for one in mine[-2:]] == [False, True]
    assert all(one.usage is None for one in chunks)


@pytest.mark.parametrize("changes", [{}, {"logprobs": 2}, {"echo": True, "n": 2}])
def test_a_completion_is_of_its_type(calm_server: RunningServer, changes: dict[str, Any]) -> None:
    body = {"prompt": ["the fox", "the dog"], "max_tokens": 4} | changes
    check(Completion, asked(calm_server, COMPLETIONS, body))


def test_a_streamed_completion_says_of_every_choice_once_why_it_ended(
    calm_server: RunningServer,
) -> None:
    body = {"prompt": ["the fox", "the dog"], "max_tokens": 4, "logprobs": 2, "stream": True}
    pieces = asked(calm_server, COMPLETIONS, body)
    ends: list[int] = []
    for piece in pieces:
        (choice,) = piece["choices"]
        if choice["finish_reason"] is None:
            # OpenAI's type is of whole answers; in a stream only the last piece has a reason.
            choice["finish_reason"] = "stop"
        else:
            ends.append(choice["index"])
        check(Completion, piece)
    assert sorted(ends) == [0, 1]


def test_models_are_of_their_type(calm_server: RunningServer) -> None:
    listed = calm_server.get("/v1/models").json()
    assert listed.keys() == {"object", "data", "refused"}
    assert listed["refused"] == []
    for one in [*listed["data"], calm_server.get("/v1/models/calm").json()]:
        check(Model, one, MODEL_FIELDS)
