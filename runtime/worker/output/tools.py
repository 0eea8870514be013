"""The tools of a request, as dialects read and force their calls."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

from runtime.types import ANY_TOOL, Tool, ToolChoice

FREEFORM_ARGUMENT = "input"
FREEFORM_SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {FREEFORM_ARGUMENT: {"type": "string"}},
        "required": [FREEFORM_ARGUMENT],
        "additionalProperties": False,
    }
)
"""What a tool that takes one text looks like to the model."""

Schema = Mapping[str, object]


@dataclass(frozen=True, slots=True)
class RequestTools:
    """The tools of a request as its calls are checked against, made once per request."""

    by_name: Mapping[str, Tool]
    definitions: list[dict[str, object]]
    is_parallel: bool = True
    refused: frozenset[str] = frozenset()

    @classmethod
    def of(cls, tools: tuple[Tool, ...], choice: ToolChoice = ANY_TOOL) -> RequestTools:
        """The tools that may be called, and the names of those that are shown and may not be.

        Parsers find the arguments' types in `definitions`.
        """
        definitions: list[dict[str, object]] = [
            {"type": "function", "function": {"name": tool.name, "parameters": schema_of(tool)}}
            for tool in tools
        ]
        by_name = {tool.name: tool for tool in callable_tools(tools, choice)}
        refused = frozenset(tool.name for tool in tools if tool.name not in by_name)
        return cls(by_name, definitions, choice.is_parallel, refused)

    @property
    def is_empty(self) -> bool:
        """None is shown, so nothing that the model writes is a call."""
        return not (self.by_name or self.refused)

    @property
    def streamed_names(self) -> frozenset[str]:
        """Those whose arguments are said as they are written."""
        return frozenset(name for name, tool in self.by_name.items() if not tool.is_freeform)


def callable_tools(tools: tuple[Tool, ...], choice: ToolChoice) -> tuple[Tool, ...]:
    """Those of the tools that may be called."""
    if choice.mode == "none":
        return ()
    if choice.allowed is None:
        return tools
    return tuple(tool for tool in tools if tool.name in choice.allowed)


def schema_of(tool: Tool) -> Schema:
    """The JSON schema of a tool's arguments; `{}` where it has none that is an object."""
    try:
        schema = json.loads(FREEFORM_SCHEMA if tool.is_freeform else tool.parameters)
    except ValueError:
        return {}
    return cast("Schema", schema) if isinstance(schema, dict) else {}


def properties_of(schema: Schema) -> Schema:
    """The schemas of an object's members, by their names."""
    return as_schema(schema.get("properties"))


def as_schema(value: object) -> Schema:
    """A part of a schema; `{}` where it is no object."""
    return cast("Schema", value) if isinstance(value, dict) else {}
