"""Calls written as each family's template writes them are read back equal, value for value."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from runtime.types import Tool
from runtime.worker.output.braced_calls import Braces
from runtime.worker.output.families import FAMILIES, Family
from runtime.worker.output.tagged_calls import Tags
from tests.schema_oracle import KINDS, is_same, meanings
from tests.unit.test_dialects import dialect, told

WRITTEN = sorted(name for name, row in FAMILIES.items() if row.syntax is not None)
SHAPES = ("plain", "nullable", "anyOf", "oneOf", "allOf", "$ref", "enum", "const", "any")
OTHERS = ["</tool_call>", "<tool_call>", "<think>", "</think>", "[TOOL_CALLS]", "<|message|>"]
NESTED = """<tool_call>
<function=other>
<parameter=path>
a
</parameter>
</function>
</tool_call>"""
PIECES = """{ } [ ] , ( ) = 7 ' " \\ \\d true null é 🌸 日本 a""".split()
BLANKS = ["\n", "  ", "\t", "b c", NESTED]


def marks_of(row: Family) -> list[str]:
    """The marks that this family has itself."""
    found = [row.start, row.end, *row.bare]
    if isinstance(row.form, Tags):
        form = row.form
        found += [form.value_end, form.closing, form.opening, f"{form.opening}x{form.call.after}"]
        found += [f"{form.argument.before}k0{form.argument.after}", form.value]
    return [mark for mark in found if mark]


def values_of(row: Family) -> dict[str, st.SearchStrategy[Any]]:
    """Values of each kind, whose texts are full of marks."""
    some = (
        st.sampled_from(marks_of(row))
        | st.sampled_from(OTHERS)
        | st.sampled_from([*PIECES, *BLANKS])
    )
    texts = st.lists(some, max_size=8).map("".join)
    keys = st.sampled_from(["a", "b", "a key"])
    json_values = st.recursive(
        st.none() | st.booleans() | st.integers(-99, 99) | texts,
        lambda one: st.lists(one, max_size=2) | st.dictionaries(keys, one, max_size=2),
        max_leaves=4,
    )
    return {
        "string": texts,
        "integer": st.integers(-(1 << 40), 1 << 40),
        "number": st.floats(allow_nan=False, allow_infinity=False) | st.integers(-9, 9),
        "boolean": st.booleans(),
        "null": st.none(),
        "array": st.lists(json_values, max_size=3),
        "object": st.dictionaries(keys, json_values, max_size=3),
    }


@st.composite
def calls(draw: st.DrawFn, row: Family) -> tuple[dict[str, Any], dict[str, Any]]:
    """A tool's schema, and arguments that follow it."""
    values = values_of(row)
    properties: dict[str, Any] = {}
    arguments: dict[str, Any] = {}
    for i in range(draw(st.integers(0, 3))):
        kind = draw(st.sampled_from(["string", *KINDS]))
        shape = draw(st.sampled_from(SHAPES))
        value = draw(values[kind])
        properties[f"k{i}"] = {
            "plain": {"type": kind},
            "nullable": {"type": [kind, "null"]},
            "anyOf": {"anyOf": [{"type": kind}, {"type": "null"}]},
            "oneOf": {"oneOf": [{"type": "boolean"}, {"$ref": f"#/$defs/{kind}"}]},
            "allOf": {"allOf": [{"type": [kind, "boolean"]}, {"type": ["object", kind]}]},
            "$ref": {"$ref": f"#/$defs/{kind}"},
            "enum": {"enum": [value, "other"]},
            "const": {"type": kind, "const": value},
            "any": {},
        }[shape]
        arguments[f"k{i}"] = value
    definitions = {kind: {"type": kind} for kind in KINDS}
    return {"type": "object", "properties": properties, "$defs": definitions}, arguments


def written(row: Family, arguments: dict[str, Any]) -> str:
    """A whole call of the tool `act`."""
    syntax = row.syntax
    assert syntax is not None
    opening = syntax.opening.format(name="act", name_json='"act"', n=0)
    if isinstance(row.form, Braces):
        body = ",".join(f"{key}:{braced(row.form, one)}" for key, one in arguments.items())
    elif syntax.row is not None:
        body = ", ".join(f"{key}={pythonic(one)}" for key, one in arguments.items())
    elif syntax.argument:
        body = "".join(
            syntax.argument.format(key=key, is_text=json.dumps(isinstance(one, str)))
            + plain(one)
            + syntax.argument_end
            for key, one in arguments.items()
        )
    else:
        body = json.dumps(arguments, ensure_ascii=False)
    return row.start + opening + body + syntax.closing


def plain(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def pythonic(value: object) -> str:
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else repr(value)


def braced(form: Braces, value: object) -> str:
    match value:
        case str():
            return form.quote + value + form.quote
        case list():
            return "[" + ",".join(braced(form, one) for one in value) + "]"
        case dict():
            return "{" + ",".join(f"{k}:{braced(form, one)}" for k, one in value.items()) + "}"
        case _:
            return json.dumps(value)


def texts_in(value: object) -> list[str]:
    match value:
        case str():
            return [value]
        case list():
            return [text for one in value for text in texts_in(one)]
        case dict():
            return [text for one in value.values() for text in texts_in(one)]
        case _:
            return []


def is_told_apart(row: Family, schema: dict[str, Any], arguments: dict[str, Any]) -> bool:
    """Nothing in the values reads as the very place where the form allows a value to end, and none
    of them has two meanings as bare text.
    """
    form = row.form
    if isinstance(form, Braces):
        return not any(form.quote in text for text in texts_in(arguments))
    if not isinstance(form, Tags):
        return True
    ends = [mark for mark in (form.argument.before, form.closing, form.end) if mark]
    after = "|".join(map(re.escape, ends))
    likes = rf"{re.escape(form.value_end)}\s*(?:{after}|$)|{re.escape(form.closing)}\s*(?:{after}"
    likes += rf"|{re.escape(form.start)}|{re.escape(form.opening)}|$)"
    return all(
        re.search(likes, plain(one).replace(NESTED, "")) is None for one in arguments.values()
    ) and all(
        (isinstance(one, str) and says_text(row))
        or is_same(meanings(plain(one), schema["properties"][key], schema)[0], one)
        for key, one in arguments.items()
    )


def says_text(row: Family) -> bool:
    """An argument says itself that it is a text."""
    return row.syntax is not None and 'string="' in row.syntax.argument


@pytest.mark.parametrize("name", WRITTEN)
@settings(max_examples=40)
@given(data=st.data())
def test_a_call_is_read_back_as_it_was_written(name: str, data: st.DataObject):
    row = FAMILIES[name]
    schema, arguments = data.draw(calls(row))
    assume(is_told_apart(row, schema, arguments))
    num_calls, before = data.draw(st.integers(1, 2)), data.draw(st.sampled_from(["", "I look."]))
    turn = before + "".join([written(row, arguments)] * num_calls)
    ends = sorted(data.draw(st.lists(st.integers(0, len(turn)), max_size=9)))
    pieces = [turn[a:b] for a, b in zip([0, *ends], [*ends, len(turn)], strict=True)]
    said = told(pieces, dialect(name), Tool(name="act", parameters=json.dumps(schema)))
    assert said.text == before
    assert [called for called, _ in said.calls] == ["act"] * num_calls
    assert all(json.loads(one) == arguments for _, one in said.calls)
    assert said.notes == ()
