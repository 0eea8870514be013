"""Requests with an image in the words of each protocol, and what is said of a refused one."""

from __future__ import annotations

import base64
from collections.abc import Callable
from typing import Any

import httpx

from tests.running_server import CHAT, RunningServer

RESPONSES, MESSAGES, OLLAMA, GENERATE = (
    "/v1/responses",
    "/v1/messages",
    "/api/chat",
    "/api/generate",
)
QUESTION = "what is this?"
SEEING = "qwen3_vl"
NUM_TOKENS = 6
PLAIN: dict[str, Any] = {"temperature": 0, "ignore_eos": True}


def b64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def url_of(data: bytes, media_type: str = "image/png") -> str:
    return f"data:{media_type};base64,{b64(data)}"


def chat_part(data: bytes, media_type: str = "image/png", **fields: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url_of(data, media_type), **fields}}


def input_part(data: bytes, media_type: str = "image/png") -> dict[str, Any]:
    return {"type": "input_image", "image_url": url_of(data, media_type), "detail": "auto"}


def image_block(data: bytes, media_type: str = "image/png") -> dict[str, Any]:
    source = {"type": "base64", "media_type": media_type, "data": b64(data)}
    return {"type": "image", "source": source}


def chat(part: Any, **fields: Any) -> tuple[str, dict[str, Any]]:
    content = [{"type": "text", "text": QUESTION}, part]
    messages = [{"role": "user", "content": content}]
    return CHAT, {"messages": messages, "max_tokens": NUM_TOKENS, **PLAIN, **fields}


def response(part: Any, **fields: Any) -> tuple[str, dict[str, Any]]:
    content = [{"type": "input_text", "text": QUESTION}, part]
    given = [{"role": "user", "content": content}]
    return RESPONSES, {"input": given, "max_output_tokens": NUM_TOKENS, **PLAIN, **fields}


def message(block: Any, **fields: Any) -> tuple[str, dict[str, Any]]:
    turn = {"role": "user", "content": [{"type": "text", "text": QUESTION}, block]}
    return MESSAGES, {"messages": [turn], "max_tokens": NUM_TOKENS, "temperature": 0, **fields}


def tool_result(block: Any, **fields: Any) -> tuple[str, dict[str, Any]]:
    call = {"type": "tool_use", "id": "c1", "name": "look", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "c1", "content": [block]}
    turns = [
        {"role": "user", "content": QUESTION},
        {"role": "assistant", "content": [call]},
        {"role": "user", "content": [result]},
    ]
    return MESSAGES, {"messages": turns, "max_tokens": NUM_TOKENS, "temperature": 0, **fields}


def ollama(data: str, **fields: Any) -> tuple[str, dict[str, Any]]:
    turn = {"role": "user", "content": QUESTION, "images": [data]}
    options = {"temperature": 0, "num_predict": NUM_TOKENS}
    body = {"model": SEEING, "messages": [turn], "stream": False, "options": options}
    return OLLAMA, {**body, **fields}


def ollama_prompt(data: str, **fields: Any) -> tuple[str, dict[str, Any]]:
    options = {"temperature": 0, "num_predict": NUM_TOKENS}
    body = {
        "model": SEEING,
        "prompt": QUESTION,
        "images": [data],
        "stream": False,
        "options": options,
    }
    return GENERATE, {**body, **fields}


WAYS: dict[str, tuple[Callable[[bytes], tuple[str, dict[str, Any]]], str]] = {
    "chat": (lambda data: chat(chat_part(data)), "messages[0].content[1]"),
    "responses": (lambda data: response(input_part(data)), "input[0].content[1]"),
    "messages": (lambda data: message(image_block(data)), "messages[0].content[1]"),
    "tool result": (
        lambda data: tool_result(image_block(data)),
        "messages[2].content[0].content[0]",
    ),
    "ollama chat": (lambda data: ollama(b64(data)), "messages[0].images[0]"),
    "ollama generate": (lambda data: ollama_prompt(b64(data)), "images[0]"),
}
"""Protocol -> a request that shows one PNG, and the path of the part that holds it."""


def answered(server: RunningServer, way: tuple[str, dict[str, Any]]) -> Any:
    """What was said, in the protocol's own words; the request must succeed."""
    found = server.post(*way)
    assert found.status_code == 200, found.text
    body = found.json()
    for name in ("choices", "output", "content", "message", "response"):
        if name in body:
            return body[name][0]["message"] if name == "choices" else body[name]
    raise AssertionError(body)


def problem(found: httpx.Response) -> str:
    """The message of a refusal; it names the part, whatever the protocol's shape is."""
    assert found.status_code == 400, found.text
    error = found.json()["error"]
    return str(error if isinstance(error, str) else error["message"])
