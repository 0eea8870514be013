"""Anthropic's events as they stand on the wire: read, held to the documented order, put together.

Types are those of Anthropic's own client, validated strictly and without unknown fields.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import httpx
from anthropic.types import Message, RawMessageStreamEvent
from pydantic import BaseModel, TypeAdapter

from tests.running_server import RunningServer

MESSAGES, COUNT = "/v1/messages", "/v1/messages/count_tokens"
OUR_FIELDS = {"hearth"}
TOOLS: list[dict[str, Any]] = [
    {
        "name": name,
        "description": description,
        "input_schema": {"type": "object", "properties": {parameter: {"type": "string"}}},
    }
    for name, description, parameter in (
        ("get_weather", "Get the current weather for a city.", "city"),
        ("read_file", "Read a file from disk.", "path"),
    )
]
"""What `hearth-tiny` knows how to call."""

_EVENTS: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)


class Event(NamedTuple):
    """One event: the name on its `event:` line, and its data."""

    name: str
    data: Any


def event_of(block: str) -> Event | None:
    """An event from its lines; None for a comment."""
    if block.startswith(":"):
        return None
    first, second = block.split("\n")
    assert first.startswith("event: "), block
    assert second.startswith("data: "), block
    event = Event(first.removeprefix("event: "), json.loads(second.removeprefix("data: ")))
    assert event.data["type"] == event.name
    return event


def events_in(body: str) -> list[Event]:
    """All events of a finished stream."""
    assert body.endswith("\n\n")
    found = (event_of(block) for block in body.removesuffix("\n\n").split("\n\n"))
    return [event for event in found if event is not None]


def check_types(event: Event) -> None:
    """The event is one that Anthropic's client knows, to the last field."""
    if event.name == "ping":
        assert event.data == {"type": "ping"}
    else:
        _check_known(_EVENTS.validate_json(json.dumps(event.data), strict=True))


def check_message(message: Any) -> Message:
    """A whole answer is one that Anthropic's client knows, to the last field."""
    checked = Message.model_validate_json(json.dumps(message), strict=True)
    _check_known(checked)
    return checked


def error_in(response: httpx.Response, kind: str) -> dict[str, Any]:
    """The error of an answer that has nothing but the envelope."""
    assert response.headers["content-type"].startswith("application/json")
    body = response.json()
    assert body.keys() == {"type", "error", "request_id"}
    assert body["type"] == "error"
    assert body["request_id"] == response.headers["request-id"]
    error = body["error"]
    assert error.keys() == {"type", "message", "details"}
    assert error["type"] == kind, error
    assert "Traceback" not in error["message"]
    assert "msgspec" not in error["message"]
    return error


def _check_known(model: BaseModel) -> None:
    assert set(model.model_extra or ()) <= OUR_FIELDS, model
    for value in model.__dict__.values():
        for one in value if isinstance(value, list) else [value]:
            if isinstance(one, BaseModel):
                _check_known(one)


def check_order(events: Sequence[Event]) -> None:
    """The documented order of a stream that went well, pings anywhere."""
    for event in events:
        check_types(event)
    names = [event.name for event in events if event.name != "ping"]
    assert names[0] == "message_start"
    assert names[-2:] == ["message_delta", "message_stop"]
    opened: str | None = None
    num_blocks = 0
    for event in events:
        match event.name:
            case "content_block_start":
                assert opened is None, "a block begins inside another"
                assert event.data["index"] == num_blocks
                opened = event.data["content_block"]["type"]
            case "content_block_delta":
                assert event.data["index"] == num_blocks
                assert event.data["delta"]["type"] in _DELTAS[opened or ""]
            case "content_block_stop":
                assert opened is not None
                assert event.data["index"] == num_blocks
                opened = None
                num_blocks += 1
            case "ping":
                pass
            case _:
                assert opened is None, f"{event.name} inside a block"
    assert names.count("message_start") == names.count("message_delta") == 1


_DELTAS = {
    "text": {"text_delta"},
    "thinking": {"thinking_delta", "signature_delta"},
    "tool_use": {"input_json_delta"},
}


def content_of(events: Sequence[Event]) -> list[Any]:
    """The blocks that the events put together, as clients do it."""
    blocks: list[Any] = []
    jsons: list[str] = []
    for _, data in events:
        if data["type"] == "content_block_start":
            blocks.append(dict(data["content_block"]))
            jsons.append("")
        if data["type"] != "content_block_delta":
            continue
        match data["delta"]:
            case {"type": "text_delta", "text": text}:
                blocks[-1]["text"] += text
            case {"type": "thinking_delta", "thinking": text}:
                blocks[-1]["thinking"] += text
            case {"type": "signature_delta", "signature": signature}:
                blocks[-1]["signature"] = signature
            case {"type": "input_json_delta", "partial_json": text}:
                jsons[-1] += text
            case unknown:
                raise AssertionError(unknown)
    for block, text in zip(blocks, jsons, strict=True):
        if text:
            block["input"] = json.loads(text)
    return blocks


def ask(server: RunningServer, **fields: Any) -> dict[str, Any]:
    """A whole answer of `tiny`, whose form is checked."""
    response = server.post(MESSAGES, _body(fields))
    assert response.status_code == 200, response.text
    check_message(response.json())
    return response.json()


def stream(server: RunningServer, **fields: Any) -> list[Event]:
    """The events of the same answer, whose order and form are checked."""
    response = server.post(MESSAGES, _body(fields) | {"stream": True})
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    events = events_in(response.text)
    check_order(events)
    return events


def _body(fields: dict[str, Any]) -> dict[str, Any]:
    plain = {"model": "tiny", "max_tokens": 12, "temperature": 0}
    return plain | {"messages": [{"role": "user", "content": "hi 😀"}]} | fields


class Reading:
    """A stream that is being read, event by event."""

    def __init__(self, response: httpx.Response) -> None:
        self.response = response
        self.events: list[Event] = []
        self.comments: list[str] = []
        self._blocks = self._read()

    async def _read(self) -> AsyncIterator[str]:
        text = ""
        async for piece in self.response.aiter_text():
            *blocks, text = (text + piece).split("\n\n")
            for block in blocks:
                yield block
        assert text == "", f"the stream broke off inside {text!r}"

    async def next_event(self) -> Event | None:
        """The next event; None at the end."""
        async for block in self._blocks:
            event = event_of(block)
            if event is None:
                self.comments.append(block)
            else:
                self.events.append(event)
                return event
        return None

    async def rest(self) -> list[Event]:
        """All events, once the stream is over."""
        while await self.next_event():
            pass
        return self.events


@asynccontextmanager
async def reading(server: RunningServer, **fields: Any) -> AsyncGenerator[Reading]:
    """A stream whose headers have arrived; leaving the block closes the connection."""
    async with (
        server.client() as client,
        client.stream("POST", MESSAGES, json=_body(fields) | {"stream": True}) as response,
    ):
        yield Reading(response)


def num_prompt_tokens(usage: dict[str, int]) -> int:
    """The whole prompt, whatever part of it was reused."""
    cached = usage["cache_creation_input_tokens"] + usage["cache_read_input_tokens"]
    return usage["input_tokens"] + cached
