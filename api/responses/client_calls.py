"""Calls of tools that the client runs, as the items of an answer."""

from __future__ import annotations

from typing import TypeVar

import msgspec

from api.openai.response_schemas import LocalShellAction, PatchOperation, ShellAction
from api.responses.client_tools import ClientKind
from api.responses.output import (
    ItemStatus,
    LocalShellActionAnswer,
    OutputItem,
    OutputLocalShellCall,
    OutputPatchCall,
    OutputSearchCall,
    OutputShellCall,
    PatchAnswer,
    ShellActionAnswer,
)

T = TypeVar("T")

ID_KINDS: dict[ClientKind, str] = {
    "shell": "sh",
    "local_shell": "lsh",
    "apply_patch": "apc",
    "tool_search": "tsc",
}


def client_call(
    kind: ClientKind, item_id: str, status: ItemStatus, call_id: str, arguments: str
) -> OutputItem:
    """The item of a call. Until its arguments are complete, and where they were cut, it is empty:
    the strict schema holds the model to the rest.
    """
    match kind:
        case "shell":
            shell = _read(arguments, ShellAction) or ShellAction()
            action = ShellActionAnswer(shell.commands, shell.timeout_ms, shell.max_output_length)
            return OutputShellCall(item_id, status, call_id, action)
        case "local_shell":
            one = _read(arguments, LocalShellAction) or LocalShellAction()
            local = LocalShellActionAnswer(
                one.command, one.env, one.working_directory, one.timeout_ms, one.user
            )
            return OutputLocalShellCall(item_id, status, call_id, local)
        case "apply_patch":
            patch = _read(arguments, PatchOperation)
            answer = PatchAnswer("update_file", "", "")
            if patch is not None:
                diff = msgspec.UNSET if patch.type == "delete_file" else patch.diff or ""
                answer = PatchAnswer(patch.type, patch.path, diff)
            is_done = status == "completed" and patch is not None
            return OutputPatchCall(
                item_id, "completed" if is_done else "in_progress", call_id, answer
            )
        case "tool_search":
            is_whole = _read(arguments, dict[str, msgspec.Raw]) is not None
            raw = msgspec.Raw(arguments.encode() if is_whole else b"{}")
            return OutputSearchCall(item_id, status, call_id, raw)


def _read(arguments: str, kind: type[T]) -> T | None:
    try:
        return msgspec.json.decode(arguments, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
