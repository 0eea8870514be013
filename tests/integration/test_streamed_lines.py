"""Every line end that a client may know, in an answer streamed by every protocol."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest

from tests.running_server import CHAT, COMPLETIONS, RunningServer

LINE_ENDS = [chr(i) for i in range(sys.maxunicode + 1) if len(f"a{chr(i)}b".splitlines()) > 1]
SAID = f"a{'b'.join(LINE_ENDS)}c"
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"x": {"const": SAID}},
    "required": ["x"],
    "additionalProperties": False,
}
TALK: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 300}
NAMED = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}
FORMAT = {"type": "json_schema", "name": "x", "schema": SCHEMA, "strict": True}
ASKED: dict[str, dict[str, Any]] = {
    CHAT: TALK | {"response_format": NAMED},
    COMPLETIONS: {"prompt": SAID, "echo": True, "max_tokens": 1},
    "/v1/messages": TALK | {"output_config": {"format": FORMAT}},
    "/v1/responses": {"input": "hi", "text": {"format": FORMAT}, "max_output_tokens": 300},
    "/api/chat": TALK | {"format": SCHEMA, "options": {"num_predict": 300}},
    "/api/generate": {"prompt": "hi", "format": SCHEMA, "options": {"num_predict": 300}},
}


TOLD = {"content", "response", "text", "delta"}
"""The fields in which pieces of an answer are, in one protocol or another."""


def said_in(value: Any, key: str = "") -> str:
    """The pieces of an answer that an event has."""
    if isinstance(value, str):
        return value if key in TOLD else ""
    pairs = value.items() if isinstance(value, dict) else ()
    listed = [(key, one) for one in value] if isinstance(value, list) else ()
    return "".join(said_in(one, name) for name, one in (*pairs, *listed))


@pytest.mark.parametrize("path", ASKED)
def test_what_a_client_reads_line_by_line_is_whole(server: RunningServer, path: str) -> None:
    body = {"model": "tiny", "stream": True, "temperature": 0} | ASKED[path]
    response = server.post(path, body)
    assert response.status_code == 200, response.text
    text = response.content.decode()
    lines = text.splitlines()
    assert lines == text.split("\n")[:-1]
    told = [line.removeprefix("data: ") for line in lines if line.startswith(("data: {", "{"))]
    said = "".join(said_in(json.loads(line)) for line in told)
    if SAID not in said:
        made, _ = json.JSONDecoder().raw_decode(said[said.index("{") :])
        assert made == {"x": SAID}
