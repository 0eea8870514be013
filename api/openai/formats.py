"""What form an answer must have: `response_format` of chat, `text.format` of responses."""

from __future__ import annotations

import msgspec

from api.http.refusal import refuse
from api.openai.fields import JsonSchemaFormat, is_given
from runtime.types import Constraint

ANYTHING = "{}"


def constraint_of(
    kind: str, schema: JsonSchemaFormat | None, path: str, schema_path: str
) -> Constraint | None:
    """The constraint that a format of this kind stands for; None where any text will do. At
    `schema_path` is the object that has the `schema`.

    Raises:
        InvalidRequest: there is no such kind, or its schema is missing or no schema.
    """
    if kind == "text":
        return None
    if kind == "json_object":
        return Constraint(kind="json_object", field=path)
    if kind != "json_schema":
        known = "text, json_object or json_schema"
        refuse(path, f"of type {kind[:64]!r} is not supported: use {known}.")
    if schema is None or not is_given(schema.schema):
        refuse(path, 'of type "json_schema" needs a schema: give `name` and `schema`.')
    text = schema_text(schema.schema, f"{schema_path}.schema")
    return Constraint(kind="json_schema", text=text, field=path)


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
