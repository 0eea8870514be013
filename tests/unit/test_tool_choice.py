"""Tools that are shown and may not be called: by their dialect's marks, and by their names."""

from __future__ import annotations

import json

import pytest
from msgspec.structs import replace

from runtime.errors import InvalidRequest
from runtime.types import ChatPrompt, Tool, ToolChoice
from runtime.worker.output import forced_calls
from runtime.worker.output.dialect import ReasoningBlock
from tests.unit.test_guide import (
    EOS,
    FORCED,
    LOOK,
    RNG,
    USER,
    allowed,
    dialect,
    ids_of,
    plan_of,
    read,
    required,
    speak,
    tokenizer,
)


@pytest.mark.parametrize("block", ["closed", "open"])
@pytest.mark.parametrize("name", FORCED)
def test_where_no_call_may_be_none_can_be_opened(name: str, block: ReasoningBlock):
    choice = ToolChoice(mode="none")
    prompt = ChatPrompt(messages=USER, tools=(LOOK,), tool_choice=choice)
    mark = ids_of(dialect(name).tool_start)
    guide = plan_of(prompt, name, block=block).start()
    guide.advance([*ids_of("I look."), *mark[:-1]])
    possible = allowed(guide)
    assert possible is not None
    assert set(range(len(tokenizer()))) - set(possible) == {mark[-1]}


def test_of_some_allowed_tools_only_these_are_called():
    tools = (replace(LOOK, is_strict=False), Tool(name="other"))
    choice = ToolChoice(allowed=("look",))
    prompt = ChatPrompt(messages=USER, tools=tools, tool_choice=choice)
    wish = 'I look.<tool_call>\n{"name": "other", "arguments": {}}\n</tool_call>'
    text, _, calls = read(speak(plan_of(prompt).start(), wish, RNG), dialect("json_tools"), tools)
    assert text.startswith("I look.")
    assert {name for name, _ in calls} == {"look"}


ONE_CALL = '\n{"name": "look", "arguments": {"unit": "day", "days": 3}}\n</tool_call>'


def test_calls_that_are_forced_may_follow_each_other_as_templates_write_them():
    spoken = dialect("json_tools")
    choice = ToolChoice(mode="required")
    guide = plan_of(ChatPrompt(messages=USER, tools=(LOOK,), tool_choice=choice)).start()
    said = ids_of("\n".join([spoken.tool_start + ONE_CALL] * 3))
    for token_id in said:
        assert token_id in (allowed(guide) or [])
        guide.advance([token_id])
    assert len(read(said, spoken, (LOOK,))[2]) == 3
    for _ in range(2):
        guide.advance(ids_of("\n"))
    assert allowed(guide) == sorted([EOS, *ids_of(spoken.tool_start)]), "blank lines come to an end"


def test_nothing_but_the_end_may_follow_the_only_call():
    guide = plan_of(required(LOOK)).start()
    guide.advance(ids_of(dialect("json_tools").tool_start + ONE_CALL))
    assert allowed(guide) == [EOS]


FLAT = Tool(
    name="look",
    parameters='{"type":"object","properties":{"at":{"type":"integer"},"what":{"type":"string"}},'
    '"required":["what"],"additionalProperties":false}',
    is_strict=True,
)
NESTED = Tool(
    name="look",
    parameters='{"type":"object","properties":{"at":{"type":"array","items":{"type":"object",'
    '"properties":{"a":{"type":"string"},"b":{"enum":["x","y"]},"c":{"type":"null"}},'
    '"required":["b"],"additionalProperties":false},"minItems":1,"maxItems":3}},"required":[],'
    '"additionalProperties":false}',
    is_strict=True,
)


@pytest.mark.parametrize(
    ("name", "tool", "row", "arguments"),
    [
        ("function_gemma", FLAT, "at:3,what:<escape>a, b:c<escape>", {"at": 3, "what": "a, b:c"}),
        ("function_gemma", FLAT, "what:<escape>a<escape>", {"what": "a"}),
        ("gemma4", FLAT, 'what:<|"|>a, b:{c}<|"|>', {"what": "a, b:{c}"}),
        ("gemma4", NESTED, "", {}),
        ("gemma4", NESTED, 'at:[{b:<|"|>x<|"|>}]', {"at": [{"b": "x"}]}),
        (
            "gemma4",
            NESTED,
            'at:[{b:<|"|>y<|"|>},{a:<|"|>"<|"|>,b:<|"|>x<|"|>,c:null}]',
            {"at": [{"b": "y"}, {"a": '"', "b": "x", "c": None}]},
        ),
        ("pythonic", NESTED, 'at=[{"b": "y"}]', {"at": [{"b": "y"}]}),
    ],
)
def test_arguments_in_a_row_are_held_to_their_schema(
    name: str, tool: Tool, row: str, arguments: dict[str, object]
):
    spoken, form = dialect(name), forced_calls.form_of(dialect(name))
    assert form is not None
    wish = spoken.tool_start + form.opening.format(name="look") + row + form.closing
    said = speak(plan_of(required(tool), name).start(), wish, RNG)
    ((called, written),) = read(said, spoken, (tool,))[2]
    assert (called, json.loads(written)) == ("look", arguments)


def test_a_list_in_a_row_is_as_long_as_its_schema_says():
    spoken = dialect("gemma4")
    wish = spoken.tool_start + "call:look{at:[" + ",".join(['{b:<|"|>x<|"|>}'] * 9)
    said = speak(plan_of(required(NESTED), "gemma4").start(), wish, RNG)
    ((_, written),) = read(said, spoken, (NESTED,))[2]
    assert json.loads(written) == {"at": [{"b": "x"}] * 3}


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("function_gemma", {"at": {"type": "array", "items": {"type": "integer"}}}),
        ("gemma4", {"at": {"anyOf": [{"type": "string"}, {"type": "integer"}]}}),
        ("gemma4", {"at": {"type": "string", "pattern": "a+"}}),
        ("gemma4", {"a-b": {"type": "string"}}),
        ("pythonic", {"from": {"type": "string"}}),
    ],
)
def test_what_a_row_cannot_hold_is_not_forced(name: str, parameters: dict[str, object]):
    schema = {"type": "object", "properties": parameters}
    tool = Tool(name="look", parameters=json.dumps(schema))
    assert not forced_calls.can_force(dialect(name), (tool,))
    with pytest.raises(InvalidRequest) as caught:
        plan_of(required(tool), name)
    assert caught.value.param == "tool_choice"
