"""Histories that a strict template would refuse: none is, and what was said is shown or told."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.prompt.arrange import BEGUN_BEFORE, NO_ANSWER
from runtime.types import Message, Tool, ToolCall, ToolCallDelta
from runtime.worker.input.template import Template
from runtime.worker.input.turns import TurnStore
from runtime.worker.output.dialect import Dialect
from runtime.worker.output.families import find, speaking
from runtime.worker.output.parser import OutputParser
from runtime.worker.output.tools import RequestTools
from tests.damaged import DAMAGES, HISTORIES, conversation, damaged
from tests.templates import TEMPLATES, template_of
from tests.unit.test_compose import Talk
from tests.unit.test_past import asked

TOOL = Tool(name="look", description="Look.", parameters='{"type": "object", "properties": {}}')
PROTOCOLS = st.sampled_from(["chat", "messages", "responses"])


@cache
def template(name: str) -> Template:
    with TemporaryDirectory() as folder:
        return template_of(Path(folder), name)


def told(name: str, *messages: Message) -> tuple[str, dict[str, int]]:
    """What the model reads, and by which rules it was changed."""
    talk = Talk(template(name), TurnStore(), needs_state=False)
    composed = talk.compose(*messages, tools=(TOOL,))
    text = talk.template.text_of(list(composed.token_ids))
    return text, {change.rule: change.num_places for change in composed.changes}


def user(text: str) -> Message:
    return Message(role="user", text=text)


def calling(*ids: str, text: str = "") -> Message:
    calls = (ToolCall(id=one, name="look", arguments=f'{{"at": "x{one}"}}') for one in ids)
    return Message(role="assistant", text=text, tool_calls=tuple(calls))


def result(call_id: str) -> Message:
    return Message(role="tool", text=f"seen {call_id}", tool_call_id=call_id, name="look")


@pytest.mark.parametrize("call_id", ["call_" + 24 * "0", "toolu_01", "c1", "call00001"])
def test_ids_are_given_as_the_template_takes_them(call_id: str):
    text, rules = told("nine_letters", user("one"), calling(call_id), result(call_id))
    assert f"seen {call_id}" in text
    assert rules == ({} if call_id == "call00001" else {"call_ids": 2})
    again, _ = told("nine_letters", user("one"), calling(call_id), result(call_id), user("two"))
    assert again.startswith(text.rpartition("<|im_end|>")[0])


def test_a_user_s_words_after_a_result_are_in_it_where_they_may_not_follow():
    text, rules = told(
        "nine_letters", user("one"), calling("call00001"), result("call00001"), user("two")
    )
    assert text.index("seen") < text.index("two")
    assert rules == {"joined": 2}


@pytest.mark.parametrize("name", ["one_call", "first_call"])
def test_parallel_calls_are_shown_one_after_the_other(name: str):
    done = [calling("a1", "b2", text="I look."), result("a1"), result("b2")]
    text, rules = told(name, user("one"), *done, user("two"))
    places = [text.index(one) for one in ("I look.", "xa1", "seen a1", "xb2", "seen b2", "two")]
    assert places == sorted(places)
    assert rules == {"single_calls": 1}


def test_a_call_that_nobody_answered_is_shown_as_text():
    text, rules = told("nine_letters", user("one"), calling("call00001"), user("two"))
    assert "xcall00001" in text
    assert rules == {"open_calls": 1}


def test_an_answer_before_any_question_has_a_turn_before_it():
    answer = Message(role="assistant", text="hello")
    text, rules = told("alternating", answer, user("two"))
    assert text.index(BEGUN_BEFORE) < text.index("hello")
    assert rules["leading_answer"] == 1


def test_an_empty_answer_says_so_where_none_may_be():
    text, rules = told("nine_letters", user("one"), Message(role="assistant"), user("two"))
    assert NO_ANSWER in text
    assert rules == {"empty_answers": 1}


def test_a_lenient_template_is_given_everything_as_it_came():
    history = [calling("a1", "b2", text="I look."), result("a1"), result("b2")]
    others = [user("two"), calling("c3"), user("three"), Message(role="assistant"), user("four")]
    _, rules = told("qwen3", user("one"), *history, *others)
    assert rules == {}


@pytest.mark.parametrize("name", ["text_arguments", "printed_arguments", "calls_only"])
def test_arguments_that_a_template_takes_as_text_only_are_as_the_model_wrote_them(name: str):
    written = '{"at": ["Zürich", 7, null], "to": {"a": "\\"<b>\\n"}}'
    raw = (
        "I look.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>look<｜tool▁sep｜>"
        f"{written}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
    )
    family = find(TEMPLATES[name], ())
    assert family is not None
    parser = OutputParser(speaking(family, Dialect()), index=0, tools=RequestTools.of((TOOL,)))
    chunks = [*parser.feed(raw), *parser.finish()]
    said = "".join(one.arguments for one in chunks if isinstance(one, ToolCallDelta))
    assert said == written
    forms = template(name).forms
    is_shown = name != "calls_only"
    assert forms.tools == ("native" if is_shown else "generic")
    assert (forms.calls, forms.results) == ("native", "native")
    assert forms.arguments == "text"
    spellings = [said, json.dumps(json.loads(said), separators=(",", ":"))]
    for arguments in spellings:
        call = ToolCall(id="a1", name="look", arguments=arguments)
        answer = Message(role="assistant", text="I look.", tool_calls=(call,))
        text, rules = told(name, user("one"), answer, result("a1"), user("two"))
        assert raw in text
        assert TOOL.name in text.partition("one")[0]
        assert rules == ({} if is_shown else {"generic_tools": 1})


def test_where_a_template_shows_calls_and_no_tools_the_form_of_its_calls_is_told():
    text, _ = told("calls_only", Message(role="system", text="Be brief."), user("one"))
    begun, told_form, _ = text.partition(
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>the tool's name<｜tool▁sep｜>{}"
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
    )
    assert told_form
    assert '"name": "look"' in begun
    assert "tool_response" not in text
    spoken = Dialect(name="deepseek_v31")
    assert template("calls_only").spoken(spoken) is spoken


@pytest.mark.parametrize("name", TEMPLATES)
@settings(max_examples=12)
@given(
    protocol=PROTOCOLS,
    kinds=st.lists(st.integers(0, 7), min_size=1, max_size=3),
    wishes=st.lists(st.tuples(st.integers(0, 10**6), DAMAGES), max_size=2),
)
def test_no_history_is_refused(
    name: str, protocol: str, kinds: list[int], wishes: list[tuple[int, str]]
):
    body = damaged(conversation(protocol, kinds), HISTORIES[protocol][1], wishes).body
    told(name, *asked(protocol, body).messages)
