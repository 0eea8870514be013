"""The tools of a request, as dialects read and force their calls."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

from runtime.types import Tool

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

    @classmethod
    def of(cls, tools: tuple[Tool, ...], *, is_parallel: bool = True) -> RequestTools:
        """The tools that may be called; parsers find the arguments' types in `definitions`."""
        definitions: list[dict[str, object]] = [
            {"type": "function", "function": {"name": tool.name, "parameters": schema_of(tool)}}
            for tool in tools
        ]
        return cls({tool.name: tool for tool in tools}, definitions, is_parallel)

    @property
    def streamed_names(self) -> frozenset[str]:
        """Those whose arguments are said as they are written."""
        return frozenset(name for name, tool in self.by_name.items() if not tool.is_freeform)


def schema_of(tool: Tool) -> Schema:
    """The JSON schema of a tool's arguments; `{}` where it has none that is an object."""
    try:
        schema = json.loads(FREEFORM_SCHEMA if tool.is_freeform else tool.parameters)
    except ValueError:
        return {}
    return cast("Schema", schema) if isinstance(schema, dict) else {}


def properties_of(schema: Schema) -> Schema:
    """The schemas of an object's members, by their names."""
    found = schema.get("properties")
    return cast("Schema", found) if isinstance(found, dict) else {}
