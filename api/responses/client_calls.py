"""Calls of tools that the client runs, as the items of an answer."""

from __future__ import annotations

from typing import TypeVar

import msgspec

from api.openai.response_schemas import LocalShellAction, ShellAction
from api.responses.client_tools import ClientKind
from api.responses.json_texts import JsonTexts
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
    kind: ClientKind,
    item_id: str,
    status: ItemStatus,
    call_id: str,
    arguments: str,
    texts: JsonTexts,
) -> OutputItem:
    """The item of a call, whose `texts` are those in the arguments. What is not finished is left
    out of it, so that nobody runs the half of it; the strict schema holds the model to the rest.
    """
    match kind:
        case "shell":
            shell = _read(arguments, ShellAction) or ShellAction()
            commands = texts.whole_in("commands")
            action = ShellActionAnswer(commands, shell.timeout_ms, shell.max_output_length)
            return OutputShellCall(item_id, status, call_id, action)
        case "local_shell":
            one = _read(arguments, LocalShellAction) or LocalShellAction()
            local = LocalShellActionAnswer(
                one.command, one.env, one.working_directory, one.timeout_ms, one.user
            )
            return OutputLocalShellCall(item_id, status, call_id, local)
        case "apply_patch":
            is_done = status == "completed" and is_patch_known(texts)
            now = "completed" if is_done else "in_progress"
            return OutputPatchCall(item_id, now, call_id, _patch(texts))
        case "tool_search":
            is_whole = _read(arguments, dict[str, msgspec.Raw]) is not None
            raw = msgspec.Raw(arguments.encode() if is_whole else b"{}")
            return OutputSearchCall(item_id, status, call_id, raw)


def is_patch_known(texts: JsonTexts) -> bool:
    """It is known of which file it is, and what is done with that."""
    return texts.is_whole("type") and texts.is_whole("path")


def _patch(texts: JsonTexts) -> PatchAnswer:
    kind = texts.text("type") if is_patch_known(texts) else "update_file"
    path = texts.text("path") if is_patch_known(texts) else ""
    diff = (texts.text("diff") if texts.is_whole("diff") else "") or ""
    return PatchAnswer(kind or "", path or "", msgspec.UNSET if kind == "delete_file" else diff)


def _read(arguments: str, kind: type[T]) -> T | None:
    try:
        return msgspec.json.decode(arguments, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
