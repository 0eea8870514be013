"""Tools for templates that have no form for them: nothing is lost, and turns stay as they were."""

from __future__ import annotations

import json
import random
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx_lm.utils import load_tokenizer

from runtime.prompt.tools_as_text import NATIVE, ToolForms, written_out
from runtime.types import Chunk, GenerateRequest, Message, TextDelta, Tool, ToolCall, ToolCallDelta
from runtime.worker.input.template import Template, inner_tokenizer
from runtime.worker.input.turns import TurnStore
from runtime.worker.output.constraint import Constrainer
from runtime.worker.output.dialect import Dialect, with_generic_calls
from runtime.worker.output.grammar import Grammars
from runtime.worker.output.parser import OutputParser
from runtime.worker.output.tools import RequestTools
from tests.templates import template_of
from tests.tiny_models import write_tokenizer
from tests.unit.test_compose import END, Talk
from tests.unit.test_guide import EOS, LOOK, SCHEMA, required

NONE = ToolForms(tools=False, calls=False, results=False)
FORMS = {
    "alternating": NONE,
    "calls_only": ToolForms(tools=False),
    "chatml": NATIVE,
    "effort": NONE,
    "gemma": NONE,
    "no_calls": ToolForms(calls=False),
    "printed_arguments": NATIVE,
    "qwen3": NATIVE,
    "role_ends": NATIVE,
    "smollm2": NONE,
    "text_arguments": NATIVE,
}
LOSING = sorted(name for name, forms in FORMS.items() if forms == NONE)
SPOKEN = with_generic_calls(Dialect())
SYSTEM = Message(role="system", text="Be brief.")
USER = Message(role="user", text="the quick brown fox")
CALL = ToolCall(id="a", name="look", arguments='{"at":7}')
CALLED = Message(role="assistant", text="let me see", tool_calls=(CALL,))
RESULT = Message(role="tool", text="rain falls", tool_call_id="a", name="look")
RAW_CALL = '<tool_call>\n{"name": "look", "arguments": {"at":7}}\n</tool_call>'


@cache
def template(name: str) -> Template:
    with TemporaryDirectory() as folder:
        return template_of(Path(folder), name)


def rules(talk: Talk, *messages: Message, **fields: Any) -> dict[str, int]:
    changes = talk.compose(*messages, **fields).changes
    return {change.rule: change.num_places for change in changes}


@pytest.mark.parametrize("name", sorted(FORMS))
def test_what_a_template_shows_of_tools_is_found_by_asking_it(name: str):
    assert template(name).tool_forms == FORMS[name]


def test_tools_are_text_for_a_template_in_whose_form_nobody_reads_calls():
    for is_first in (True, False):
        unread = Template(template("qwen3")._tokenizer, reads_calls=False)
        assert unread.arranged(tools_first=is_first).tool_forms == NONE
        assert unread.spoken(Dialect()) == SPOKEN


def test_calls_and_results_are_written_in_the_documented_form():
    other = ToolCall(id="b", name="read", arguments="{}")
    both = Message(role="assistant", text="I see.", tool_calls=(CALL, other))
    second = Message(role="tool", text="dry", tool_call_id="b")
    written, num_changed = written_out((USER, both, RESULT, second), NONE, lambda: False)
    page = (Path(__file__).parents[2] / "docs" / "tool-calls.md").read_text()
    assert num_changed == 3
    assert [(one.role, one.text) for one in written] == [
        ("user", USER.text),
        (
            "assistant",
            (
                'I see.\n<tool_call>\n{"name": "look", "arguments": {"at": 7}}\n</tool_call>\n'
                '<tool_call>\n{"name": "read", "arguments": {}}\n</tool_call>'
            ),
        ),
        (
            "user",
            "<tool_response>\nrain falls\n</tool_response>\n<tool_response>\ndry\n</tool_response>",
        ),
    ]
    assert written[1].text in page
    assert written[2].text in page


def test_what_a_user_says_beside_a_result_is_in_its_turn_only_where_roles_alternate():
    sent = (USER, CALLED, RESULT, USER)
    assert [one.role for one in written_out(sent, NONE, lambda: True).messages] == [
        *("user", "assistant", "user", "user")
    ]
    written, num_changed = written_out(sent, NONE, lambda: False)
    assert num_changed == 3
    assert written[2].text == f"<tool_response>\nrain falls\n</tool_response>\n\n{USER.text}"


