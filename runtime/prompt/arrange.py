"""Arrange: bring any client's messages into an order and form that a model's template renders.

Positions are kept and nothing is dropped: what a template has no form for is given in a user's
turn, sealed. What is done to a message never depends on later ones, except for results of the same
calls, so that a conversation's beginning stays as it is while it grows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from hashlib import sha256
from typing import NamedTuple

import msgspec

from runtime.prompt.joining import JoinedMessages
from runtime.prompt.rewriting import Made, RewriteStep, each
from runtime.prompt.seal import sealed
from runtime.prompt.tools_as_text import as_text
from runtime.types import Image, Message, Tool, ToolCall

FAILED = "The tool call failed:\n"
LOADED = "These tools can be called from now on:"
NO_ANSWER = "[no answer]"
BEGUN_BEFORE = "[The conversation began before this answer.]"
_JOINT = "\n\n"
_SHORT_ID = 9


class Abilities(NamedTuple):
    """What a template renders without losing or refusing it.

    A system message at the beginning; one later on; a user's turn after a user's; a user's turn
    after a tool's result; an image in a tool's result; any ids of calls; several calls in
    one message; a call that no result follows; an answer before any question; an empty answer.
    """

    system: bool = True
    late_system: bool = True
    users_in_a_row: bool = True
    user_after_tool: bool = True
    images_in_results: bool = True
    any_ids: bool = True
    parallel_calls: bool = True
    open_calls: bool = True
    leading_answers: bool = True
    empty_answers: bool = True


Codes = Callable[[Sequence[Message]], Sequence[str]]
"""What seals a system text at each place of a conversation."""


def arranging_steps(
    abilities: Abilities,
    codes: Codes,
    tools: Sequence[Tool] = (),
    definition: Callable[[Tool], str] | None = None,
) -> list[RewriteStep]:
    """Until the template takes the messages. `definition` gives a tool's text in its form."""
    steps = [RewriteStep("result_order", _with_ordered_results)]
    if not abilities.images_in_results and abilities.user_after_tool:
        steps.append(RewriteStep("result_images", _with_images_after_results))
    steps.append(RewriteStep("failed_call", each(_saying_that_it_failed)))
    if definition is not None:
        by_name = {tool.name: tool for tool in tools}
        steps.append(RewriteStep("loaded_tools", each(partial(_with_loaded, by_name, definition))))
    steps.append(RewriteStep("joined", partial(_with_joined, _joint_of_one)))
    steps += _fitting_steps(abilities)
    if not abilities.system:
        steps.append(RewriteStep("system_as_user", partial(_as_users, codes, is_head=True)))
    if not abilities.late_system:
        steps.append(RewriteStep("late_system", partial(_as_users, codes, is_head=False)))
    steps.append(RewriteStep("joined", partial(_with_joined, partial(_joint_of_users, abilities))))
    return steps


def _fitting_steps(abilities: Abilities) -> list[RewriteStep]:
    """What a template would refuse of a history, as it takes it."""
    steps: list[RewriteStep] = []
    if not abilities.any_ids:
        steps.append(RewriteStep("call_ids", each(_with_plain_ids)))
    if not abilities.parallel_calls:
        steps.append(RewriteStep("single_calls", _with_single_calls))
    if not abilities.open_calls:
        steps.append(RewriteStep("open_calls", _with_open_calls_as_text))
        steps.append(RewriteStep("joined", partial(_with_joined, _joint_of_one)))
    if not abilities.empty_answers:
        steps.append(RewriteStep("empty_answers", each(_without_empty_answers)))
    if not abilities.leading_answers:
        steps.append(RewriteStep("leading_answer", _with_a_beginning))
    return steps


def _with_plain_ids(message: Message) -> Message:
    """Ids of calls as nine letters and digits, the same for the same id."""
    if not message.tool_calls and message.tool_call_id is None:
        return message
    calls = tuple(
        msgspec.structs.replace(call, id=_plain_id(call.id)) for call in message.tool_calls
    )
    result_of = message.tool_call_id
    result_of = None if result_of is None else _plain_id(result_of)
    return msgspec.structs.replace(message, tool_calls=calls, tool_call_id=result_of)


def _plain_id(call_id: str) -> str:
    is_short = len(call_id) == _SHORT_ID and call_id.isascii() and call_id.isalnum()
    return call_id if is_short else sha256(call_id.encode()).hexdigest()[:_SHORT_ID]


def _with_single_calls(messages: Sequence[Message]) -> list[Made]:
    """Calls of one message one after the other, each with its result."""
    made: list[Made] = []
    number = 0
    while number < len(messages):
        message = messages[number]
        end = number + 1
        while end < len(messages) and messages[end].role == "tool":
            end += 1
        if len(message.tool_calls) < 2:
            made += [Made(messages[one], (one,)) for one in range(number, end)]
            number = end
            continue
        waiting: list[int] = list(range(number + 1, end))
        for place, call in enumerate(message.tool_calls):
            alone = msgspec.structs.replace(message, tool_calls=(call,))
            if place:
                alone = Message(role="assistant", tool_calls=(call,))
            made.append(Made(alone, (number,)))
            of_it = [one for one in waiting if messages[one].tool_call_id == call.id]
            made += [Made(messages[one], (one,)) for one in of_it]
            waiting = [one for one in waiting if one not in of_it]
        made += [Made(messages[one], (one,)) for one in waiting]
        number = end
    return made


def _with_open_calls_as_text(messages: Sequence[Message]) -> list[Made]:
    """Calls that no result follows, though something else does, and results of no call, as text."""
    made: list[Made] = []
    calls: tuple[ToolCall, ...] = ()
    for number, message in enumerate(messages):
        following = messages[number + 1].role if number + 1 < len(messages) else "tool"
        is_open = bool(message.tool_calls) and following != "tool"
        is_loose = message.role == "tool" and not calls
        calls = calls if message.role == "tool" else message.tool_calls
        made.append(Made(as_text(message) if is_open or is_loose else message, (number,)))
    return made


