"""Which members an object may have when its schema names some."""

import json
from datetime import date
from typing import Any

import pytest

from runtime.errors import InvalidRequest
from runtime.types import ChatPrompt, Constraint
from tests.unit.test_guide import RNG, USER, plan_of, speak, tokenizer


def test_an_answer_has_the_members_that_its_schema_names_and_no_others():
    inner = {"type": "object", "properties": {"b": {"type": "boolean"}}, "required": ["b"]}
    wanted = {"type": "object", "properties": {"a": inner}, "required": ["a"]}
    constraint = Constraint(kind="json_schema", text=json.dumps(wanted))
    prompt = ChatPrompt(messages=USER)
    wish = '{"a": {"b": true, "left": 1}, "wise": 2}'
    said = speak(plan_of(prompt, constraint=constraint).start(), wish, RNG)
    assert tokenizer().decode(said) == '{"a": {"b": true}}'


@pytest.mark.parametrize(
    "more",
    [
        {"additionalProperties": True},
        {"additionalProperties": {"type": "integer"}},
        {"allOf": [{"properties": {"left": {"type": "integer"}}}]},
        {"anyOf": [{"required": ["left"]}, {"required": ["a"]}]},
    ],
)
def test_a_schema_that_speaks_of_other_members_has_them(more: dict[str, Any]):
    wanted = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
    constraint = Constraint(kind="json_schema", text=json.dumps(wanted | more))
    wish = '{"a": true, "left": 1}'
    said = speak(plan_of(ChatPrompt(messages=USER), constraint=constraint).start(), wish, RNG)
    assert tokenizer().decode(said) == wish


FILE: dict[str, Any] = {"type": "string", "format": "file-path", "enum": ["a"]}


@pytest.mark.parametrize(
    ("schema", "wish"),
    [
        (FILE, '"a"'),
        ({"type": "array", "items": FILE, "minItems": 1, "uniqueItems": False}, '["a", "a"]'),
        ({"anyOf": [{"type": "null"}, FILE]}, '"a"'),
        ({"$ref": "#/$defs/f", "$defs": {"f": FILE}}, '"a"'),
        (
            {"type": "object", "properties": {"format": FILE}, "required": ["format"]},
            '{"format": "a"}',
        ),
        ({"const": {"format": "file-path"}}, '{"format": "file-path"}'),
    ],
)
def test_what_a_schema_only_remarks_keeps_nobody_from_following_it(
    schema: dict[str, Any], wish: str
):
    constraint = Constraint(kind="json_schema", text=json.dumps(schema))
    said = speak(plan_of(ChatPrompt(messages=USER), constraint=constraint).start(), wish, RNG)
    assert tokenizer().decode(said) == wish


def test_a_format_that_is_known_is_held():
    schema = {"type": "string", "format": "date"}
    constraint = Constraint(kind="json_schema", text=json.dumps(schema))
    plan = plan_of(ChatPrompt(messages=USER), constraint=constraint)
    said = tokenizer().decode(speak(plan.start(), '"never"', RNG))
    assert date.fromisoformat(json.loads(said))


def test_why_a_pattern_cannot_be_held_is_said_whole():
    schema = {"type": "string", "pattern": "^(?=x)"}
    constraint = Constraint(kind="json_schema", text=json.dumps(schema), field="text.format")
    with pytest.raises(InvalidRequest, match=r"look-around.* is not supported") as caught:
        plan_of(ChatPrompt(messages=USER), constraint=constraint)
    assert "\n" not in caught.value.message
