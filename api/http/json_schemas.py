"""JSON schemas that clients send: kept as they are written, and looked at only at the top."""

from __future__ import annotations

from typing import Final, cast

import msgspec

from api.http.body import decoded_at
from api.http.refusal import refuse

ANYTHING = "{}"
_OTHERS: Final = frozenset({"array", "boolean", "integer", "null", "number", "string"})


class _Head(msgspec.Struct):
    type: object = None


def schema_text(raw: msgspec.Raw, path: str) -> str:
    """A JSON schema as text; null is one that allows anything.

    Raises:
        InvalidRequest: it is no object.
    """
    text = bytes(raw).decode(errors="replace")
    if text == "null":
        return ANYTHING
    if not text.startswith("{"):
        refuse(path, "must be a JSON schema, that is an object.")
    return text


def parameters_text(raw: msgspec.Raw, path: str) -> str:
    """The schema of a tool's arguments as text.

    Raises:
        InvalidRequest: it is no schema, or one of what arguments never are.
    """
    text = schema_text(raw, path)
    kind = decoded_at(raw, _Head, path).type if text != ANYTHING else None
    kinds = cast("list[object]", kind) if isinstance(kind, list) else [kind]
    names = [one for one in kinds if isinstance(one, str)]
    if names and len(names) == len(kinds) and _OTHERS.issuperset(names):
        said = " or ".join(names)
        refuse(f"{path}.type", f"is {said}: arguments are an object, so it must be object.")
    return text
