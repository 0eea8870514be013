"""Chunks of an answer as items and events of the Responses API, with exact values."""

from __future__ import annotations

from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from api.responses.events import OutputWriter, Shape
from api.responses.items import seal
from api.responses.tools import ToolNames, ToolRef
from runtime.types import (
    Chunk,
    Finished,
    FinishReason,
    ReasoningDelta,
    TextDelta,
    ToolCallDelta,
    Usage,
)

NAMES = ToolNames(
    {
        "look": ToolRef("look"),
        "agents__wait": ToolRef("wait", "agents"),
        "note": ToolRef("note", is_custom=True),
    }
)


def text(piece: str) -> TextDelta:
    return TextDelta(index=0, text=piece)


def thought(piece: str) -> ReasoningDelta:
    return ReasoningDelta(index=0, text=piece)


def call(arguments: str, name: str | None = None, index: int = 0) -> ToolCallDelta:
    call_id = f"call_{index}" if name is not None else None
    return ToolCallDelta(index=0, call_index=index, arguments=arguments, id=call_id, name=name)


def end(reason: FinishReason = "stop") -> Finished:
    return Finished(index=0, reason=reason, usage=Usage(num_prompt_tokens=1))


def written(*chunks: Chunk, shape: Shape = Shape(NAMES)) -> tuple[list[Any], list[Any]]:  # noqa: B008
    """The events and the items, ids left out."""
    writer = OutputWriter(shape)
    events = [event for chunk in chunks for event in writer.add(chunk)]
    return [plain(event) for event in events], [plain(item) for item in writer.items]


def plain(value: Any) -> Any:
    found = msgspec.json.decode(msgspec.json.encode(value))
    found.pop("id", None)
    found.pop("item_id", None)
    if "item" in found:
        found["item"].pop("id")
    return found


def test_nothing_said_is_no_item() -> None:
    assert written(text(""), end()) == ([], [])


def test_a_message_is_told_piece_by_piece() -> None:
    events, items = written(text("a"), text("b"), end())
    part = {"type": "output_text", "text": "ab", "annotations": [], "logprobs": []}
    message = {"type": "message", "role": "assistant", "status": "completed", "content": [part]}
    assert items == [message]
    where = {"output_index": 0, "content_index": 0}
    kind = "response.output_text."
    assert events == [
        {
            "type": "response.output_item.added",
            "output_index": 0,
            "item": message | {"status": "in_progress", "content": []},
        },
        {"type": "response.content_part.added", **where, "part": part | {"text": ""}},
        {"type": f"{kind}delta", **where, "delta": "a", "logprobs": []},
        {"type": f"{kind}delta", **where, "delta": "b", "logprobs": []},
        {"type": f"{kind}done", **where, "text": "ab", "logprobs": []},
        {"type": "response.content_part.done", **where, "part": part},
        {"type": "response.output_item.done", "output_index": 0, "item": message},
    ]


def test_what_is_cut_is_incomplete_and_what_was_whole_before_is_not() -> None:
    _, items = written(text("a"), call('{"a', "look"), end("length"))
    assert [item["status"] for item in items] == ["completed", "incomplete"]


def test_a_call_has_the_name_and_the_namespace_that_the_client_knows() -> None:
    events, items = written(call("", "agents__wait"), call("{"), call("}"), end("tool_calls"))
    whole = {
        "type": "function_call",
        "status": "completed",
        "call_id": "call_0",
        "name": "wait",
        "namespace": "agents",
        "arguments": "{}",
    }
    assert items == [whole]
    kind = "response.function_call_arguments."
    assert events == [
        {
            "type": "response.output_item.added",
            "output_index": 0,
            "item": whole | {"status": "in_progress", "arguments": ""},
        },
        {"type": f"{kind}delta", "output_index": 0, "delta": "{"},
        {"type": f"{kind}delta", "output_index": 0, "delta": "}"},
        {"type": f"{kind}done", "output_index": 0, "arguments": "{}", "name": "wait"},
        {"type": "response.output_item.done", "output_index": 0, "item": whole},
    ]


