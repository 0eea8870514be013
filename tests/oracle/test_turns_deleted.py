"""An answer that its client gives back changed is known again, until its conversation is deleted.

The client drops what the model thought, as most do, or spells a call's arguments anew: the next
prompt would differ from what was computed, if the server did not put back what it said.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from tests.calm_model import END, saying, write_calm_model
from tests.oracle.talking import BLOCK, SETTINGS, TOO_SLOW, Sightings, whole
from tests.running_server import CHAT, RunningServer, running
from tests.tiny_models import TOOL_CALL
from tests.waiting import until

THOUGHT, OTHER_THOUGHT = "let me see", "the quick brown fox"
FILLER = "the quick brown fox jumps over the lazy dog while rain falls on the hearth " * 8
TOPICS = ("vqxbzkwjhfgpdmtcnrl", "nhgkqzvjxwbdfpctmrlvqxz")
"""Words that are in nothing else. A talk without a session id is known by its length."""
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "look",
            "parameters": {"type": "object", "properties": {"at": {"type": "integer"}}},
        },
    }
]


@dataclass
class Use:
    """What an answer says of its tokens; `is_healed` if something was put back into its prompt."""

    num_prompt: int
    num_said: int
    num_cached: int
    reason: str | None
    is_healed: bool

    @property
    def num_tokens(self) -> int:
        return self.num_prompt + self.num_said


@dataclass
class Talk:
    """A client's conversation. `calls` has the model call a tool, whose arguments come back with
    other spaces.
    """

    topic: str
    session: str | None
    calls: bool = False
    messages: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    use: Use | None = None

    def forked(self, session: str | None) -> Talk:
        return Talk(self.topic, session, self.calls, list(self.messages), self.use)

    def ask(self, here: Here, thought: str = THOUGHT) -> Use:
        """A turn; what the model thinks and says is told to it."""
        question = {"role": "user", "content": f"{self.topic} {FILLER}"}
        messages = [*self.messages, question]
        said = f"<tool_call>{TOOL_CALL}</tool_call>" if self.calls else "while rain falls"
        body: dict[str, Any] = saying(here.model, f"{thought}</think>{said}{END}")
        body |= {"messages": messages, "chat_template_kwargs": {"enable_thinking": True}}
        body |= {"session_id": self.session, "max_tokens": 60}
        body |= {"tools": TOOLS} if self.calls else {}
        response = here.server.post(CHAT, body)
        assert response.status_code == 200, response.text
        answer = response.json()
        message = answer["choices"][0]["message"]
        assert message["reasoning_content"] == thought, message
        self.messages = [*messages, *self.given_back(message)]
        usage = answer["usage"]
        self.use = Use(
            usage["prompt_tokens"],
            usage["completion_tokens"],
            usage["prompt_tokens_details"]["cached_tokens"],
            answer["hearth"]["cache"]["reason"],
            any(one["rule"] == "healed_turn" for one in answer["hearth"].get("prompt", ())),
        )
        return self.use

    def given_back(self, message: dict[str, Any]) -> list[dict[str, Any]]:
        """The answer without its thoughts, and the result of its call with spaces in it."""
        if not self.calls:
            return [{"role": "assistant", "content": message["content"]}]
        [call] = message["tool_calls"]
        arguments = json.dumps(json.loads(call["function"]["arguments"]), separators=(" , ", " : "))
        function = {"name": call["function"]["name"], "arguments": arguments}
        return [
            {"role": "assistant", "tool_calls": [call | {"function": function}]},
            {"role": "tool", "tool_call_id": call["id"], "content": "rain falls"},
        ]


class Here:
    """A home and its server."""

    def __init__(self, folder: Path) -> None:
        self.home, self.model = folder / "home", folder / "models" / "m"
        write_calm_model(self.model)
        self.tokenizer = Tokenizer.from_file(str(self.model / "tokenizer.json"))
        self.sightings = Sightings()
        self.server: RunningServer

    @contextmanager
    def served(self) -> Generator[None]:
        config = f'models_dir = "{self.model.parent}"\ndefault_model = "m"\n{SETTINGS}'
        with running(self.home, config=config) as self.server:
            self.server.wait_for_the_store()
            yield
            assert "Traceback" not in self.server.stderr, self.server.stderr

    def entry(self, talk: Talk) -> Any:
        """The line of a conversation in the list, if it has one: by its name or its length."""
        if talk.session is not None:
            query = {"conversation": talk.session}
            answer = self.server.request("GET", "/admin/cache/conversation", params=query)
            return answer.json()["conversation"] if answer.status_code == 200 else None
        assert talk.use is not None
        lengths = (talk.use.num_tokens, talk.use.num_tokens - 1)
        views = self.server.get("/admin/cache").json()["conversations"]
        return next((one for one in views if one["num_tokens"] in lengths), None)

    def kept(self, talk: Talk) -> Any:
        """Its line, once its latest turn is on disk but for what is in no whole block."""

        def is_kept() -> bool:
            assert talk.use is not None
            entry = self.entry(talk)
            return entry is not None and entry["num_durable"] >= whole(talk.use.num_tokens - 1)

        asyncio.run(until(is_kept, f"{talk.topic} is on disk"))
        return self.entry(talk)

    def is_in_files(self, talk: Talk) -> bool:
        """Its topic is in some file, but for the tokens at its ends, which may be others there."""
        piece = self.tokenizer.encode(f" {talk.topic} ", add_special_tokens=False).ids[3:-3]
        return bool(self.sightings.holding(self.home, [piece]))

    def delete(self, talk: Talk) -> None:
        assert self.is_in_files(talk)
        query = {"conversation": talk.session or self.kept(talk)["id"]}
        answer = self.server.request("DELETE", "/admin/cache/conversations", params=query)
        assert answer.status_code == 200, answer.text
        assert self.entry(talk) is None


@pytest.fixture
def here(tmp_path: Path) -> Here:
    return Here(tmp_path)


def check_known(before: Use | None, after: Use, *, is_in_memory: bool = True) -> None:
    """All that was there before is reused, thoughts included."""
    assert before is not None
    assert after.is_healed
    if after.reason == TOO_SLOW and not is_in_memory:
        return
    slack = 1 if is_in_memory else BLOCK
    assert after.num_cached >= before.num_tokens - slack, (before, after)


def check_unknown(after: Use, num_shared: int) -> None:
    """Nothing is reused but what others begin with, and nothing is put back."""
    assert not after.is_healed
    assert after.num_cached <= num_shared, after


@pytest.mark.parametrize("calls", [False, True])
@pytest.mark.parametrize("is_named", [True, False])
def test_what_comes_back_changed_is_known_in_memory_and_after_a_restart_until_it_is_deleted(
    here: Here, is_named: bool, calls: bool
):
    names = ("one", "two") if is_named else (None, None)
    one, other = (Talk(topic, name, calls) for topic, name in zip(TOPICS, names, strict=True))
    with here.served():
        for talk in (one, other):
            num_shared = talk.ask(here).num_cached  # the other one begins like the first one
            check_known(talk.use, talk.ask(here))
        here.kept(one)
        here.kept(other)
    with here.served():
        for talk in (one, other):
            check_known(talk.use, talk.ask(here), is_in_memory=False)
        here.kept(other)
        here.delete(one)
        assert not here.is_in_files(one)
        check_unknown(one.ask(here), num_shared)
        check_known(other.use, other.ask(here))
        here.kept(one)
        here.delete(one)
        assert not here.is_in_files(one)
        here.kept(other)
    with here.served():
        check_unknown(one.ask(here), num_shared)
        check_known(other.use, other.ask(here), is_in_memory=False)


@pytest.mark.parametrize("is_restarted", [False, True])
def test_who_goes_on_under_another_name_keeps_what_was_said_when_the_first_one_is_deleted(
    here: Here, is_restarted: bool
):
    source = Talk(TOPICS[0], "source")
    with here.served():
        source.ask(here)
        source.ask(here)
        fork = source.forked("fork")
        fork.ask(here)
        source.ask(here)
        here.kept(source)
        here.kept(fork)
        if not is_restarted:
            here.delete(source)
            check_known(fork.use, fork.ask(here))
    with here.served():
        if is_restarted:
            here.delete(source)
        check_known(fork.use, fork.ask(here), is_in_memory=False)
        here.kept(fork)
        here.delete(fork)
        assert not here.is_in_files(fork)
        after = fork.ask(here)
        assert not after.is_healed


def test_answers_that_look_the_same_are_each_known_with_its_own_thoughts(here: Here):
    talks = [Talk(TOPICS[0], name) for name in ("one", "two")]
    with here.served():
        uses = [
            talk.ask(here, thought)
            for talk, thought in zip(talks, (THOUGHT, OTHER_THOUGHT), strict=True)
        ]
        added: set[int] = set()
        for talk, before in zip(talks, uses, strict=True):
            after = talk.ask(here)
            check_known(before, after)
            added.add(after.num_prompt - before.num_tokens)
        assert len(added) == 1, "each goes on from its own thoughts"
        here.kept(talks[0])
        here.delete(talks[0])
        check_known(talks[1].use, talks[1].ask(here))
