"""`hearth prompt explain` for agents and pictures, by the command line and a real server."""

from __future__ import annotations

import json
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from tests.agents import CODE, Agent
from tests.image_requests import WAYS
from tests.running_server import RunningServer, hearth, running
from tests.tiny_vlms import encoded, picture


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Generator[RunningServer]:
    with running(tmp_path_factory.mktemp("home")) as server:
        yield server


def asked(server: RunningServer, body: Any, *words: str) -> Any:
    return hearth(
        "prompt",
        "explain",
        "-",
        *words,
        stdin=json.dumps(body),
        HEARTH_HOME=str(server.home),
        HEARTH_PORT=str(server.port),
    )


def explained(server: RunningServer, body: Any, *words: str) -> Any:
    done = asked(server, body, *words, "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert sum(part["num_tokens"] for part in found["parts"]) == len(found["tokens"])
    assert all(part["sources"] for part in found["parts"])
    return found


def text_of(found: Any) -> str:
    return "".join(part["text"] for part in found["parts"])


def question(text: str) -> Any:
    return {"messages": [{"role": "user", "content": text}]}


def test_a_request_to_an_agent_is_shown_with_the_agents_history(server: RunningServer):
    agent = Agent.made(server)
    first = agent.say("What is the code word?")
    body = question("And which river was calm?")
    found = explained(server, body, "--agent", agent.id)
    assert CODE in text_of(found)
    assert first.text in text_of(found)
    sources = [source for part in found["parts"] for source in part["sources"]]
    for place in (
        "messages[0] (system)",
        "messages[1] (user)",
        "messages[2] (assistant)",
        "messages[3] (user)",
    ):
        assert place in sources
    assert server.get(agent.path).json()["turns"] == 1
    assert agent.say("And which river was calm?").num_prompt_tokens == len(found["tokens"])


def test_what_an_agent_is_asked_next_is_compared_with_what_it_was_asked(
    server: RunningServer, tmp_path: Path
):
    agent = Agent.made(server)
    agent.say("Hello.")
    other = tmp_path / "other.json"
    other.write_text(json.dumps(question("Good bye.")))
    done = asked(server, question("Good day."), str(other), "--agent", agent.id, "--json")
    parting = json.loads(done.stdout)
    assert parting["part"] == parting["other_part"] == "messages[3] (user)"


def test_an_agent_that_is_not_there_is_named(server: RunningServer):
    done = asked(server, question("Hi"), "--agent", "agent_nobody")
    assert done.returncode == 1
    assert "agent_nobody" in done.stderr


def test_what_is_no_chat_is_refused_and_not_shown_as_another_prompt(server: RunningServer):
    done = asked(server, {"prompt": "Once upon a time"})
    assert done.returncode == 1
    assert "messages is missing" in done.stderr


def test_an_agents_tool_results_and_a_bare_continuation_are_shown(server: RunningServer):
    tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
    agent = Agent.made(server, tools=[tool])
    call = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    history = [
        {"role": "user", "content": "Look!"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "a heron"},
    ]
    found = explained(server, {"messages": history}, "--agent", agent.id)
    assert "a heron" in text_of(found)
    assert "look" in text_of(found)


@pytest.mark.parametrize("name", [one for one in WAYS if one != "ollama generate"])
def test_a_picture_is_shown_where_the_model_sees_it(name: str, seeing_server: RunningServer):
    way, _ = WAYS[name]
    path, body = way(encoded(picture(1)))
    found = explained(seeing_server, body)
    usage = seeing_server.post(path, body).json()
    reported = usage.get("usage", usage)
    names = ("prompt_tokens", "input_tokens", "prompt_eval_count")
    num_tokens = next(reported[one] for one in names if one in reported)
    num_cached = reported.get("cache_read_input_tokens", 0)
    assert len(found["tokens"]) == num_tokens + num_cached
    assert any("messages[" in source for part in found["parts"] for source in part["sources"])
    assert "what is this?" in text_of(found)


def test_two_requests_with_other_pictures_part_at_the_picture(
    seeing_server: RunningServer, tmp_path: Path
):
    way, _ = WAYS["chat"]
    other = tmp_path / "other.json"
    other.write_text(json.dumps(way(encoded(picture(2)))[1]))
    done = asked(seeing_server, way(encoded(picture(1)))[1], str(other))
    assert "in messages[0] (user): another picture" in done.stdout
