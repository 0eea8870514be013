"""One conversation in the words of every protocol, read back by the API's own converters."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from api.agents import convert as agents
from api.agents.schemas import AgentConfig, AgentGenerate
from api.anthropic.convert import ConversionContext, messages_to_generate
from api.anthropic.schemas import MessagesRequest
from api.anthropic.signature import sign
from api.http.caller import Caller
from api.ollama.convert import chat_request
from api.ollama.schemas import OllamaChatRequest
from api.openai.convert import chat_to_generate
from api.openai.response_schemas import ResponseRequest
from api.openai.schemas import ChatRequest
from api.responses.convert import check, items_of, plan_of
from api.responses.items import seal
from runtime.config.settings import Settings
from runtime.types import GenerateRequest, Message, ModelSpec

Body = dict[str, Any]

SPEC = ModelSpec(id="m", path="/m", context=8192, model_type="qwen3", nbytes=1, created_s=1)
SETTINGS = Settings(home=Path("/nowhere"))
SCHEMA = {"type": "object"}
LOOK = {"name": "look", "description": "Look.", "parameters": SCHEMA}
CALLER = Caller()


def chat_message(message: Message) -> Body:
    told: Body = {"role": message.role, "content": message.text}
    if message.reasoning is not None:
        told["reasoning_content"] = message.reasoning
    if message.tool_calls:
        told["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call in message.tool_calls
        ]
    if message.tool_call_id is not None:
        told["tool_call_id"] = message.tool_call_id
    return told


def chat(messages: Sequence[Message]) -> GenerateRequest:
    body = {
        "messages": [chat_message(one) for one in messages],
        "tools": [{"type": "function", "function": LOOK}],
    }
    data = msgspec.json.decode(json.dumps(body), type=ChatRequest)
    return chat_to_generate(data, "r", SPEC, SETTINGS, CALLER)


def _items(message: Message) -> list[Body]:
    if message.role == "tool":
        return [
            {
                "type": "function_call_output",
                "call_id": message.tool_call_id,
                "output": message.text,
            }
        ]
    items: list[Body] = []
    if message.reasoning is not None:
        sealed = seal(message.reasoning)
        items.append({"type": "reasoning", "summary": [], "encrypted_content": sealed})
    if message.text or not message.tool_calls:
        kind = "output_text" if message.role == "assistant" else "input_text"
        parts = [{"type": kind, "text": message.text}]
        items.append({"type": "message", "role": message.role, "content": parts})
    items += [
        {
            "type": "function_call",
            "call_id": call.id,
            "name": call.name,
            "arguments": call.arguments,
        }
        for call in message.tool_calls
    ]
    return items


def responses(messages: Sequence[Message]) -> GenerateRequest:
    head = messages[0].text if messages[0].role == "system" else None
    body: Body = {
        "input": [item for one in messages[head is not None :] for item in _items(one)],
        "tools": [{"type": "function", **LOOK}],
    }
    body |= {"instructions": head} if head is not None else {}
    data = msgspec.json.decode(json.dumps(body), type=ResponseRequest)
    check(data)
    return plan_of(data, items_of(data), "r", SPEC, CALLER, SETTINGS).request


def _turn(message: Message) -> Body:
    if message.role == "tool":
        result = {
            "type": "tool_result",
            "tool_use_id": message.tool_call_id,
            "content": [{"type": "text", "text": message.text}],
        }
        return {"role": "user", "content": [result]}
    parts: list[Body] = []
    if message.reasoning is not None:
        signature = sign(message.reasoning)
        parts.append({"type": "thinking", "thinking": message.reasoning, "signature": signature})
    if message.text or not message.tool_calls:
        parts.append({"type": "text", "text": message.text})
    parts += [
        {"type": "tool_use", "id": call.id, "name": call.name, "input": json.loads(call.arguments)}
        for call in message.tool_calls
    ]
    return {"role": message.role, "content": parts}


def anthropic(messages: Sequence[Message]) -> GenerateRequest:
    """As its clients send them: results and what the user says next are one turn."""
    turns: list[Body] = []
    for number, one in enumerate(messages):
        if not number and one.role == "system":
            continue
        turn, before = _turn(one), messages[number - 1].role if number else None
        if before == "tool" and turn["role"] == "user":
            turns[-1]["content"] += turn["content"]
        else:
            turns.append(turn)
    tool = {"name": "look", "description": "Look.", "input_schema": SCHEMA}
    body: Body = {"messages": turns, "max_tokens": 9, "tools": [tool]}
    if messages[0].role == "system":
        body["system"] = [{"type": "text", "text": messages[0].text}]
    data = msgspec.json.decode(json.dumps(body), type=MessagesRequest)
    return messages_to_generate(data, "r", ConversionContext(SPEC, SETTINGS, CALLER)).request


def _ollama_message(message: Message) -> Body:
    told: Body = {"role": message.role, "content": message.text}
    if message.reasoning is not None:
        told["thinking"] = message.reasoning
    if message.tool_calls:
        told["tool_calls"] = [
            {"function": {"name": call.name, "arguments": json.loads(call.arguments)}}
            for call in message.tool_calls
        ]
    return told | ({"tool_name": "look"} if message.role == "tool" else {})


def ollama(messages: Sequence[Message]) -> GenerateRequest:
    body = {
        "model": "m",
        "messages": [_ollama_message(one) for one in messages],
        "tools": [{"type": "function", "function": LOOK}],
    }
    data = msgspec.json.decode(json.dumps(body), type=OllamaChatRequest)
    return chat_request(data, "r", SPEC, SETTINGS, CALLER)


def agent(messages: Sequence[Message]) -> GenerateRequest:
    """All but what came after the last answer is the agent's history, as it is stored."""
    head = messages[0].text if messages[0].role == "system" else None
    rest = messages[head is not None :]
    answers = [number for number, one in enumerate(rest) if one.role == "assistant"]
    num_known = answers[-1] + 1 if answers else 0
    own: Body = {"tools": [{"type": "function", "function": LOOK}]}
    own |= {"system": head} if head is not None else {}
    config = agents.config_of(agents.sent_fields(json.dumps(own).encode(), AgentConfig))
    body = json.dumps({"messages": [chat_message(one) for one in rest[num_known:]]}).encode()
    data = agents.chat_of(config, agents.sent_fields(body, AgentGenerate))
    asked = chat_to_generate(data, "r", SPEC, SETTINGS, CALLER, needs_messages=False)
    history = [agents.unpacked(agents.packed(one)) for one in rest[:num_known]]
    return agents.with_history(asked, agents.read_config(config).system, history)[0]


PROTOCOLS: dict[str, Callable[[Sequence[Message]], GenerateRequest]] = {
    "chat": chat,
    "responses": responses,
    "messages": anthropic,
    "ollama": ollama,
    "agents": agent,
}
