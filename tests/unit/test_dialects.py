"""Every dialect of tool calls that mlx-lm reads, and harmony: whole, cut, cut off, garbled."""

import json
import pkgutil
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import mlx_lm.tool_parsers
import pytest
from hypothesis import given
from hypothesis import strategies as st

from api.http.draft import Draft, settled
from runtime.prompt.canonical import canonical, is_same_thought, thoughts_of
from runtime.prompt.healing import AnswerRecord
from runtime.types import (
    ANY_TOOL,
    Chunk,
    Finished,
    Message,
    ReasoningDelta,
    TextDelta,
    Tool,
    ToolChoice,
    Usage,
)
from runtime.types import ToolCallDelta as Call
from runtime.worker.output import harmony
from runtime.worker.output.dialect import Dialect, ReasoningBlock
from runtime.worker.output.families import FAMILIES, speaking
from runtime.worker.output.parser import NO_TOOLS, OutputParser
from runtime.worker.output.tools import RequestTools

SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "when": {"type": "object"},
    },
}
WEATHER = Tool(name="get_weather", parameters=json.dumps(SCHEMA))
SAY = Tool(name="say", is_freeform=True)
CITY = {"city": "Zürich <West>", "days": 3}
CITY_JSON = '{"city": "Zürich <West>", "days": 3}'
K3 = "<|open|>{}<|sep|>{}<|close|>{}<|sep|>"


def dialect(name: str) -> Dialect:
    if name == "harmony":
        return harmony.dialect()
    return speaking(FAMILIES[name], Dialect(think_start="<think>", think_end="</think>"))


def glm_call(prefix: str = "") -> str:
    return (
        f"<{prefix}tool_call>get_weather\n<{prefix}arg_key>city</{prefix}arg_key>\n"
        f"<{prefix}arg_value>Zürich <West></{prefix}arg_value>\n"
        f"<{prefix}arg_key>days</{prefix}arg_key>\n<{prefix}arg_value>3</{prefix}arg_value>\n"
        f"</{prefix}tool_call>"
    )


SPOKEN: dict[str, str] = {
    "function_gemma": "<start_function_call>call:get_weather{city:<escape>Zürich <West><escape>,"
    "days:3}<end_function_call>",
    "gemma4": '<|tool_call>call:get_weather{city:<|"|>Zürich <West><|"|>,days:3}<tool_call|>',
    "glm47": glm_call(),
    "laguna": glm_call(),
    "longcat": glm_call("longcat_"),
    "json_tools": '<tool_call>\n{"name": "get_weather", "arguments": '
    + CITY_JSON
    + "}\n</tool_call>",
    "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0"
    f"<|tool_call_argument_begin|>{CITY_JSON}<|tool_call_end|><|tool_calls_section_end|>",
    "kimi_k3": "<|open|>tools<|sep|>"
    + K3.format(
        'call tool="get_weather" index="1"',
        K3.format('argument key="city" type="string"', "Zürich <West>", "argument")
        + K3.format('argument key="days" type="number"', "3", "argument"),
        "call",
    )
    + "<|close|>tools<|sep|>",
    "minicpm5": '<function name="get_weather"><param name="city"><![CDATA[Zürich <West>]]></param>'
    '<param name="days">3</param></function>',
    "minimax_m2": '<minimax:tool_call>\n<invoke name="get_weather">\n<parameter name="city">Zürich '
    '<West></parameter>\n<parameter name="days">3</parameter>\n</invoke>\n</minimax:tool_call>',
    "mistral": f"[TOOL_CALLS]get_weather[ARGS]{CITY_JSON}",
    "muse_spark": '<atem:function_calls>\n<atem:invoke name="get_weather">\n<atem:parameter '
    'name="city">Zürich <West></atem:parameter>\n<atem:parameter name="days">3</atem:parameter>\n'
    "</atem:invoke>\n</atem:function_calls>",
    "pythonic": '<|tool_call_start|>[get_weather(city="Zürich <West>", days=3)]<|tool_call_end|>',
    "qwen3_coder": "<tool_call>\n<function=get_weather>\n<parameter=city>\nZürich <West>\n"
    "</parameter>\n<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>",
    "harmony": "<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>"
    f"{CITY_JSON}<|call|>",
}
STREAMED = ("json_tools", "kimi_k2", "mistral", "harmony")


