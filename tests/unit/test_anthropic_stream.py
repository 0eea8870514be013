"""Chunks sorted into content blocks, in the order in which the model wrote them."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from api.anthropic.convert import ConvertedRequest
from api.anthropic.signature import sign
from api.anthropic.stream import Blocks, answered
from runtime.types import (
    ChatPrompt,
    Chunk,
    GenerateRequest,
    PrefillProgress,
    ReasoningDelta,
    TextDelta,
    ToolCallDelta,
)

REQUEST = GenerateRequest(request_id="r", model="m", prompt=ChatPrompt(messages=()))


def call(number: int, arguments: str) -> ToolCallDelta:
    return ToolCallDelta(
        index=0, call_index=number, arguments=arguments, id=f"c{number}", name=f"f{number}"
    )


def more(number: int, arguments: str) -> ToolCallDelta:
    return ToolCallDelta(index=0, call_index=number, arguments=arguments)


def content(*chunks: Chunk, shows_thinking: bool = True) -> list[Any]:
    blocks = Blocks()
    for chunk in chunks:
        blocks.take(chunk)
    asked = ConvertedRequest(REQUEST, shows_thinking=shows_thinking)
    return [json.loads(msgspec.json.encode(answered(block, asked))) for block in blocks.finish()]


def test_thoughts_texts_and_calls_stay_in_their_order() -> None:
    chunks = [
        PrefillProgress(num_done=1, num_total=2),
        ReasoningDelta(index=0, text="Hm"),
        ReasoningDelta(index=0, text="."),
        TextDelta(index=0, text=""),
        TextDelta(index=0, text="Look: "),
        call(0, ""),
        more(0, '{"a":'),
        more(0, " 1}"),
        call(1, "{}"),
        TextDelta(index=0, text="Done"),
        TextDelta(index=0, text="."),
    ]
    assert content(*chunks) == [
        {"type": "thinking", "thinking": "Hm.", "signature": sign("Hm.")},
        {"type": "text", "text": "Look: "},
        {"type": "tool_use", "id": "c0", "name": "f0", "input": {"a": 1}},
        {"type": "tool_use", "id": "c1", "name": "f1", "input": {}},
        {"type": "text", "text": "Done."},
    ]


def test_each_block_begins_once_and_the_next_closes_it() -> None:
    blocks = Blocks()
    begun = [
        new.index if (new := blocks.take(chunk)[0]) is not None else None
        for chunk in (TextDelta(index=0, text="a"), TextDelta(index=0, text="b"), call(0, "{}"))
    ]
    assert begun == [0, None, 1]
    assert [block.content for block in blocks.done] == ["ab"]


def test_hidden_thoughts_are_in_the_signature_only() -> None:
    (block,) = content(ReasoningDelta(index=0, text="Hm."), shows_thinking=False)
    assert block == {"type": "thinking", "thinking": "", "signature": sign("Hm.")}


@pytest.mark.parametrize("arguments", ['{"a": ', "7", '["a"]', "look", "[" * 2000])
def test_arguments_that_are_no_object_are_shown_as_the_text_they_are(arguments: str) -> None:
    (block,) = content(call(0, arguments))
    assert block["input"] == {"arguments": arguments}


def test_a_call_without_arguments_has_an_empty_input() -> None:
    (block,) = content(call(0, ""))
    assert block["input"] == {}
