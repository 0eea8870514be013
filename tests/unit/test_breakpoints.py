"""A breakpoint ends a prefix at its very token, whatever follows it in its message."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.prompt.rewriting import moved_to
from runtime.types import Breakpoint, Message, ToolCall
from runtime.worker.input.turns import TurnStore
from tests.templates import template_of
from tests.unit.test_compose import END, SYSTEM, USER, Talk

HEADS = st.lists(st.sampled_from(["fox", " is", "\n", ".", "  ", "{", '"', "ä", "42"]), min_size=1)
TAILS = st.sampled_from(["", "x", " y", "\n", "\n\nz", ".", "0", "ö"])
CALL = ToolCall(id="c", name="look", arguments='{"at": 1}')


@cache
def talk_in(name: str) -> Talk:
    return Talk(template_of(Path(mkdtemp()), name), TurnStore())


def conversation(number: int, text: str, point: Breakpoint | None, last: str) -> list[Message]:
    said = [
        SYSTEM,
        USER,
        Message(role="assistant", text="Let me see.", tool_calls=(CALL,)),
        Message(role="tool", text="rain falls", tool_call_id="c", name="look"),
        Message(role="user", text=last),
    ]
    points = () if point is None else (point,)
    said[number] = msgspec.structs.replace(said[number], text=text, breakpoints=points)
    return said


@pytest.mark.parametrize("name", ["chatml", "qwen3"])
@given(
    number=st.integers(0, 3),
    head=HEADS.map("".join).filter(str.strip),
    tails=st.lists(TAILS, min_size=2, max_size=2, unique=True),
)
def test_another_request_shares_all_tokens_before_a_breakpoint(
    name: str, number: int, head: str, tails: list[str]
):
    talk = talk_in(name)
    point = Breakpoint(at=len(head), keep_s=300.0)
    one, other = (f"{head}\nA{tail}" if tail else head for tail in tails)
    kept = talk.compose(*conversation(number, one, point, "And?"))
    ((position, keep_s),) = kept.keeps
    assert keep_s == 300.0
    assert position in kept.boundaries
    assert position not in kept.passing
    plain = talk.compose(*conversation(number, one, None, "And?"))
    assert kept.token_ids == plain.token_ids, "a breakpoint changes nothing that the model reads"
    shared = talk.compose(*conversation(number, other, None, "Or?"))
    assert shared.token_ids[:position] == kept.token_ids[:position]
    # Only the token that reaches over the breakpoint is left out.
    assert not talk.text_of(kept.token_ids[:position]).endswith("A")
    reached = talk.template.text_of(kept.token_ids[: position + 1])
    if "\ufffd" not in reached:
        assert reached.rstrip("\n").endswith(head.rstrip()) or head.rstrip() in reached


def test_breakpoints_of_one_message_are_at_as_many_tokens():
    talk = talk_in("chatml")
    points = tuple(Breakpoint(at=at, keep_s=float(at)) for at in (3, 7, 11))
    said = Message(role="user", text="one\ntwo\nsix\nten", breakpoints=points)
    composed = talk.compose(SYSTEM, said)
    found = [(talk.text_of(composed.token_ids[:at])[-3:], s) for at, s in composed.keeps]
    assert found == [("one", 3.0), ("two", 7.0), ("six", 11.0)]


def test_a_breakpoint_behind_a_call_is_before_the_next_one():
    talk = talk_in("chatml")
    other = ToolCall(id="d", name="look", arguments='{"at": 2}')
    point = Breakpoint(at=0, keep_s=300.0, num_calls=1)
    said = Message(role="assistant", tool_calls=(CALL, other), breakpoints=(point,))
    results = [Message(role="tool", text="r", tool_call_id=one) for one in "cd"]
    composed = talk.compose(SYSTEM, USER, said, *results)
    ((position, _),) = composed.keeps
    before = talk.text_of(composed.token_ids[:position])
    assert ('"at": 1' in before, '"at": 2' in before) == (True, False)


def test_a_breakpoint_after_a_turn_that_is_known_is_at_its_token():
    talk = talk_in("chatml")
    first = talk.compose(SYSTEM, USER)
    whole = talk.says(first, f"rain{END}", "rain")
    said = Message(role="assistant", text="rain")
    point = Breakpoint(at=4, keep_s=300.0)
    asked = Message(role="user", text="Well\nand then?", breakpoints=(point,))
    composed = talk.compose(SYSTEM.kept(3600.0), USER, said, asked)
    assert composed.token_ids[: len(whole)] == whole
    (head, _), (position, keep_s) = composed.keeps
    assert (head, keep_s) == (composed.prefix_end, 300.0)
    assert talk.text_of(composed.token_ids[:position]).endswith("user\nWell")


MOVES: list[tuple[str, Callable[[str], str]]] = [
    ("in front", lambda text: f"The call failed:\n{text}"),
    ("around", lambda text: f"<a>\n{text}\n</a>"),
    ("not at all", lambda text: text),
]


@pytest.mark.parametrize(("name", "change"), MOVES)
@given(head=st.text("abc \n", min_size=1), tail=st.text("xyz \n"))
def test_a_place_moves_with_the_words_before_it(
    name: str, change: Callable[[str], str], head: str, tail: str
):
    before = head + tail
    after = change(before)
    at = moved_to(before, after, len(head))
    start = after.index(before)
    places = [i for i in range(len(after)) if after.startswith(head[-64:], i)]
    is_told_apart = len(places) == 1 or after.startswith(head)
    assert at == start + len(head) or not is_told_apart
    assert 0 <= at <= len(after)


@pytest.mark.parametrize(
    ("before", "after", "at", "expected"),
    [
        ("a\nb\nc", "a\nc", 3, 1),
        ("abc", "xy", 2, 2),
        ("abc", "x", 2, 1),
        ("a\nb\nc", "a\nc", 5, 3),
        ("gone\nkept", "kept", 4, 4),
        ("x-header: 1\nBe brief.", "Be brief.", 21, 9),
        ("one two", "one two", 7, 7),
    ],
)
def test_a_place_in_a_changed_text(before: str, after: str, at: int, expected: int):
    assert moved_to(before, after, at) == expected
