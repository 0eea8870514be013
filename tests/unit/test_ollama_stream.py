"""Calls in Ollama's stream, where each is one piece: whole, or not at all."""

from __future__ import annotations

import json
from typing import Any

import pytest

from api.http.draft import Draft, settled
from api.observe.record import Tally
from api.ollama.stream import Clock, LineStream, chat_form
from runtime.types import Chunk, Finished, Usage
from runtime.worker.output.parser import OutputParser
from runtime.worker.output.tools import RequestTools
from tests.unit.test_dialects import SPOKEN, WEATHER, dialect


def told(name: str, turn: str, *, is_cut: bool) -> tuple[list[Any], list[str]]:
    """The calls in the lines of a stream, and those of an answer that is not streamed."""
    parser = OutputParser(dialect(name), index=0, tools=RequestTools.of((WEATHER,)))
    chunks: list[Chunk] = [chunk for one in turn for chunk in parser.feed(one)]
    chunks += parser.finish(is_cut=is_cut)
    reason, usage = parser.reason("length" if is_cut else "stop"), Usage(num_prompt_tokens=1)
    chunks.append(Finished(index=0, reason=reason, usage=usage, notes=parser.notes))
    draft = Draft()
    for chunk in settled(chunks):
        draft.add(chunk)
    stream = LineStream(chat_form, "some", Tally(), Clock())
    lines = [json.loads(line) for line in stream.chunks(chunks).splitlines()]
    calls = [call for line in lines for call in line["message"].get("tool_calls", ())]
    return [call["function"]["arguments"] for call in calls], [c.arguments for c in draft.calls]


@pytest.mark.parametrize("is_cut", [False, True])
@pytest.mark.parametrize("name", sorted(SPOKEN))
def test_a_streamed_call_is_whole_or_not_told(name: str, is_cut: bool) -> None:
    turn = SPOKEN[name]
    for end in range(len(turn) + 1):
        streamed, whole = told(name, turn[:end], is_cut=is_cut)
        assert streamed == [json.loads(one) for one in whole]
        assert streamed in ([], [{"city": "Zürich <West>", "days": 3}], [{"city": "Zürich <West>"}])


@pytest.mark.parametrize("arguments", ['{"city": Tokyo}', '{"city": "Tokyo"', '{"city" "a"}'])
def test_a_call_whose_arguments_are_no_json_is_not_told_as_an_empty_one(arguments: str) -> None:
    call = f'<tool_call>\n{{"name": "get_weather", "arguments": {arguments}}}\n</tool_call>'
    streamed, whole = told("json_tools", SPOKEN["json_tools"] + call, is_cut=False)
    assert streamed == [json.loads(one) for one in whole]
    assert {} not in streamed
    assert len(streamed) in (1, 2)
