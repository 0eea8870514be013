"""Tools that a conversation adds and removes on its way, so that its beginning stays as it is."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from api.anthropic.breakpoints import Breakpoints
from api.anthropic.schemas import (
    ChangedTool,
    ToolAdditionBlock,
    ToolDefinition,
    ToolRemovalBlock,
)
from api.anthropic.tools import tool_of
from api.http.refusal import refuse
from runtime.types import Tool, ToolChoice

REMOVED = "The tool {name} is not available any more."


class ToolChanges:
    """Knows which tools there are at each point of a conversation.

    A tool that is added on the way is shown where it is added; one that is removed stays in the
    prompt, the model reads that it is gone, and it cannot be called.
    """

    def __init__(
        self, declared: Sequence[Tool] = (), breakpoints: Breakpoints | None = None
    ) -> None:
        self._tools = {tool.name: tool for tool in declared}
        self._breakpoints = breakpoints or Breakpoints()
        self._shown_later: set[str] = set()
        self._changed: dict[str, bool] = {}
        """Whether it is there, of each tool that was added or removed."""

    def add(self, block: ToolAdditionBlock, path: str) -> str:
        """The name of the tool that is added.

        Raises:
            InvalidRequest: it is defined wrongly, or not at all.
        """
        at = f"{path}.tool"
        if block.tool.type == "tool_definition":
            definition = block.tool.definition or ToolDefinition()
            tool = tool_of(definition, f"{at}.definition", self._breakpoints)
            self._tools[tool.name] = tool
            name = tool.name
        else:
            name = self._named(block.tool, at)
        if name not in self._changed:
            self._shown_later.add(name)
        self._changed[name] = True
        return name

    def remove(self, block: ToolRemovalBlock, path: str) -> str:
        """What the model reads of a tool that is removed.

        Raises:
            InvalidRequest: there is no such tool.
        """
        name = self._named(block.tool, f"{path}.tool")
        self._changed[name] = False
        return REMOVED.format(name=name)

    def restated(self) -> tuple[str, tuple[str, ...]]:
        """All changes so far, for a model that does not read any more where they were made: what
        it reads of those that are gone, and which ones it is shown.
        """
        gone = [name for name, is_there in self._changed.items() if not is_there]
        there = [name for name, is_there in self._changed.items() if is_there]
        return "\n".join(REMOVED.format(name=name) for name in gone), tuple(there)

    @property
    def tools(self) -> tuple[Tool, ...]:
        """All that there ever were; those that were added are shown where that was."""
        return tuple(
            msgspec.structs.replace(tool, is_deferred=True) if name in self._shown_later else tool
            for name, tool in self._tools.items()
        )

    def available(self, choice: ToolChoice) -> ToolChoice:
        """The choice without the tools that are gone in the end.

        Raises:
            InvalidRequest: one of them must be called, or nothing else could.
        """
        gone = {name for name, is_there in self._changed.items() if not is_there}
        if not gone:
            return choice
        if choice.name in gone:
            refuse("tool_choice.name", f"is {choice.name!r}, which was removed: name another one.")
        allowed = tuple(name for name in self._tools if name not in gone)
        if choice.mode == "required" and not allowed:
            refuse("tool_choice", "needs a tool, but all of them were removed: leave it out.")
        return msgspec.structs.replace(choice, allowed=allowed)

    def size_of(self, name: str) -> int:
        """The characters of a tool as it is shown."""
        tool = self._tools.get(name)
        if tool is None:
            return 0
        return len(tool.name) + len(tool.description or "") + len(tool.parameters)

    def _named(self, given: ChangedTool, path: str) -> str:
        if given.type != "tool_reference":
            refuse(
                f"{path}.type",
                f"is {given.type[:64]!r}, which is on a server that Anthropic's own servers call: "
                "give a tool of your own.",
            )
        if given.name not in self._tools:
            refuse(f"{path}.name", f"is {(given.name or '')[:64]!r}, which no tool is called.")
        return given.name or ""
