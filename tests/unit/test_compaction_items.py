"""Compaction items: what asks for one, what one stands for, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from api.http.caller import Caller
from api.openai.response_schemas import ResponseRequest
from api.responses.compaction import live, sealed_summary
from api.responses.convert import ResponsePlan, items_of, plan_of
from api.responses.events import SummaryWriter
from api.responses.items import Item, seal
from runtime.config.settings import Settings
from runtime.errors import InvalidRequest, NoSummary
from runtime.prompt.compaction import INTRODUCTION, REQUEST
from runtime.types import (
    ChatPrompt,
    Finished,
    Message,
    ModelSpec,
    ReasoningDelta,
    TextDelta,
    ToolChoice,
    Usage,
)

SPEC = ModelSpec(id="m", path="/m", context=4096, model_type="qwen3", nbytes=1, created_s=1)
LOOK: dict[str, Any] = {"type": "function", "name": "look", "parameters": {"type": "object"}}
TRIGGER: dict[str, Any] = {"type": "compaction_trigger"}
DONE = Finished(index=0, reason="stop", usage=Usage(num_prompt_tokens=1))


def said(role: str, text: str) -> dict[str, Any]:
    return {"type": "message", "role": role, "content": text}


def summary(text: str, kind: str = "compaction") -> dict[str, Any]:
    return {"type": kind, "id": "cmp_1", "encrypted_content": sealed_summary(text)}


CALL: dict[str, Any] = {"type": "function_call", "call_id": "c1", "name": "look", "arguments": "{}"}
OUTPUT: dict[str, Any] = {"type": "function_call_output", "call_id": "c1", "output": "a fox"}
THOUGHT: dict[str, Any] = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "h"}]}


def plan(*items: dict[str, Any], **body: Any) -> ResponsePlan:
    data = msgspec.json.decode(json.dumps({"input": items} | body), type=ResponseRequest)
    settings = Settings(home=Path("/nowhere"))
    return plan_of(data, items_of(data), "resp_1", SPEC, Caller(), settings)


def prompt(*items: dict[str, Any], **body: Any) -> ChatPrompt:
    found = plan(*items, **body).request.prompt
    assert isinstance(found, ChatPrompt)
    return found


def test_a_trigger_asks_for_a_summary_of_the_very_prompt_that_would_go_on() -> None:
    history = (said("user", "hi"), CALL, OUTPUT)
    form = {"format": {"type": "json_object"}}
    tools: dict[str, Any] = {"tools": [LOOK], "tool_choice": "required", "text": form}
    without, asked = prompt(*history, **tools), plan(*history, TRIGGER, **tools)
    assert asked.compacts
    assert isinstance(asked.request.prompt, ChatPrompt)
    assert asked.request.prompt.messages == (*without.messages, Message(role="user", text=REQUEST))
    assert asked.request.prompt.tools == without.tools
    assert asked.request.prompt.tool_choice == ToolChoice(mode="none")
    assert asked.request.constraint is None


def test_a_summary_stands_for_what_the_model_said_and_called() -> None:
    items = (said("developer", "rules"), said("user", "hi"), THOUGHT, CALL, OUTPUT)
    read = prompt(*items, said("assistant", "done"), summary("all is well"), said("user", "more"))
    assert read.messages == (
        Message(role="system", text="rules"),
        Message(role="user", text="hi"),
        Message(role="user", text=INTRODUCTION + "all is well"),
        Message(role="user", text="more"),
    )


@pytest.mark.parametrize("kind", ["compaction", "compaction_summary", "context_compaction"])
def test_every_name_of_a_compaction_item_is_read(kind: str) -> None:
    (message,) = prompt(summary("so far", kind)).messages
    assert message.text == INTRODUCTION + "so far"


ANY_ITEM = st.sampled_from(
    [
        *(said("user", "u"), said("developer", "d"), said("system", "s"), said("assistant", "a")),
        *(CALL, OUTPUT, THOUGHT, {"type": "web_search_call"}, summary("1"), summary("2")),
    ]
)


@given(items=st.lists(ANY_ITEM, min_size=1, max_size=12))
def test_nothing_that_others_than_the_model_said_is_lost_and_only_the_last_summary_is_read(
    items: list[dict[str, Any]],
) -> None:
    read = live([Item(msgspec.Raw(json.dumps(one).encode()), "input") for one in items]).items
    found = [json.loads(bytes(one.raw)) for one in read]
    places = [i for i, one in enumerate(items) if one["type"] == "compaction"]
    last = places[-1] if places else 0
    others = [one for one in items[:last] if one.get("role", "assistant") != "assistant"]
    assert found == others + items[last:]


@pytest.mark.parametrize(
    ("items", "param"),
    [
        ([TRIGGER], "input[0]"),
        ([TRIGGER, said("user", "hi")], "input[0]"),
        ([said("user", "hi"), TRIGGER, TRIGGER], "input[1]"),
        ([said("user", "hi"), {"type": "compaction"}], "input[1].encrypted_content"),
        (
            [{"type": "compaction", "encrypted_content": "gAAAAABother"}],
            "input[0].encrypted_content",
        ),
        (
            [{"type": "compaction", "encrypted_content": sealed_summary("x")[:-6]}],
            "input[0].encrypted_content",
        ),
        # What was sealed as a thought is no summary.
        ([{"type": "compaction", "encrypted_content": seal("x")}], "input[0].encrypted_content"),
        ([{"type": "compaction", "encrypted_content": 7}], "input[0].encrypted_content"),
    ],
)
def test_what_cannot_be_read_is_refused_by_its_field(
    items: list[dict[str, Any]], param: str
) -> None:
    with pytest.raises(InvalidRequest) as refused:
        plan(*items)
    assert refused.value.param == param


def test_a_summary_is_one_item_whatever_is_thought_beside_it() -> None:
    writer = SummaryWriter()
    chunks = [
        ReasoningDelta(index=0, text="let me see"),
        TextDelta(index=0, text=" all is"),
        TextDelta(index=0, text=" well\n"),
        DONE,
    ]
    events = [event for chunk in chunks for event in writer.add(chunk)]
    assert [event.type for event in events] == [
        "response.output_item.added",
        "response.compaction.compacting",
        "response.output_item.done",
    ]
    (item,) = msgspec.to_builtins(writer.items)
    assert (item["type"], item["encrypted_content"]) == (
        "compaction",
        sealed_summary("all is well"),
    )


def test_an_empty_summary_is_an_error_and_no_item() -> None:
    writer = SummaryWriter()
    writer.add(ReasoningDelta(index=0, text="hm"))
    writer.add(TextDelta(index=0, text=" \n"))
    with pytest.raises(NoSummary):
        writer.add(DONE)
    assert not writer.items