@dataclass(frozen=True)
class Told:
    text: str
    reasoning: str
    calls: tuple[tuple[str, str], ...]
    notes: tuple[str, ...]
    reason: str


def told(
    pieces: list[str],
    spoken: Dialect,
    *tools: Tool,
    is_cut: bool = False,
    choice: ToolChoice = ANY_TOOL,
    **fields: Any,
) -> Told:
    given = RequestTools.of(tools or (WEATHER,), choice)
    parser = OutputParser(spoken, index=0, tools=given, **fields)
    chunks: list[Chunk] = []
    for piece in pieces:
        chunks += parser.feed(piece)
        if parser.is_stopped:
            break
    chunks += parser.finish(is_cut=is_cut)
    calls: list[tuple[str, str]] = []
    for chunk in chunks:
        if isinstance(chunk, Call) and chunk.id is not None:
            assert chunk.call_index == len(calls)
            calls.append((chunk.name or "", chunk.arguments))
        elif isinstance(chunk, Call):
            assert chunk.call_index == len(calls) - 1
            calls[-1] = (calls[-1][0], calls[-1][1] + chunk.arguments)
    return Told(
        "".join(c.text for c in chunks if isinstance(c, TextDelta)),
        "".join(c.text for c in chunks if isinstance(c, ReasoningDelta)),
        tuple(calls),
        parser.notes,
        parser.reason("length" if is_cut else "stop"),
    )


def test_the_table_has_every_dialect_of_the_pinned_version():
    upstream = {module.name for module in pkgutil.iter_modules(mlx_lm.tool_parsers.__path__)}
    assert upstream | {"harmony"} == set(SPOKEN)


@pytest.mark.parametrize("name", SPOKEN)
def test_a_call_is_read(name: str):
    said = told([SPOKEN[name]], dialect(name))
    ((called, arguments),) = said.calls
    assert called == "get_weather"
    assert json.loads(arguments) == CITY
    assert (said.text, said.notes, said.reason) == ("", (), "tool_calls")
    assert told(list(SPOKEN[name]), dialect(name)) == said


@pytest.mark.parametrize("name", STREAMED)
def test_arguments_that_are_json_come_as_they_are_written_and_while_they_are(name: str):
    parser = OutputParser(dialect(name), index=0, tools=RequestTools.of((WEATHER,)))
    seen: list[str] = []
    for character in SPOKEN[name]:
        seen += [c.arguments for c in parser.feed(character) if isinstance(c, Call)]
    assert "".join(seen) == CITY_JSON
    assert seen[0] == ""
    assert max(len(piece) for piece in seen) <= 2


@given(data=st.data())
def test_how_a_turn_is_cut_does_not_matter(data: st.DataObject):
    name = data.draw(st.sampled_from(sorted(SPOKEN)))
    turn = data.draw(st.sampled_from(TURNS)).replace("CALL", SPOKEN[name])
    if name == "harmony":
        turn = f"<|channel|>analysis<|message|>hm<|end|><|start|>assistant{SPOKEN[name]}"
    turn = turn[: data.draw(st.integers(0, len(turn)))]
    is_cut, choice = data.draw(st.booleans()), ToolChoice(is_parallel=data.draw(st.booleans()))
    ends = sorted(data.draw(st.lists(st.integers(0, len(turn)), max_size=9)))
    pieces = [turn[a:b] for a, b in zip([0, *ends], [*ends, len(turn)], strict=True)]
    fields: dict[str, Any] = {"is_cut": is_cut, "choice": choice, "stop": ("STOP",)}
    assert told(pieces, dialect(name), **fields) == told([turn], dialect(name), **fields)


