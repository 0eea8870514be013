"""Schemas in words that a grammar has allow the same values as those in all words there are."""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.errors import InvalidRequest
from runtime.types import ChatPrompt, Constraint
from runtime.worker.output.decided_schema import decided
from runtime.worker.output.schema_algebra import Undecided
from tests.unit.test_guide import USER, plan_of, speak, tokenizer

Json = Any

SCALARS: list[Json] = [None, False, True, 0, 1, 2, 5, 1.5, "", "a", "ab", "b", "^", "-]"]
VALUES = st.recursive(
    st.sampled_from(SCALARS),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from("abc"), inner),
    max_leaves=6,
)
NAMES = st.lists(st.sampled_from("abc"), unique=True, max_size=2)
KINDS = ["null", "boolean", "integer", "number", "string", "array", "object"]
TEST: dict[str, st.SearchStrategy[Json]] = {
    "type": st.sampled_from(KINDS),
    "const": st.sampled_from(SCALARS),
    "enum": st.lists(st.sampled_from(SCALARS), min_size=1, max_size=3),
    "required": NAMES,
    "minimum": st.sampled_from([0, 1, 2.5]),
    "maxLength": st.integers(0, 2),
}


def schemas(inner: st.SearchStrategy[Json]) -> st.SearchStrategy[Json]:
    """Schemas around those of `inner`, with a few keys each."""
    members = st.dictionaries(st.sampled_from("abc"), inner, min_size=1, max_size=2)
    keys: dict[str, st.SearchStrategy[Json]] = {
        **TEST,
        "properties": members,
        "additionalProperties": st.booleans(),
        "items": inner,
        "minItems": st.integers(0, 2),
        "maxItems": st.integers(0, 3),
        "uniqueItems": st.booleans(),
        "not": inner,
        "anyOf": st.lists(inner, min_size=1, max_size=2),
        "if": inner,
        "then": inner,
        "else": inner,
        "dependentRequired": st.dictionaries(st.sampled_from("abc"), NAMES, max_size=1),
    }
    return st.lists(st.sampled_from(sorted(keys)), unique=True, max_size=4).flatmap(
        lambda chosen: st.fixed_dictionaries({key: keys[key] for key in chosen})
    )


LEAVES = st.sampled_from(sorted(TEST)).flatmap(lambda key: TEST[key].map(lambda v: {key: v}))
SCHEMAS = st.recursive(LEAVES | st.booleans(), schemas, max_leaves=6)
REWRITTEN = {"not", "if", "then", "else", "dependentRequired", "dependentSchemas"}


def allows(schema: Json, value: Json) -> bool:
    return jsonschema.Draft202012Validator(schema).is_valid(value)


def keys_in(schema: Json) -> set[str]:
    """Every key of the schema and of those inside of it."""
    if isinstance(schema, list):
        return {key for one in schema for key in keys_in(one)}
    if not isinstance(schema, dict):
        return set()
    inner = (value for key, value in schema.items() if key not in ("const", "enum", "required"))
    named = (set() if key == "properties" else {key} for key in schema)
    return {key for keys in named for key in keys} | {
        key for one in inner for key in keys_in(one)
    } - set("abc")


@given(SCHEMAS, st.lists(VALUES, min_size=4, max_size=12))
def test_what_is_decided_allows_the_same_values_in_other_words(schema: Json, values: list[Json]):
    try:
        found = decided(schema)
    except Undecided:
        return
    assert not keys_in(found) & REWRITTEN
    for value in [*values, *SCALARS]:
        assert allows(found, value) == allows(schema, value), (found, value)


CARD = {
    "type": "object",
    "properties": {"pay": {"enum": ["card", "cash"]}, "number": {"enum": [1, 2]}},
    "required": ["pay"],
    "additionalProperties": False,
    "if": {"properties": {"pay": {"const": "card"}}, "required": ["pay"]},
    "then": {"required": ["number"]},
    "else": {"properties": {"number": False}},
}
HELD: list[Json] = [
    CARD,
    {"type": "string", "not": {"enum": ["a", "ab", ""]}, "maxLength": 3},
    {"type": "integer", "minimum": 0, "maximum": 99, "not": {"enum": [3, 5, 10]}},
    {"type": "array", "items": {"enum": ["x", "y", "z"]}, "uniqueItems": True, "minItems": 2},
    {"type": "array", "items": {"type": "boolean"}, "uniqueItems": True},
    {"type": ["string", "null", "boolean"], "maxLength": 2, "not": {"type": "string"}},
    {
        "type": "object",
        "properties": {"a": {"type": "boolean"}, "b": {"type": "null"}},
        "additionalProperties": False,
        "not": {"required": ["a", "b"]},
    },
    {
        "type": "object",
        "properties": {"a": {"type": "boolean"}, "b": {"type": "null"}},
        "additionalProperties": False,
        "dependentRequired": {"a": ["b"]},
    },
    {
        "type": "object",
        "properties": {"one": {"$ref": "#/$defs/word"}},
        "required": ["one"],
        "$defs": {"word": {"type": "string", "maxLength": 2, "not": {"const": "a"}}},
    },
]


@pytest.mark.parametrize("schema", HELD, ids=str)
def test_whatever_is_said_within_a_decided_schema_follows_the_one_that_was_sent(schema: Json):
    plan = plan_of(
        ChatPrompt(messages=USER),
        constraint=Constraint(kind="json_schema", text=json.dumps(schema)),
    )
    for seed in range(12):
        said = tokenizer().decode(speak(plan.start(), "", random.Random(seed)))
        jsonschema.validate(json.loads(said), schema)


@pytest.mark.parametrize(
    ("wish", "said"),
    [
        ('{"pay": "card"}', '{"pay":"card","number":'),
        ('{"pay": "card", "number": 2}', '{"pay":"card","number":2}'),
        ('{"pay": "cash", "number": 2}', '{"pay":"cash"}'),
    ],
)
def test_what_must_follow_depends_on_what_was_said(wish: str, said: str):
    constraint = Constraint(kind="json_schema", text=json.dumps(CARD))
    guide = plan_of(ChatPrompt(messages=USER), constraint=constraint).start()
    answer = tokenizer().decode(speak(guide, wish, random.Random(1)))
    assert answer.replace(" ", "").startswith(said)


MANY = {"enum": [f"w{i}" for i in range(40)]}


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        ({"properties": {"a": {"type": "array", "uniqueItems": True}}}, "#/properties/a"),
        ({"properties": {"a": {"items": MANY, "uniqueItems": True}}}, "#/properties/a"),
        ({"$defs": {"x": {"not": {"pattern": "a+"}}}, "$ref": "#/$defs/x"}, "#/$defs/x/not"),
        ({"anyOf": [{"not": {"const": {"a": 1}}}]}, "#/anyOf/0/not"),
        ({"items": {"contains": {"const": 1}}}, "#/items"),
        ({"type": "object", "not": {"required": "a"}}, "#/not"),
        ({"not": {"anyOf": [{"properties": {c: {"const": c} for c in "abcdefgh"}}] * 9}}, "#/not"),
        (
            {"dependentRequired": {f"a{i}": [f"b{i}"] for i in range(90)}, "type": "object"},
            "#/dependentSchemas/a",
        ),
    ],
)
def test_what_cannot_be_decided_is_refused_with_its_place(schema: Json, place: str):
    constraint = Constraint(kind="json_schema", text=json.dumps(schema), field="f")
    with pytest.raises(InvalidRequest) as caught:
        plan_of(ChatPrompt(messages=USER), constraint=constraint)
    assert caught.value.param == "f"
    assert f" at {place}" in str(caught.value)
