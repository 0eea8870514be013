"""Tools of a Messages request: the client's own, and those that Anthropic defines for clients to
run, of which the model here is given the schema.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from api.anthropic.breakpoints import Breakpoints
from api.anthropic.schemas import ToolDefinition
from api.http.json_schemas import parameters_text
from api.http.refusal import refuse
from runtime.types import Tool

Property = dict[str, object]


def tool_of(definition: ToolDefinition, path: str, breakpoints: Breakpoints) -> Tool:
    """A tool as the model is shown it.

    Raises:
        InvalidRequest: it is described wrongly, or one that only Anthropic's servers run.
    """
    if definition.type in (None, "custom"):
        name, description = definition.name, definition.description
        parameters = parameters_text(definition.input_schema, f"{path}.input_schema")
    else:
        found = client_tool(definition)
        if found is None:
            refuse(
                path,
                f"is {definition.name[:64] or 'a tool'!r} of type {definition.type[:64]!r}, which "
                "Anthropic's own servers run or define: leave it out, or give a tool of your own "
                "with an input_schema.",
            )
        name, description = definition.name or found.name, found.description
        parameters = _schema(found.properties, found.required)
    if not name:
        refuse(f"{path}.name", "is missing: it is required.")
    return Tool(
        name=name,
        description=_with_examples(description, definition.input_examples),
        parameters=parameters,
        is_strict=bool(definition.strict),
        is_deferred=bool(definition.defer_loading),
        keep_s=breakpoints.keep_s(definition.cache_control, path),
    )


def _with_examples(description: str | None, examples: Sequence[msgspec.Raw] | None) -> str | None:
    """What the model is told of a tool; examples have no place of their own in templates."""
    if not examples:
        return description
    written = (bytes(one).decode(errors="replace") for one in examples)
    return "\n".join((description or "", "Examples of its input:", *written)).strip()


class ClientTool(NamedTuple):
    """A tool whose input Anthropic documents and which the client runs."""

    name: str
    description: str
    properties: dict[str, Property]
    required: tuple[str, ...] = ()


def client_tool(definition: ToolDefinition) -> ClientTool | None:
    """The tool that this type stands for; None for one that no client runs."""
    kind, _, version = (definition.type or "").rpartition("_")
    match kind:
        case "bash" if version in ("20241022", "20250124"):
            return _BASH
        case "text_editor" if version in _EDITORS:
            return _editor(definition, version)
        case "memory" if version == "20250818":
            return _MEMORY
        case "computer" if version in _COMPUTERS:
            return _computer(definition, version)
        case _:
            return None


def _schema(properties: dict[str, Property], required: Sequence[str]) -> str:
    schema = {"type": "object", "properties": properties, "required": required}
    return msgspec.json.encode(schema).decode()


def _text(about: str) -> Property:
    return {"type": "string", "description": about}


def _number(about: str) -> Property:
    return {"type": "integer", "description": about}


def _one_of(*words: str) -> Property:
    return {"type": "string", "enum": words}


def _numbers(about: str, count: int) -> Property:
    items = {"type": "integer"}
    return {
        "type": "array",
        "items": items,
        "minItems": count,
        "maxItems": count,
        "description": about,
    }


_BASH = ClientTool(
    "bash",
    "Runs a command in a bash session that stays open between calls. Give either `command` or "
    "`restart`.",
    {
        "command": _text("The command to run."),
        "restart": {"type": "boolean", "description": "Start a new session instead."},
    },
)

_FILE: dict[str, Property] = {
    "path": _text("The file or folder, as an absolute path."),
    "view_range": _numbers("For `view`: the first and the last line; -1 is the end.", 2),
    "file_text": _text("For `create`: what the file is to contain."),
    "old_str": _text("For `str_replace`: the text to replace, which must be there exactly once."),
    "new_str": _text("For `str_replace`: the text that takes its place."),
    "insert_line": _number("For `insert`: the line behind which to insert; 0 is the beginning."),
}
_INSERT_TEXT: dict[str, Property] = {"insert_text": _text("For `insert`: the text to insert.")}
_EDITORS = {
    "20241022": "str_replace_editor",
    "20250124": "str_replace_editor",
    "20250429": "str_replace_based_edit_tool",
    "20250728": "str_replace_based_edit_tool",
}
_COMMANDS = ("view", "create", "str_replace", "insert")


def _editor(definition: ToolDefinition, version: str) -> ClientTool:
    """The first two versions can undo, and take the text to insert as `new_str`."""
    is_old = version in ("20241022", "20250124")
    commands = (*_COMMANDS, "undo_edit") if is_old else _COMMANDS
    fields = _FILE | {"new_str": _text("For `str_replace` and `insert`: the new text.")}
    about = "Shows, creates and edits text files."
    if definition.max_characters is not None:
        about += f" `view` shows at most {definition.max_characters} characters."
    properties = {
        "command": _one_of(*commands),
        **(fields if is_old else _FILE | _INSERT_TEXT),
    }
    return ClientTool(_EDITORS[version], about, properties, ("command", "path"))


_MEMORY = ClientTool(
    "memory",
    "Keeps notes in files below /memories, which are there in later conversations too. Look there "
    "before you begin a task, and write down what should not be forgotten.",
    {
        "command": _one_of(*_COMMANDS, "delete", "rename"),
        **_FILE,
        **_INSERT_TEXT,
        "old_path": _text("For `rename`: the path as it is."),
        "new_path": _text("For `rename`: the path as it is to be."),
    },
    ("command",),
)

_FIRST_ACTIONS = (
    "key",
    "type",
    "mouse_move",
    "left_click",
    "left_click_drag",
    "right_click",
    "middle_click",
    "double_click",
    "screenshot",
    "cursor_position",
)
_LATER_ACTIONS = (
    "left_mouse_down",
    "left_mouse_up",
    "scroll",
    "hold_key",
    "wait",
    "triple_click",
)
_COMPUTERS = {
    "20241022": _FIRST_ACTIONS,
    "20250124": (*_FIRST_ACTIONS, *_LATER_ACTIONS),
    "20251124": (*_FIRST_ACTIONS, *_LATER_ACTIONS),
}


def _computer(definition: ToolDefinition, version: str) -> ClientTool:
    actions = _COMPUTERS[version]
    properties: dict[str, Property] = {
        "coordinate": _numbers("Where the action is, or where a drag ends: x and y in pixels.", 2),
        "text": _text("For `type` what to type; for `key` and `hold_key` the keys, as `ctrl+s`."),
    }
    if version != "20241022":
        properties |= {
            "start_coordinate": _numbers("For `left_click_drag`: where it begins.", 2),
            "duration": {"type": "number", "description": "For `hold_key`, `wait`: seconds."},
            "scroll_direction": _one_of("up", "down", "left", "right"),
            "scroll_amount": _number("For `scroll`: how many steps."),
        }
    if definition.enable_zoom and version == "20251124":
        actions = (*actions, "zoom")
        properties["region"] = _numbers("For `zoom`: x and y of two opposite corners.", 4)
    about = "Uses the mouse and the keyboard of a computer and takes screenshots of its display."
    size = (definition.display_width_px, definition.display_height_px)
    if None not in size:
        about += f" The display has {size[0]}x{size[1]} pixels."
    if definition.display_number is not None:
        about += f" It is the X11 display {definition.display_number}."
    return ClientTool("computer", about, {"action": _one_of(*actions), **properties}, ("action",))