TURNS = (
    "CALL",
    "I look.\n\nCALL",
    "CALLCALL",
    "<think>\nhm CALL",
    "<think>hm</think>\n\nCALL\nDone. STOP here",
)


@pytest.mark.parametrize("name", SPOKEN)
def test_two_calls_are_two_and_with_parallel_calls_off_one(name: str):
    turn = SPOKEN[name] * 2
    if name == "mistral":
        turn = SPOKEN[name] + SPOKEN[name].removeprefix("[TOOL_CALLS]")
    if name == "harmony":
        turn = f"{SPOKEN[name]}<|start|>assistant{SPOKEN[name]}"
    assert len(told([turn], dialect(name)).calls) == 2
    alone = told([turn], dialect(name), choice=ToolChoice(is_parallel=False))
    assert (len(alone.calls), alone.text, alone.reason) == (1, "", "tool_calls")


@pytest.mark.parametrize("name", SPOKEN)
def test_a_call_of_a_tool_that_is_not_there_is_text(name: str):
    said = told([SPOKEN[name]], dialect(name), Tool(name="other"))
    assert (said.text, said.calls) == (SPOKEN[name], ())
    assert (said.notes, said.reason) == (("unknown_tool",), "stop")


@pytest.mark.parametrize("choice", [ToolChoice(mode="none"), ToolChoice(allowed=("other",))])
@pytest.mark.parametrize("name", SPOKEN)
def test_a_call_of_a_tool_that_is_not_to_be_called_is_text(name: str, choice: ToolChoice):
    said = told([SPOKEN[name]], dialect(name), WEATHER, Tool(name="other"), choice=choice)
    assert (said.text, said.calls) == (SPOKEN[name], ())
    assert (said.notes, said.reason) == (("refused_tool_call",), "stop")


@pytest.mark.parametrize("name", sorted(set(SPOKEN) - set(STREAMED)))
def test_a_call_that_breaks_off_is_text_and_says_so(name: str):
    turn = SPOKEN[name]
    broken = turn[: turn.index("Zürich") + 3]
    said = told([broken], dialect(name))
    assert (said.text, said.calls) == (broken, ())
    assert (said.notes, said.reason) == (("unclosed_tool_call",), "stop")


@pytest.mark.parametrize("name", SPOKEN)
def test_of_a_call_that_is_cut_off_before_it_is_told_nothing_is_text(name: str):
    turn = SPOKEN[name]
    start = dialect(name).tool_start
    end = len(start) if name in STREAMED else turn.index("Zürich") + 3
    for pieces in (["So:", turn[:end]], [*"So:", *turn[:end]]):
        said = told(pieces, dialect(name), is_cut=True)
        assert (said.text, said.calls) == ("So:", ())
        assert (said.notes, said.reason) == (("unclosed_tool_call",), "length")


@pytest.mark.parametrize("is_cut", [False, True])
@pytest.mark.parametrize("name", STREAMED)
def test_a_streamed_call_that_breaks_off_is_never_a_clean_end(name: str, is_cut: bool):
    turn = SPOKEN[name]
    said = told([turn[: turn.index("West") + 2]], dialect(name), is_cut=is_cut)
    assert said.calls == (("get_weather", '{"city": "Zürich <We'),)
    assert said.notes[0] in ("unclosed_tool_call", "malformed_tool_call")
    assert said.reason == "length"


