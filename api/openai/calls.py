"""Calls of tools in chat answers: arguments as they come, a custom tool's text when it is whole."""

from __future__ import annotations

from typing import NamedTuple

from api.openai.freeform import freeform_input
from api.openai.schemas import CalledCustom, CalledFunction, CalledTool
from runtime.types import ToolCall, ToolCallDelta


class CallFormat(NamedTuple):
    """How calls are told: of the tools in `customs` as a text; with `is_older` as the one call
    of a function.
    """

    customs: frozenset[str] = frozenset()
    is_older: bool = False


PLAIN = CallFormat()


def called_tool(call: ToolCall) -> CalledTool:
    """A whole call."""
    if call.is_custom:
        custom = CalledCustom(freeform_input(call.arguments), call.name)
        return CalledTool(id=call.id, type="custom", custom=custom)
    function = CalledFunction(call.arguments, call.name)
    return CalledTool(id=call.id, type="function", function=function)


class StreamedCalls:
    """Calls piece by piece. What a custom tool is given is known, and told, when it is whole."""

    def __init__(self, customs: frozenset[str]) -> None:
        self._customs = customs
        self._texts: dict[tuple[int, int], list[str]] = {}

    def pieces(self, chunk: ToolCallDelta) -> list[CalledTool]:
        """What is to be told when this comes."""
        ended = self.rest(chunk.index) if chunk.id is not None else []
        piece = self._piece(chunk)
        return [*ended, piece] if piece is not None else ended

    def rest(self, choice: int) -> list[CalledTool]:
        """The texts of a choice to which nothing is added any more."""
        ended = [at for at in self._texts if at[0] == choice]
        texts = [(at[1], freeform_input("".join(self._texts.pop(at)))) for at in ended]
        return [CalledTool(index=at, custom=CalledCustom(text)) for at, text in texts if text]

    def _piece(self, chunk: ToolCallDelta) -> CalledTool | None:
        at = chunk.index, chunk.call_index
        if chunk.id is not None and chunk.name in self._customs:
            self._texts[at] = [chunk.arguments]
            custom = CalledCustom("", chunk.name)
            return CalledTool(id=chunk.id, type="custom", custom=custom, index=chunk.call_index)
        if at in self._texts:
            self._texts[at].append(chunk.arguments)
            return None
        if chunk.id is None:
            return CalledTool(index=chunk.call_index, function=CalledFunction(chunk.arguments))
        function = CalledFunction(chunk.arguments, chunk.name or "")
        return CalledTool(id=chunk.id, type="function", function=function, index=chunk.call_index)
