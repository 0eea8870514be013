"""What nobody knows of a body is named, wherever it is."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from api.anthropic.schemas import MessagesRequest
from api.http.unused import MAX_NAMED, unused_fields
from api.openai.response_schemas import ResponseRequest
from api.openai.schemas import ChatRequest, CompletionRequest
from tests.whole_bodies import BODIES, Place, places, with_fields

NAMES = st.sampled_from(["glow", "zz", "aura_9", "x.y", "[0]", "", "größe"])
VALUES = st.sampled_from([0, 1, "", "a", True, [], {}, {"type": "text"}, [{"text": "x"}], [[1]]])


def unused(body: Any, kind: Any = ChatRequest, **more: Any) -> list[str]:
    return unused_fields(json.dumps(body).encode(), kind, **more)


def at_once(name: str) -> st.SearchStrategy[dict[tuple[Place, str], object]]:
    where = st.sampled_from(places(BODIES[name].body))
    return st.dictionaries(st.tuples(where, NAMES), VALUES, max_size=MAX_NAMED)


@pytest.mark.parametrize("name", BODIES)
def test_a_body_with_everything_that_is_known_has_nothing_unused(name: str):
    kind, body = BODIES[name]
    assert unused(body, kind) == []


@pytest.mark.parametrize("name", BODIES)
@given(data=st.data())
def test_every_unknown_field_at_any_depth_is_named(name: str, data: st.DataObject):
    kind, body = BODIES[name]
    changed, expected = with_fields(body, data.draw(at_once(name)))
    found = unused(changed, kind)
    assert len(found) == len(set(found))
    assert set(found) == expected


def test_what_is_null_or_false_asks_for_nothing():
    said = {"role": "user", "content": "?", "a": None, "b": False, "c": 0}
    assert unused({"messages": [said], "d": None, "e": []}) == ["e", "messages[0].c"]


def test_more_than_the_first_are_counted():
    body = {"messages": [], **{f"f{i:03}": 1 for i in range(100)}}
    assert unused(body) == [*(f"f{i:03}" for i in range(MAX_NAMED)), "68 more"]
    turns = [{"role": "user", "content": "?", "x": 1}] * 10_000
    assert unused({"messages": turns})[-1] == f"{10_000 - MAX_NAMED} more"


def test_long_names_are_cut():
    (name,) = unused({"messages": [], "x" * 10_000: 1})
    assert name == "x" * 64


def test_parts_of_controls_that_nobody_reads_are_named():
    body = {
        "messages": [],
        "reasoning": {"level": "high", "type": "on", "effort": "low", "other": None},
        "metadata": {"reasoning": {"level": 3}, "thinking": "words", "mine": {"level": 1}},
        "thinking": True,
        "extra_body": {"top_k": 1, "session_id": "s"},
    }
    assert unused(body) == ["extra_body.top_k"]


def test_an_object_of_a_type_that_nobody_knows_is_named_by_who_reads_it():
    blocks = [{"type": "hologram", "data": {"x": 1}}, {"type": "text", "text": "a", "glow": 3}]
    body = {"messages": [{"role": "user", "content": blocks}]}
    assert unused(body, MessagesRequest) == ["messages[0].content[1].glow"]
    items = [{"type": "hologram", "glow": 1}, {"id": "r1", "glow": 1}]
    assert unused({"input": items}, ResponseRequest) == ["input[1].glow"]


def test_a_field_can_be_without_effect_in_one_place_and_known_in_another():
    assert unused({"prompt": "", "n": 1}, CompletionRequest, but={"n"}) == ["n"]
    assert unused({"prompt": "", "load": 1}, CompletionRequest, also={"load"}) == []


@pytest.mark.parametrize("body", [b"", b"7", b"[]", b"null", b"{", b'{"a":"\xff"}'])
def test_what_is_no_object_has_no_fields(body: bytes):
    assert unused_fields(body, ChatRequest) == []
