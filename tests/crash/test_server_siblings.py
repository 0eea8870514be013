"""Row 18: agents that share a beginning never take or spoil what is another's."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from store.block_names import BLOCK_TOKENS
from tests.conversation import CODE, QUESTION
from tests.crash.server_store import check_store, stored_tokens
from tests.running_server import CHAT, RunningServer, running

NUM_BRANCHES = 3
"""The sibling, the edit, and the answer that nobody read."""
CONFIG = 'default_model = "hearth-tiny"\n'
RIVER = "On day {} the river was calm and the boats stayed in the harbour."


class Talk:
    """Agents over one server: everything each was told, and what was computed for it."""

    def __init__(self, num_sentences: int) -> None:
        filler = " ".join(RIVER.format(day) for day in range(num_sentences))
        system = f"You are helpful. The code word is {CODE}."
        self.shared = [
            {"role": "system", "content": system},
            {"role": "user", "content": filler},
            {"role": "assistant", "content": "I see."},
        ]
        self.agents: dict[str, list[Any]] = {}
        self.num_prompt_tokens: dict[str, int] = {}
        self.num_shared_tokens = 0
        self.num_computed = 0

    def start(self, name: str) -> None:
        self.agents[name] = [*self.shared, {"role": "user", "content": f"I am {name}. {QUESTION}"}]

    def turn(self, server: RunningServer, name: str) -> dict[str, Any]:
        """Ask the agent's next question; what the answer says of the cache."""
        answer = self.ask(server, self.agents[name], session_id=name)
        message = answer["choices"][0]["message"]
        assert CODE in message["content"]
        self.agents[name] += [message, {"role": "user", "content": QUESTION}]
        self.num_prompt_tokens[name] = answer["usage"]["prompt_tokens"]
        self.num_shared_tokens = self.num_shared_tokens or answer["usage"]["prompt_tokens"]
        return answer["hearth"]["cache"]

    def ask(self, server: RunningServer, messages: Sequence[Any], **fields: Any) -> dict[str, Any]:
        body = {"messages": messages, "temperature": 0, "max_tokens": 60} | fields
        response = server.request("POST", CHAT, json=body, timeout=600)
        assert response.status_code == 200, response.text
        answer = response.json()
        usage, cache = answer["usage"], answer["hearth"]["cache"]
        # Decoding is a step ahead: also the KV of the token that ends an answer is computed.
        self.num_computed += usage["prompt_tokens"] - cache["cached_tokens"]
        self.num_computed += usage["completion_tokens"]
        return answer


def ping_pong(talk: Talk, server: RunningServer, num_turns: int) -> None:
    for name in ("Ada", "Bob"):
        talk.start(name)
    for turn in range(num_turns):
        for name in ("Ada", "Bob"):
            before = talk.num_prompt_tokens.get(name)
            cache = talk.turn(server, name)
            if before is not None:
                assert cache["cached_tokens"] >= before - 1, (name, turn, cache)
            elif name == "Bob":
                assert cache["cached_tokens"] >= talk.num_prompt_tokens["Ada"] - 40


def retry(talk: Talk, server: RunningServer) -> None:
    messages = talk.agents["Ada"][:-2]
    answer = talk.ask(server, messages)
    assert answer["hearth"]["cache"]["cached_tokens"] == answer["usage"]["prompt_tokens"] - 1


def edit(talk: Talk, server: RunningServer) -> None:
    """Half of a long text is new; what came before it is not computed again."""
    text = talk.shared[1]["content"]
    edited = text[: len(text) // 2] + " BUT " + text[len(text) // 2 :]
    messages = [talk.shared[0], {"role": "user", "content": edited}, *talk.agents["Bob"][2:]]
    answer = talk.ask(server, messages)
    share = answer["hearth"]["cache"]["cached_tokens"] / talk.num_shared_tokens
    assert 0.4 < share < 0.6
    assert answer["hearth"]["cache"]["reason"] == "diverged"
    assert CODE in answer["choices"][0]["message"]["content"]


def abort(talk: Talk, server: RunningServer) -> None:
    """Leave in the middle of an answer; what was asked stays known."""
    messages = [*talk.agents["Ada"][:-1], {"role": "user", "content": "Tell me all of it."}]
    body = {"messages": messages, "temperature": 0, "max_tokens": 2000, "stream": True}
    body |= {"ignore_eos": True}
    before = talk.num_prompt_tokens["Ada"]
    with server.stream("POST", CHAT, json=body) as response:
        next(response.iter_lines())
    answer = talk.ask(server, messages)
    prompt_tokens = answer["usage"]["prompt_tokens"]
    assert answer["hearth"]["cache"]["cached_tokens"] >= before - 1
    talk.num_computed += prompt_tokens - before  # the prompt of the answer that nobody read


def scenario(home: Path, num_sentences: int, num_turns: int) -> None:
    talk = Talk(num_sentences)
    with running(home, config=CONFIG) as server:
        ping_pong(talk, server, num_turns)
        retry(talk, server)
        edit(talk, server)
        abort(talk, server)
        for name in ("Ada", "Bob"):
            before = talk.num_prompt_tokens[name]
            assert talk.turn(server, name)["cached_tokens"] >= before - 1
    assert check_store(home / "kv") > 0
    with running(home, config=CONFIG) as server:
        # Who leaves another's block before its end keeps the beginning of it as well, and what is
        # behind the last whole block of each is in no slot.
        begun = NUM_BRANCHES * (BLOCK_TOKENS - 1)
        behind = len(server.get("/admin/cache").json()["conversations"]) * (BLOCK_TOKENS - 1)
        num_stored = stored_tokens(server)
        assert 0.9 * talk.num_computed - behind < num_stored <= talk.num_computed + begun
        for name in ("Ada", "Bob"):
            before = talk.num_prompt_tokens[name]
            cache = talk.turn(server, name)
            assert cache["tier"] in ("warm", "hot")
            assert cache["cached_tokens"] >= before - 1
        assert server.figure("hearth_kv_hash_mismatches_total") == 0


def test_siblings_share_their_beginning_and_nothing_else(tmp_path: Path):
    scenario(tmp_path, num_sentences=60, num_turns=4)


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_siblings_share_their_beginning_for_a_hundred_turns(tmp_path: Path):
    """A hundred turns end at the 8,000 tokens over which hearth-tiny is known to recall."""
    scenario(tmp_path, num_sentences=150, num_turns=100)
