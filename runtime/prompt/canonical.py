"""Canonical form: a chain of digests that tells which conversation a request continues.

What clients are known to change on the way is left out of an assistant's turn: thinking, ids,
blanks around it and at the ends of lines, how arguments are written, and arguments that are what
the tool's schema says they are without being given. Everything else counts to the letter, and so
do everybody else's words. The digests stay in memory and
inside private files that hold the tokens as well.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import cast

import msgspec

from runtime.types import Message, Tool, ToolCall

DIGEST_BYTES = 16
_OPENS, _CLOSES = "<think>", "</think>"
_pack = msgspec.msgpack.Encoder().encode


def digest(*parts: object) -> bytes:
    """16 bytes that name these values."""
    return blake2b(_pack(parts), digest_size=DIGEST_BYTES).digest()


Form = tuple[object, ...]
"""A message without what clients change."""


Defaults = Mapping[str, Mapping[str, str]]
"""By tool and argument: what it is where a call does not give it, as JSON."""
NO_DEFAULTS: Defaults = {}


def defaults_of(tools: Sequence[Tool]) -> Defaults:
    """What the schemas of tools say of arguments that are left out."""
    found = {tool.name: _defaults(tool.parameters) for tool in tools}
    return {name: defaults for name, defaults in found.items() if defaults}


def forms(messages: Sequence[Message], defaults: Defaults = NO_DEFAULTS) -> list[Form]:
    """The canonical forms of a conversation's messages."""
    return [
        canonical(message, messages[:number], defaults) for number, message in enumerate(messages)
    ]


def chain(root: bytes, said: Sequence[Form]) -> list[bytes]:
    """One digest for each of these forms: of it and of everything before it, from `root` on."""
    links: list[bytes] = []
    before = root
    for form in said:
        before = advance(before, form)
        links.append(before)
    return links


def advance(before: bytes, form: Form) -> bytes:
    """The digest of a conversation that `before` names and that goes on with this turn."""
    return digest(before, form)


def canonical(
    message: Message, before: Sequence[Message] = (), defaults: Defaults = NO_DEFAULTS
) -> Form:
    """A message without what clients change; `before` are the messages that precede it."""
    pictures = [(image.at, image.data, image.url) for image in message.images]
    if message.role == "assistant":
        is_thought = bool(message.reasoning)
        said = answer(message.text, message.tool_calls, defaults, is_thought=is_thought)
        return (*said, pictures) if pictures else said
    return (
        message.role,
        message.text,
        message.name,
        message.is_error,
        _call_number(message, before),
        message.loaded_tools,
        pictures,
    )


def answer(
    text: str,
    calls: Sequence[ToolCall] = (),
    defaults: Defaults = NO_DEFAULTS,
    *,
    is_thought: bool = False,
) -> Form:
    """An assistant's turn as a client shows it; with `is_thought` its thoughts are elsewhere."""
    return (
        "assistant",
        _trimmed(_parted(text, is_thought=is_thought)[1]),
        [(call.name, _arguments(call.arguments, defaults.get(call.name, {}))) for call in calls],
    )


def thoughts(text: str) -> bytes:
    """What stands for an assistant's thoughts; empty for none."""
    return digest(trimmed) if (trimmed := _trimmed(text)) else b""


def thoughts_of(message: Message) -> bytes | None:
    """The same of a message that says them; None where its client left them out."""
    return thoughts(message.reasoning or _parted(message.text)[0]) or None


def shown(message: Message) -> str:
    """What an assistant's message says beside its thoughts."""
    return _parted(message.text, is_thought=bool(message.reasoning))[1]


def is_same_thought(message: Message, had: bytes) -> bool:
    """Whether a message leaves out what stands for its thoughts, or says just that.

    A stream may have told the beginning of an answer as thoughts where there were none.
    """
    given = thoughts_of(message)
    if given is None or given == had:
        return True
    begins = _trimmed(message.reasoning or "")
    return not had and bool(begins) and _trimmed(message.text).startswith(begins)


def _parted(text: str, *, is_thought: bool = False) -> tuple[str, str]:
    """The thoughts that a text begins with, and what follows them.

    Their block may close without having opened, as streams tell it where a prompt opened it; not
    inside of code, and not where they have been told apart.
    """
    before, mark, after = text.partition(_CLOSES)
    start = before.lstrip()
    if mark and start.startswith(_OPENS):
        return start.removeprefix(_OPENS), after
    is_orphan = mark and not is_thought and _OPENS not in before and before.count("`") % 2 == 0
    return (before, after) if is_orphan else ("", text)


def _call_number(message: Message, before: Sequence[Message]) -> int | None:
    """Which call of the last turn that made any a tool's result answers; ids are not stable."""
    if message.tool_call_id is None:
        return None
    for earlier in reversed(before):
        if earlier.tool_calls:
            ids = [call.id for call in earlier.tool_calls]
            return ids.index(message.tool_call_id) if message.tool_call_id in ids else -1
    return -1


def _arguments(text: str, defaults: Mapping[str, str]) -> str:
    """JSON in one spelling, without what it would be anyway; what is none, as text."""
    try:
        return _spelled(_given(json.loads(text), defaults))
    except (ValueError, RecursionError):
        return _trimmed(text)


def _given(arguments: object, defaults: Mapping[str, str]) -> object:
    """Those that are not their default."""
    if not defaults or not isinstance(arguments, dict):
        return arguments
    named = cast("dict[str, object]", arguments)
    return {key: one for key, one in named.items() if _spelled(one) != defaults.get(key)}


def _defaults(parameters: str) -> dict[str, str]:
    """By argument of this JSON schema its default."""
    try:
        properties = json.loads(parameters).get("properties", {}).items()
        return {key: _spelled(one["default"]) for key, one in properties if "default" in one}
    except (ValueError, RecursionError, AttributeError, TypeError):
        return {}


def _spelled(value: object) -> str:
    return json.dumps(_plain(value), sort_keys=True, separators=(",", ":"))


def _trimmed(text: str) -> str:
    """Without blanks around it and at the ends of its lines."""
    return "\n".join(line.rstrip() for line in text.split("\n")).strip()


def _plain(value: object) -> object:
    """Numbers as JavaScript writes them: 1.0 is 1."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, list):
        return [_plain(one) for one in cast("list[object]", value)]
    if isinstance(value, dict):
        return {key: _plain(one) for key, one in cast("dict[str, object]", value).items()}
    return value