@pytest.mark.parametrize(
    ("end", "num_calls"),
    [
        ('{"city": "Zür', 1),
        ('{"city": "Zürich"}', 2),
        ("", 1),
        ('{"city": Zürich}}\n</tool_call>', 1),
        ('{"city": "Zürich"\n</tool_call>', 1),
        ('{"city": "\\ud83d"}', 2),
    ],
)
def test_an_answer_that_is_not_streamed_has_no_half_of_a_call(end: str, num_calls: int):
    tools = RequestTools.of((WEATHER,))
    parser = OutputParser(dialect("json_tools"), index=0, tools=tools)
    opening = '<tool_call>{"name": "get_weather", "arguments": ' + end
    chunks = [*parser.feed(SPOKEN["json_tools"] + opening), *parser.finish(is_cut=True)]
    usage = Usage(num_prompt_tokens=1)
    done = Finished(index=0, reason="length", usage=usage, notes=parser.notes)
    draft = Draft()
    for chunk in settled([*chunks, done]):
        draft.add(chunk)
    assert len(draft.calls) == num_calls
    assert json.loads(draft.calls[0].arguments) == CITY
    note = "malformed_tool_call" if end.endswith("</tool_call>") else "unclosed_tool_call"
    assert (draft.text, parser.notes) == ("", (note,))


@pytest.mark.parametrize("name", sorted(set(SPOKEN) - {"mistral", "harmony", "kimi_k2"}))
def test_a_whole_call_without_its_last_mark_is_repaired(name: str):
    spoken = dialect(name)
    said = told([SPOKEN[name].removesuffix(spoken.tool_end)], spoken)
    assert [json.loads(arguments) for _, arguments in said.calls] == [CITY]
    assert (said.text, said.notes, said.reason) == ("", ("repaired_tool_call",), "tool_calls")


@pytest.mark.parametrize("name", sorted(SPOKEN))
def test_garbage_between_the_marks_is_text(name: str):
    spoken = dialect(name)
    garbled = f"So: \n{spoken.tool_start} 7 garbage, text {spoken.tool_end}"
    said = told([garbled], spoken, Tool(name="7"))
    assert (said.text, said.calls) == (garbled, ())
    assert said.notes == ("malformed_tool_call",)
    assert said.reason == "stop"


@pytest.mark.parametrize(
    ("body", "arguments", "notes"),
    [
        ('{"name":"get_weather","arguments":{"city":"a\nb"}}', '{"city":"a\\nb"}', True),
        ('{"name":"get_weather","arguments":{"city":"a"}', '{"city":"a"}', True),
        ('{"name":"get_weather","arguments":{"city":"a"}}}', '{"city":"a"}', True),
        ('{"name":"get_weather","parameters":{"city":"a"}}', '{"city": "a"}', True),
        ('{"arguments":{"city":"a"},"name":"get_weather"}', '{"city": "a"}', False),
        ('{"name":"get_weather","arguments":"{\\"city\\": 1}"}', '{"city": 1}', False),
        ('{"name":"get_weather"}', "{}", False),
        ('{"name":"get_weather","arguments":{"city":"</tool_call>"}}', None, False),
        ('{"name":"get_weather","arguments":{"city":"\\ud83d"}}', '{"city":"\\ud83d"}', False),
        ('{"arguments":{"city":"\\ud83d"},"name":"get_weather"}', '{"city": "\\ud83d"}', False),
    ],
)
def test_odd_json_calls(body: str, arguments: str | None, notes: bool):
    said = told([f"<tool_call>{body}</tool_call>"], dialect("json_tools"))
    assert said.calls == (("get_weather", arguments or '{"city":"</tool_call>"}'),)
    assert said.notes == (("repaired_tool_call",) if notes else ())
    assert (said.text, said.reason) == ("", "tool_calls")


@pytest.mark.parametrize(
    "body",
    [
        '{"name":"get_weather","arguments":7}',
        '{"name":"get_weather","arguments":"no json"}',
        '{"name":"get_weather","arguments":[]}',
        '{"name":["get_weather"],"arguments":{}}',
        '[{"name":"get_weather","arguments":{}},7]',
        '{"arguments":{"city":NaN},"name":"get_weather"}',
    ],
)
def test_json_that_is_no_call_is_text(body: str):
    turn = f"<tool_call>{body}</tool_call>"
    said = told([turn], dialect("json_tools"))
    assert (said.text, said.calls, said.notes) == (turn, (), ("malformed_tool_call",))


