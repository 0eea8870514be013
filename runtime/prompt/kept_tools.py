"""Kept tools: those of a conversation, for a request that leaves them out or spells them anew.

Templates write tools before everything else. Without them, or with them or the keys of their
schemas in another order, a conversation that goes on does not begin as it did.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from runtime.types import ChatPrompt, PromptChange, Tool, ToolChoice

KEPT_TOOLS = "kept_tools"
RESPELLED = "tool_spelling"
_decode = msgspec.msgpack.Decoder(tuple[Tool, ...]).decode
_encode = msgspec.msgpack.Encoder().encode


def packed(tools: Sequence[Tool]) -> bytes:
    """Tools as they are kept beside a turn; nothing for none."""
    return _encode(tools) if tools else b""


def unpacked(kept: bytes) -> tuple[Tool, ...]:
    """The tools of `packed`; none where it is damaged."""
    try:
        return _decode(kept)
    except msgspec.DecodeError:
        return ()


class WithTools(NamedTuple):
    """A prompt with tools that were kept, and how that is told."""

    prompt: ChatPrompt
    change: PromptChange


def with_tools_of(prompt: ChatPrompt, kept: bytes, *, can_forbid: bool) -> WithTools | None:
    """The prompt with the tools that were kept; None where it may not be or changes nothing.

    A prompt without tools gets all of them, and none may be called, which `can_forbid` says is
    possible. One with tools gets the order and the spelling of the kept ones, if its own differ in
    nothing but their order and that of keys.
    """
    tools = unpacked(kept)
    choice = prompt.tool_choice
    if not prompt.tools:
        if choice.mode == "required" or not tools or not can_forbid:
            return None
        choice = ToolChoice(mode="none", is_parallel=choice.is_parallel)
        changed = msgspec.structs.replace(prompt, tools=tools, tool_choice=choice)
        return WithTools(changed, PromptChange(rule=KEPT_TOOLS, num_places=len(tools)))
    spelled = _respelled(prompt.tools, tools)
    num_places = sum(one is not other for one, other in zip(spelled, prompt.tools, strict=True))
    if not num_places:
        return None
    changed = msgspec.structs.replace(prompt, tools=spelled)
    return WithTools(changed, PromptChange(rule=RESPELLED, num_places=num_places))


def _respelled(sent: tuple[Tool, ...], kept: Sequence[Tool]) -> tuple[Tool, ...]:
    """The tools in the order of `kept`, with their schemas spelled as there; or as they came."""
    named = {tool.name: tool for tool in sent}
    if not len(named) == len(sent) == len(kept):
        return sent
    respelled: list[Tool] = []
    for other in kept:
        one = named.get(other.name)
        if one is None or _shown(one) != _shown(other):
            return sent
        is_same = one.parameters == other.parameters
        spelled = one if is_same else msgspec.structs.replace(one, parameters=other.parameters)
        respelled.append(spelled)
    return tuple(respelled)


def _shown(tool: Tool) -> tuple[object, ...]:
    """What a model reads of a tool, however its schema is spelled."""
    return tool.description, tool.is_freeform, _sorted(tool.parameters)


def _sorted(parameters: str) -> str:
    """JSON in one order of keys; what is none, as it is."""
    try:
        return json.dumps(json.loads(parameters), sort_keys=True)
    except (ValueError, RecursionError):
        return parameters
