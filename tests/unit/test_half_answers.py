"""Half of an answer, as its client was told it, is read as the very tokens that said it."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.prompt.healing import AnswerRecord
from runtime.types import ChatPrompt, Chunk, Message, ToolCall
from runtime.worker.input.compose import Composed
from runtime.worker.input.template import Template
from runtime.worker.input.turns import PendingTurn, TurnStore
from runtime.worker.output.dialect import Dialect
from runtime.worker.output.families import FAMILIES, speaking
from runtime.worker.output.parser import OutputParser
from runtime.worker.output.tools import RequestTools
from tests.templates import template_of
from tests.unit.test_compose import END, LOOK, SYSTEM, USER, Talk

DIALECT = speaking(FAMILIES["json_tools"], Dialect(think_start="<think>", think_end="</think>"))
CALL = '<tool_call>\n{"name": "look", "arguments": {"at": 7}}\n</tool_call>'
GO_ON = Message(role="user", text="go on")


class Told(NamedTuple):
    """What a client was told of an answer, and how many of its tokens said that."""

    record: AnswerRecord
    num_tokens: int
    is_open: bool
    rest: list[Chunk]
    """Held back until it was clear that the answer ends here."""

    @property
    def message(self) -> Message:
        calls = tuple(
            ToolCall(f"c{i}", one.name, one.arguments) for i, one in enumerate(self.calls)
        )
        return Message(role="assistant", text="".join(self.record.texts), tool_calls=calls)

    @property
    def calls(self) -> list[ToolCall]:
        return self.record.calls


@cache
def _template(name: str) -> Template:
    with TemporaryDirectory() as folder:  # a template that is loaded needs no files
        return template_of(Path(folder), name)


def talk_of(name: str) -> Talk:
    return Talk(_template(name), TurnStore(), dialect=DIALECT)


def told(talk: Talk, composed: Composed, output: list[int]) -> Told:
    """What a client is told of these tokens."""
    block = talk.template.reasoning_block(composed.token_ids)
    prompt = ChatPrompt(messages=(USER,), tools=(LOOK,))
    tools = RequestTools.of(prompt.tools, prompt.tool_choice)
    parser = OutputParser(DIALECT, index=0, tools=tools, reasoning=block)
    detokenizer = talk.template.detokenizer(composed.token_ids)
    record, num_tokens = AnswerRecord(), 0
    for number, token_id in enumerate(output, 1):
        chunks = parser.feed(detokenizer.add(token_id))
        for chunk in chunks:
            record.add(chunk)
        num_tokens = number if chunks else num_tokens
    is_open = not parser.is_settled
    rest = parser.finish(detokenizer.finish(), is_cut=True)
    return Told(record, num_tokens, is_open, rest)


def interrupted(talk: Talk, composed: Composed, output: list[int]) -> None:
    """The model said this when it was told to stop."""
    said = told(talk, composed, output)
    assert composed.lineage is not None
    answer = PendingTurn(talk.store, composed.lineage, talk.template, composed.token_ids)
    answer.spoken = said.record
    for chunk in said.rest:
        answer.spoken.add(chunk)
    answer.end(output, is_whole=not said.is_open)


def num_common(one: list[int], other: list[int]) -> int:
    pairs = zip(one, other, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def squeezed(text: str) -> str:
    """Without blanks, which clients change."""
    return "".join(text.split())


WORDS = st.text("ab <\n\u00e9\u20ac\U0001f600.", min_size=1, max_size=40)


@pytest.mark.parametrize("name", ["chatml", "qwen3"])
@given(thoughts=WORDS, text=WORDS, cut=st.floats(0, 1), left=st.floats(0, 1))
def test_wherever_an_answer_is_cut_its_tokens_are_read_again(
    name: str, thoughts: str, text: str, cut: float, left: float
):
    talk = talk_of(name)
    asked = talk.compose(SYSTEM, USER)
    raw = f"<think>\n{thoughts}\n</think>\n\n{text}"
    output = talk.template.encode(raw).token_ids
    output = output[: 1 + int(cut * (len(output) - 1))]
    interrupted(talk, asked, output)
    had = output[: 1 + int(left * (len(output) - 1))]
    client = told(talk, asked, had)
    if not client.message.text.strip():
        return
    following = talk.compose(SYSTEM, USER, client.message, GO_ON)
    common = num_common([*asked.token_ids, *had], following.token_ids)
    assert common >= len(asked.token_ids) + client.num_tokens - client.is_open
    read = squeezed(talk.template.text_of(following.token_ids))
    assert squeezed(talk.template.text_of(asked.token_ids)) in read
    assert squeezed(client.message.text) + END in read


@pytest.mark.parametrize("end", ["", "\n" + CALL[:20], "\n" + CALL[:-5]])
def test_a_call_that_was_cut_is_left_out_and_what_comes_before_it_read_again(end: str):
    talk = talk_of("qwen3")
    asked = talk.compose(SYSTEM, USER)
    output = talk.template.encode(f"<think>\nhm\n</think>\n\n{CALL}{end}").token_ids
    interrupted(talk, asked, output)
    call = Message(role="assistant", text="", tool_calls=(ToolCall("x", "look", '{"at":7}'),))
    result = Message(role="tool", text="rain", tool_call_id="x", name="look")
    following = talk.compose(SYSTEM, USER, call, result)
    whole = talk.template.encode(f"<think>\nhm\n</think>\n\n{CALL}").token_ids
    before = [*asked.token_ids, *whole]
    assert following.token_ids[: len(before)] == before


def test_an_answer_that_goes_on_otherwise_than_it_was_is_read_as_its_client_has_it():
    talk = talk_of("qwen3")
    asked = talk.compose(SYSTEM, USER)
    interrupted(talk, asked, talk.template.encode("<think>\nhm\n</think>\n\nred fox").token_ids)
    given_back = Message(role="assistant", text="red dog")
    read = talk.text_of(talk.compose(SYSTEM, USER, given_back, GO_ON).token_ids)
    assert "red dog" in read
    assert "hm" not in read
