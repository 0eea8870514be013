"""Tools that are shown and may not be called: by their dialect's marks, and by their names."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from runtime.types import ChatPrompt, Tool, ToolChoice
from runtime.worker.dialects.dialect import ReasoningBlock
from tests.unit.test_guide import (
    FORCED,
    LOOK,
    RNG,
    USER,
    allowed,
    dialect,
    ids_of,
    plan_of,
    read,
    speak,
    tokenizer,
)


@pytest.mark.parametrize("block", ["closed", "open"])
@pytest.mark.parametrize("name", [*FORCED, "gemma4", "pythonic"])
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
