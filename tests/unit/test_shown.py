"""What a template is given appears in the prompt, or the answer says that it does not."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.errors import InvalidRequest
from runtime.prompt.shown import Loss, Shown
from runtime.types import Message, Role, ToolCall
from runtime.worker.input.compose import Composed
from runtime.worker.input.template import Template
from runtime.worker.input.template_input import ContentForms
from runtime.worker.input.turns import TurnStore
from tests.templates import FIRST_USER, TEMPLATES, template_of
from tests.unit.test_compose import Talk

PARTS: dict[str, set[Role]] = {
    "parts": {"user", "system", "assistant", "tool"},
    "user_parts": {"user"},
}
LOSES = {"strict_calls", "nine_letters"}
"""Templates that leave out words of messages which they have a form for."""
BLANKS = st.sampled_from(["", " ", "\n", "\n\n"])
KINDS = st.sampled_from(["user", "system", "answer", "thought", "call", "empty"])


@cache
def template(name: str) -> Template:
    with TemporaryDirectory() as folder:
        return template_of(Path(folder), name)


def message(kind: str, number: int, around: str) -> list[Message]:
    """Messages of a kind, each with a word that is in no other."""
    word = f"{around}word{number}x \"a\"\n    indented\t<b>'c' é😀{around}"
    match kind:
        case "answer":
            return [Message(role="assistant", text=word)]
        case "thought":
            return [Message(role="assistant", text=word, reasoning=f"thought{number}x")]
        case "empty":
            return [Message(role="assistant")]
        case "call":
            arguments = f'{{"at": [{{"to": "argument{number}x\\n"}}]}}'
            call = ToolCall(id=f"call{number:05}", name="look", arguments=arguments)
            said = word if number % 2 else ""
            result = Message(role="tool", text=f"result{number}x {word}", tool_call_id=call.id)
            return [Message(role="assistant", text=said, tool_calls=(call,)), result]
        case _:
            return [Message(role="user" if kind == "user" else "system", text=word)]


def asked_of(talk: Talk, messages: Sequence[Message]) -> Composed | InvalidRequest:
    try:
        return talk.compose(*messages)
    except InvalidRequest as error:
        return error


def words(messages: Sequence[Message]) -> list[str]:
    """The words that tell messages apart."""
    said = [one.text + "".join(call.arguments for call in one.tool_calls) for one in messages]
    return [word for text in said for word in text.replace('"', " ").split() if "x" in word]


@pytest.mark.parametrize("name", TEMPLATES)
def test_in_which_form_a_template_shows_texts_is_found_by_asking_it(name: str):
    is_text = name in {"text_arguments", "printed_arguments", "calls_only"}
    forms = ContentForms(frozenset(PARTS.get(name, ())), has_text_arguments=is_text)
    assert template(name).content_forms == forms


@pytest.mark.parametrize("name", TEMPLATES)
@given(kinds=st.lists(st.tuples(KINDS, BLANKS), max_size=6), ends=BLANKS)
def test_every_text_is_in_the_prompt_or_the_answer_says_that_it_is_not(
    name: str, kinds: list[tuple[str, str]], ends: str
):
    pairs = [*kinds, ("user", ends)]
    messages = [one for n, (kind, around) in enumerate(pairs) for one in message(kind, n, around)]
    talk = Talk(template(name), TurnStore(), needs_state=False)
    composed = talk.compose(*messages)
    read = talk.text_of(composed.token_ids)
    missing = [word for word in words(messages) if word.partition("\\")[0] not in read]
    told = {change.rule: change.num_places for change in composed.changes}
    assert not missing or "lost_text" in told
    assert name in LOSES or "lost_text" not in told
    thoughts = [one.reasoning for one in messages if one.reasoning and one.reasoning not in read]
    assert bool(thoughts) == ("left_out_thoughts" in told)


def test_a_question_of_which_nothing_is_shown_is_refused_by_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setitem(TEMPLATES, "broken", FIRST_USER)
    talk = Talk(template_of(tmp_path, "broken"), TurnStore(), needs_state=False)
    first, answer = Message(role="user", text="one"), Message(role="assistant", text="two")
    late = Message(role="user", text="three three")
    talk.compose(first)
    with pytest.raises(InvalidRequest) as refused:
        talk.compose(first, answer, late)
    assert refused.value.param == "messages[2]"
    assert "messages[2] (user)" in refused.value.message
    old = talk.compose(first, answer, late, answer)
    assert [one.num_places for one in old.changes if one.rule == "lost_text"] == [1]


@pytest.mark.parametrize(
    ("text", "said", "loss"),
    [
        ("<s> a b </s>", " a b\n", Loss.NOTHING),
        (r'{"x": "a\n\"b\" é"}', 'a\n"b" é', Loss.NOTHING),
        (r'{"x": "\u003ca\u003e \u00e9"}', "<a> é", Loss.NOTHING),
        ("a b c", "a\n   b\tc", Loss.NOTHING),
        ("be brief", "/no_think be brief", Loss.NOTHING),
        ("", "/no_think", Loss.NOTHING),
        ("one two three", "one two three four", Loss.SOME),
        ("one two", "three four", Loss.ALL),
        ("", "", Loss.NOTHING),
    ],
)
def test_a_text_counts_as_shown_however_a_template_spells_it(text: str, said: str, loss: Loss):
    assert Shown(text).look_for(Message(role="user", text=said)) == (loss, False)