def test_only_what_a_template_loses_is_written_out():
    written, num_changed = written_out((USER, CALLED, RESULT), FORMS["no_calls"], lambda: True)
    assert (written[0], written[2], num_changed) == (USER, RESULT, 1)
    assert written_out((USER, CALLED, RESULT), NATIVE, lambda: True).messages[1] is CALLED


@pytest.mark.parametrize("name", LOSING)
def test_a_request_that_leaves_out_its_tools_goes_on_from_the_same_tokens(name: str):
    talk = Talk(template(name), TurnStore())
    tools = (Tool(name="look", parameters='{"type": "object"}'),)
    asked = talk.compose(SYSTEM, USER, tools=tools)
    known = talk.says(asked, RAW_CALL + END, calls=(CALL,))
    answer = Message(role="assistant", tool_calls=(CALL,))
    asked = talk.compose(SYSTEM, USER, answer, RESULT, USER, tools=())
    assert asked.token_ids[: len(known)] == known
    assert "kept_tools" in {change.rule for change in asked.changes}


@pytest.mark.parametrize("name", LOSING)
def test_the_tools_precede_the_system_text_and_are_told(name: str):
    talk = Talk(template(name), TurnStore())
    composed = talk.compose(SYSTEM, USER, tools=(LOOK,))
    text = talk.text_of(composed.token_ids)
    assert text.index("<tools>") < text.index('"days"') < text.index(SYSTEM.text)
    assert text.index(SYSTEM.text) < text.index(USER.text)
    assert rules(talk, USER, tools=(LOOK,))["generic_tools"] == 1
    assert "generic_calls" not in rules(talk, USER)


def test_a_template_with_forms_of_its_own_is_left_alone():
    told = rules(Talk(template("qwen3"), TurnStore()), SYSTEM, USER, CALLED, RESULT)
    assert not {"generic_tools", "generic_calls"} & told.keys()
    told = rules(Talk(template("no_calls"), TurnStore()), USER, CALLED, RESULT)
    assert told == {"generic_calls": 1}


WORDS = st.sampled_from(["rain", "fox", "dog", "你好", "a\nb", '{"x": 1}', "</tool_response>"])
STEPS = st.lists(
    st.tuples(st.lists(WORDS, min_size=1, max_size=3), st.booleans(), WORDS), min_size=1, max_size=4
)


@given(name=st.sampled_from(LOSING), steps=STEPS, has_system=st.booleans(), shows=st.booleans())
def test_every_call_and_result_is_in_the_prompt_in_its_place(
    name: str, steps: list[tuple[list[str], bool, str]], has_system: bool, shows: bool
):
    """A user asks; calls with numbered arguments, their results, perhaps words beside them."""
    sent = [SYSTEM] * has_system
    wanted: list[str] = []
    for number, (results, has_words, words) in enumerate(steps):
        sent.append(Message(role="user", text=f"question {number}: {words}."))
        ids = [f"{number}-{one}" for one in range(len(results))]
        calls = tuple(
            ToolCall(id=one, name="look", arguments=json.dumps({"at": f"call {one}."}))
            for one in ids
        )
        sent.append(Message(role="assistant", text=f"step {number}.", tool_calls=calls))
        sent += [
            Message(role="tool", text=f"result {one}: {text}.", tool_call_id=one)
            for one, text in zip(ids, results, strict=True)
        ]
        wanted += [f"question {number}: {words}.", f"step {number}."]
        wanted += [f"call {one}." for one in ids]
        wanted += [f"result {one}: {text}." for one, text in zip(ids, results, strict=True)]
        if has_words:
            sent.append(Message(role="user", text=f"besides {number}."))
            wanted.append(f"besides {number}.")
        sent.append(Message(role="assistant", text=f"answer {number}."))
        wanted.append(f"answer {number}.")
    sent.append(USER)
    talk = Talk(template(name), TurnStore())
    composed = talk.compose(*sent, tools=(LOOK,) * shows)
    text = talk.text_of(composed.token_ids)
    places = [text.find(one) for one in [*wanted, USER.text]]
    assert -1 not in places
    assert places == sorted(places)
    told = {change.rule for change in composed.changes}
    assert "generic_calls" in told
    assert ("generic_tools" in told) == shows


