"""Bare text becomes the value that a schema asks for."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.worker.output.typed import repaired_json, typed
from tests.schema_oracle import KINDS, is_same, meanings, schemas

ROOT: dict[str, Any] = {"$defs": {"num": {"type": "integer"}, "loop": {"$ref": "#/$defs/loop"}}}


@pytest.mark.parametrize(
    ("text", "schema", "value"),
    [
        ("5", {"type": "string"}, "5"),
        ("null", {"type": "string"}, "null"),
        (" a\n", {"type": "string"}, " a\n"),
        ('{"a": 1}', {"type": "string"}, '{"a": 1}'),
        ("5", {"type": "integer"}, 5),
        ("5.0", {"type": "integer"}, 5),
        (" 5\n", {"type": "integer"}, 5),
        ("1e20", {"type": "number"}, 1e20),
        ("five", {"type": "integer"}, "five"),
        ("true", {"type": "integer"}, True),
        ("True", {"type": "boolean"}, True),
        ("0", {"type": "boolean"}, False),
        ("None", {"type": "null"}, None),
        ("null", {"type": ["string", "null"]}, None),
        ("nullify", {"type": ["string", "null"]}, "nullify"),
        ("007", {"type": ["string", "integer"]}, "007"),
        ("7", {"type": ["string", "integer"]}, 7),
        ("7", {"anyOf": [{"type": "integer"}, {"type": "null"}]}, 7),
        ("some text", {"anyOf": [{"type": "object"}, {"type": "string"}]}, "some text"),
        ("7", {"allOf": [{"$ref": "#/$defs/num"}]}, 7),
        ("7", {"$ref": "#/$defs/loop"}, 7),
        ("7", {"$ref": "elsewhere"}, 7),
        ("7", {"enum": [7, "x"]}, 7),
        ("7", {"enum": ["7", 8]}, "7"),
        ("x", {"const": "x"}, "x"),
        ("1", {"enum": [1, 2]}, 1),
        ("true", {"const": True}, True),
        ("[1, 'a', True]", {"type": "array"}, [1, "a", True]),
        ('{"a": "\\d"}', {"type": "object"}, {"a": "\\d"}),
        ("{'a': None}", {"properties": {}}, {"a": None}),
        ("[" * 100_000, {"type": "array"}, "[" * 100_000),
        ("9" * 5000, {"type": "integer"}, "9" * 5000),
        ("NaN", {"type": "number"}, "NaN"),
        ("1", {"type": ["boolean", "integer"]}, 1),
        ("0", {"type": ["integer", "boolean"]}, 0),
        ("1", {"type": ["boolean", "null"]}, True),
        ("7", {"allOf": [{"type": ["string", "integer"]}, {"type": "string"}]}, "7"),
        ("7", {"type": "string", "anyOf": [{"minLength": 1}, {"maxLength": 3}]}, "7"),
        ("7", {"$ref": "#/$defs/num", "enum": ["7", 7]}, 7),
        (" x", {"enum": ["x", " x"]}, " x"),
        ("x\n", {"enum": ["x", " x"]}, "x"),
        ("NULL", {"type": ["string", "null"]}, "NULL"),
        ("NULL", {"type": ["integer", "null"]}, None),
        ("None", {"type": ["string", "null"]}, None),
        ("7", {}, 7),
        ("seven", {}, "seven"),
        ("{1: 2", {}, "{1: 2"),
    ],
)
def test_a_text_has_the_type_of_its_schema(text: str, schema: dict[str, Any], value: object):
    found = typed(text, schema, ROOT)
    assert (found, type(found)) == (value, type(value))


def test_only_backslashes_that_escape_nothing_are_doubled():
    assert repaired_json(r'"\d \n \u12 \u00e9 \\"') == r'"\\d \n \\u12 \u00e9 \\"'


TEXTS = st.sampled_from(
    """x 1 0 -7 7.0 2.5 1e3 007 true false null True FALSE None NULL [] [1] {} """.split()
) | st.sampled_from(['{"a": 1}', '"x"', '"', "", " ", " x", "x ", " 1", "\nnull", "a b"])
VALUES = st.sampled_from(
    ["x", " x", "1", "true", "null", "", 1, 0, 2.5, True, False, None, [1], {}]
)


@settings(max_examples=500)
@given(text=TEXTS, schema=schemas(VALUES))
def test_a_text_becomes_what_its_schema_allows(text: str, schema: dict[str, Any]):
    root = {"$defs": {kind: {"type": kind} for kind in KINDS}}
    allowed = meanings(text, schema, root)
    found = typed(text, schema, root)
    assert not allowed or any(is_same(found, one) for one in allowed)
