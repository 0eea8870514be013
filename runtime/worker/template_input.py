"""Messages, tools and arguments as chat templates expect them: the dictionaries of OpenAI's API."""

from __future__ import annotations

import json
from typing import Any

from runtime.errors import InvalidRequest
from runtime.types import ChatPrompt, Message, Tool

_OWN_KWARGS = frozenset(
    {"chat_template", "continue_final_message", "conversation", "documents", "tools"}
)


def shown_tools(prompt: ChatPrompt) -> tuple[Tool, ...]:
    """The tools that the prompt begins with: deferred ones are shown where they are loaded."""
    return tuple(tool for tool in prompt.tools if not tool.is_deferred)


def template_kwargs(prompt: ChatPrompt) -> dict[str, object]:
    given: dict[str, object] = json.loads(prompt.template_kwargs)
    if reserved := _OWN_KWARGS & given.keys():
        name = min(reserved)
        raise InvalidRequest(f"{name!r} is not yours to set.", f"chat_template_kwargs.{name}")
    return given


def template_message(message: Message) -> dict[str, object]:
    rendered: dict[str, object] = {"role": message.role, "content": message.text}
    if message.reasoning is not None:
        rendered["reasoning_content"] = message.reasoning
    if message.tool_calls:
        rendered["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": _arguments(call.arguments)},
            }
            for call in message.tool_calls
        ]
    if message.tool_call_id is not None:
        rendered["tool_call_id"] = message.tool_call_id
    if message.name is not None:
        rendered["name"] = message.name
    return rendered


def _arguments(text: str) -> Any:
    # Most templates iterate over a mapping; text that is none is shown as it is.
    try:
        return json.loads(text)
    except ValueError:
        return text


def template_tool(tool: Tool) -> dict[str, object]:
    function: dict[str, object] = {"name": tool.name, "parameters": json.loads(tool.parameters)}
    if tool.description is not None:
        function["description"] = tool.description
    return {"type": "function", "function": function}
