"""Messages requests as JSON, turned into the runtime's own without a server."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from api.anthropic.convert import ConversionContext, ConvertedRequest, messages_to_generate
from api.anthropic.schemas import MessagesRequest
from api.http.caller import Caller
from api.http.unused import unused_fields
from runtime.config.settings import Settings
from runtime.errors import InvalidRequest
from runtime.types import ChatPrompt, Message, ModelSpec

SPEC = ModelSpec(id="m", path="/m", context=4096, model_type="qwen3", nbytes=1, created_s=0)
USER = {"role": "user", "content": "hi"}
EPHEMERAL = {"type": "ephemeral"}
HOUR = {"type": "ephemeral", "ttl": "1h"}
NOBODY = Caller()
LOOK: dict[str, Any] = {"name": "look", "input_schema": {"type": "object"}}


def asked(caller: Caller = NOBODY, **fields: Any) -> ConvertedRequest:
    body = {"messages": [USER], "max_tokens": 9} | fields
    data = msgspec.json.decode(json.dumps(body), type=MessagesRequest)
    unused = unused_fields(json.dumps(body).encode(), MessagesRequest)
    door = ConversionContext(SPEC, Settings(home=Path("/nowhere")), caller, unused)
    return messages_to_generate(data, "msg_1", door)


def prompt_of(**fields: Any) -> ChatPrompt:
    prompt = asked(**fields).request.prompt
    assert isinstance(prompt, ChatPrompt)
    return prompt


def messages_of(*turns: Any, **fields: Any) -> list[Message]:
    return list(prompt_of(messages=list(turns), **fields).messages)


def text(said: str, **fields: Any) -> dict[str, Any]:
    return {"type": "text", "text": said, **fields}


def user(*blocks: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(blocks)}


def assistant(*blocks: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": list(blocks)}


def refused(**fields: Any) -> tuple[str | None, str]:
    with pytest.raises(InvalidRequest) as caught:
        asked(**fields)
    return caught.value.param, caught.value.message
