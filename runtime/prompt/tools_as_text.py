"""Tools, calls and results as text, for chat templates that have no form for them.

There is one form (docs/tool-calls.md): definitions in the system prompt, a call in the assistant's
turn as models of the Hermes and Qwen families write it, a result in a user's turn.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec

from runtime.prompt.joining import JoinedMessages
from runtime.types import Message, ToolCall

DEFINITIONS = "generic_tools"
CALLS = "generic_calls"
"""The rules by which it is told that definitions, or calls and results, are given as text."""
SPLIT = "split_calls"
"""The rule by which it is told that words beside calls are given in a message before them."""

CALL_START, CALL_END = "<tool_call>", "</tool_call>"
RESULT_START, RESULT_END = "<tool_response>", "</tool_response>"
_JOINT = "\n\n"
_OPENING = "You can use these tools:\n<tools>"
_HOW = """\
</tools>
To use a tool, write this and nothing after it, with the tool's name and its arguments as JSON:"""
_RETURNS = f"What it returns comes in the next message, inside {RESULT_START} and {RESULT_END}."


class CallForm(NamedTuple):
    """How a model writes a call whose arguments are one JSON object, before these and behind.

    The name of the tool is filled into the `opening`.
    """

    opening: str
    closing: str

    def begun(self, name: str, arguments: str) -> str:
        """A call up to the end of its arguments."""
        named = self.opening.format(name=name, name_json=json.dumps(name, ensure_ascii=False), n=0)
        return named + arguments


OURS = CallForm(f'{CALL_START}\n{{{{"name": {{name_json}}, "arguments": ', f"}}\n{CALL_END}")
"""How it is told to write them whose template has no form for them."""


class ToolForms(NamedTuple):
    """What a template has forms of its own for. Without one for tools those for calls and results
    are used only if the model can be told by us how it writes calls.

    Where it `splits`, it shows what is said beside a call only in a message before it.
    """

    tools: bool = True
    calls: bool = True
    results: bool = True
    splits: bool = False


NATIVE = ToolForms()
GENERIC = ToolForms(tools=False, calls=False, results=False)


class WrittenOut(NamedTuple):
    """Messages without what a template would lose, and how many of those given became others."""

    messages: tuple[Message, ...]
    num_changed: int = 0


def with_definitions(
    messages: Sequence[Message],
    definitions: Sequence[str],
    form: CallForm = OURS,
    *,
    has_system: bool,
) -> tuple[Message, ...]:
    """The messages with these tools, and how to call one, before all that they say.

    They are in the system message, or in the first one where the template takes no other.
    """
    example = form.begun("the tool's name", "{}") + form.closing
    returns = [_RETURNS] if form == OURS else []
    text = "\n".join([_OPENING, *definitions, _HOW, example, *returns])
    role = "system" if has_system else "user"
    opening = Message(role=role, text=text)
    if not messages or messages[0].role != role:
        return (opening, *messages)
    first, *rest = messages
    is_empty = not (first.text or first.images)
    if is_empty:
        return (opening, *rest)
    joined = JoinedMessages(opening)
    joined.add(first, _JOINT, even_empty=True)
    return (joined.message(), *rest)


def is_lost(message: Message, forms: ToolForms) -> bool:
    """A template with these forms would not show all of this message."""
    if message.role == "tool":
        return not forms.results
    return bool(message.tool_calls) and not forms.calls


def written_out(
    messages: Sequence[Message], forms: ToolForms, may_follow: Callable[[], bool]
) -> WrittenOut:
    """The messages with their calls and results as text.

    Results in a row are one user's turn. `may_follow` says whether a user's turn may follow
    another; where it may not, what a user says beside a result is in its turn.
    """
    if not any(is_lost(message, forms) for message in messages):
        return WrittenOut(tuple(messages))
    made: list[JoinedMessages] = []
    num_changed = 0
    was_result = False
    for message in messages:
        is_result = message.role == "tool" and not forms.results
        turn = as_text(message) if is_lost(message, forms) else message
        are_users = bool(made) and made[-1].role == turn.role == "user"
        if are_users and is_result and was_result:
            made[-1].add(turn, "\n", even_empty=True)
        elif are_users and (is_result or was_result) and not may_follow():
            made[-1].add(turn, _JOINT, even_empty=True)
            num_changed += not is_result
        else:
            made.append(JoinedMessages(turn))
        num_changed += turn is not message
        was_result = is_result
    return WrittenOut(tuple(one.message() for one in made), num_changed)


def split(messages: Sequence[Message]) -> WrittenOut:
    """The messages with what is said beside calls before them."""
    made: list[Message] = []
    for message in messages:
        if not (message.text.strip() and message.tool_calls):
            made.append(message)
            continue
        made.append(msgspec.structs.replace(message, tool_calls=()))
        made.append(Message(role="assistant", tool_calls=message.tool_calls))
    return WrittenOut(tuple(made), len(made) - len(messages))


def as_text(message: Message) -> Message:
    """The message with its calls, or what it is the result of, as text."""
    if message.role == "tool":
        opening = f"{RESULT_START}\n"
        images = tuple(
            msgspec.structs.replace(image, at=image.at + len(opening)) for image in message.images
        )
        text = f"{opening}{message.text}\n{RESULT_END}"
        points = tuple(
            msgspec.structs.replace(point, at=point.at + len(opening))
            for point in message.breakpoints
        )
        return Message(role="user", text=text, images=images, breakpoints=points)
    said = [message.text] if message.text else []
    text = "\n".join([*said, *map(_call, message.tool_calls)])
    return msgspec.structs.replace(message, text=text, tool_calls=())


def _call(call: ToolCall) -> str:
    return OURS.begun(call.name, arguments_json(call.arguments)) + OURS.closing


def arguments_json(text: str) -> str:
    """The arguments of a call as JSON, in one spelling; what is none is given as a text."""
    try:
        value: object = json.loads(text)
    except (ValueError, RecursionError):
        value = text
    return json.dumps(value, ensure_ascii=False)
