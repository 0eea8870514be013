"""Answers that were cut off, and answers that the client begins: what the model goes on from."""

from __future__ import annotations

from pathlib import Path

import pytest

from runtime.types import Message, Thinking
from runtime.worker.input.turns import TurnStore
from runtime.worker.output import harmony
from runtime.worker.output.dialect import Dialect
from tests.templates import template_of
from tests.unit.test_compose import END, SYSTEM, USER, Talk, echo, num_healed


@pytest.fixture(params=["chatml", "qwen3"])
def talk(request, tmp_path: Path) -> Talk:
    return Talk(template_of(tmp_path, request.param), TurnStore())


def test_an_answer_that_was_cut_off_is_healed_and_goes_on_where_it_was_cut(talk: Talk):
    before = talk.says(talk.compose(SYSTEM, USER), "<think>\na\n</think>\n\nrain fa", "rain fa")
    cut = Message(role="assistant", text="rain fa")
    asked = talk.compose(SYSTEM, USER, cut, Message(role="user", text="Go on."))
    assert asked.token_ids[: len(before)] == before
    assert talk.text_of(asked.token_ids[len(before) :]).startswith(f"{END}\n<|im_start|>")
    resumed = talk.compose(SYSTEM, USER, cut, continues_last=True)
    assert resumed.token_ids == before
    whole = talk.says(resumed, f"lls{END}", "lls")
    both = Message(role="assistant", text="rain falls")
    after = talk.compose(SYSTEM, USER, both, Message(role="user", text="And now?"))
    assert after.token_ids[: len(whole)] == whole


@pytest.mark.parametrize(("raw", "text"), [("rain falls here", "rain fal"), ("rain STOP", "rain")])
def test_an_answer_is_healed_up_to_its_stop_string(talk: Talk, raw: str, text: str):
    stop = raw.removeprefix(text).split()[0]
    asked = talk.compose(SYSTEM, USER)
    talk.says(asked, f"<think>\nSTOP {raw[:4]}\n</think>\n\n{raw}", text, stop=stop)
    given_back = Message(role="assistant", text=text)
    healed = talk.compose(SYSTEM, USER, given_back, Message(role="user", text="Go on."))
    assert num_healed(healed) == 1
    said = talk.text_of(healed.token_ids[len(asked.token_ids) :]).split("</think>\n\n")[1]
    assert said.split(END)[0].strip() == text


def test_a_stop_string_that_is_not_in_the_tokens_heals_nothing(talk: Talk):
    talk.says(talk.compose(SYSTEM, USER), "rain falls", "rain", stop="snow")
    back = talk.compose(SYSTEM, USER, Message(role="assistant", text="rain"), USER)
    assert not num_healed(back)


BEGUN = Message(role="assistant", text="The answer is")


@pytest.mark.parametrize("is_known", [True, False])
@pytest.mark.parametrize(
    ("raw", "stop"), [("", None), ("<tool_call>", None), (" here", " here"), (END, None)]
)
def test_who_asks_again_for_an_answer_that_added_nothing_is_asked_the_same(
    talk: Talk, is_known: bool, raw: str, stop: str | None
):
    if is_known:
        talk.says(talk.compose(USER), BEGUN.text, BEGUN.text)
    first = talk.compose(USER, BEGUN, continues_last=True)
    talk.says(first, raw, "", stop=stop)
    again = talk.compose(USER, BEGUN, continues_last=True)
    assert (again.token_ids, again.changes) == (first.token_ids, first.changes)


@pytest.mark.parametrize("name", ["chatml", "qwen3", "role_ends", "alternating"])
@pytest.mark.parametrize(
    ("last", "end"),
    [
        (BEGUN, "The answer is"),
        (Message(role="assistant", text=" 42 ", reasoning="a"), " 42 "),
        (Message(role="assistant", text="<think>\nlet me"), "<think>\nlet me"),
        (Message(role="assistant", text="<think>a</think>\n\nso"), "a\n</think>\n\nso"),
    ],
)
def test_a_begun_answer_ends_the_prompt(tmp_path: Path, name: str, last: Message, end: str):
    template = template_of(tmp_path, name)
    dialect = Dialect(think_start="<think>", think_end="</think>")
    talk = Talk(template, TurnStore(), dialect=dialect)
    asked = talk.compose(USER, tools=())
    begun = talk.compose(USER, last, tools=(), continues_last=True)
    text = talk.text_of(begun.token_ids)
    opened = talk.text_of(asked.token_ids)
    assert text.startswith(opened)
    assert text.endswith(end)
    assert text.count("<think>") == text.count("</think>") + (end == "<think>\nlet me")
    assert begun.beginning is not None
    assert begun.beginning.is_thinking == (end == "<think>\nlet me")


def test_thinking_that_the_template_opens_is_closed_before_the_text(talk: Talk):
    talk.composer.dialect = Dialect(think_start="<think>", think_end="</think>")
    on = Thinking(is_enabled=True)
    text = talk.text_of(talk.compose(USER, BEGUN, thinking=on, continues_last=True).token_ids)
    head = talk.text_of(talk.compose(USER, thinking=on).token_ids)
    closing = "\n</think>\n\n" if head.endswith("<think>\n") else ""
    assert text == f"{head}{closing}The answer is"


def test_channels_open_the_last_one_for_a_begun_answer(tmp_path: Path):
    talk = Talk(template_of(tmp_path, "chatml"), TurnStore(), dialect=harmony.dialect())
    last = Message(role="assistant", text="So", reasoning="Hm.")
    text = talk.text_of(talk.compose(USER, last, continues_last=True).token_ids)
    assert text.endswith(
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>So"
    )


@pytest.mark.parametrize("continues_last", [True, False])
def test_a_turn_with_calls_is_over_and_so_is_one_that_is_not_to_be_gone_on_with(
    talk: Talk, continues_last: bool
):
    last = echo('{"at": 7}') if continues_last else BEGUN
    composed = talk.compose(USER, last, continues_last=continues_last)
    assert composed.beginning is None
    assert talk.text_of(composed.token_ids).endswith("<|im_start|>assistant\n")