def _without_empty_answers(message: Message) -> Message:
    is_empty = not (message.text.strip() or message.tool_calls or message.images)
    if message.role != "assistant" or not is_empty:
        return message
    return msgspec.structs.replace(message, text=NO_ANSWER)


def _with_a_beginning(messages: Sequence[Message]) -> list[Made]:
    """A user's turn before an answer that nobody's question precedes."""
    made = [Made(message, (number,)) for number, message in enumerate(messages)]
    roles = [message.role for message in messages]
    first = next((n for n, role in enumerate(roles) if role != "system"), len(roles))
    if first < len(roles) and roles[first] == "assistant":
        made.insert(first, Made(Message(role="user", text=BEGUN_BEFORE), (first,)))
    return made


def _with_ordered_results(messages: Sequence[Message]) -> list[Made]:
    """Results of parallel calls in the order of the calls; clients send them as they complete."""
    ordered: list[int] = []
    calls: tuple[ToolCall, ...] = ()
    number = 0
    while number < len(messages):
        end = number
        while end < len(messages) and messages[end].role == "tool":
            end += 1
        if end == number:
            calls = messages[number].tool_calls or calls
            ordered.append(number)
        elif end - number == 1:
            ordered.append(number)
        else:
            places = {call.id: place for place, call in enumerate(calls)}
            ids = {one: messages[one].tool_call_id or "" for one in range(number, end)}
            ordered += sorted(ids, key=lambda one: places.get(ids[one], len(places)))
        number = max(end, number + 1)
    return [Made(messages[one], (one,)) for one in ordered]


def _with_images_after_results(messages: Sequence[Message]) -> list[Made]:
    """Images of tools' results in the user's turn that follows them."""
    moved: list[Made] = []
    images: list[Image] = []
    shown_by: list[int] = []

    def show() -> None:
        if images:
            moved.append(Made(Message(role="user", images=tuple(images)), tuple(shown_by)))
            images.clear()
            shown_by.clear()

    for number, message in enumerate(messages):
        if message.role != "tool":
            show()
        if message.role == "tool" and message.images:
            images += (msgspec.structs.replace(image, at=0) for image in message.images)
            shown_by.append(number)
            bare = msgspec.structs.replace(message, images=())
            moved.append(Made(bare, (number,)))
        else:
            moved.append(Made(message, (number,)))
    show()
    return moved


def _saying_that_it_failed(message: Message) -> Message:
    if not message.is_error:
        return message
    text, images = FAILED + message.text, _later(message.images, len(FAILED))
    return msgspec.structs.replace(message, text=text, images=images, is_error=False)


def _with_loaded(
    tools: Mapping[str, Tool], definition: Callable[[Tool], str], message: Message
) -> Message:
    """The tools that are loaded here, as text."""
    loaded = [tools[name] for name in message.loaded_tools if name in tools]
    if not loaded:
        return message
    shown = "\n".join([LOADED, *(definition(tool) for tool in loaded)])
    text = f"{message.text}\n{shown}" if message.text else shown
    return msgspec.structs.replace(message, text=text, loaded_tools=())


def _as_users(codes: Codes, messages: Sequence[Message], *, is_head: bool) -> list[Made]:
    """The system messages at the beginning, or those later on, sealed in a user's turn."""
    roles = [message.role for message in messages]
    num_head = next((i for i, role in enumerate(roles) if role != "system"), len(roles))
    places = range(num_head) if is_head else range(num_head, len(roles))
    moved = {number for number in places if roles[number] == "system"}
    seals = codes(messages) if moved else ()
    return [
        Made(_as_user(message, seals[number]) if number in moved else message, (number,))
        for number, message in enumerate(messages)
    ]


def _as_user(message: Message, code: str) -> Message:
    """The message in its envelope; a picture stays among the words where it was."""
    text, start = sealed(message.text, code)
    images = _later(message.images, start)
    return msgspec.structs.replace(message, role="user", text=text, images=images)


def _later(images: Sequence[Image], by: int) -> tuple[Image, ...]:
    """The pictures of a text before which so many characters were put."""
    return tuple(msgspec.structs.replace(image, at=image.at + by) for image in images)


Joint = Callable[[JoinedMessages, Message], str | None]
"""What joins two messages that the template does not take one after the other."""


def _joint_of_one(last: JoinedMessages, one: Message) -> str | None:
    """That of pieces of one text, or of one turn."""
    match last.role, one.role:
        case ("system", "system"):
            return _JOINT
        case ("assistant", "assistant"):
            # Clients of Responses send text and calls as separate items.
            return "" if not last.has_text or not one.text else "\n"
        case _:
            return None


def _joint_of_users(abilities: Abilities, last: JoinedMessages, one: Message) -> str | None:
    match last.role, one.role:
        case ("user", "user"):
            return None if abilities.users_in_a_row else _JOINT
        case ("tool", "user"):
            return None if abilities.user_after_tool else _JOINT
        case _:
            return None


def _with_joined(joint: Joint, messages: Sequence[Message]) -> list[Made]:
    runs: list[JoinedMessages] = []
    numbers: list[list[int]] = []
    for number, message in enumerate(messages):
        if runs and (between := joint(runs[-1], message)) is not None:
            runs[-1].add(message, between)
            numbers[-1].append(number)
        else:
            runs.append(JoinedMessages(message))
            numbers.append([number])
    return [Made(run.message(), tuple(of)) for run, of in zip(runs, numbers, strict=True)]
