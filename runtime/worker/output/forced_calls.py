"""Calls that a grammar can hold a model to: what a whole call looks like in its dialect.

A dialect whose arguments are JSON takes any schema. One with a tag for each argument has the
arguments in the schema's order, a text as it is and every other value as JSON.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import cast

from msgspec.structs import replace

from runtime.types import Tool
from runtime.worker.output.closed_schema import closed
from runtime.worker.output.dialect import Dialect
from runtime.worker.output.families import CallSyntax, family_of
from runtime.worker.output.joined import JsonRule, Literal, RuleWriter, with_definitions
from runtime.worker.output.tools import Schema, as_schema, properties_of, schema_of

_COUNTER = "\0"
_DIGITS = "/[0-9]{1,4}/"
_TOKEN = re.compile(r"<\[\d+\]>")
_TEXT_KEYS = frozenset({"type", "description", "title", "default", "examples", "$comment"})


_OF_THE_WHOLE = frozenset(
    "anyOf oneOf allOf $ref patternProperties not if dependentRequired dependentSchemas".split()
)
"""What a schema says of all arguments together, which a grammar of one after the other cannot."""


def can_force(dialect: Dialect, tools: Sequence[Tool]) -> bool:
    """Calls of these tools can be held to a grammar in this dialect."""
    form = form_of(dialect)
    if form is None or form.row is None:
        return form is not None
    return all(form.row.can_write(tool.name, schema_of(tool)) for tool in tools)


def is_exact(dialect: Dialect, tool: Tool) -> bool:
    """A forced call follows the whole schema; tags leave what a text may be to the model."""
    form = form_of(dialect)
    if form is None or not (form.argument or form.row):
        return form is not None
    schema = schema_of(tool)
    if form.row is not None:
        kinds = [as_schema(one).get("type") for one in properties_of(schema).values()]
        if not form.row.mark or "object" in kinds or "array" in kinds:
            return not form.row.mark
    return not schema.keys() & _OF_THE_WHOLE and all(
        _is_plain(one) for one in properties_of(schema).values()
    )


def held(tool: Tool) -> Tool:
    """The tool as one whose calls follow its schema; arguments that it does not name are none."""
    if tool.is_strict or tool.is_freeform:
        return tool
    schema = closed(schema_of(tool))
    return replace(tool, is_strict=True, parameters=json.dumps(schema, ensure_ascii=False))


def rest_of_call(
    dialect: Dialect, tools: Sequence[Tool], literal: Literal, json_rule: JsonRule
) -> list[str]:
    """Lark rules, the first named `call`, for what follows the opening mark of one call.

    Raises:
        KeyError: the dialect cannot be forced.
    """
    form = form_of(dialect)
    if form is None:
        raise KeyError(dialect.name)
    rules = [f"call: {' | '.join(f'call_{i}' for i in range(len(tools)))}"]
    for i, tool in enumerate(tools):
        named = form.opening.format(name=tool.name, name_json=json.dumps(tool.name), n=_COUNTER)
        opening = f" {_DIGITS} ".join(literal(part) for part in named.split(_COUNTER))
        parts = [opening, f"arguments_{i}", literal(form.closing)]
        rules.append(f"call_{i}: {' '.join(part for part in parts if part)}")
        schema = schema_of(tool) if tool.is_strict or tool.is_freeform else _loose(tool, form)
        if form.row is not None:
            row = RuleWriter(form.row, f"row_{i}", literal, json_rule)
            rules += [f"arguments_{i}: {row.arguments(schema)}", *row.rules]
        elif form.argument:
            rules += _tagged(i, form, schema, literal, json_rule)
        else:
            rules.append(f"arguments_{i}: {json_rule(_object_of(schema))}")
    return rules


def form_of(dialect: Dialect) -> CallSyntax | None:
    """How a call is written in this dialect; None where it cannot be forced."""
    family = family_of(dialect.name)
    return None if family is None else family.syntax


def _loose(tool: Tool, form: CallSyntax) -> Schema:
    """What is demanded of a tool that is not strict: an object, or each tag at most once."""
    if not (form.argument or form.row):
        return {"type": "object"}
    return {**schema_of(tool), "additionalProperties": False}


def _object_of(schema: Schema) -> Schema:
    return schema if "type" in schema or "$ref" in schema else {"type": "object", **schema}


def _is_plain(schema: object) -> bool:
    """A text of any content, an enumeration, or no text at all."""
    if not isinstance(schema, dict):
        return True
    known = cast("Schema", schema)
    return not _is_text(known) or "enum" in known or not known.keys() - _TEXT_KEYS


def _is_text(schema: object) -> bool:
    return isinstance(schema, dict) and cast("dict[str, object]", schema).get("type") == "string"


def _tagged(
    i: int, form: CallSyntax, schema: Schema, literal: Literal, json_rule: JsonRule
) -> list[str]:
    """Rules for arguments with a tag each."""
    required = schema.get("required")
    needed = set(cast("list[str]", required)) if isinstance(required, list) else set[str]()
    order: list[str] = []
    rules: list[str] = []
    for n, (key, value) in enumerate(properties_of(schema).items()):
        name = f"argument_{i}_{n}"
        order.append(name if key in needed else f"{name}?")
        is_text = json.dumps(_is_text(value))
        head = literal(form.argument.format(key=key, is_text=is_text))
        rules += _argument(name, head, with_definitions(value, schema), form, (literal, json_rule))
    body = " ".join(order) or '""'
    return [f"arguments_{i}: {body}", *rules]


def _argument(
    name: str, head: str, schema: object, form: CallSyntax, lark: tuple[Literal, JsonRule]
) -> list[str]:
    literal, json_rule = lark
    values = _enumerated(schema)
    if _is_text(schema) and values:
        options = " | ".join(literal(str(value)) for value in values)
        return [f"{name}: {head} ({options}) {literal(form.argument_end)}"]
    end = literal(form.argument_end)
    if _is_text(schema) and (token := _TOKEN.search(end)):
        # No text can contain a token that is none: with what stands before it, it ends the value.
        before = end[: token.start()].strip()
        last = re.escape(json.loads(before)).replace("/", "\\/") if before else ""
        rest = end[token.start() :]
        return [f"{name}: {head} {name}_text {rest}", f"{name}_text: /(?s:.*){last}/"]
    if _is_text(schema):
        suffix = json.dumps(form.argument_end)
        return [f"{name}: {head} {name}_text", f"{name}_text[suffix={suffix}]: /(?s:.*)/"]
    return [f"{name}: {head} {json_rule(schema)} {literal(form.argument_end)}"]


def _enumerated(schema: object) -> list[object]:
    values = cast("Schema", schema).get("enum") if isinstance(schema, dict) else None
    return cast("list[object]", values) if isinstance(values, list) else []
