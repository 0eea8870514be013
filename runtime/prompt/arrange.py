"""Arrange: bring any client's messages into an order and form that a model's template renders.

Positions are kept and nothing is dropped: what a template has no form for is given in a user's
turn, inside `<system-reminder>`. What is done to a message never depends on later ones, except for
results of the same calls, so that a conversation's beginning stays as it is while it grows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import msgspec

from runtime.prompt.stabilise import OPEN, reminder_of
from runtime.types import Image, Message, Tool

FAILED = "The tool call failed:\n"
LOADED = "These tools can be called from now on:"
_JOINT = "\n\n"


class Abilities(NamedTuple):
    """What a template renders without losing or refusing it.

    A system message at the beginning; one later on; a user's turn after a user's; a user's turn
    after a tool's result; an image in a tool's result.
    """

    system: bool = True
    late_system: bool = True
    users_in_a_row: bool = True
    user_after_tool: bool = True
    images_in_results: bool = True


def arrange(
    messages: Sequence[Message],
    abilities: Abilities,
    tools: Sequence[Tool] = (),
    definition: Callable[[Tool], str] | None = None,
) -> tuple[Message, ...]:
    """The messages as the template takes them. `definition` gives a tool's text in its form."""
    by_name = {tool.name: tool for tool in tools}
    arranged: list[Message] = []
    ordered = _with_ordered_results(messages)
    if not abilities.images_in_results and abilities.user_after_tool:
        ordered = _with_images_after_results(ordered)
    for message in ordered:
        one = _as_text(message, by_name, definition)
        is_head = all(earlier.role == "system" for earlier in arranged)
        if one.role == "system" and not (abilities.system if is_head else abilities.late_system):
            one = _reminder(one) if not is_head else msgspec.structs.replace(one, role="user")
        if arranged and (joint := _joint(arranged[-1], one, abilities)) is not None:
            arranged[-1] = _joined(arranged[-1], one, joint)
        else:
            arranged.append(one)
    return tuple(arranged)


def _with_ordered_results(messages: Sequence[Message]) -> list[Message]:
    """Results of parallel calls in the order of the calls; clients send them as they complete."""
    ordered: list[Message] = []
    number = 0
    while number < len(messages):
        end = number
        while end < len(messages) and messages[end].role == "tool":
            end += 1
        results = list(messages[number:end])
        if len(results) > 1:
            results = _by_call(results, ordered)
        ordered += results or [messages[number]]
        number = max(end, number + 1)
    return ordered


def _with_images_after_results(messages: Sequence[Message]) -> list[Message]:
    """Images of tools' results in the user's turn that follows them."""
    moved: list[Message] = []
    images: list[Image] = []
    for message in messages:
        if images and message.role != "tool":
            moved.append(Message(role="user", images=tuple(images)))
            images = []
        if message.role == "tool" and message.images:
            images += (msgspec.structs.replace(image, at=0) for image in message.images)
            moved.append(msgspec.structs.replace(message, images=()))
        else:
            moved.append(message)
    if images:
        moved.append(Message(role="user", images=tuple(images)))
    return moved


def _by_call(results: list[Message], before: Sequence[Message]) -> list[Message]:
    calls = next((one.tool_calls for one in reversed(before) if one.tool_calls), ())
    order = {call.id: number for number, call in enumerate(calls)}
    return sorted(results, key=lambda one: order.get(one.tool_call_id or "", len(order)))


def _as_text(
    message: Message, tools: Mapping[str, Tool], definition: Callable[[Tool], str] | None
) -> Message:
    """What the text does not say yet: that a tool failed, and the tools that are loaded here."""
    text, images = message.text, message.images
    if message.is_error:
        text, images = FAILED + text, _later(images, len(FAILED))
    loaded = [tools[name] for name in message.loaded_tools if name in tools]
    if loaded and definition is not None:
        shown = "\n".join([LOADED, *(definition(tool) for tool in loaded)])
        text = f"{text}\n{shown}" if text else shown
    if text is message.text:
        return message
    return msgspec.structs.replace(
        message, text=text, images=images, is_error=False, loaded_tools=()
    )


def _reminder(message: Message) -> Message:
    """The message as a user's reminder; a picture stays among the words where it was."""
    body = message.text.strip()
    opening, blanks = len(OPEN) + 1, message.text.index(body)
    images = tuple(
        msgspec.structs.replace(image, at=opening + min(max(image.at - blanks, 0), len(body)))
        for image in message.images
    )
    text = reminder_of(body)
    return msgspec.structs.replace(message, role="user", text=text, images=images)


def _later(images: Sequence[Image], by: int) -> tuple[Image, ...]:
    """The pictures of a text before which so many characters were put."""
    return tuple(msgspec.structs.replace(image, at=image.at + by) for image in images)


def _joint(last: Message, one: Message, abilities: Abilities) -> str | None:
    """What joins two messages that the template does not take one after the other."""
    match last.role, one.role:
        case ("system", "system"):
            return _JOINT
        case ("assistant", "assistant"):
            # One turn, in pieces: clients of Responses send text and calls as separate items.
            return "" if not last.text or not one.text else "\n"
        case ("user", "user"):
            return None if abilities.users_in_a_row else _JOINT
        case ("tool", "user"):
            return None if abilities.user_after_tool else _JOINT
        case _:
            return None


def _joined(last: Message, one: Message, joint: str) -> Message:
    text = last.text + joint + one.text if last.text and one.text else last.text or one.text
    shift = len(text) - len(one.text)
    images = (*last.images, *_later(one.images, shift))
    keeps = [keep_s for keep_s in (last.keep_s, one.keep_s) if keep_s is not None]
    reasoning = "\n".join(part for part in (last.reasoning, one.reasoning) if part)
    return msgspec.structs.replace(
        last,
        text=text,
        images=images,
        reasoning=reasoning or None,
        tool_calls=(*last.tool_calls, *one.tool_calls),
        keep_s=max(keeps, default=None),
    )
