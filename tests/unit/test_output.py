"""Generated text to chunks, however it is cut: answer, reasoning, tool calls, stop strings."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.types import Chunk, ReasoningDelta, TextDelta, TokenLogprob, TokenLogprobs, Tool
from runtime.types import ToolCallDelta as Call
from runtime.worker.output.dialect import Dialect, transitions
from runtime.worker.output.families import FAMILIES, speaking
from runtime.worker.output.parser import OutputParser
from runtime.worker.output.tools import RequestTools

MARKED = speaking(FAMILIES["json_tools"], Dialect(think_start="<think>", think_end="</think>"))
LOOK = '<tool_call>\n{"name": "look", "arguments": {"at": 7}}\n</tool_call>'


def tools(*names: str) -> RequestTools:
    return RequestTools.of(tuple(Tool(name=name) for name in names))


def told(chunks: list[Chunk]) -> tuple[str, str, list[tuple[int, str, str]]]:
    """Answer, reasoning and calls of the chunks."""
    text = "".join(c.text for c in chunks if isinstance(c, TextDelta))
    reasoning = "".join(c.text for c in chunks if isinstance(c, ReasoningDelta))
    calls: list[tuple[int, str, str]] = []
    for chunk in chunks:
        if isinstance(chunk, Call) and chunk.name is not None:
            calls.append((chunk.call_index, chunk.name, chunk.arguments))
        elif isinstance(chunk, Call):
            calls[-1] = (*calls[-1][:2], calls[-1][2] + chunk.arguments)
    return text, reasoning, calls


def parse(pieces: list[str], dialect: Dialect = MARKED, **fields: Any) -> list[Chunk]:
    parser = OutputParser(dialect, index=0, **fields)
    chunks: list[Chunk] = []
    for piece in pieces:
        chunks += parser.feed(piece)
        if parser.is_stopped:
            break
    return [*chunks, *parser.finish()]


def cuts_of(text: str) -> st.SearchStrategy[list[str]]:
    """The text cut into pieces in any way."""
    places = st.lists(st.integers(0, len(text)), max_size=8).map(sorted)
    return places.map(
        lambda ends: [text[a:b] for a, b in zip([0, *ends], [*ends, len(text)], strict=True)]
    )


CASES: list[tuple[str, dict[str, Any], tuple[str, str, list[tuple[int, str, str]]]]] = [
    ("hello  world \n", {}, ("hello  world \n", "", [])),
    ("  hello", {}, ("  hello", "", [])),
    ("<think>\na b\n</think>\n\nyes", {}, ("yes", "a b", [])),
    ("a b\n</think>\n\nyes", {"reasoning": "open"}, ("yes", "a b", [])),
    ("<think>a  \n b", {}, ("", "a  \n b", [])),
    ("<think>\n\n</think>\n\nyes", {}, ("yes", "", [])),
    ("a<think>b</think>c", {}, ("ac", "b", [])),
    ("a < b <thin", {}, ("a < b <thin", "", [])),
    ("one STOP two", {"stop": ("STOP",)}, ("one ", "", [])),
    ("one STO", {"stop": ("STOP",)}, ("one STO", "", [])),
    ("one two", {"stop": ("two", "one t")}, ("", "", [])),
    ("aaab", {"stop": ("aab",)}, ("a", "", [])),
    ("<think>STOP</think>no STOP", {"stop": ("STOP",)}, ("no ", "STOP", [])),
    (LOOK, {"tools": tools("look")}, ("", "", [(0, "look", '{"at": 7}')])),
    (f"see\n\n{LOOK}\n", {"tools": tools("look")}, ("see", "", [(0, "look", '{"at": 7}')])),
    (
        f"<think>hm\n{LOOK}{LOOK}",
        {"tools": tools("look")},
        ("", "hm", [(0, "look", '{"at": 7}'), (1, "look", '{"at": 7}')]),
    ),
    (f"a{LOOK}b", {"tools": tools("look")}, ("ab", "", [(0, "look", '{"at": 7}')])),
    ("see  \n", {"tools": tools("look")}, ("see  \n", "", [])),
    ("see \nSTOP", {"tools": tools("look"), "stop": ("STOP",)}, ("see \n", "", [])),
    (LOOK, {"tools": tools("other")}, (LOOK, "", [])),
    (LOOK, {}, (LOOK, "", [])),
    (LOOK[:-12], {"tools": tools("look")}, ("", "", [(0, "look", '{"at": 7}')])),
    ("<tool_call>{", {"tools": tools("look")}, ("<tool_call>{", "", [])),
    ("<tool_call>[]</tool_call>x", {"tools": tools("a")}, ("<tool_call>[]</tool_call>x", "", [])),
    ("<tool_call>7</tool_call>x", {"tools": tools("a")}, ("<tool_call>7</tool_call>x", "", [])),
]


@pytest.mark.parametrize(("text", "fields", "expected"), CASES)
def test_text_is_taken_apart(text: str, fields: dict[str, Any], expected: object):
    assert told(parse([text], **fields)) == expected
    assert told(parse(list(text), **fields)) == expected


@given(data=st.data())
def test_how_the_text_is_cut_does_not_matter(data: st.DataObject):
    text, fields, expected = data.draw(st.sampled_from(CASES))
    assert told(parse(data.draw(cuts_of(text)), **fields)) == expected


@given(text=st.text(max_size=50), data=st.data())
def test_without_marks_the_text_is_what_was_fed(text: str, data: st.DataObject):
    assert told(parse(data.draw(cuts_of(text)), Dialect())) == (text, "", [])


@given(text=st.text("abc", max_size=40), stop=st.text("abc", min_size=1, max_size=4))
def test_a_stop_string_ends_the_text_at_its_first_place(text: str, stop: str):
    said, _, _ = told(parse(list(text), Dialect(), stop=(stop,)))
    assert said == text.split(stop, maxsplit=1)[0]


@pytest.mark.parametrize("stop", ["a", "<", "call>", ">\n", "!<tool", "k>"])
def test_a_stop_string_is_not_looked_for_inside_a_mark_that_is_one_token(stop: str):
    pieces = ["<think>", "Look", "</think>", "Oh!", "<tool_call>", *LOOK[11:-12], "</tool_call>"]
    said, thought, calls = told(parse(pieces, tools=tools("look"), stop=(stop,)))
    assert (said, thought, calls) == ("Oh!", "Look", [(0, "look", '{"at": 7}')])


@pytest.mark.parametrize(("stop", "said"), [("a", "s"), ("<", "sa"), ("a<tool_call>", "s")])
def test_a_stop_string_ends_text_before_a_mark_or_that_names_it(stop: str, said: str):
    pieces = ["s", "a", "<tool_call>"] if stop != "<" else ["sa<", "<tool_call>"]
    chunks = parse([*pieces, *LOOK[11:]], tools=tools("look"), stop=(stop,))
    assert told(chunks) == (said, "", [])


def test_a_mark_in_a_constrained_answer_is_text_that_a_stop_string_ends():
    pieces = ["1", "<think>", "2"]
    assert told(parse(pieces, is_constrained=True, stop=("hi",)))[0] == "1<t"


def test_nothing_is_said_that_could_be_the_start_of_a_stop_string():
    parser = OutputParser(Dialect(), index=0, stop=("stop",))
    assert told(parser.feed("a s"))[0] == "a "
    assert told(parser.feed("to"))[0] == ""
    assert told(parser.feed("re"))[0] == "store"
    assert not parser.is_stopped
    assert parser.feed("xstop more")[0] == TextDelta(index=0, text="x")
    assert parser.is_stopped
    assert parser.feed("again") == []
    assert parser.finish() == []


def test_arguments_that_are_text_stay_as_they_are_and_ids_are_kept():
    call = '<tool_call>{"name": "f", "id": "c1", "arguments": "{ }"}</tool_call>'
    (chunk,) = parse([call], tools=tools("f"))
    assert isinstance(chunk, Call)
    assert (chunk.id, chunk.arguments) == ("c1", "{ }")


NO_CALLS = ("<tool_call>{</tool_call>", "<tool_call> 7 \n</tool_call>", "<tool_call>[]\n")


@given(data=st.data(), pieces=st.lists(st.sampled_from((*NO_CALLS[:2], " ", "\n\n", "a "))))
def test_what_is_no_call_is_given_back_to_the_letter(data: st.DataObject, pieces: list[str]):
    text = "".join(["So:", *pieces, data.draw(st.sampled_from(NO_CALLS))])
    said = told(parse(data.draw(cuts_of(text)), tools=tools("look")))
    assert said == (text, "", [])


def test_blanks_before_a_call_are_dropped_also_after_one_that_is_none():
    text = f"see\n\n{NO_CALLS[0]} \n{LOOK} \n"
    assert told(parse([text], tools=tools("look"))) == (
        f"see\n\n{NO_CALLS[0]}",
        "",
        [(0, "look", '{"at": 7}')],
    )


def test_every_log_probability_comes_with_the_text_it_belongs_to():
    def logprobs(text: str) -> TokenLogprobs:
        return TokenLogprobs(chosen=TokenLogprob(token=text, token_bytes=b"", logprob=-1.0))

    parser = OutputParser(Dialect(), index=0, stop=("xyz",))
    chunks: list[Chunk] = []
    for piece in ("a", "", "x", "y", "b"):
        chunks += parser.feed(piece, logprobs(piece))
    deltas = [c for c in (*chunks, *parser.finish()) if isinstance(c, TextDelta)]
    assert [c.text for c in deltas] == ["a", "xyb"]
    assert [[one.chosen.token for one in c.logprobs] for c in deltas] == [
        ["a"],
        ["", "x", "y", "b"],
    ]


STOPPED = [
    ("<think>\nhm\n\nhm\n</think>\n\nyes\n\nno", {}),
    ("hm\n\nhm\n</think>\n\n\n\nyes\n\nno", {"reasoning": "open"}),
    ("\n\nyes\n\nno", {"tools": tools("look")}),
    ("<think>hm</think>\n\n<think>hm</think>\n\nyes\n\nno", {}),
]


@pytest.mark.parametrize("stop", ["\n\n", "\n", "\n\nno", "s\n"])
@pytest.mark.parametrize(("text", "fields"), STOPPED)
@given(data=st.data())
def test_stop_strings_count_from_the_first_character_of_the_answer(
    text: str, fields: dict[str, Any], stop: str, data: st.DataObject
):
    said, _, _ = told(parse(data.draw(cuts_of(text)), stop=(stop,), **fields))
    assert said == "yes\n\nno".split(stop, maxsplit=1)[0]


@pytest.mark.parametrize("stop", ["\n\n", "\n", "\n\nno", "s\n"])
@pytest.mark.parametrize("fields", [{}, {"tools": tools("look")}, {"is_constrained": True}])
@given(data=st.data())
def test_stop_strings_count_from_the_answer_on_where_the_prompt_has_closed_the_thoughts(
    fields: dict[str, Any], stop: str, data: st.DataObject
):
    pieces = data.draw(cuts_of("\n\n \n\nyes\n\nno"))
    said, _, _ = told(parse(pieces, stop=(stop,), reasoning="closed", **fields))
    assert said.lstrip() == "yes\n\nno".split(stop, maxsplit=1)[0]


def test_no_mark_that_an_answer_may_begin_with_begins_with_a_blank():
    for family in FAMILIES.values():
        edges = transitions(speaking(family, MARKED), (), has_tools=True)
        marks = [mark for more in edges.values() for mark, _ in more]
        assert marks == [mark.lstrip() for mark in marks]


def test_nor_do_they_count_between_a_block_that_never_opened_and_the_answer():
    chunks = parse(["hm", "</think>", "\n\n", "yes", "\n\n", "no"], stop=("\n\n",))
    said, _, _ = told(chunks)
    assert said == "hm</think>\n\nyes"
