"""Tools of the Responses API that the client runs: shells, patches, and searches for tools.

The model is shown each as a function of the same name, whose arguments are what the item of a call
says in its own fields.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Literal, NamedTuple

import msgspec

from api.http.body import decoded_at
from api.http.json_schemas import parameters_text
from api.openai.response_schemas import (
    ApplyPatchCallItem,
    ApplyPatchCallOutputItem,
    LocalShellCallItem,
    LocalShellCallOutputItem,
    LocalSkill,
    SearchToolFields,
    ShellCallItem,
    ShellCallOutputItem,
    ShellEnvironment,
    ShellOutput,
    ShellToolFields,
    ToolSearchCallItem,
    ToolSearchOutputItem,
)
from api.responses.items import Item
from runtime.errors import InvalidRequest
from runtime.types import Tool

ClientKind = Literal["shell", "local_shell", "apply_patch", "tool_search"]
KINDS: tuple[ClientKind, ...] = ("shell", "local_shell", "apply_patch", "tool_search")


class ClientCall(NamedTuple):
    """A call of such a tool, with its arguments as JSON text."""

    kind: ClientKind
    call_id: str
    arguments: str


class ClientOutput(NamedTuple):
    """What a call of such a tool gave; a search gives tools."""

    call_id: str
    text: str
    is_error: bool = False
    tools: tuple[msgspec.Raw, ...] = ()


_STRING = {"type": "string"}
_MS = {"type": "integer", "description": "Milliseconds until it is ended."}
_SHELL: dict[str, object] = {
    "type": "object",
    "properties": {
        "commands": {"type": "array", "items": _STRING, "description": "Commands, each a line."},
        "timeout_ms": _MS,
        "max_output_length": {"type": "integer", "description": "Characters of output to show."},
    },
    "required": ["commands"],
    "additionalProperties": False,
}
_LOCAL_SHELL: dict[str, object] = {
    "type": "object",
    "properties": {
        "command": {"type": "array", "items": _STRING, "description": "The program, its words."},
        "working_directory": _STRING,
        "timeout_ms": _MS,
        "env": {"type": "object", "additionalProperties": _STRING},
        "user": _STRING,
    },
    "required": ["command"],
    "additionalProperties": False,
}
_PATCH: dict[str, object] = {
    "type": "object",
    "properties": {
        "type": {"enum": ["create_file", "update_file", "delete_file"]},
        "path": _STRING,
        "diff": {
            "type": "string",
            "description": "To create a file its lines, each behind a +; to update one hunks that "
            "begin with @@, whose lines begin with a blank, + or -; nothing to delete one.",
        },
    },
    "required": ["type", "path"],
    "additionalProperties": False,
}
_FIXED: dict[str, tuple[str, dict[str, object]]] = {
    "shell": ("Runs commands in a shell, one after the other.", _SHELL),
    "local_shell": ("Runs one command on the user's machine.", _LOCAL_SHELL),
    "apply_patch": ("Creates, updates or deletes one file.", _PATCH),
}


def client_tool(kind: str, raw: msgspec.Raw, path: str) -> Tool | str:
    """The tool as the model is shown it, or what is said of one that the client does not run.

    Raises:
        InvalidRequest: it is described wrongly.
    """
    if kind == "tool_search":
        search = decoded_at(raw, SearchToolFields, path)
        if search.execution != "client":
            return f"{path}: {kind}"
        parameters = parameters_text(search.parameters, f"{path}.parameters")
        about = search.description or "Finds tools, which can be called afterwards."
        return Tool(name=kind, description=about, parameters=parameters)
    if kind not in _FIXED:
        return f"{path}: {kind[:64]}"
    description, schema = _FIXED[kind]
    if kind == "shell":
        where = decoded_at(raw, ShellToolFields, path).environment
        if where is not None and where.type != "local":
            return f"{path}.environment: {where.type[:64]}"
        skills = [f"{one.name} ({one.path}): {one.description}" for one in _skills(where)]
        description = "\n".join((description, *(["Skills:", *skills] if skills else ())))
    return Tool(
        name=kind,
        description=description,
        parameters=msgspec.json.encode(schema).decode(),
        is_strict=True,
    )


def _skills(where: ShellEnvironment | None) -> list[LocalSkill]:
    return (where.skills or []) if where is not None else []


def call_of(item: msgspec.Struct) -> ClientCall | None:
    """A call that is sent back, with the arguments as the model wrote them."""
    match item:
        case ShellCallItem():
            return ClientCall("shell", item.call_id, _written(item.action))
        case LocalShellCallItem():
            return ClientCall("local_shell", item.call_id, _written(item.action))
        case ApplyPatchCallItem():
            return ClientCall("apply_patch", item.call_id, _written(item.operation))
        case ToolSearchCallItem():
            call_id = item.call_id or item.id or ""
            return ClientCall("tool_search", call_id, bytes(item.arguments).decode())
        case _:
            return None


def _written(fields: msgspec.Struct) -> str:
    """The arguments: what is given of the fields."""
    return msgspec.json.encode(fields).decode()


def output_of(item: msgspec.Struct) -> ClientOutput | None:
    """What such a call gave, as the model reads it."""
    match item:
        case ShellCallOutputItem():
            return ClientOutput(item.call_id, "\n".join(_said(one) for one in item.output))
        case LocalShellCallOutputItem():
            return ClientOutput(item.call_id or item.id or "", item.output)
        case ApplyPatchCallOutputItem():
            text = item.output if item.output is not None else item.status
            return ClientOutput(item.call_id, text, is_error=item.status == "failed")
        case ToolSearchOutputItem():
            return ClientOutput(item.call_id or item.id or "", "", tools=tuple(item.tools))
        case _:
            return None


def found_in(item: Item) -> list[msgspec.Raw]:
    """The tools in the output of a search; none where it cannot be read."""
    with suppress(InvalidRequest):
        return decoded_at(item.raw, ToolSearchOutputItem, item.path).tools
    return []


def _said(one: ShellOutput) -> str:
    """Both streams, and how the command ended where that was not well."""
    parts = [text.rstrip("\n") for text in (one.stdout, one.stderr) if text]
    if one.outcome.type == "timeout":
        parts.append("[timed out]")
    elif one.outcome.exit_code:
        parts.append(f"[exit code {one.outcome.exit_code}]")
    return "\n".join(parts)
