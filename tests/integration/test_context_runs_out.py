"""Conversations that outgrow their context go on, in the words of every protocol."""

from __future__ import annotations

import json
import signal
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from typing_extensions import override

from runtime.embedded import HEARTH_TINY
from tests.integration.test_http_errors import error_in
from tests.running_server import CHAT, RunningServer, running
from tests.waiting import until

CONTEXT = 600
MOST = CONTEXT - CONTEXT // 8
"""An eighth of the context is left to the answer."""

SUMMED = 1400
"""The context where turns are summed up: the request for a summary takes some of it."""
SUMMARY_REQUEST = 150
"""Tokens with which a summary is asked for."""

CONFIG = f"""
default_model = "whole"
prewarm_share = 0
block_size = 16
spare_worker = false

[models."*".sampling]
temperature = 0

[models.whole]
path = "{HEARTH_TINY}"

[models.sums]
path = "{HEARTH_TINY}"
context = {SUMMED}
overflow = "summarise"

[models.plain]
path = "{HEARTH_TINY}"
context = {CONTEXT}

[models.short]
path = "{HEARTH_TINY}"
context = {CONTEXT}
overflow = "drop_oldest_turns"
"""
RULES = "You are helpful and brief. The code word is walrus."
SEAM_TOKENS = 4
"""How much of the end of what was said before may be computed again."""


class Turn(NamedTuple):
    """What an answer says of itself."""

    text: str
    num_prompt: int
    num_cached: int
    num_output: int
    dropped: dict[str, int]
    summarised: dict[str, int]
    summaries: dict[str, int]

    @property
    def num_turns_dropped(self) -> int:
        return self.dropped.get("num_turns", 0)


class Client(ABC):
    """One conversation, whole at every request. `body` and `told` are its protocol's."""

    path: str
    model = "short"

    def __init__(self, server: RunningServer) -> None:
        self.server = server
        self.said: list[tuple[str, str]] = []

    def say(self, text: str) -> Turn:
        self.said.append(("user", text))
        response = self.server.post(self.path, {"model": self.model} | self.body())
        assert response.status_code == 200, response.text
        answer = response.json()
        text, num_prompt, num_output = self.told(answer)
        hearth = answer["hearth"]
        rewrites = {one["rule"]: one for one in hearth.get("prompt", [])}
        self.said.append(("assistant", text))
        cached = hearth["cache"]["cached_tokens"]
        return Turn(
            text,
            num_prompt,
            cached,
            num_output,
            rewrites.get("dropped_turns", {}),
            rewrites.get("summarised_turns", {}),
            hearth.get("summaries", {}),
        )

    @abstractmethod
    def body(self) -> dict[str, Any]: ...

    @abstractmethod
    def told(self, answer: dict[str, Any]) -> tuple[str, int, int]: ...

    def messages(self) -> list[dict[str, Any]]:
        return [{"role": role, "content": text} for role, text in self.said]


class Chat(Client):
    path = CHAT

    @override
    def body(self) -> dict[str, Any]:
        return {"messages": [{"role": "system", "content": RULES}, *self.messages()]}

    @override
    def told(self, answer: dict[str, Any]) -> tuple[str, int, int]:
        usage = answer["usage"]
        text = answer["choices"][0]["message"]["content"]
        return text, usage["prompt_tokens"], usage["completion_tokens"]


class Named(Chat):
    """With a session id, whose conversation says when all of it is on disk."""

    @override
    def body(self) -> dict[str, Any]:
        return super().body() | {"session_id": "named"}


class Messages(Client):
    path = "/v1/messages"

    @override
    def body(self) -> dict[str, Any]:
        return {"system": RULES, "max_tokens": 60, "messages": self.messages()}

    @override
    def told(self, answer: dict[str, Any]) -> tuple[str, int, int]:
        usage = answer["usage"]
        read = usage["cache_read_input_tokens"] + usage["cache_creation_input_tokens"]
        text = "".join(one.get("text", "") for one in answer["content"])
        return text, usage["input_tokens"] + read, usage["output_tokens"]


class Responses(Client):
    path = "/v1/responses"

    @override
    def body(self) -> dict[str, Any]:
        return {"instructions": RULES, "input": self.messages(), "store": False}

    @override
    def told(self, answer: dict[str, Any]) -> tuple[str, int, int]:
        usage = answer["usage"]
        (message,) = [one for one in answer["output"] if one["type"] == "message"]
        return message["content"][0]["text"], usage["input_tokens"], usage["output_tokens"]


