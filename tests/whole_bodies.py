"""For every kind of body one with an object in every place, and which objects are the client's."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, NamedTuple

import msgspec

from api.admin.history import RestoreAsked
from api.agents.schemas import AgentCreate, AgentFork, AgentGenerate
from api.anthropic.schemas import MessagesRequest
from api.cache_hints import HintRequest
from api.ollama.schemas import GenerateBody, OllamaChatRequest
from api.openai.embeddings import EmbeddingRequest
from api.openai.response_schemas import ResponseRequest
from api.openai.schemas import ChatRequest, CompletionRequest
from api.openai.tokens import DetokenizeRequest, TokenizeRequest
from api.responses.conversation_handlers import ConversationChange, NewConversation, NewItems

Body = dict[str, Any]

SCHEMA: Body = {"type": "object", "properties": {"at": {"type": "integer"}}}
LOOK: Body = {"name": "look", "description": "Look.", "parameters": SCHEMA}
CLIENTS_OWN = frozenset(
    {"parameters", "input_schema", "schema", "arguments", "input", "logit_bias", "keep"}
)
"""Objects by these names hold whatever the client wants."""
OPEN = frozenset({"metadata", "chat_template_kwargs"})
"""Objects by these names do as well, but what they have inside that is known is looked into."""

MESSAGES: list[Body] = [
    {"role": "system", "content": [{"type": "text", "text": "Be brief."}]},
    {"role": "user", "content": "Look."},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": "c1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
        ],
    },
    {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "A wall."}]},
    {
        "role": "user",
        "content": [
            {"type": "text", "text": "And?", "prompt_cache_breakpoint": {"mode": "explicit"}}
        ],
    },
]
TOOLS: list[Body] = [{"type": "function", "function": LOOK}]
THINKING: Body = {"reasoning": {"effort": "none"}, "thinking": {"type": "disabled"}}
CHAT: Body = {
    "messages": MESSAGES,
    "tools": TOOLS,
    "tool_choice": {
        "type": "allowed_tools",
        "allowed_tools": {
            "mode": "auto",
            "tools": [{"type": "function", "function": {"name": "look"}}],
        },
    },
    "response_format": {"type": "text"},
    "prediction": {"type": "content", "content": [{"type": "text", "text": "I looked."}]},
    "stream_options": {"include_usage": True},
    "prompt_cache_options": {"mode": "implicit"},
    "metadata": {**THINKING},
    "extra_body": {**THINKING},
    "chat_template_kwargs": {"reasoning": {"effort": "none"}},
    "max_tokens": 1,
    **THINKING,
}
AGENT: Body = {
    "tools": TOOLS,
    "response_format": {"type": "text"},
    "metadata": {**THINKING},
    "extra_body": {**THINKING},
    **THINKING,
}
RESPONSES: Body = {
    "input": [
        {"role": "user", "content": [{"type": "input_text", "text": "Look."}]},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Hm."}]},
        {"type": "function_call", "call_id": "c1", "name": "look", "arguments": "{}"},
        {
            "type": "function_call_output",
            "call_id": "c1",
            "output": [{"type": "input_text", "text": "A wall."}],
        },
        {"type": "custom_tool_call", "call_id": "c2", "name": "say", "input": "x"},
        {"type": "custom_tool_call_output", "call_id": "c2", "output": "y"},
        {"type": "message", "role": "user", "content": "And?"},
    ],
    "tools": [
        {"type": "function", **LOOK},
        {"type": "custom", "name": "say", "format": {"type": "text"}},
        {"type": "namespace", "name": "n", "tools": [{"type": "function", **LOOK}]},
    ],
    "tool_choice": {
        "type": "allowed_tools",
        "mode": "auto",
        "tools": [{"type": "function", "name": "look"}],
    },
    "text": {"format": {"type": "text"}},
    "metadata": {**THINKING},
    "extra_body": {**THINKING},
    "store": False,
    "max_output_tokens": 1,
    **THINKING,
}
EPHEMERAL: Body = {"type": "ephemeral"}
ANTHROPIC: Body = {
    "system": [{"type": "text", "text": "Be brief.", "cache_control": EPHEMERAL}],
    "messages": [
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "Look.", "cache_control": EPHEMERAL},
                {"type": "document", "source": {"type": "text", "data": "Once."}, "title": "T"},
                {
                    "type": "document",
                    "source": {"type": "content", "content": [{"type": "text", "text": "B."}]},
                },
                {
                    "type": "search_result",
                    "content": [{"type": "text", "text": "Found."}],
                    "title": "t",
                    "source": "s",
                },
            ],
        },
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Hm."},
                {"type": "text", "text": "Yes."},
                {"type": "tool_use", "id": "c1", "name": "look", "input": {"at": 1}},
            ],
        },
        {
            "role": "user",
            "content": [
                {
                    "type": "tool_result",
                    "tool_use_id": "c1",
                    "content": [
                        {"type": "text", "text": "A wall."},
                        {"type": "tool_reference", "tool_name": "look"},
                    ],
                }
            ],
        },
    ],
    "tools": [{"name": "look", "input_schema": SCHEMA, "cache_control": EPHEMERAL}],
    "tool_choice": {"type": "auto"},
    "thinking": {"type": "disabled"},
    "output_config": {},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "metadata": {"user_id": "u"},
    "max_tokens": 1,
}
OLLAMA: Body = {
    "model": "hearth-tiny",
    "messages": [
        {"role": "user", "content": "Look."},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"function": {"name": "look", "arguments": {"at": 1}}}],
        },
        {"role": "tool", "content": "A wall.", "tool_name": "look"},
    ],
    "tools": TOOLS,
    "options": {"num_predict": 1},
    "stream": False,
}


class Whole(NamedTuple):
    """A body, what it is decoded as, and names of the object at its top that stand for others."""

    kind: type[msgspec.Struct]
    body: Body


BODIES: dict[str, Whole] = {
    "chat": Whole(ChatRequest, CHAT),
    "completions": Whole(CompletionRequest, {"prompt": "Hi", "max_tokens": 1}),
    "responses": Whole(ResponseRequest, RESPONSES),
    "messages": Whole(MessagesRequest, ANTHROPIC),
    "embeddings": Whole(EmbeddingRequest, {"input": "Hi"}),
    "tokenize": Whole(TokenizeRequest, {"messages": MESSAGES, "tools": TOOLS}),
    "detokenize": Whole(DetokenizeRequest, {"tokens": [5]}),
    "ollama_chat": Whole(OllamaChatRequest, OLLAMA),
    "ollama_generate": Whole(
        GenerateBody,
        {"model": "hearth-tiny", "prompt": "Hi", "options": {"num_predict": 1}, "stream": False},
    ),
    "conversation": Whole(
        NewConversation, {"items": RESPONSES["input"], "metadata": {"topic": "lamps"}}
    ),
    "conversation_change": Whole(ConversationChange, {"metadata": {"topic": "doors"}}),
    "conversation_items": Whole(NewItems, {"items": RESPONSES["input"]}),
    "hints": Whole(HintRequest, {"session_id": "s"}),
    "agent": Whole(AgentCreate, AGENT),
    "fork": Whole(AgentFork, AGENT),
    "agent_generate": Whole(AgentGenerate, {"messages": MESSAGES[1:2], "max_tokens": 1}),
}
REFUSING = (RestoreAsked,)
"""Bodies that are refused with a field that nobody knows."""

Place = tuple[str | int, ...]


def places(body: Body) -> list[Place]:
    """The way to each object whose unknown fields are to be named."""
    return list(_places(body, ()))


def _places(value: object, way: Place) -> Iterator[Place]:
    if isinstance(value, dict):
        if not (way and way[-1] in OPEN):
            yield way
        for name, inner in value.items():
            if name not in CLIENTS_OWN or isinstance(inner, list):
                yield from _places(inner, (*way, name))
    elif isinstance(value, list):
        for number, inner in enumerate(value):
            yield from _places(inner, (*way, number))


def written(way: Place) -> str:
    """The way as answers write it."""
    text = ""
    for step in way:
        text += f"[{step}]" if isinstance(step, int) else f".{step}"
    return text.removeprefix(".")


def with_fields(body: Body, extra: dict[tuple[Place, str], object]) -> tuple[Body, set[str]]:
    """The body with these fields at those places, and their paths."""
    changed = json.loads(json.dumps(body))
    for (way, name), value in extra.items():
        at: Any = changed
        for step in way:
            at = at[step]
        at[name] = value
    return changed, {written((*way, name)) for way, name in extra}
