"""Places: up to which character a rendered text is that of a part of its prompt.

Found by rendering that part alone, or with other words behind it, and comparing. Belongs to the
intake thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from runtime.errors import InvalidRequest
from runtime.prompt.healing import (
    KnownPrefix,
    Spliced,
    TemplateRenderer,
    num_common_characters,
    worth_marking,
)
from runtime.prompt.stabilise import varying_from
from runtime.types import Breakpoint, ChatPrompt, Message, Tool
from runtime.worker.input.template_input import shown_tools

_MARKS = ("\ue000", "\ue001")
"""Characters for private use: no text goes on with either of them, but with one at most."""


def other_than(text: str) -> str:
    """A text that begins otherwise than this one."""
    return _MARKS[text.startswith(_MARKS[0])]


class Mark(NamedTuple):
    """A character of a rendered text; with `keep_s` a breakpoint is before it."""

    at: int
    keep_s: float | None = None


def marks_of(
    renderer: TemplateRenderer, prompt: ChatPrompt, text: str, first: int = 0, *, num_ends: int = 0
) -> list[Mark]:
    """The places in the text from message `first` on that are wanted: breakpoints, and where layers
    cannot be cut the ends of so many messages, and of those with a breakpoint there.
    """
    num_messages = len(prompt.messages)
    ends: set[int] = set()
    marks: list[Mark] = []
    for number in range(first, num_messages):
        message = prompt.messages[number]
        for point in message.breakpoints:
            at = place_of(renderer, prompt, text, number, point)
            (end,) = ends_of(renderer, prompt, text, [number]) if not at else [at]
            marks.append(Mark(end, point.keep_s))
            if point.at >= len(message.text) and point.num_calls >= len(message.tool_calls):
                ends.add(number)
    if num_ends:
        ends |= set(worth_marking(num_messages, first, num_ends))
        marks += map(Mark, ends_of(renderer, prompt, text, sorted(ends)))
    if not first:
        marks += [
            Mark(end_of_tools(renderer, prompt, text, number + 1), tool.keep_s)
            for number, tool in enumerate(prompt.tools)
            if tool.keep_s is not None
        ]
    return marks


def keeps_at(marks: Sequence[Mark], positions: Sequence[int]) -> list[tuple[int, float]]:
    """The breakpoints among the marks, by the positions of their tokens."""
    pairs = zip(marks, positions, strict=True)
    return [
        (position, one.keep_s) for one, position in pairs if one.keep_s is not None and position
    ]


def known_keeps(spliced: Spliced, known: KnownPrefix) -> list[tuple[int, float]]:
    """Breakpoints in what is known as tokens. Where they are in it is not known any more: those of
    the head count for all of it, those of turns for all that is known.
    """
    messages = spliced.prompt.messages[: spliced.number + 1]
    keeps: dict[int, float] = {}
    for message in messages:
        end = known.prefix_end if message.role == "system" else 0
        end = end or len(known.token_ids)
        for point in message.breakpoints:
            keeps[end] = max(keeps.get(end, 0.0), point.keep_s)
    return list(keeps.items())


def ends_of(
    renderer: TemplateRenderer, prompt: ChatPrompt, text: str, messages: Sequence[int]
) -> list[int]:
    """Up to which character the text of this prompt is that of the messages up to each."""
    return [_num_shared(renderer, prompt, text, number + 1) for number in messages]


def place_of(
    renderer: TemplateRenderer, prompt: ChatPrompt, text: str, number: int, point: Breakpoint
) -> int:
    """Up to which character the text is that of message `number` up to a breakpoint in it.

    0 where the template does not show it.
    """
    message = prompt.messages[number]
    if point.num_calls:
        cut = msgspec.structs.replace(message, tool_calls=message.tool_calls[: point.num_calls])
    else:
        cut = msgspec.structs.replace(
            message,
            text=message.text[: point.at] + other_than(message.text[point.at :]),
            images=message.images[: point.num_images],
        )
    messages = (*prompt.messages[:number], cut, *prompt.messages[number + 1 :])
    return _num_common(renderer, prompt, text, messages, prompt.tools)


def end_of_tools(renderer: TemplateRenderer, prompt: ChatPrompt, text: str, num_tools: int) -> int:
    """Up to which character the text is the same whatever follows the first tools."""
    first = next(iter(prompt.messages), Message(role="user"))
    other = msgspec.structs.replace(first, text=other_than(first.text), images=(), tool_calls=())
    tools = prompt.tools[:num_tools]
    if num_tools < len(prompt.tools):
        name = other_than(prompt.tools[num_tools].name)
        tools = (*tools, msgspec.structs.replace(prompt.tools[num_tools], name=name))
    return _num_common(renderer, prompt, text, (other,), tools)


def end_of_head(renderer: TemplateRenderer, prompt: ChatPrompt, text: str) -> int:
    """Up to which character the text is that of tools and the system prompt alone."""
    heads = (m.role == "system" for m in prompt.messages)
    num_head = next((i for i, is_head in enumerate(heads) if not is_head), 0)
    if not num_head and not shown_tools(prompt):
        return 0
    return _num_shared(renderer, prompt, text, num_head)


def varying_at(prompt: ChatPrompt, text: str) -> int:
    """Up to which character the text precedes what changes of the system prompt; 0 for all."""
    for message in prompt.messages:
        if message.role != "system":
            return 0
        if (at := varying_from(message.text)) is not None:
            body = message.text.strip()
            start = text.find(body)
            return start + max(at - message.text.index(body), 0) if start >= 0 else 0
    return 0


def _num_shared(
    renderer: TemplateRenderer, prompt: ChatPrompt, text: str, num_messages: int
) -> int:
    return _num_common(renderer, prompt, text, prompt.messages[:num_messages], prompt.tools)


def _num_common(
    renderer: TemplateRenderer,
    prompt: ChatPrompt,
    text: str,
    messages: tuple[Message, ...],
    tools: tuple[Tool, ...],
) -> int:
    """How much of the text is that of these messages and tools."""
    shorter = ChatPrompt(
        messages=messages,
        tools=tools,
        thinking=prompt.thinking,
        template_kwargs=prompt.template_kwargs,
    )
    try:
        return num_common_characters(renderer.render(shorter, opens_answer=False), text)
    except InvalidRequest:
        return 0