class Truncated(Responses):
    """As a client of Responses asks for it, of a model whose owner said nothing."""

    model = "plain"

    @override
    def body(self) -> dict[str, Any]:
        return super().body() | {"truncation": "auto"}


class Ollama(Client):
    path = "/api/chat"

    @override
    def body(self) -> dict[str, Any]:
        messages = [{"role": "system", "content": RULES}, *self.messages()]
        return {"messages": messages, "stream": False}

    @override
    def told(self, answer: dict[str, Any]) -> tuple[str, int, int]:
        return answer["message"]["content"], answer["prompt_eval_count"], answer["eval_count"]


class Agent(Client):
    """Its history is the server's; model and context are its own."""

    model = "whole"

    context, overflow = CONTEXT, "drop_oldest_turns"

    def __init__(self, server: RunningServer) -> None:
        super().__init__(server)
        own = {"model": "whole", "max_context": self.context, "overflow": self.overflow}
        made = server.post("/v1/agents", {"system": RULES, "temperature": 0} | own)
        assert made.status_code == 201, made.text
        self.agent = f"/v1/agents/{made.json()['id']}"
        self.path = f"{self.agent}/generate"

    @override
    def body(self) -> dict[str, Any]:
        return {"messages": self.messages()[-1:]}

    @override
    def told(self, answer: dict[str, Any]) -> tuple[str, int, int]:
        usage = answer["usage"]
        text = answer["choices"][0]["message"]["content"]
        return text, usage["prompt_tokens"], usage["completion_tokens"]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with running(tmp_path_factory.mktemp("overflow"), config=CONFIG) as server:
        yield server
        assert "Traceback" not in server.stderr


def words(number: int) -> str:
    return f"Note {number}: the fox is by the river. " + "The rain falls on the hill. " * 3


@pytest.mark.parametrize("kind", [Chat, Messages, Responses, Truncated, Ollama, Agent])
def test_an_outgrown_conversation_goes_on_and_what_is_left_of_it_is_reused_turn_by_turn(
    kind: type[Client], server: RunningServer
):
    client = kind(server)
    last = client.say("What is the code word?")
    num_cuts = 0
    for number in range(24):
        turn = client.say(words(number))
        assert turn.num_prompt <= MOST
        if turn.num_turns_dropped == last.num_turns_dropped:
            assert turn.num_cached >= last.num_prompt + last.num_output - SEAM_TOKENS
        else:
            num_cuts += 1
            assert turn.num_turns_dropped > last.num_turns_dropped
            assert turn.dropped["num_places"] == 2 * turn.num_turns_dropped
            assert turn.dropped["num_tokens"] >= CONTEXT // 4
            assert turn.num_cached > 0
        last = turn
    assert num_cuts >= 2
    assert "walrus" in client.say("What is the code word?").text


def outgrown(server: RunningServer, kind: type[Client] = Chat) -> Client:
    """A conversation that does not fit, never sent yet."""
    client = kind(server)
    for number in range(30):
        client.said += [("user", words(number)), ("assistant", f"Noted {number}.")]
    return client


def test_an_agents_history_stays_whole(server: RunningServer):
    agent = Agent(server)
    turns = [agent.say(words(number)) for number in range(12)]
    assert turns[-1].num_turns_dropped
    history = server.get(f"{agent.agent}/history").json()
    assert len(history["data"]) == 12
    view = server.get(agent.agent).json()
    assert view["config"]["overflow"] == "drop_oldest_turns"


def test_a_stream_tells_as_much(server: RunningServer):
    client = outgrown(server)
    client.said.append(("user", "And now?"))
    body = {"model": "short", "stream": True, "stream_options": {"include_usage": True}}
    text = server.post(CHAT, body | client.body()).text
    events = [json.loads(line[6:]) for line in text.split("\n\n") if line.startswith("data: {")]
    *_, hearth = [one["hearth"] for one in events if "hearth" in one]
    (told,) = hearth["prompt"]
    assert told["rule"] == "dropped_turns"
    assert told["num_turns"] * 2 == told["num_places"] > 0


