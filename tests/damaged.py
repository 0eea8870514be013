"""Conversations in the words of each protocol, and what may have happened to their past.

Every text has a word of its own, by which it is found in the prompt.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from hypothesis import strategies as st

from tests.running_server import CHAT

Path = tuple[str | int, ...]
RULES = "You are an agent. " + " ".join(f"Rule {n}: go on to what is next." for n in range(40))
SCHEMA = {"type": "object", "properties": {"at": {"type": "integer"}}}
FUNCTION = {"name": "look", "description": "Look.", "parameters": SCHEMA}
PDF = "JVBERi0xLjcKJSBub3RoaW5n"
PNG = "iVBORw0KGgo="
HALF = "cut \ud83d"

HISTORIES: Mapping[str, tuple[str, str]] = {
    "chat": (CHAT, "messages"),
    "messages": ("/v1/messages", "messages"),
    "responses": ("/v1/responses", "input"),
    "ollama": ("/api/chat", "messages"),
}
"""Protocol -> its route, and the field that holds what was said."""

USAGES: Mapping[str, Callable[[Any], int]] = {
    "chat": lambda answer: answer["usage"]["prompt_tokens"],
    "messages": lambda answer: sum(
        answer["usage"][name]
        for name in ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens")
    ),
    "responses": lambda answer: answer["usage"]["input_tokens"],
    "ollama": lambda answer: answer["prompt_eval_count"],
}
"""Protocol -> the tokens of the whole prompt, as its answers tell them."""


def conversation(name: str, kinds: Sequence[int]) -> dict[str, Any]:
    """A turn for each number, whose bits say: a tool is called, texts are parts, two texts."""
    words = (f"qvword{number}x" for number in itertools.count())
    made = {"chat": _chat, "messages": _messages, "responses": _responses, "ollama": _ollama}
    return made[name](kinds, words)


def _texts(kind: int, words: Iterator[str], part: str) -> Any:
    if not kind & 2:
        return next(words)
    return [{"type": part, "text": next(words)} for _ in range(1 + bool(kind & 4))]


def _chat(kinds: Sequence[int], words: Iterator[str]) -> dict[str, Any]:
    said: list[Any] = [{"role": "system", "content": RULES}]
    for number, kind in enumerate(kinds):
        said.append({"role": "user", "content": _texts(kind, words, "text")})
        if kind & 1:
            function = {"name": "look", "arguments": '{"at": 7}'}
            call = {"id": f"call0000{number}", "type": "function", "function": function}
            said.append({"role": "assistant", "content": next(words), "tool_calls": [call]})
            result = {"role": "tool", "tool_call_id": call["id"]}
            said.append(result | {"content": _texts(kind, words, "text")})
        said.append({"role": "assistant", "content": _texts(kind, words, "text")})
    said.append({"role": "user", "content": next(words)})
    tools = [{"type": "function", "function": FUNCTION}]
    return {"model": "tiny", "messages": said, "tools": tools, "max_tokens": 1}


def _messages(kinds: Sequence[int], words: Iterator[str]) -> dict[str, Any]:
    said: list[Any] = []
    for number, kind in enumerate(kinds):
        said.append({"role": "user", "content": _texts(kind, words, "text")})
        if kind & 1:
            use = {"type": "tool_use", "id": f"t{number}", "name": "look", "input": {"at": 7}}
            text = {"type": "text", "text": next(words)}
            said.append({"role": "assistant", "content": [text, use]})
            result = {"type": "tool_result", "tool_use_id": f"t{number}"}
            result |= {"content": _texts(kind, words, "text")}
            said.append({"role": "user", "content": [result]})
        said.append({"role": "assistant", "content": _texts(kind, words, "text")})
    said.append({"role": "user", "content": next(words)})
    tool = {"name": "look", "description": "Look.", "input_schema": SCHEMA}
    return {"model": "tiny", "system": RULES, "messages": said, "tools": [tool], "max_tokens": 1}


def _responses(kinds: Sequence[int], words: Iterator[str]) -> dict[str, Any]:
    items: list[Any] = []
    for number, kind in enumerate(kinds):
        content = _texts(kind, words, "input_text")
        items.append({"type": "message", "role": "user", "content": content})
        if kind & 1:
            call: dict[str, Any] = {"type": "function_call", "call_id": f"c{number}"}
            items.append(call | {"name": "look", "arguments": '{"at": 7}'})
            output = {"type": "function_call_output", "call_id": f"c{number}"}
            items.append(output | {"output": _texts(kind, words, "input_text")})
        content = _texts(kind, words, "output_text")
        items.append({"type": "message", "role": "assistant", "content": content})
    items.append({"type": "message", "role": "user", "content": next(words)})
    body: dict[str, Any] = {"model": "tiny", "instructions": RULES, "input": items}
    return body | {"tools": [{"type": "function", **FUNCTION}], "max_output_tokens": 1}


def _ollama(kinds: Sequence[int], words: Iterator[str]) -> dict[str, Any]:
    said: list[Any] = [{"role": "system", "content": RULES}]
    for kind in kinds:
        said.append({"role": "user", "content": next(words)})
        if kind & 1:
            call = {"function": {"name": "look", "arguments": {"at": 7}}}
            said.append({"role": "assistant", "content": next(words), "tool_calls": [call]})
            said.append({"role": "tool", "tool_name": "look", "content": next(words)})
        said.append({"role": "assistant", "content": next(words)})
    said.append({"role": "user", "content": next(words)})
    tools = [{"type": "function", "function": FUNCTION}]
    body: dict[str, Any] = {"model": "tiny", "messages": said, "tools": tools, "stream": False}
    return body | {"options": {"num_predict": 1}}


# Damage

_GONE = object()
DAMAGES = st.sampled_from(
    [
        *(_GONE, None, 5, True, [], [7], {}, HALF, "{", "", {"odd": {"at": [1]}}),
        {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {}},
        {"type": "web_search_call", "id": "w", "status": "completed"},
        {"type": "compaction", "encrypted_content": "of another server"},
        [{"type": "image_url", "image_url": {"url": f"data:image/jpeg;base64,{PNG}"}}],
        [{"type": "image", "source": {"type": "file", "file_id": "file_unknown"}}],
        [{"type": "input_image", "file_id": "file_unknown"}],
        [{"type": "document", "source": {"type": "base64", "data": PDF}}],
        [{"type": "input_file", "file_id": "file_unknown"}, {"type": "input_audio"}],
    ]
)
"""What stands in a place instead of what was there."""


class Damaged(NamedTuple):
    """The body, and the words of the texts that are whole."""

    body: dict[str, Any]
    words: list[str]


def damaged(body: Any, field: str, wish: Sequence[tuple[int, object]]) -> Damaged:
    """The body with some places of its past, each named by any number, holding something else.

    A text is not whole where it is in such a place, or in an object whose type is one.
    """
    body = copy.deepcopy(body)
    for number, instead in wish:
        past = body[field][:-1]
        places = list(_places(past, ()))
        if not places:
            continue
        _set(past, places[number % len(places)], instead)
        body[field][:-1] = past
    return Damaged(body, _words(body[field]))


def _places(value: Any, path: Path) -> Iterator[Path]:
    inner = value.items() if isinstance(value, dict) else enumerate(value)
    for step, part in inner:
        yield (*path, step)
        if isinstance(part, dict | list):
            yield from _places(part, (*path, step))


def _set(value: Any, path: Path, instead: object) -> None:
    for step in path[:-1]:
        value = value[step]
    if instead is _GONE:
        del value[path[-1]]
    else:
        value[path[-1]] = copy.deepcopy(instead)


_TYPES = frozenset(
    {
        *("text", "input_text", "output_text", "message", "tool_result"),
        *("function_call_output", "function"),
    }
)


def _words(value: Any) -> list[str]:
    """Those of texts that are still in a place of texts."""
    found: list[str] = []
    if isinstance(value, list):
        return [word for part in value for word in _words(part)]
    if not isinstance(value, dict) or not value.keys() & {"type", "role"}:
        return found
    if str(value.get("type", "text")) not in _TYPES:
        return found
    for name in ("text", "content", "output"):
        inner = value.get(name)
        if isinstance(inner, str) and inner.startswith("qvword"):
            found.append(inner)
        elif isinstance(inner, list):
            found += _words(inner)
    return found
