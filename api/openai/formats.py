"""What form an answer must have: `response_format` of chat, `text.format` of responses."""

from __future__ import annotations

from api.http.json_schemas import schema_text
from api.http.refusal import refuse
from api.openai.fields import JsonSchemaFormat, is_given
from runtime.types import Constraint


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
