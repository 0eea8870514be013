"""No history ends a conversation: what was sent before is mended where it cannot be read."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.damaged import DAMAGES, HISTORIES, RULES, USAGES, Damaged, conversation, damaged
from tests.image_requests import MESSAGES, image_block, problem
from tests.running_server import CHAT, RunningServer
from tests.tiny_vlms import encoded, picture

SEAM_TOKENS = 4
"""What of the end of a common prefix may be computed again."""
FORM = settings(
    max_examples=4,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


def posted(server: RunningServer, path: str, body: Any) -> Any:
    """The answer; the body is written as clients do, with halves of characters escaped."""
    found = server.request(
        "POST",
        path,
        content=json.dumps(body).encode(),
        headers={"content-type": "application/json"},
    )
    assert found.is_success, found.text
    return found.json()


def read(server: RunningServer, body: Any) -> tuple[list[int], str]:
    """The prompt, in tokens and as text."""
    view = posted(server, "/admin/prompt/explain", body)
    return view["tokens"], "".join(part["text"] for part in view["parts"])


def num_common(one: list[int], other: list[int]) -> int:
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))


@pytest.mark.parametrize("name", HISTORIES)
@FORM
@given(data=st.data())
def test_a_damaged_past_is_answered_and_what_is_whole_of_it_is_read_and_reused(
    name: str, server: RunningServer, data: st.DataObject
) -> None:
    path, field = HISTORIES[name]
    body = conversation(name, data.draw(st.lists(st.integers(0, 7), min_size=1, max_size=3)))
    posted(server, path, body)
    tokens, _ = read(server, body)
    wish = data.draw(st.lists(st.tuples(st.integers(0, 10**6), DAMAGES), min_size=1, max_size=3))
    broken: Damaged = damaged(body, field, wish)
    first, again = (posted(server, path, broken.body) for _ in range(2))
    now, text = read(server, broken.body)
    assert [word for word in broken.words if word not in text] == []
    num_prompt = USAGES[name](again)
    assert num_prompt == len(now)
    assert first["hearth"]["cache"]["cached_tokens"] >= num_common(tokens, now) - SEAM_TOKENS
    assert again["hearth"]["cache"]["cached_tokens"] >= num_prompt - 1


# Pictures, which the worker looks at

RED = encoded(picture(1))
MOVING = encoded(picture(1), "GIF", save_all=True, append_images=[picture(2)])
LINE = "[image: it cannot be shown here]"


def looked_at(data: bytes, media_type: str = "image/png") -> list[dict[str, Any]]:
    """A conversation in which a tool gave this picture, up to its result."""
    call = {"type": "tool_use", "id": "c1", "name": "look", "input": {}}
    result = {
        "type": "tool_result",
        "tool_use_id": "c1",
        "content": [image_block(data, media_type)],
    }
    return [
        {"role": "user", "content": RULES},
        {"role": "assistant", "content": [call]},
        {"role": "user", "content": [result]},
    ]


def answered(server: RunningServer, turns: list[Any], model: str) -> Any:
    body = {"model": model, "messages": turns, "max_tokens": 1}
    return posted(server, MESSAGES, body)


@pytest.mark.parametrize(
    ("data", "model"),
    [(RED, "blind"), (RED[:-40], "qwen3_vl"), (MOVING, "qwen3_vl"), (b"%PDF-1.7", "qwen3_vl")],
    ids=["blind", "broken", "moving", "no picture"],
)
def test_a_picture_of_a_tool_that_cannot_be_shown_is_a_line_now_and_in_the_next_turn(
    data: bytes, model: str, seeing_server: RunningServer
) -> None:
    turns = looked_at(data)
    now = answered(seeing_server, turns, model)
    assert {"rule": "unseen_images", "num_places": 1} in now["hearth"]["prompt"]
    assert any("messages[2].content[0].content[0]" in one for one in now["hearth"]["ignored"])
    later = [*turns, {"role": "assistant", "content": "yes"}, {"role": "user", "content": "go on"}]
    then = answered(seeing_server, later, model)
    num_before = USAGES["messages"](now)
    assert then["hearth"]["cache"]["cached_tokens"] >= num_before - 8
    assert LINE in read(seeing_server, {"model": model, "messages": later, "max_tokens": 1})[1]


def test_a_picture_is_what_its_bytes_are_and_is_seen(seeing_server: RunningServer) -> None:
    turns = looked_at(RED, "image/jpeg")
    found = answered(seeing_server, turns, "qwen3_vl")
    assert "ignored" not in found["hearth"]
    assert LINE not in read(seeing_server, {"model": "qwen3_vl", "messages": turns})[1]


def test_a_broken_picture_is_refused_as_newest_input_only(seeing_server: RunningServer) -> None:
    words = {"type": "text", "text": "look"}
    bad = {"role": "user", "content": [words, image_block(RED[:-40])]}
    body = {"model": "qwen3_vl", "messages": [bad], "max_tokens": 1}
    assert "Could not process image" in problem(seeing_server.post(MESSAGES, body))
    said = {"role": "assistant", "content": "yes"}
    found = answered(seeing_server, [bad, said, {"role": "user", "content": "go on"}], "qwen3_vl")
    assert any("Could not process image" in one for one in found["hearth"]["ignored"])


def test_half_a_character_and_broken_arguments_are_read_and_told(server: RunningServer) -> None:
    function = {"name": "look", "arguments": '{"at": "\\ud83d"'}
    call = {"role": "assistant", "tool_calls": [{"id": "call00001", "function": function}]}
    result = {"role": "tool", "tool_call_id": "call00001", "content": "cut \ud83d"}
    turns = [{"role": "user", "content": "hi"}, call, result]
    found = posted(server, CHAT, {"model": "tiny", "messages": turns, "max_tokens": 1})
    told = found["hearth"]["ignored"]
    assert any(one.startswith("the body (1 half") for one in told)
    assert any("tool_calls[0].function.arguments (1 half" in one for one in told)
