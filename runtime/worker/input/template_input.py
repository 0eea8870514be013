"""Messages, tools and arguments as chat templates expect them: the dictionaries of OpenAI's API."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import msgspec

from runtime.prompt.tools_as_text import arguments_json
from runtime.types import ChatPrompt, Message, Role, Tool


class ContentForms(NamedTuple):
    """How a template wants what messages say: as a string, or of these roles as a list of parts.

    Pictures are parts among texts, or where there is a `picture_mark` that mark in the string.
    The arguments of calls are objects, or texts in JSON.
    """

    parts: frozenset[Role] = frozenset()
    picture_mark: str = ""
    has_text_arguments: bool = False

    def with_parts(self, role: Role) -> ContentForms:
        return self._replace(parts=self.parts | {role})


STRINGS = ContentForms()


def shown_tools(prompt: ChatPrompt) -> tuple[Tool, ...]:
    """The tools that the prompt begins with: deferred ones are shown where they are loaded."""
    if not prompt.tools:
        return ()
    return tuple(tool for tool in prompt.tools if not tool.is_deferred)


def template_kwargs(prompt: ChatPrompt) -> dict[str, object]:
    return json.loads(prompt.template_kwargs)


def template_message(message: Message, forms: ContentForms = STRINGS) -> dict[str, object]:
    content: object = message.text
    if forms.picture_mark:
        content = _marked(message, forms.picture_mark)
    elif message.images or message.role in forms.parts:
        content = _parts(message)
    rendered: dict[str, object] = {"role": message.role, "content": content}
    if message.reasoning is not None:
        rendered["reasoning_content"] = message.reasoning
    if message.tool_calls:
        arguments = arguments_json if forms.has_text_arguments else _arguments
        rendered["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": arguments(call.arguments)},
            }
            for call in message.tool_calls
        ]
    if message.tool_call_id is not None:
        rendered["tool_call_id"] = message.tool_call_id
    if message.name is not None:
        rendered["name"] = message.name
    return rendered


def _marked(message: Message, mark: str) -> str:
    """The text with a mark where each picture is."""
    return "".join(part.get("text", mark) for part in _parts(message))


def _parts(message: Message) -> list[dict[str, str]]:
    """The parts of a text around its pictures."""
    parts: list[dict[str, str]] = []
    done = 0
    for image in sorted(message.images, key=lambda image: image.at):
        if message.text[done : image.at]:
            parts.append({"type": "text", "text": message.text[done : image.at]})
        parts.append({"type": "image"})
        done = max(done, image.at)
    if message.text[done:]:
        parts.append({"type": "text", "text": message.text[done:]})
    return parts


def defused(prompt: ChatPrompt, words: Sequence[str]) -> ChatPrompt:
    """The prompt with a blank of no width in these words, which from clients are but words."""
    if not words or not any(word in text for word in words for text in _texts(prompt)):
        return prompt

    def plain(text: str) -> str:
        for word in words:
            text = text.replace(word, f"{word[0]}\u200b{word[1:]}")
        return text

    def message(one: Message) -> Message:
        return msgspec.structs.replace(
            one,
            text=plain(one.text),
            images=tuple(
                msgspec.structs.replace(image, at=len(plain(one.text[: image.at])))
                for image in one.images
            ),
            reasoning=plain(one.reasoning) if one.reasoning is not None else None,
            tool_calls=tuple(
                msgspec.structs.replace(call, arguments=plain(call.arguments))
                for call in one.tool_calls
            ),
        )

    def tool(one: Tool) -> Tool:
        description = plain(one.description) if one.description is not None else None
        parameters = plain(one.parameters)
        return msgspec.structs.replace(one, description=description, parameters=parameters)

    return msgspec.structs.replace(
        prompt,
        messages=tuple(map(message, prompt.messages)),
        tools=tuple(map(tool, prompt.tools)),
    )


def num_changed(prompt: ChatPrompt, plain: ChatPrompt) -> int:
    """How many messages and tools of a prompt are others in `plain`."""
    if prompt is plain:
        return 0
    pairs = [*zip(prompt.messages, plain.messages, strict=True)]
    tools = [*zip(prompt.tools, plain.tools, strict=True)]
    return sum(one != other for one, other in pairs) + sum(one != other for one, other in tools)


def _texts(prompt: ChatPrompt) -> Iterator[str]:
    for message in prompt.messages:
        yield message.text
        yield message.reasoning or ""
        yield from (call.arguments for call in message.tool_calls)
    for tool in prompt.tools:
        yield tool.description or ""
        yield tool.parameters


def has_odd_arguments(message: Message) -> bool:
    """A call of it has arguments that are no object, over which many templates cannot iterate."""
    return any(not isinstance(_arguments(call.arguments), dict) for call in message.tool_calls)


def with_wrapped_arguments(message: Message, forms: ContentForms = STRINGS) -> dict[str, object]:
    """The message for such a template: those arguments inside of an object."""
    calls = (
        call
        if isinstance(_arguments(call.arguments), dict)
        else msgspec.structs.replace(call, arguments=json.dumps({"arguments": call.arguments}))
        for call in message.tool_calls
    )
    return template_message(msgspec.structs.replace(message, tool_calls=tuple(calls)), forms)


def _arguments(text: str) -> Any:
    # Most templates iterate over a mapping; text that is none is shown as it is.
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def template_tool(tool: Tool) -> dict[str, object]:
    function: dict[str, object] = {"name": tool.name, "parameters": json.loads(tool.parameters)}
    if tool.description is not None:
        function["description"] = tool.description
    return {"type": "function", "function": function}