def test_arguments_that_turn_out_to_be_no_json_are_said_whole_and_noted():
    said = told(
        ['<tool_call>{"name":"get_weather","arguments":{"city":nope}}</tool_call>Next'],
        dialect("json_tools"),
    )
    assert said.calls == (("get_weather", '{"city":nope}}'),)
    assert (said.text, said.notes) == ("Next", ("malformed_tool_call",))
    assert said.reason == "length"


@pytest.mark.parametrize("value", ['"*** Begin"', '{"input":"*** Begin"}', '{"patch":"*** Begin"}'])
def test_a_free_form_tool_takes_one_text(value: str):
    turn = '<tool_call>{"name":"say","arguments":' + value + "}</tool_call>"
    said = told([turn], dialect("json_tools"), SAY)
    assert said.calls == (("say", '{"input": "*** Begin"}'),)


def test_a_free_form_call_in_harmony_is_the_text_itself():
    turn = "<|channel|>commentary to=functions.say<|message|>*** Begin\nx = 1<|call|>"
    assert told([turn], dialect("harmony"), SAY).calls == (
        ("say", '{"input": "*** Begin\\nx = 1"}'),
    )


HARMONY_TURNS = [
    ("<|channel|>final<|message|>Hi.", ("Hi.", "")),
    (
        "<|channel|>analysis<|message|>a  b<|end|><|start|>assistant<|channel|>final<|message|>c",
        ("c", "a  b"),
    ),
    (
        (
            "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>commentary<|message|>"
            "I look.<|end|><|start|>assistant<|channel|>final<|message|>b"
        ),
        ("I look.b", "a"),
    ),
    ("<|channel|>analysis<|message|>a<|channel|>final<|message|>b", ("b", "a")),
    ("<|channel|>odd<|message|>b<|end|>", ("<|channel|>odd<|message|>b<|end|>", "")),
    ("plain", ("plain", "")),
]


@pytest.mark.parametrize(("turn", "expected"), HARMONY_TURNS)
def test_channels_are_told_apart(turn: str, expected: tuple[str, str]):
    for pieces in ([turn], list(turn)):
        said = told(pieces, dialect("harmony"))
        assert (said.text, said.reasoning) == expected


@pytest.mark.parametrize(
    ("turn", "block", "expected"),
    [
        ("\n</think>\nyes", "closed", ("yes", ())),
        ("\n</think>\nyes", "unsaid", ("yes", ())),
        ("hm\n</think>\nyes", "unsaid", ("hm\n</think>\nyes", ("orphan_think_end",))),
        ("see `</think>`", "unsaid", ("see `</think>`", ())),
        ("```\n</think>\n```", "unsaid", ("```\n</think>\n```", ())),
        ("the </think> tag", "closed", ("the </think> tag", ())),
        ("a<think>b</think>the </think> tag", "unsaid", ("athe </think> tag", ())),
    ],
)
def test_a_block_that_closes_without_having_opened(
    turn: str, block: str, expected: tuple[str, tuple[str, ...]]
):
    for pieces in ([turn], list(turn)):
        said = told(pieces, dialect("glm47"), reasoning=block)
        assert (said.text, said.notes) == expected


@pytest.mark.parametrize(
    ("turn", "reasoning", "text"),
    [
        ("hm\n</think>\n\nyes", "hm", "yes"),
        ("`a` and\nb</think>yes", "`a` and\nb", "yes"),
        ("hm</think>a</think>b", "hm", "a</think>b"),
        ("hm</think>\n<think>b</think>c", "hm", "c"),
        ("hm</think>\n\n", "hm", ""),
    ],
)
def test_text_before_an_end_of_thoughts_that_never_began_is_reasoning_once_it_is_whole(
    turn: str, reasoning: str, text: str
):
    for pieces in ([turn], list(turn)):
        parser = OutputParser(
            dialect("glm47"), index=0, tools=RequestTools.of((WEATHER,), ANY_TOOL)
        )
        streamed = [chunk for piece in pieces for chunk in parser.feed(piece)] + parser.finish()
        draft, other = Draft(), TextDelta(index=1, text="other")
        for chunk in settled([other, *streamed]):
            if chunk != other:
                draft.add(chunk)
        assert draft.text.rstrip() == text
        assert (draft.reasonings[0], parser.notes) == (reasoning, ("orphan_think_end",))


