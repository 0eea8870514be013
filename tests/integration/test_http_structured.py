"""Forms of answers and forced calls over HTTP: what a client parses is what it asked for."""

from __future__ import annotations

import json
from collections.abc import Iterator
from enum import Enum
from typing import Any

import jsonschema
import openai
import pytest
from openai import OpenAI
from pydantic import BaseModel, Field

from tests.running_server import RunningServer

QUESTION: Any = [{"role": "user", "content": "Who sits at the hearth?"}]
QUIET: Any = {"extra_body": {"enable_thinking": False}, "max_tokens": 400}


class Mood(Enum):
    calm = "calm"
    merry = "merry"


class Guest(BaseModel):
    """Somebody; every member is bounded, so that any model comes to an end."""

    name: str = Field(max_length=12)
    age: int = Field(ge=0, le=120)
    moods: list[Mood] = Field(max_length=3)
    seat: int | None = Field(ge=1, le=9)


class Look(BaseModel):
    """Look at a place."""

    at: int = Field(ge=0, le=99)
    mood: Mood


LOOK = openai.pydantic_function_tool(Look, name="look")


@pytest.fixture
def client(server: RunningServer) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0) as client:
        yield client


@pytest.mark.parametrize("model", ["tiny", "hearth-tiny"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_parsed_answer_is_what_was_asked_for(client: OpenAI, model: str, temperature: float):
    said = client.chat.completions.parse(
        model=model, messages=QUESTION, response_format=Guest, temperature=temperature, **QUIET
    )
    choice = said.choices[0]
    assert choice.finish_reason == "stop"
    assert isinstance(choice.message.parsed, Guest)


def test_a_streamed_answer_is_the_same_as_the_whole_one(client: OpenAI):
    asked: Any = {"model": "tiny", "messages": QUESTION, "temperature": 1.0, "seed": 4, **QUIET}
    whole = client.chat.completions.parse(response_format=Guest, **asked)
    with client.chat.completions.stream(response_format=Guest, **asked) as stream:
        streamed = stream.get_final_completion()
    assert streamed.choices[0].message.parsed == whole.choices[0].message.parsed
    assert streamed.choices[0].message.content == whole.choices[0].message.content


def test_responses_are_held_to_their_format(client: OpenAI):
    said = client.responses.parse(
        model="tiny",
        input="Who?",
        text_format=Guest,
        max_output_tokens=400,
        reasoning={"effort": "none"},
    )
    assert isinstance(said.output_parsed, Guest)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "look"}}])
def test_a_forced_call_is_parsed(client: OpenAI, choice: Any):
    said = client.chat.completions.parse(
        model="tiny", messages=QUESTION, tools=[LOOK], tool_choice=choice, temperature=1.0, **QUIET
    )
    (call, *_) = said.choices[0].message.tool_calls or []
    assert isinstance(call.function.parsed_arguments, Look)
    assert said.choices[0].finish_reason in ("tool_calls", "stop")


def test_any_object_is_json(client: OpenAI):
    said = client.chat.completions.create(
        model="hearth-tiny", messages=QUESTION, response_format={"type": "json_object"}, **QUIET
    )
    choice = said.choices[0]
    if choice.finish_reason == "stop":
        jsonschema.validate(json.loads(choice.message.content or ""), {"type": "object"})
    else:
        assert choice.finish_reason == "length"


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (
            "/v1/chat/completions",
            {
                "messages": QUESTION,
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "schema": {"type": "objekt"}},
                },
            },
            "response_format",
        ),
        (
            "/v1/responses",
            {
                "input": "x",
                "text": {
                    "format": {"type": "json_schema", "name": "x", "schema": {"type": "objekt"}}
                },
            },
            "text.format",
        ),
    ],
)
def test_a_schema_that_cannot_be_enforced_is_refused_in_its_own_field(
    server: RunningServer, path: str, body: dict[str, Any], param: str
):
    answer = server.post(path, {"model": "tiny", **body})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == param
    assert "objekt" in error["message"]


def test_messages_are_held_to_their_format(server: RunningServer):
    schema = Guest.model_json_schema() | {"additionalProperties": False}
    body = {
        "model": "tiny",
        "max_tokens": 400,
        "messages": QUESTION,
        "thinking": {"type": "disabled"},
        "output_config": {"format": {"type": "json_schema", "schema": schema}},
    }
    answer = server.post("/v1/messages", body).json()
    assert answer["stop_reason"] == "end_turn"
    Guest.model_validate_json(answer["content"][0]["text"])