def test_calls_beside_one_another_are_items_of_their_own() -> None:
    _, items = written(call("{}", "look"), call("", "look", 1), call("{}"), end("tool_calls"))
    assert [(item["call_id"], item["arguments"]) for item in items] == [
        ("call_0", "{}"),
        ("call_1", "{}"),
    ]


def test_a_custom_call_gives_its_text() -> None:
    events, items = written(call('{"input":"a\\n', "note"), call('b"}'), end("tool_calls"))
    whole = {
        "type": "custom_tool_call",
        "status": "completed",
        "call_id": "call_0",
        "name": "note",
        "input": "a\nb",
    }
    assert items == [whole]
    kind = "response.custom_tool_call_input."
    assert events[1:] == [
        {"type": f"{kind}delta", "output_index": 0, "delta": "a\n"},
        {"type": f"{kind}delta", "output_index": 0, "delta": "b"},
        {"type": f"{kind}done", "output_index": 0, "input": "a\nb"},
        {"type": "response.output_item.done", "output_index": 0, "item": whole},
    ]
    _, garbled = written(call("a\nb", "note"), end("tool_calls"))
    assert garbled == [whole]
    _, cut = written(call('{"input":"a\\nb', "note"), end("length"))
    assert cut == [whole | {"status": "incomplete"}]


def test_reasoning_is_content_and_sealed_when_asked() -> None:
    _, items = written(
        thought("h"), thought("m"), text("a"), end(), shape=Shape(NAMES, False, True)
    )
    assert items[0] == {
        "type": "reasoning",
        "status": "completed",
        "summary": [],
        "content": [{"type": "reasoning_text", "text": "hm"}],
        "encrypted_content": seal("hm"),
    }
    events, unsealed = written(thought("hm"), end())
    assert "encrypted_content" not in unsealed[0]
    assert [event["type"].removeprefix("response.") for event in events] == [
        *("output_item.added", "content_part.added", "reasoning_text.delta"),
        *("reasoning_text.done", "content_part.done", "output_item.done"),
    ]


def test_reasoning_is_told_once_as_a_summary_to_a_client_that_asks_for_one() -> None:
    events, items = written(thought("h"), thought("m"), end(), shape=Shape(NAMES, True))
    part = {"type": "summary_text", "text": "hm"}
    content = [{"type": "reasoning_text", "text": "hm"}]
    assert items == [
        {"type": "reasoning", "status": "completed", "summary": [part], "content": content}
    ]
    where = {"output_index": 0, "summary_index": 0}
    kind = "response.reasoning_summary_"
    assert events[1:-1] == [
        {"type": f"{kind}part.added", **where, "part": part | {"text": ""}},
        {"type": f"{kind}text.delta", **where, "delta": "h"},
        {"type": f"{kind}text.delta", **where, "delta": "m"},
        {"type": f"{kind}text.done", **where, "text": "hm"},
        {"type": f"{kind}part.done", **where, "part": part},
    ]


PIECES = st.lists(
    st.one_of(
        st.builds(text, st.text(max_size=3)),
        st.builds(thought, st.text(max_size=3)),
        st.builds(call, st.text(max_size=3), st.sampled_from(["look", "note", "agents__wait"])),
    ),
    max_size=12,
)


@given(pieces=PIECES, reason=st.sampled_from(["stop", "length", "tool_calls"]))
def test_whatever_is_said_every_item_is_opened_told_and_closed_once(
    pieces: list[Chunk], reason: FinishReason
) -> None:
    events, items = written(*pieces, end(reason))
    added = [e["output_index"] for e in events if e["type"] == "response.output_item.added"]
    done = [e for e in events if e["type"] == "response.output_item.done"]
    assert added == [event["output_index"] for event in done] == list(range(len(items)))
    assert [event["item"] for event in done] == items
    said = "".join(e["delta"] for e in events if e["type"] == "response.output_text.delta")
    assert said == "".join(piece.text for piece in pieces if isinstance(piece, TextDelta))
    open_item = -1
    for event in events:
        if event["type"] == "response.output_item.added":
            open_item = event["output_index"]
        assert event["output_index"] == open_item
