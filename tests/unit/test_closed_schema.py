"""Which members an object may have when its schema names some."""

import json
from typing import Any

import pytest

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