def generated(text: str, *tools: Tool, dialect: Dialect = SPOKEN) -> tuple[list[Chunk], list[str]]:
    """The chunks of a text that came character by character, and what was odd."""
    parser = OutputParser(dialect, index=0, tools=RequestTools.of(tools))
    chunks: list[Chunk] = []
    for character in text:
        chunks += parser.feed(character)
    return chunks + parser.finish(), list(parser.notes)


def calls_of(chunks: list[Chunk]) -> list[tuple[str, str]]:
    calls: list[tuple[str, str]] = []
    for chunk in chunks:
        if isinstance(chunk, ToolCallDelta):
            if chunk.name is not None:
                calls.append((chunk.name, ""))
            calls[-1] = (calls[-1][0], calls[-1][1] + chunk.arguments)
    return calls


def text_of(chunks: list[Chunk]) -> str:
    return "".join(chunk.text for chunk in chunks if isinstance(chunk, TextDelta))


def test_a_call_that_the_model_writes_by_itself_is_one():
    chunks, notes = generated(f"let me see\n{RAW_CALL}", LOOK)
    assert (text_of(chunks), calls_of(chunks), notes) == (
        "let me see",
        [("look", '{"at":7}')],
        [],
    )


def test_a_result_that_the_model_invents_ends_the_answer_before_it():
    invented = "\n<tool_response>\nsunny\n</tool_response>\nIt is sunny."
    chunks, notes = generated(f"{RAW_CALL}{invented}", LOOK)
    assert (text_of(chunks), notes) == ("", ["invented_tool_result"])
    assert calls_of(chunks) == [("look", '{"at":7}')]
    words = "A result stands in <tool_response>, then </tool_response>."
    chunks, notes = generated(words, LOOK)
    assert (text_of(chunks), notes) == (words, [])


@pytest.mark.parametrize("name", [*LOSING, "no_calls"])
@pytest.mark.parametrize("invented", [False, True])
def test_the_next_turns_hold_the_very_tokens_that_were_generated(name: str, invented: bool):
    talk = Talk(template(name), TurnStore())
    messages = [SYSTEM, USER]
    known: list[int] = []
    for number in range(4):
        composed = talk.compose(*messages)
        assert composed.token_ids[: len(known)] == known, number
        given_back = ToolCall(id=f"c{number}", name="look", arguments='{ "at": 7 }')
        if invented:
            fields: dict[str, Any] = {"stop": "<tool_response>", "is_last": True}
            talk.says(composed, f"{RAW_CALL}\n<tool_response>", calls=(CALL,), **fields)
            known = [*composed.token_ids, *talk.template.encode(f"{RAW_CALL}\n").token_ids]
        else:
            known = talk.says(composed, RAW_CALL + END, calls=(CALL,))
        answer = Message(role="assistant", tool_calls=(given_back,))
        messages += [answer, Message(role="tool", text="rain", tool_call_id=given_back.id)]
    assert talk.compose(*messages).changes[-1].num_places == 4


@cache
def plain_words() -> Any:
    with TemporaryDirectory() as folder:
        write_tokenizer(Path(folder), special_tokens=["<|im_end|>"])
        return inner_tokenizer(load_tokenizer(Path(folder)))


@pytest.mark.parametrize("seed", range(3))
def test_a_demanded_call_is_forced_with_marks_of_several_tokens(seed: int):
    """Whatever the model would rather say, in a vocabulary without the marks."""
    words = plain_words()
    constrainer = Constrainer(Dialect(), words, Grammars(words, len(words), [EOS]))
    prompt = required(LOOK)
    request = GenerateRequest(request_id="r", model="m", prompt=prompt)
    plan = constrainer.speaking(SPOKEN).demands(request, "unsaid", None).plan
    assert plan is not None
    assert len(plan.trigger) > 1
    guide, rng, said = plan.start(), random.Random(seed), list[int]()
    while EOS not in said:
        mask = guide.mask()
        assert mask is not None
        bits = int.from_bytes(mask, "little")
        said.append(rng.choice([one for one in range(len(words)) if bits >> one & 1]))
        guide.advance(said[-1:])
    chunks, notes = generated(words.decode(said[:-1]), LOOK)
    ((name, arguments),) = calls_of(chunks)
    assert (name, notes) == ("look", [])
    jsonschema.validate(json.loads(arguments), SCHEMA)
