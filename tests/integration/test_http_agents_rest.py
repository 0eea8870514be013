"""Answers of agents that were cut off: they are gone on with, and stay one turn."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from openai import OpenAI

from tests.agents import FILLER, Agent, refusal, said
from tests.running_server import RunningServer, running, streaming
from tests.waiting import until

STORY = "What is Hearth?"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with running(tmp_path_factory.mktemp("rests")) as server:
        yield server
        assert "Traceback" not in server.stderr


def content(turn: Any) -> list[tuple[str, str]]:
    return [(one["role"], one["content"]) for one in turn["messages"]]


@pytest.mark.parametrize("fields", [{}, {"messages": []}])
def test_a_cut_answer_goes_on_as_if_it_had_not_been_cut(tiny: RunningServer, fields: Any):
    whole = Agent.made(tiny).say(STORY)
    assert whole.finish_reason == "stop"
    assert whole.num_output_tokens > 8
    agent = Agent.made(tiny)
    cut = agent.say(STORY, max_tokens=3)
    assert cut.finish_reason == "length"
    text, parts = cut.text, [cut]
    while parts[-1].finish_reason == "length":
        part = said(agent.post("generate", fields | {"max_tokens": 4}).json())
        parts.append(part)
        text += part.text
        assert part.turn == 1
        assert part.num_computed_tokens <= 2
    assert len(parts) > 2
    assert text == whole.text
    (turn,) = agent.turns()
    assert content(turn) == [("user", STORY), ("assistant", whole.text)]
    assert (turn["turn"], turn["finish_reason"]) == (1, "stop")
    assert turn["usage"]["prompt_tokens"] == cut.num_prompt_tokens
    assert turn["usage"]["completion_tokens"] == sum(part.num_output_tokens for part in parts)
    assert agent.view()["turns"] == 1


def test_the_turn_after_a_rest_finds_all_of_it(tiny: RunningServer):
    agent = Agent.made(tiny)
    agent.say(FILLER)
    agent.say(STORY, max_tokens=3)
    rest = agent.send([], expected_turn=2)
    after = agent.say("Hello!")
    assert (rest.turn, after.turn) == (2, 3)
    known = rest.num_prompt_tokens + rest.num_output_tokens
    assert after.num_cached_tokens >= known - 1
    other = Agent.made(tiny)
    other.say(FILLER)
    other.say(STORY)
    assert other.say("Hello!").num_prompt_tokens == after.num_prompt_tokens


def test_openais_own_client_streams_the_rest(tiny: RunningServer):
    agent = Agent.made(tiny)
    cut = agent.say(STORY, max_tokens=3)
    with OpenAI(base_url=f"{tiny.url}{agent.path}", api_key="none") as client:
        stream = client.chat.completions.create(model="hearth-tiny", messages=[], stream=True)
        chunks = list(stream)
    rest = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert rest
    assert chunks[-1].to_dict()["agent"] == {"id": agent.id, "turn": 1}
    assert content(agent.turns()[0])[-1] == ("assistant", cut.text + rest)


async def test_a_rest_that_breaks_off_leaves_the_turn_as_it_was(tiny: RunningServer):
    agent = Agent.made(tiny)
    agent.say(STORY, max_tokens=3)
    (before,) = agent.turns()
    endless = {"ignore_eos": True, "max_tokens": 3000}
    async with streaming(tiny, f"{agent.path}/generate", endless) as stream:
        await stream.next_event()
    await until(lambda: agent.view()["queued"] == 0, "its place is free")
    assert agent.turns() == [before]
    assert agent.send([]).turn == 1


def test_an_agent_speaks_once_more_on_demand(tiny: RunningServer):
    agent = Agent.made(tiny)
    agent.say(STORY, max_tokens=3)
    again = agent.send([], continue_final_message=False, max_tokens=3)
    assert again.turn == 2
    assert [len(turn["messages"]) for turn in agent.turns()] == [2, 1]


def test_a_rest_in_a_fork_leaves_its_parent_alone(tiny: RunningServer):
    agent = Agent.made(tiny)
    agent.say(STORY, max_tokens=3)
    before = agent.turns()
    fork = agent.fork()
    assert fork.send([]).turn == 1
    assert fork.turns() != before
    assert agent.turns() == before


def test_what_cannot_be_gone_on_with_is_refused_by_name(tiny: RunningServer):
    fresh = Agent.made(tiny)
    error = refusal(fresh.post("generate", {}), 400)
    assert (error["param"], "no answer yet" in error["message"]) == ("messages", True)
    function = {"name": "get_weather", "description": "Get the current weather for a city."}
    parameters = {"type": "object", "properties": {"city": {"type": "string"}}}
    tools = [{"type": "function", "function": function | {"parameters": parameters}}]
    agent = Agent.made(tiny, system=None, tools=tools)
    assert agent.say("What is the weather in Zurich?").tool_calls
    error = refusal(agent.post("generate", {}), 400)
    assert (error["param"], "send their results" in error["message"]) == ("messages", True)
    missed = refusal(agent.post("generate", {"expected_turn": 4}), 409)
    assert missed["code"] == "turn_conflict"
    assert len(agent.turns()) == 1