@given(st.lists(st.sampled_from(["a", "b", " ", "\n", "`", "```", "</think>"]), max_size=12))
def test_nothing_of_such_an_answer_is_lost_and_what_was_streamed_is_recognised(pieces: list[str]):
    parser = OutputParser(dialect("glm47"), index=0)
    streamed = [chunk for piece in pieces for chunk in parser.feed(piece)] + parser.finish()
    text = "".join(chunk.text for chunk in streamed if isinstance(chunk, TextDelta))
    draft, record = Draft(), AnswerRecord()
    for chunk in settled(streamed):
        draft.add(chunk)
    for chunk in streamed:
        record.add(chunk)
    mark = "</think>" if parser.notes else ""
    whole = "".join((draft.reasoning + mark + draft.text).split())
    assert whole == "".join(text.split())
    assert whole in {"".join("".join(pieces).split()).removeprefix(one) for one in ("", "</think>")}
    sent = Message(role="assistant", text=text)
    assert record.form() == canonical(sent)
    assert record.thought() == (thoughts_of(sent) or b"")
    kept = Message(role="assistant", text=draft.text, reasoning=draft.reasoning or None)
    assert record.form() == canonical(kept)
    assert thoughts_of(kept) in {record.thought() or None, None}


CALL = '<tool_call>{"name": "get_weather", "arguments": {"city": "Zurich"}}</tool_call>'
EXPECTED_PIECES = st.lists(
    st.sampled_from(
        [*("a", "b", " ", "\n", "`", "```", "STOP"), "<think>", "</think>", "</think>", CALL]
    ),
    max_size=12,
)


@given(
    pieces=EXPECTED_PIECES,
    cuts=st.sets(st.integers(0, 200)),
    has_tools=st.booleans(),
    is_cut=st.booleans(),
)
def test_where_thoughts_are_expected_a_stream_says_what_the_whole_answer_says(
    pieces: list[str], cuts: set[int], has_tools: bool, is_cut: bool
):
    """However it is split; and the whole answer is what it is where nothing is expected."""
    turn = "".join(pieces)
    ends = sorted({cut for cut in cuts if cut < len(turn)} | {0, len(turn)})
    split = [turn[start:end] for start, end in pairwise(ends)]
    tools = RequestTools.of((WEATHER,), ANY_TOOL) if has_tools else NO_TOOLS

    def spoken(block: ReasoningBlock, split: list[str]) -> tuple[OutputParser, list[Chunk]]:
        parser = OutputParser(
            dialect("json_tools"), index=0, tools=tools, reasoning=block, stop=("STOP",)
        )
        chunks = [chunk for piece in split for chunk in parser.feed(piece)]
        return parser, [*chunks, *parser.finish(is_cut=is_cut)]

    parser, streamed = spoken("expected", split)
    _, unexpected = spoken("unsaid", list(turn))
    stream, whole, plain, record = Draft(), Draft(), Draft(), AnswerRecord()
    for chunk in streamed:
        stream.add(chunk)
        record.add(chunk)
    for chunk in settled(streamed):
        whole.add(chunk)
    for chunk in settled(unexpected):
        plain.add(chunk)
    assert stream.text == whole.text
    assert [one.arguments for one in stream.calls] == [one.arguments for one in whole.calls]
    assert whole.text.strip() == plain.text.strip()
    assert whole.reasoning.strip() == plain.reasoning.strip()
    if "no_thoughts" not in parser.notes:
        assert stream.reasoning == whole.reasoning
        assert "orphan_think_end" not in parser.notes
    sent = Message(
        role="assistant",
        text=stream.text,
        reasoning=stream.reasoning or None,
        tool_calls=tuple(stream.calls),
    )
    assert record.form() == canonical(sent)
    if not whole.reasoning or stream.reasoning == whole.reasoning:
        assert is_same_thought(sent, record.thought())


