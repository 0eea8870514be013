"""Any client's messages in an order and form that a template renders, with nothing lost."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.prompt import canonical
from runtime.prompt.arrange import (
    BEGUN_BEFORE,
    FAILED,
    LOADED,
    NO_ANSWER,
    Abilities,
    arranging_steps,
)
from runtime.prompt.rewriting import Rewritten, rewrite
from runtime.prompt.seal import Seal, sealed
from runtime.prompt.thinking import switches
from runtime.types import ChatPrompt, Image, Message, Role, Thinking, Tool, ToolCall
from runtime.worker.input.probe import definition_of
from tests.templates import TEMPLATES, template_of

NOTHING = Abilities(system=False, late_system=False, users_in_a_row=False, user_after_tool=False)
FETCH = Tool(name="fetch", description="Fetch a page.", is_deferred=True)


SEAL = Seal(b"secret")


def rewritten(messages: Sequence[Message], abilities: Abilities, *more: Any) -> Rewritten:
    return rewrite(messages, arranging_steps(abilities, SEAL.codes, *more))


def arrange(messages: Sequence[Message], abilities: Abilities, *more: Any) -> tuple[Message, ...]:
    return rewritten(messages, abilities, *more).messages


def reminder_of(messages: Sequence[Message], number: int) -> str:
    return sealed(messages[number].text, SEAL.codes(messages)[number]).text


def message(role: Role, text: str = "", **fields) -> Message:
    return Message(role=role, text=text, **fields)


def calls(*ids: str) -> tuple[ToolCall, ...]:
    return tuple(ToolCall(id=one, name="look", arguments="{}") for one in ids)


def test_adjacent_system_messages_are_one():
    arranged = arrange(
        [message("system", "a"), message("system", "b"), message("user", "c")], Abilities()
    )
    assert [one.text for one in arranged] == ["a\n\nb", "c"]


def test_a_late_system_message_becomes_a_reminder_in_its_place():
    late = message("system", "background job done").kept(300.0)
    messages = [message("user", "a"), message("assistant", "b"), late, message("user", "c")]
    arranged = arrange(messages, Abilities(late_system=False))
    assert [one.role for one in arranged] == ["user", "assistant", "user", "user"]
    assert arranged[2].text == reminder_of(messages, 2)
    (point,) = arranged[2].breakpoints
    assert (point.keep_s, arranged[2].text[: point.at].endswith("job done")) == (300.0, True)
    assert arrange(messages, Abilities())[2] == late


def test_users_in_a_row_are_joined_where_the_template_raises():
    messages = [message("user", "a"), message("system", "s"), message("user", "b")]
    (only,) = arrange(messages, NOTHING)
    assert only.text == f"a\n\n{reminder_of(messages, 1)}\n\nb"


def test_images_keep_their_place_when_messages_are_joined():
    image = Image(at=1, field="f", data=b"x")
    (only,) = arrange([message("user", "ab"), message("user", "cd", images=(image,))], NOTHING)
    assert only.text[only.images[0].at :] == "d"


def test_images_keep_their_place_among_words_that_are_framed():
    image = Image(at=2, field="f", data=b"x")
    failed = message("tool", "abcd", images=(image,), is_error=True)
    late = message("system", "\nabcd", images=(msgspec.structs.replace(image, at=3),))
    told, reminded = arrange([message("user", "q"), failed, late], Abilities(late_system=False))[
        -2:
    ]
    for one in (told, reminded):
        assert one.text[: one.images[0].at].endswith("ab")
        assert one.text[one.images[0].at :].startswith("cd")


def test_results_come_in_the_order_of_their_calls():
    asked = message("assistant", tool_calls=calls("x", "y", "z"))
    done = [message("tool", one, tool_call_id=one) for one in ("z", "x", "y")]
    arranged = arrange([message("user", "a"), asked, *done], Abilities())
    assert [one.text for one in arranged[2:]] == ["x", "y", "z"]


def test_a_failed_call_says_so():
    failed = message("tool", "no such file", tool_call_id="x", is_error=True)
    arranged = arrange([message("assistant", tool_calls=calls("x")), failed], Abilities())
    assert arranged[1].text == f"{FAILED}no such file"


def test_an_assistants_turn_in_pieces_is_one():
    pieces = [
        message("assistant", reasoning="hm"),
        message("assistant", "I look."),
        message("assistant", tool_calls=calls("x")),
        message("assistant", tool_calls=calls("y")),
    ]
    (turn,) = arrange(pieces, Abilities())
    assert (turn.text, turn.reasoning, turn.tool_calls) == ("I look.", "hm", calls("x", "y"))


def test_a_loaded_tool_is_shown_where_it_was_loaded():
    messages = [
        message("user", "a"),
        message("tool", "found", tool_call_id="x", loaded_tools=("fetch",)),
    ]
    arranged = arrange(messages, Abilities(), [FETCH], definition_of)
    assert arranged[1].text == f"found\n{LOADED}\n{definition_of(FETCH)}"


TEXT = st.text("ab c\n", max_size=6)
ROLES = st.sampled_from(["system", "user", "assistant", "tool"])
ABILITIES = st.builds(Abilities, *[st.booleans()] * 4)


@settings(deadline=None)
@given(st.lists(st.builds(Message, role=ROLES, text=TEXT), max_size=8), ABILITIES)
def test_no_word_is_lost_or_moved(messages: list[Message], abilities: Abilities):
    arranged = "\n".join(one.text for one in arrange(messages, abilities))
    plain = re.sub("</?(system-message|tool_response)[^>]*>", "", arranged)
    plain = plain.replace(NO_ANSWER, "").replace(BEGUN_BEFORE, "")
    assert "".join(plain.split()) == "".join("".join(one.text for one in messages).split())


@settings(deadline=None)
@given(st.lists(st.builds(Message, role=ROLES, text=TEXT), max_size=8), ABILITIES)
def test_a_beginning_stays_as_it_is_while_the_conversation_grows(
    messages: list[Message], abilities: Abilities
):
    whole = arrange([*messages, message("assistant", "x"), message("user", "y")], abilities)
    start = arrange([*messages, message("assistant", "x")], abilities)
    assert whole[: len(start)] == start


# Probes: what each template can do


@pytest.mark.parametrize(
    ("name", "abilities", "responds"),
    [
        ("chatml", Abilities(), {"enable_thinking"}),
        ("qwen3", Abilities(), {"enable_thinking"}),
        (
            "alternating",
            Abilities(False, False, users_in_a_row=False, leading_answers=False),
            set[str](),
        ),
        ("role_ends", Abilities(), set[str]()),
        ("effort", Abilities(), {"reasoning_effort"}),
    ],
)
def test_a_template_is_asked_what_it_can(
    tmp_path: Path, name: str, abilities: Abilities, responds: set[str]
):
    probe = template_of(tmp_path, name).probe
    assert probe.abilities == abilities
    assert probe.responds == responds
    assert probe.thinks_by_default == (name == "qwen3")


@pytest.mark.parametrize("name", TEMPLATES)
def test_every_template_shows_every_message_once_arranged(tmp_path: Path, name: str):
    template = template_of(tmp_path, name)
    messages = [
        message("system", "one"),
        message("system", "two"),
        message("user", "three"),
        message("system", "four"),
        message("user", "five"),
        message("assistant", "six"),
        message("system", "seven"),
    ]
    arranged = arrange(messages, template.probe.abilities)
    text = template.render(ChatPrompt(messages=arranged))
    places = [text.index(one.text) for one in messages]
    assert places == sorted(places)


@pytest.mark.parametrize("name", ["chatml", "qwen3", "role_ends"])
def test_a_loaded_tool_looks_as_the_templates_own_do(tmp_path: Path, name: str):
    template = template_of(tmp_path, name, tools_first=False)
    shown = template.probe.definition(FETCH)
    ready = Tool(name="fetch", description="Fetch a page.")
    text = template.render(ChatPrompt(messages=(message("user", "a"),), tools=(ready,)))
    assert shown in text
    assert shown.startswith("{")
    hidden = template.render(ChatPrompt(messages=(message("user", "a"),), tools=(FETCH,)))
    assert "fetch" not in hidden


# Thinking


@pytest.mark.parametrize(
    ("wish", "responds", "chosen"),
    [
        (Thinking(), {"enable_thinking"}, {}),
        (Thinking(is_enabled=True), {"enable_thinking"}, {"enable_thinking": True}),
        (Thinking(is_enabled=False), {"thinking"}, {"thinking": False}),
        (Thinking(effort="none"), {"enable_thinking"}, {"enable_thinking": False}),
        (
            Thinking(effort="high"),
            {"enable_thinking"},
            {"enable_thinking": True, "reasoning_effort": "high"},
        ),
        (Thinking(effort="xhigh"), {"reasoning_effort"}, {"reasoning_effort": "high"}),
        (Thinking(effort="minimal"), {"reasoning_effort"}, {"reasoning_effort": "low"}),
        (Thinking(is_enabled=False), {"reasoning_effort"}, {"reasoning_effort": "low"}),
        (Thinking(is_enabled=True), set[str](), {"enable_thinking": True}),
    ],
)
def test_a_wish_becomes_the_switches_the_template_knows(
    wish: Thinking, responds: set[str], chosen: dict[str, object]
):
    assert switches(wish, frozenset(responds)) == chosen


# Canonical form


def chain(*messages: Message) -> bytes:
    return canonical.chain(b"root", canonical.forms(messages))[-1]


def test_what_clients_change_does_not_count():
    def turn(text: str, arguments: str, call_id: str) -> tuple[Message, ...]:
        call = ToolCall(id=call_id, name="look", arguments=arguments)
        return (
            message("user", "a"),
            message("assistant", text, tool_calls=(call,)),
            message("tool", "b", tool_call_id=call_id),
        )

    known = chain(*turn("I look.", '{"x": 1, "y": "é"}', "one"))
    assert chain(*turn(" I look. \n", '{"y":"\\u00e9","x":1.0}', "two")) == known
    assert chain(*turn("<think>\nhm\n</think>\n\nI look.", '{"x":1,"y":"é"}', "3")) == known
    assert chain(*turn("I look.", '{"x": 2, "y": "é"}', "one")) != known
    assert chain(*turn("I  look.", '{"x": 1, "y": "é"}', "one")) != known, "a client's own edit"
    assert chain(*turn("I looked.", '{"x": 1, "y": "é"}', "one")) != known


def test_an_argument_that_is_what_its_schema_says_it_is_anyway_does_not_count():
    properties = {"all": {"type": "boolean", "default": False}, "x": {"default": {"b": 1, "a": 0}}}
    look = Tool(name="look", parameters=json.dumps({"properties": properties}))
    defaults = canonical.defaults_of([look, Tool(name="wait", parameters="nonsense")])

    def form(arguments: str, name: str = "look") -> canonical.Form:
        call = ToolCall(id="1", name=name, arguments=arguments)
        said = message("assistant", tool_calls=(call,))
        assert canonical.answer("", (call,), defaults) == canonical.canonical(said, (), defaults)
        return canonical.canonical(said, (), defaults)

    known = form('{"at": 7}')
    assert form('{"all": false, "at": 7}') == form('{"at":7,"x":{"a":0,"b":1.0}}') == known
    assert form('{"all": true, "at": 7}') != known
    assert form('{"all": 0, "at": 7}') != known
    assert form('{"all": null, "at": 7}') != known
    assert form('{"other": false, "at": 7}') != known
    assert form('{"all": false, "at": 7}', "wait") != form('{"at": 7}', "wait")
    assert form("[]") != form("{}")


def test_an_edit_of_indentation_is_another_conversation_and_blanks_at_line_ends_are_not():
    code = "def f():\n    if a:\n        b()\n    c()"
    known = chain(message("user", "a"), message("assistant", code))
    assert (
        chain(message("user", "a"), message("assistant", f"\n{code.replace('a:', 'a: ')}\t\n"))
        == known
    )
    edited = code.replace("        b()\n    c()", "        b()\n        c()")
    assert chain(message("user", "a"), message("assistant", edited)) != known


def test_thoughts_are_those_that_a_client_gives_however_it_does():
    thoughts_of = canonical.thoughts_of
    assert thoughts_of(message("assistant", "b")) is None
    assert thoughts_of(message("assistant", "b", reasoning=" \n")) is None
    known = thoughts_of(message("assistant", "b", reasoning="hm \nso"))
    assert known == thoughts_of(message("assistant", "<think>\nhm\nso\n</think>b"))
    assert known != thoughts_of(message("assistant", "b", reasoning="hm\n so"))


def test_everybody_elses_words_count_to_the_letter():
    assert chain(message("user", "a b")) != chain(message("user", "a  b"))
    assert chain(message("tool", "x")) != chain(message("tool", "x", is_error=True))
    assert chain(message("user", "a"), message("user", "b")) != chain(message("user", "ab"))


def test_a_picture_that_an_assistant_is_said_to_have_shown_is_another_conversation():
    first, second = (Image(at=1, field="f", data=data) for data in (b"x", b"y"))
    turns = [message("assistant", "ab"), message("assistant", "ab", images=(first,))]
    turns += [message("assistant", "ab", images=(second,))]
    turns += [message("assistant", "ab", images=(msgspec.structs.replace(first, at=2),))]
    assert len({chain(one) for one in turns}) == len(turns)


def test_images_of_results_follow_them_where_a_template_shows_none_inside():
    seen = tuple(Image(at=3, field=name) for name in ("one", "other"))
    asked = message("assistant", tool_calls=calls("x", "y"))
    results = [
        Message(role="tool", text="done", tool_call_id=name, images=(image,))
        for name, image in zip(("x", "y"), seen, strict=True)
    ]
    prompt = [message("user", "a"), asked, *results, message("user", "b")]
    assert arrange(prompt, Abilities()) == tuple(prompt)
    arranged = arrange(prompt, Abilities(images_in_results=False))
    assert [one.role for one in arranged] == ["user", "assistant", "tool", "tool", "user", "user"]
    assert not any(one.images for one in arranged[2:4])
    assert [(image.at, image.field) for image in arranged[4].images] == [(0, "one"), (0, "other")]
    last = arrange(prompt[:4], Abilities(images_in_results=False))
    assert last == arranged[:5]
