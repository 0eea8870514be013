"""What a client says of the time after an answer decides what leaves memory first."""

from __future__ import annotations

import secrets
from collections.abc import AsyncGenerator, Generator
from pathlib import Path
from typing import Any

import pytest

from runtime.cache.service import KvStore
from runtime.keys import digest_of
from runtime.kv_messages import HotBudget
from runtime.supervisor.supervisor import Supervisor
from runtime.types import CacheParams
from store.keyed_names import Whom
from tests.asking import ask, supervising_with_store, worker_of
from tests.running_server import CHAT, RunningServer, running
from tests.tiny_models import write_model
from tests.waiting import until

KEYS = {"ada": "key-of-ada-0123456789", "bob": "key-of-bob-0123456789"}


def words(num_words: int = 150) -> str:
    """What nobody said before."""
    return " ".join(secrets.token_hex(3) for _ in range(num_words))


@pytest.fixture
async def served(tmp_path: Path) -> AsyncGenerator[tuple[Supervisor, KvStore]]:
    write_model(tmp_path / "models" / "m")
    async with supervising_with_store(tmp_path, models_dir=tmp_path / "models") as both:
        yield both


@pytest.fixture
def supervisor(served: tuple[Supervisor, KvStore]) -> Supervisor:
    return served[0]


NAMES = ("warm up", "first", "second")


def other_than(name: str) -> str:
    return "second" if name == "first" else "first"


class Talk:
    """Conversations that fill the memory there is, and which of them a third one leaves."""

    def __init__(self, supervisor: Supervisor) -> None:
        self._supervisor = supervisor
        self._num_computed = 0
        # None begins as another one does, or it would be used again by that one.
        self.texts = {
            name: f"{name[0]} {words(4 if ' ' in name else 150)}" for name in (*NAMES, "third")
        }

    async def say(self, name: str, **hints: Any) -> int:
        """How many tokens of the conversation were in memory."""
        cache = CacheParams(session_id=name, **hints)
        said = await ask(self._supervisor, self.texts[name], max_tokens=2, cache=cache)
        usage = said.finished.usage
        self._num_computed += usage.num_prompt_tokens - 1 - usage.cache.num_tokens
        return usage.cache.num_tokens

    async def fill(self) -> None:
        """From now on there is no room for one more."""
        worker, number = worker_of(self._supervisor), self._num_computed
        channel = worker.kv

        def are_kept() -> bool:
            """A prompt is counted when it is computed, and its bytes when its answer has ended."""
            is_idle = worker.watchdog.phase == "idle"
            return is_idle and channel.counts.num_computed_tokens >= number

        await until(are_kept, "both are counted and kept")
        channel.set_budget(HotBudget(num_bytes=channel.counts.hot_bytes * 6 // 5))


@pytest.mark.parametrize("over", ["first", "second"])
async def test_a_conversation_that_is_over_leaves_first(supervisor: Supervisor, over: str):
    talk = Talk(supervisor)
    for name in NAMES:
        await talk.say(name, is_last=name == over)
    await talk.fill()
    await talk.say("third")
    assert await talk.say(other_than(over)) > 100


@pytest.mark.parametrize("away", ["first", "second"])
async def test_a_conversation_whose_tool_runs_stays(supervisor: Supervisor, away: str):
    talk = Talk(supervisor)
    for name in NAMES:
        await talk.say(name, pause_s=600.0 if name == away else None)
    await talk.fill()
    await talk.say("third")
    assert await talk.say(away) > 100


@pytest.mark.parametrize("over", ["first", "second"])
async def test_it_can_be_said_between_two_requests(served: tuple[Supervisor, KvStore], over: str):
    supervisor, kv = served
    talk = Talk(supervisor)
    for name in NAMES:
        await talk.say(name)
    await talk.fill()
    kv.hint(Whom(session_id=over), None, is_over=True)
    await talk.say("third")
    assert await talk.say(other_than(over)) > 100


# Over HTTP


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Generator[RunningServer]:
    keys = "\n".join(f'{name} = "{digest_of(key)}"' for name, key in KEYS.items())
    with running(tmp_path_factory.mktemp("home"), config=f"[api_keys]\n{keys}\n") as server:
        yield server


def sent(server: RunningServer, who: str, path: str, body: dict[str, Any], **headers: str) -> Any:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    allowed = {"authorization": f"Bearer {KEYS[who]}", **named}
    return server.request("POST", path, json={"model": "hearth-tiny", **body}, headers=allowed)


def said(text: str, **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], "max_tokens": 1, **fields}


def test_hints_are_fields_or_headers_and_a_wrong_one_is_refused(server: RunningServer) -> None:
    for fields in ({"tool_pause_s": 30}, {"release": True, "session_id": "s"}):
        assert sent(server, "ada", CHAT, said("Hi", **fields)).status_code == 200
        assert sent(server, "ada", "/v1/messages", said("Hi", **fields)).status_code == 200
    headed = sent(server, "ada", CHAT, said("Hi"), x_hearth_tool_pause="30", x_hearth_release="1")
    assert headed.json()["hearth"]["ignored"] == ["release (it names no conversation)"]
    for fields, headers, param in (
        ({"tool_pause_s": -1}, {}, "tool_pause_s"),
        ({}, {"x_hearth_tool_pause": "soon"}, "x-hearth-tool-pause"),
    ):
        refused = sent(server, "ada", CHAT, said("Hi", **fields), **headers)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "session_id"),
        ({"session_id": "s", "release": True, "prefetch": True}, "release"),
        ({"session_id": "s", "release": True, "tool_pause_s": 1}, "release"),
        ({"session_id": "s", "tool_pause_s": 3601}, "tool_pause_s"),
    ],
)
def test_a_hint_that_means_nothing_is_refused(
    server: RunningServer, body: dict[str, Any], param: str
) -> None:
    refused = sent(server, "ada", "/v1/cache/hints", body)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)


async def test_only_its_own_tenant_brings_a_conversation_into_memory(server: RunningServer) -> None:
    session = secrets.token_hex(8)
    assert sent(server, "ada", CHAT, said(words(), session_id=session)).status_code == 200
    ask_for = {"session_id": session, "prefetch": True, "glow": 1}

    def brought(who: str) -> int:
        answer = sent(server, who, "/v1/cache/hints", ask_for).json()
        assert answer["hearth"] == {"ignored": ["glow"]}
        return answer["prefetched_tokens"]

    await until(lambda: brought("ada") > 100, "it is on disk, and comes")
    assert brought("bob") == 0
