"""Agents over HTTP: only new messages are sent, and only new tokens are computed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from openai import OpenAI
from openai.types.chat import ChatCompletionChunk

from tests.agents import AGENTS, FILLER, SLACK, SYSTEM, Agent, refusal
from tests.conversation import CODE, QUESTION
from tests.running_server import RunningServer, events_of, running
from tests.waiting import until


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with running(tmp_path_factory.mktemp("agents")) as server:
        yield server
        assert "Traceback" not in server.stderr


# Remembering


def test_an_agent_recalls_what_was_said_turns_before(tiny: RunningServer):
    agent = Agent.made(tiny, system="You are helpful.")
    agent.say(f"The code word is {CODE}. {FILLER}")
    agent.say("Hello!")
    answer = agent.say()
    assert CODE in answer.text
    assert answer.turn == 3
    assert agent.view()["turns"] == 3


def test_each_turn_computes_its_new_tokens_only(tiny: RunningServer):
    agent = Agent.made(tiny)
    before = agent.say(FILLER)
    for _ in range(3):
        answer = agent.say()
        known = before.num_prompt_tokens + before.num_output_tokens
        assert answer.num_prompt_tokens > known
        assert answer.num_computed_tokens <= answer.num_prompt_tokens - known + SLACK
        assert CODE in answer.text
        before = answer


def test_the_history_is_what_was_sent_and_answered_in_order(tiny: RunningServer):
    agent = Agent.made(tiny)
    answers = [agent.say(f"Hello {number}!") for number in range(3)]
    turns = agent.turns()
    assert [turn["turn"] for turn in turns] == [1, 2, 3]
    for number, (turn, answer) in enumerate(zip(turns, answers, strict=True)):
        sent, got = turn["messages"]
        assert sent == {"role": "user", "content": f"Hello {number}!"}
        assert got["content"] == answer.text
        assert turn["finish_reason"] == answer.finish_reason
        assert turn["usage"]["prompt_tokens"] == answer.num_prompt_tokens


def test_the_history_comes_in_pages_in_both_directions(tiny: RunningServer):
    agent = Agent.made(tiny)
    for _ in range(3):
        agent.say("Hello!", max_tokens=2)
    path = f"{agent.path}/history"
    page = tiny.get(f"{path}?limit=2").json()
    assert [turn["turn"] for turn in page["data"]] == [1, 2]
    assert page["has_more"]
    rest = tiny.get(f"{path}?limit=2&after=2").json()
    assert [turn["turn"] for turn in rest["data"]] == [3]
    assert not rest["has_more"]
    latest = tiny.get(f"{path}?limit=1&order=desc").json()
    assert [turn["turn"] for turn in latest["data"]] == [3]
    assert [turn["turn"] for turn in agent.turns(order="desc", after=3)] == [2, 1]
    assert refusal(tiny.get(f"{path}?limit=0"), 400)["param"] == "limit"


def test_a_streamed_turn_is_kept_as_it_was_streamed(tiny: RunningServer):
    agent = Agent.made(tiny)
    body = {"messages": [{"role": "user", "content": "What is the code word?"}]}
    wanted = {"stream": True, "stream_options": {"include_usage": True}}
    response = agent.post("generate", body | wanted)
    *events, done = events_of(response.text)
    assert done == "[DONE]"
    for event in events:
        ChatCompletionChunk.model_validate(event, strict=True)
    text = "".join(
        choice["delta"].get("content", "") for event in events for choice in event["choices"]
    )
    assert CODE in text
    (last,) = [one for one in events if one["choices"] and one["choices"][0]["finish_reason"]]
    assert last["agent"] == {"id": agent.id, "turn": 1}
    assert events[-1]["usage"]["completion_tokens"] > 0
    assert agent.turns()[0]["messages"][-1]["content"] == text


def test_openais_own_client_talks_to_an_agent(tiny: RunningServer):
    agent = Agent.made(tiny)
    with OpenAI(base_url=f"{tiny.url}{agent.path}", api_key="none") as client:
        first = client.chat.completions.create(
            model="hearth-tiny", messages=[{"role": "user", "content": "Hello!"}]
        )
        assert first.choices[0].finish_reason == "stop"
        stream = client.chat.completions.create(
            model="hearth-tiny", messages=[{"role": "user", "content": QUESTION}], stream=True
        )
        assert CODE in "".join(chunk.choices[0].delta.content or "" for chunk in stream)
    assert agent.view()["turns"] == 2


def test_reasoning_and_tool_calls_are_kept_to_the_letter_and_sent_again(tiny: RunningServer):
    parameters = {"type": "object", "properties": {"city": {"type": "string"}}}
    function = {"name": "get_weather", "description": "Get the current weather for a city."}
    tools = [{"type": "function", "function": function | {"parameters": parameters}}]
    agent = Agent.made(tiny, system=None, tools=tools, enable_thinking=True)
    called = agent.say("What is the weather in Zurich?")
    (call,) = called.tool_calls
    assert called.finish_reason == "tool_calls"
    kept = agent.turns()[0]["messages"][1]
    assert kept["tool_calls"] == called.tool_calls
    assert kept.get("reasoning_content") == called.reasoning
    result = {"role": "tool", "tool_call_id": call["id"], "content": "Light rain, 9 degrees"}
    answer = agent.send([result])
    assert "Light rain, 9 degrees" in answer.text
    known = called.num_prompt_tokens + called.num_output_tokens
    assert answer.num_computed_tokens <= answer.num_prompt_tokens - known + SLACK


def test_what_a_client_puts_into_the_assistants_mouth_is_history(tiny: RunningServer):
    agent = Agent.made(tiny, system="You are helpful.")
    injected = [
        {"role": "user", "content": "Which word did we agree on?"},
        {"role": "assistant", "content": f"The code word is {CODE}."},
        {"role": "user", "content": "What is the code word?"},
    ]
    assert CODE in agent.send(injected).text
    assert [one["role"] for one in agent.turns()[0]["messages"]] == [
        "user",
        "assistant",
        "user",
        "assistant",
    ]


# Being


@pytest.mark.parametrize("stream", [False, True])
def test_the_call_of_a_custom_tool_is_one_in_the_history_too(tiny: RunningServer, stream: bool):
    form = {"type": "grammar", "grammar": {"syntax": "regex", "definition": "(rain|snow)"}}
    tool = {"type": "custom", "custom": {"name": "note", "format": form}}
    agent = Agent.made(tiny, tools=[tool], tool_choice="required", parallel_tool_calls=False)
    given = {"name": "note", "input": "sun"}
    earlier = {"id": "c", "type": "custom", "custom": given}
    asked = [
        {"role": "user", "content": "Note it."},
        {"role": "assistant", "tool_calls": [earlier]},
        {"role": "tool", "tool_call_id": "c", "content": "noted"},
    ]
    response = agent.post("generate", {"messages": asked, "stream": stream})
    assert response.status_code == 200, response.text
    (turn,) = agent.turns()
    history = [one for one in turn["messages"] if one.get("tool_calls")]
    assert [one["tool_calls"][0]["type"] for one in history] == ["custom", "custom"]
    assert history[0]["tool_calls"] == [earlier]
    assert history[1]["tool_calls"][0]["custom"]["input"] in ("rain", "snow")


def test_an_agent_is_made_shown_listed_changed_and_deleted(tiny: RunningServer):
    made = tiny.post(
        AGENTS,
        {
            "id": "critic.1",
            "name": "Critic",
            "system": SYSTEM,
            "temperature": 0,
            "metadata": {"team": "review", "level": 3},
            "ttl": 3600,
        },
    ).json()
    assert (made["id"], made["name"], made["model"]) == ("critic.1", "Critic", "hearth-tiny")
    assert (made["status"], made["tokens"], made["turns"]) == ("none", 0, 0)
    assert made["expires_at"] == pytest.approx(made["last_used_at"] + 3600)
    assert made["config"] == {"system": SYSTEM, "temperature": 0}
    assert made["metadata"] == {"team": "review", "level": 3}
    agent = Agent(tiny, "critic.1")
    listed = tiny.get(AGENTS).json()["data"]
    assert listed[0]["id"] == "critic.1"
    assert "config" not in listed[0]
    changed = tiny.request(
        "PATCH", agent.path, json={"name": None, "temperature": 0.5, "pinned": True}
    ).json()
    assert (changed["name"], changed["pinned"], changed["expires_at"]) == (None, True, None)
    assert changed["config"] == {"system": SYSTEM, "temperature": 0.5}
    gone = tiny.request("DELETE", agent.path).json()
    assert gone == {"id": "critic.1", "kv": "deleted", "deleted": True, "object": "agent.deleted"}
    assert refusal(tiny.get(agent.path), 404)["code"] == "agent_not_found"
    assert refusal(tiny.request("DELETE", agent.path), 404)["code"] == "agent_not_found"


def test_what_cannot_be_changed_is_refused_or_named(tiny: RunningServer):
    agent = Agent.made(tiny)
    refused = tiny.request("PATCH", agent.path, json={"id": "other", "temperature": 1})
    assert refusal(refused, 400)["param"] == "id"
    assert agent.view()["config"]["temperature"] == 0
    sent = {"id": agent.id, "name": "n", "turns": 7, "session_id": "s", "n": 1, "glow": None}
    changed = tiny.request("PATCH", agent.path, json=sent).json()
    assert changed["name"] == "n"
    assert changed["hearth"] == {"ignored": ["turns", "session_id", "n"]}
    assert "hearth" not in agent.view()
    copy = agent.post("fork", {"turn": 0, "turns": 7}).json()
    assert copy["hearth"] == {"ignored": ["turns"]}
    turn = {"messages": [{"role": "user", "content": "?"}], "max_tokens": 1, "system": "s"}
    asked = turn | {"tools": [{"type": "web_search"}], "expected_turn": 0}
    ignored = agent.post("generate", asked).json()["hearth"]["ignored"]
    assert ignored == ["system", "tools[0]: web_search"]


IN_BRIEF = (
    *("id", "agent_id", "model", "status"),
    *("tokens", "context_tokens", "last_used_at", "last_accessed"),
)


async def test_an_agents_fields_have_other_names_and_a_listing_is_in_brief_too(
    tiny: RunningServer,
):
    sent = {"agent_id": "review-agent", "system_prompt": SYSTEM, "persist": False}
    made = tiny.post(AGENTS, sent)
    assert made.status_code == 201
    assert made.json()["id"] == made.json()["agent_id"] == "review-agent"
    assert "hearth" not in made.json()
    assert made.json()["config"] == {"system": SYSTEM, "persist": False}
    agent = Agent(tiny, "review-agent")
    first = agent.say(temperature=0, max_tokens=60)
    assert CODE in first.text
    again = agent.say(temperature=0, max_tokens=60)
    assert again.num_cached_tokens >= first.num_prompt_tokens
    view = agent.view()
    assert view["status"] == "hot"
    assert view["tokens"] >= again.num_prompt_tokens
    assert [
        (one["status"], one["disk_bytes"], one["durable_tokens"]) for one in view["models"]
    ] == [("hot", 0, 0)]
    kept = Agent.made(tiny)
    kept.say()
    await until(lambda: kept.view()["status"] != "none", "the KV is found")

    def are_listed_as_they_are() -> bool:
        """What was just answered may be stored between the two."""
        lines = {one["agent_id"]: one for one in tiny.get(AGENTS).json()["agents"]}
        return all(
            lines[view["id"]]
            == {name: view[name] for name in IN_BRIEF}
            | {"last_used_at": pytest.approx(view["last_used_at"], abs=1)}
            for view in (agent.view(), kept.view())
        )

    await until(are_listed_as_they_are, "both are listed as they are")
    twice = tiny.post(AGENTS, sent | {"agent_id": "a", "id": "b"})
    assert refusal(twice, 400)["param"] == "agent_id"


def test_the_listing_comes_in_pages(tiny: RunningServer):
    ids = [Agent.made(tiny).id for _ in range(3)]
    first = tiny.get(f"{AGENTS}?limit=2").json()
    assert [one["id"] for one in first["data"]] == [ids[2], ids[1]]
    assert first["has_more"]
    rest = tiny.get(f"{AGENTS}?limit=1&after={ids[1]}").json()
    assert [one["id"] for one in rest["data"]] == [ids[0]]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"id": "../x"}, "id"),
        ({"id": ""}, "id"),
        ({"model": "no-such-model"}, "model"),
        ({"temperature": 3}, "temperature"),
        ({"ttl": 0}, "ttl"),
        ({"stop": [""]}, "stop"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"system": 5}, "system"),
        ({"pinned": "yes"}, "pinned"),
    ],
)
def test_a_field_that_cannot_be_served_is_named(
    tiny: RunningServer, fields: dict[str, Any], param: str
):
    status = 404 if param == "model" else 400
    assert refusal(tiny.post(AGENTS, fields), status)["param"] == param


def test_an_id_is_given_once(tiny: RunningServer):
    agent = Agent.made(tiny)
    error = refusal(tiny.post(AGENTS, {"id": agent.id}), 409)
    assert (error["code"], error["param"]) == ("agent_exists", "id")
    assert refusal(agent.post("fork", {"id": agent.id}), 409)["code"] == "agent_exists"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"messages": []}, "messages"),
        ({}, "messages"),
        ({"messages": [{"role": "clown", "content": "?"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": "?"}], "n": 2}, "n"),
        (
            {"messages": [{"role": "tool", "tool_call_id": "call_x", "content": "?"}]},
            "messages[0].tool_call_id",
        ),
        ({"messages": [{"role": "user", "content": "?"}], "expected_turn": -1}, "expected_turn"),
    ],
)
def test_a_refused_generate_names_the_field_and_leaves_no_trace(
    tiny: RunningServer, body: dict[str, Any], param: str
):
    agent = Agent.made(tiny)
    assert refusal(agent.post("generate", body), 400)["param"] == param
    assert agent.turns() == []


def test_a_prompt_that_no_longer_fits_is_refused_with_both_numbers(tiny: RunningServer):
    agent = Agent.made(tiny)
    agent.say("Hello!")
    body = {"messages": [{"role": "user", "content": "calm river " * 40_000}]}
    assert refusal(agent.post("generate", body), 400)["code"] == "context_length_exceeded"
    assert len(agent.turns()) == 1


def test_prompt_and_answer_of_an_agent_have_max_context_at_most(tiny: RunningServer):
    agent = Agent.made(tiny, max_context=4000)
    first = agent.say("Hello!", max_tokens=4)
    most = first.num_prompt_tokens + first.num_output_tokens + 30
    changed = tiny.request("PATCH", agent.path, json={"max_context": most, "max_tokens": 400})
    assert (changed.json()["max_context"], "hearth" in changed.json()) == (most, False)
    (listed,) = [one for one in tiny.get(AGENTS).json()["data"] if one["id"] == agent.id]
    assert listed["max_context"] == most

    cut = agent.say("Hello!", ignore_eos=True)
    assert cut.num_prompt_tokens + cut.num_output_tokens == most
    assert cut.finish_reason == "length"
    error = refusal(agent.post("generate", {"messages": [{"role": "user", "content": "?"}]}), 400)
    assert (error["code"], error["param"]) == ("context_length_exceeded", "max_context")
    assert f"max_context is {most} tokens, but the prompt has " in error["message"]
    assert "raise max_context" in error["message"]
    assert len(agent.turns()) == 2

    wider = agent.say("Hello!", max_context=10 * most, max_tokens=4)
    assert wider.num_cached_tokens >= most - 1
    assert (
        tiny.request("PATCH", agent.path, json={"max_context": None}).json()["max_context"] is None
    )
    agent.say("Hello!", max_tokens=4)


def test_a_max_context_beyond_the_models_gives_no_more_of_it(tiny: RunningServer):
    model_has = tiny.get("/v1/models/hearth-tiny").json()["context"]
    agent = Agent.made(tiny, max_context=2 * model_has)
    body = {"messages": [{"role": "user", "content": "calm river " * 2 * model_has}]}
    error = refusal(agent.post("generate", body), 400)
    assert (error["code"], error["param"]) == ("context_length_exceeded", "messages")
    assert f"maximum context length is {model_has} tokens" in error["message"]
    none = tiny.post(AGENTS, {"max_context": 1})
    assert refusal(none, 400)["param"] == "max_context"


def test_a_client_that_missed_a_turn_is_told_both_numbers(tiny: RunningServer):
    agent = Agent.made(tiny)
    agent.say("Hello!", expected_turn=0)
    body = {"messages": [{"role": "user", "content": "?"}], "expected_turn": 0}
    error = refusal(agent.post("generate", body), 409)
    assert (error["code"], error["param"]) == ("turn_conflict", "expected_turn")
    assert "is 0, but the agent has 1 turns" in error["message"]
    assert len(agent.turns()) == 1


def test_an_agent_that_nobody_made_is_not_found(tiny: RunningServer):
    agent = Agent(tiny, "nobody")
    body = {"messages": [{"role": "user", "content": "?"}]}
    for response in (
        agent.post("generate", body),
        agent.post("generate", body | {"stream": True}),
        agent.post("fork", {}),
        agent.post("reset", {}),
        tiny.get(f"{agent.path}/history"),
        tiny.request("PATCH", agent.path, json={"name": "x"}),
    ):
        error = refusal(response, 404)
        assert (error["code"], error["param"]) == ("agent_not_found", "id")


# Branching and beginning anew


def test_a_fork_goes_its_own_way_from_the_turn_it_was_made_at(tiny: RunningServer):
    agent = Agent.made(tiny, system="You are helpful.")
    first = agent.say(f"The code word is {CODE}. {FILLER}")
    second = agent.say("Hello!")
    early, late = agent.fork(turn=1), agent.fork(id="fork-of-all", temperature=0.1)
    assert len(early.turns()) == 1
    assert late.view()["config"]["temperature"] == 0.1
    assert late.turns() == agent.turns()
    for fork, parent in ((early, first), (late, second)):
        answer = fork.say()
        known = parent.num_prompt_tokens + parent.num_output_tokens
        assert CODE in answer.text
        assert answer.num_computed_tokens <= answer.num_prompt_tokens - known + SLACK
    assert len(agent.turns()) == 2
    error = refusal(agent.post("fork", {"turn": 3}), 400)
    assert (error["param"], "has 2 turns" in error["message"]) == ("turn", True)


async def test_a_fork_keeps_its_kv_when_its_parent_is_deleted_and_none_of_what_came_later(
    tiny: RunningServer,
):
    agent = Agent.made(tiny, system="You are helpful.")
    first = agent.say(f"The code word is {CODE}. {FILLER}")
    agent.say(FILLER)
    await until(lambda: agent.view()["tokens"] > 2 * len(FILLER.split()), "the second turn is kept")
    fork = agent.fork(turn=1)
    view = fork.view()
    known = first.num_prompt_tokens + first.num_output_tokens
    assert known - SLACK <= view["tokens"] <= known
    assert view["status"] == "hot"
    tiny.request("DELETE", agent.path)
    assert fork.view()["tokens"] == view["tokens"]
    answer = fork.say()
    assert CODE in answer.text
    assert answer.num_cached_tokens >= 256, "what is within a block is computed again"


def test_a_reset_agent_has_forgotten_and_goes_on(tiny: RunningServer):
    agent = Agent.made(tiny, system="You are helpful.")
    agent.say(f"The code word is {CODE}. {FILLER}")
    view = agent.post("reset", {}).json()
    assert (view["turns"], view["bytes"], view["status"]) == (0, 0, "none")
    assert agent.turns() == []
    answer = agent.say()
    assert CODE not in answer.text
    assert answer.turn == 1


def test_deleting_an_agent_leaves_no_byte_of_what_was_said(tiny: RunningServer):
    secret = "confidential-harbour-99"
    agent = Agent.made(tiny, system=f"You are helpful. {secret}-system")
    agent.say(f"The password is {secret}.")
    held = list(tiny.home.glob("history.sqlite3*"))
    assert any(secret.encode() in path.read_bytes() for path in held)
    tiny.request("DELETE", agent.path)
    assert not any(secret.encode() in path.read_bytes() for path in held if path.exists())
    assert secret not in tiny.stderr
