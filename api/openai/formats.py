"""What form an answer must have: `response_format` of chat, `text.format` of responses."""

from __future__ import annotations

import re
from collections.abc import Iterator

import msgspec

from api.http.body import decoded_at
from api.http.json_schemas import schema_text
from api.http.refusal import refuse
from api.openai.fields import JsonSchemaFormat, is_given
from api.openai.schemas import SharedFields, StructuredOutputs
from runtime.types import Constraint

_GBNF_RULE = re.compile(r"^[ \t]*[\w-]+[ \t]*::=", re.MULTILINE)


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


def structured(data: SharedFields) -> Constraint | None:
    """What vLLM's fields say that the answer must be; None where they are not given.

    Raises:
        InvalidRequest: several of them are, or one is of no known form.
    """
    found = list(_structured(data))
    if len(found) > 1:
        first, second, *_ = found
        refuse(second.field, f"does not go with {first.field}: give one of them.")
    return found[0] if found else None


def _structured(data: SharedFields) -> Iterator[Constraint]:
    guided = StructuredOutputs(
        json=data.guided_json,
        regex=data.guided_regex,
        choice=data.guided_choice,
        grammar=data.guided_grammar,
    )
    yield from _forms(guided, "guided_")
    if data.structured_outputs is not None:
        yield from _forms(data.structured_outputs, "structured_outputs.")


def _forms(given: StructuredOutputs, prefix: str) -> Iterator[Constraint]:
    if is_given(given.json):
        field = f"{prefix}json"
        raw = given.json
        if bytes(raw).startswith(b'"'):  # the schema as text
            raw = msgspec.Raw(decoded_at(raw, str, field).encode())
        yield Constraint(kind="json_schema", text=schema_text(raw, field), field=field)
    if given.json_object:
        yield Constraint(kind="json_object", field=f"{prefix}json_object")
    if given.regex is not None:
        yield Constraint(kind="regex", text=given.regex, field=f"{prefix}regex")
    if given.choice is not None:
        field = f"{prefix}choice"
        if not given.choice or not all(given.choice):
            refuse(field, "must be a list of texts, none of them empty.")
        texts = (msgspec.json.encode(one).decode() for one in given.choice)
        yield Constraint(kind="lark", text=f"start: {' | '.join(texts)}", field=field)
    if given.grammar is not None:
        field = f"{prefix}grammar"
        kind = "gbnf" if _GBNF_RULE.search(given.grammar) else "lark"
        yield Constraint(kind=kind, text=given.grammar, field=field)