def test_what_a_client_or_nobody_asks_for_is_refused_as_ever(server: RunningServer):
    body = outgrown(server, Responses).body()
    for more in ({"model": "plain"}, {"model": "short", "truncation": "disabled"}):
        error = error_in(server.post("/v1/responses", body | more))
        assert error["code"] == "context_length_exceeded"
    body = outgrown(server).body()
    for more in ({"model": "plain"}, {"model": "short", "overflow": "refuse"}):
        error = error_in(server.post(CHAT, body | more))
        assert error["code"] == "context_length_exceeded"
    assert server.post(CHAT, body | {"overflow": "whatever"}).status_code == 400


def test_a_last_turn_that_is_too_long_alone_is_refused_with_the_remedy(server: RunningServer):
    client = outgrown(server)
    client.said.append(("user", "The fox is here. " * 400))
    error = error_in(server.post(CHAT, {"model": "short"} | client.body()))
    assert error["code"] == "context_length_exceeded"
    assert "Shorten what the user says last or choose a model" in error["message"]
    limited = {"model": "whole", "overflow": "drop_oldest_turns", "max_context": CONTEXT}
    error = error_in(server.post(CHAT, client.body() | limited))
    assert error["param"] == "max_context"
    assert "or raise max_context" in error["message"]


def test_who_counts_is_told_of_what_was_sent(server: RunningServer):
    body = {"model": "short"} | outgrown(server, Messages).body()
    counted = server.post("/v1/messages/count_tokens", body).json()["input_tokens"]
    assert counted > CONTEXT


def all_are_durable(server: RunningServer) -> bool:
    listed = server.get("/admin/cache").json()["conversations"]
    return bool(listed) and all(one["is_durable"] for one in listed)


class SummedChat(Chat):
    model = "sums"


class SummedMessages(Messages):
    model = "sums"


class SummedResponses(Responses):
    model = "sums"


class SummedAgent(Agent):
    context, overflow = SUMMED, "summarise"


@pytest.mark.parametrize("kind", [SummedChat, SummedMessages, SummedResponses, SummedAgent])
def test_what_goes_is_summed_up_once_and_the_summary_is_read_turn_by_turn(
    kind: type[Client], server: RunningServer
):
    client = kind(server)
    last = client.say(f"{kind.__name__} asks: what is the code word?")
    num_made = 0
    for number in range(40):
        turn = client.say(words(number))
        assert not turn.dropped
        assert turn.num_prompt <= SUMMED - SUMMED // 8
        if turn.summarised == last.summarised:
            assert not turn.summaries
            assert turn.num_cached >= last.num_prompt + last.num_output - SEAM_TOKENS
        else:
            num_made += turn.summaries["num_summaries"]
            gone = turn.summarised["num_turns"]
            assert gone > last.summarised.get("num_turns", 0)
            assert turn.summarised["num_places"] == 2 * gone
            # Of the conversation all is known: only the request for the summary is new.
            made = turn.summaries
            assert made["prompt_tokens"] - made["cached_tokens"] <= SUMMARY_REQUEST
            assert turn.summaries["output_tokens"] > 0
        last = turn
    assert num_made >= 2


def test_where_a_summary_has_no_room_the_turns_are_dropped_and_that_is_told(
    server: RunningServer,
):
    client = outgrown(server)
    client.said.append(("user", "And now?"))
    limited = {"model": "whole", "overflow": "summarise", "max_context": 200, "max_tokens": 4}
    hearth = server.post(CHAT, client.body() | limited).json()["hearth"]
    assert [one["rule"] for one in hearth["prompt"]] == ["dropped_turns"]
    assert hearth["notes"] == ["not_summarised"]


class SummedNamed(Named):
    model = "sums"


@pytest.mark.parametrize(("kind", "num_turns"), [(Named, 10), (SummedNamed, 18)])
async def test_after_a_kill_it_is_cut_in_the_same_place_and_what_is_left_is_reused(
    tmp_path: Path, kind: type[Client], num_turns: int
):
    with running(tmp_path, config=CONFIG) as server:
        client = kind(server)
        turns = [client.say(words(number)) for number in range(num_turns)]
        before = turns[-1]
        told = before.dropped or before.summarised
        assert told == (turns[-2].dropped or turns[-2].summarised)
        assert told["num_turns"]
        await until(lambda: all_are_durable(server), "every conversation is on disk")
        server.process.send_signal(signal.SIGKILL)
        server.process.wait()
    with running(tmp_path, config=CONFIG) as server:
        client.server = server
        after = client.say("And now?")
        assert (after.dropped or after.summarised) == told
        assert not after.summaries
        assert after.num_cached >= before.num_prompt - SEAM_TOKENS