@pytest.mark.parametrize(
    ("turn", "told_first", "text", "reasoning"),
    [
        ("hm\n</think>\n\nyes", "hm", "yes", "hm"),
        ("<think>\nhm\n</think>\n\nyes", "hm", "yes", "hm"),
        ("\n</think>\nyes", "", "yes", ""),
        ("yes", "yes", "yes", ""),
        ("see `</think>`", "see `", "see `</think>`", ""),
        ("yes<think>hm</think>no", "yeshm", "yesno", "hm"),
        ("hm</think>a</think>b", "hm", "a</think>b", "hm"),
        ("yes STOP", "yes", "yes ", ""),
        ("", "", "", ""),
    ],
)
def test_what_is_expected_to_be_thought_is_told_as_reasoning_until_it_is_known(
    turn: str, told_first: str, text: str, reasoning: str
):
    for pieces in ([turn], list(turn)):
        parser = OutputParser(dialect("glm47"), index=0, reasoning="expected", stop=("STOP",))
        streamed = [chunk for piece in pieces for chunk in parser.feed(piece)] + parser.finish()
        stream, whole = Draft(), Draft()
        for chunk in streamed:
            stream.add(chunk)
        for chunk in settled(streamed):
            whole.add(chunk)
        assert stream.reasoning == told_first
        assert (stream.text, whole.text, whole.reasoning) == (text, text, reasoning)


@pytest.mark.parametrize(
    ("turn", "expected"),
    [
        ('{"a": "<think>x</think> <tool_call>{}</tool_call>"}', None),
        ('<think>hm</think>\n{"a": "</think>"}', '{"a": "</think>"}'),
        ('\n{"a": "STOP"}', '{"a": "'),
    ],
)
def test_in_a_constrained_answer_only_stop_strings_are_marks(turn: str, expected: str | None):
    for pieces in ([turn], list(turn)):
        said = told(pieces, dialect("json_tools"), is_constrained=True, stop=("STOP",))
        assert said.text == (expected or turn)
        assert said.calls == ()


@pytest.mark.parametrize(
    ("name", "turn"),
    [
        ("llama3", '{"name": "get_weather", "parameters": {"city": "Z"}}'),
        ("llama4", '[get_weather(city="Z")]'),
    ],
)
def test_an_answer_that_begins_with_a_call_is_one_and_no_other_is(name: str, turn: str):
    spoken = dialect(name)
    for pieces in ([turn], list(turn)):
        assert told(pieces, spoken).calls == (("get_weather", '{"city": "Z"}'),)
        for text in (
            f"See: {turn}",
            turn.replace("get_weather", "nobody"),
            turn[:1],
            f"{turn[:1]}1",
        ):
            assert told(list(text), spoken).text == text
        otherwise: list[dict[str, Any]] = [{"reasoning": "begun"}, {"is_constrained": True}]
        for fields in otherwise:
            said = told(pieces, spoken, **fields)
            assert (said.text, said.calls, said.notes) == (turn, (), ())


@pytest.mark.parametrize(
    ("turn", "text"),
    [
        ("a \nCALL\n b", "a \n\n b"),
        ("aCALLb", "ab"),
        ("a \nCALL\n\nCALL\n", "a"),
        ("\nCALL\nb", "b"),
    ],
)
def test_blanks_around_a_call_are_text_where_text_follows(turn: str, text: str):
    turn = turn.replace("CALL", SPOKEN["json_tools"])
    for pieces in ([turn], list(turn)):
        assert told(pieces, dialect("json_tools")).text == text
