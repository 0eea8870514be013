"""Two names over the same weights: one process, and everything else by the name that asked."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from runtime.embedded import HEARTH_TINY
from tests.conversation import Conversation
from tests.running_server import CHAT, RunningServer, hearth, running
from tests.waiting import until

CODER, CHATTY = "coder", "chatty"
CONFIG = f"""
default_model = "{CODER}"
preload = []

[models.{CODER}]
path = "{HEARTH_TINY}"
aliases = ["gpt-code"]
context = 4000
sampling = {{ temperature = 0 }}

[models.{CHATTY}]
path = "{HEARTH_TINY}"
context = 1500
keep_alive_s = -1
sampling = {{ temperature = 2, seed = 7 }}
prompt_rules = {{ tools_first = false }}
"""


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RunningServer]:
    with running(tmp_path, config=CONFIG) as server:
        yield server
        assert "Traceback" not in server.stderr


def talk(text: str, num_sentences: int = 8) -> Conversation:
    """A conversation that begins with `text`, in the midst of a template's first tokens."""
    conversation = Conversation(num_sentences)
    conversation.messages[0]["content"] = f"{text}. {conversation.messages[0]['content']}"
    return conversation


def listed(server: RunningServer, name: str | None = None) -> list[dict[str, Any]]:
    query = {"model": name} if name is not None else {}
    return server.request("GET", "/admin/cache", params=query).json()["conversations"]


async def durable(server: RunningServer, number: int) -> None:
    await until(
        lambda: len(listed(server)) == number and all(v["is_durable"] for v in listed(server)),
        f"{number} conversations are on disk, of {[v['model'] for v in listed(server)]}",
    )


def pids(server: RunningServer) -> set[int]:
    return {one["pid"] for one in server.get("/running").json()["models"] if one["pid"]}


def remove(home: Path, server: RunningServer | None, name: str, how: str) -> int:
    """Delete what was asked by a name; how many conversations that were."""
    if how == "admin":
        assert server is not None
        answer = server.request("DELETE", "/admin/cache/models", params={"model": name})
        assert answer.status_code == 200, answer.text
        return answer.json()["num_conversations"]
    port = {"HEARTH_PORT": str(server.port)} if server is not None else {}
    variables = {"HEARTH_HOME": str(home), **port}
    said = hearth("cache", "rm", "--model", name, "--json", **variables)
    assert said.returncode == 0, said.stderr
    return json.loads(said.stdout)["num_conversations"]


async def test_both_names_have_one_process_which_each_asks_in_its_own_way(server: RunningServer):
    asked = {"messages": [{"role": "user", "content": "Say a number."}], "max_tokens": 12}
    said = {name: [] for name in (CODER, CHATTY)}
    for name in (CODER, CHATTY, CODER, CHATTY):
        answer = server.post(CHAT, {"model": name, **asked}).json()
        assert answer["model"] == name
        said[name].append(answer["choices"][0]["message"]["content"])
    assert len(pids(server)) == 1
    assert server.figure("hearth_worker_starts_total") == 1
    assert said[CODER][0] == said[CODER][1]
    assert said[CHATTY][0] == said[CHATTY][1], "a seed of its own"
    assert said[CODER][0] != said[CHATTY][0], "a temperature of its own"
    running_models = {one["id"]: one for one in server.get("/running").json()["models"]}
    assert running_models[CODER]["shares_with"] == [CHATTY]
    assert running_models[CHATTY]["shares_with"] == [CODER]
    assert running_models[CHATTY]["context"] == 1500
    cards = {one["id"]: one for one in server.get("/v1/models").json()["data"]}
    assert {cards[name]["state"] for name in (CODER, CHATTY)} == {"ready"}
    assert cards[CODER]["aliases"] == ["gpt-code", "hearth-tiny"]
    for name in (CODER, CHATTY):
        assert server.figure("hearth_output_tokens_total", model=name) > 0
    left = server.request("POST", f"/admin/models/{CHATTY}/unload").json()
    assert left["shares_with"] == [CODER]
    await until(lambda: not pids(server), "one process has left")
    assert {one["state"] for one in server.get("/v1/models").json()["data"]} == {"cold"}


async def test_each_name_has_its_own_context(server: RunningServer):
    long = [{"role": "user", "content": "river " * 1000}]
    for name, status in ((CODER, 200), (CHATTY, 400), (CODER, 200)):
        answer = server.post(CHAT, {"model": name, "messages": long, "max_tokens": 1})
        assert answer.status_code == status, answer.text
    assert "1500" in server.post(CHAT, {"model": CHATTY, "messages": long}).text
    assert len(pids(server)) == 1


async def test_deleting_what_one_name_said_leaves_all_of_the_others(tmp_path: Path):
    """However they share slots, and through whatever door it is deleted."""
    rng = random.Random(5)
    told: dict[tuple[str, str | None], Conversation] = {}
    with running(tmp_path, config=CONFIG) as server:
        for number in range(3):
            for name in (CODER, CHATTY):
                session = None if number == 2 else f"{name}-{number}"
                conversation = talk("Same beginning for all" if number else f"I am {name}")
                told[name, session] = conversation
        for _ in range(2):
            for (name, session), conversation in sorted(told.items(), key=lambda _: rng.random()):
                given = {"session_id": session} if session else {}
                conversation.ask(server, model=name, temperature=0, **given)
        await durable(server, 6)
        for name in (CODER, CHATTY):
            assert {view["model"] for view in listed(server, name)} == {name}
            assert len(listed(server, name)) == 3
        assert len(pids(server)) == 1
        assert remove(tmp_path, server, CHATTY, "admin") == 3
        assert {view["model"] for view in listed(server)} == {CODER}
        check_whole(server, told, CODER)
        await durable(server, 3)
        say_again(server, told, CHATTY)
        await durable(server, 6)
    assert remove(tmp_path, None, CHATTY, "without a server") == 3
    with running(tmp_path, config=CONFIG) as server:
        check_whole(server, told, CODER)
        say_again(server, told, CHATTY)
        await durable(server, 6)
        assert remove(tmp_path, server, "gpt-code", "with a server") == 3
        check_whole(server, told, CHATTY)


def check_whole(
    server: RunningServer, told: dict[tuple[str, str | None], Conversation], name: str
) -> None:
    """What is asked by this name goes on where it was: all that it said is reused."""
    for (asked, session), conversation in told.items():
        if asked != name:
            continue
        given = {"session_id": session} if session else {}
        reply = conversation.ask(server, model=name, temperature=0, **given)
        assert reply.num_missing_tokens < 64, (name, session, reply)


def say_again(
    server: RunningServer, told: dict[tuple[str, str | None], Conversation], name: str
) -> None:
    for (asked, session), conversation in told.items():
        if asked == name:
            given = {"session_id": session} if session else {}
            conversation.ask(server, model=name, temperature=0, **given)


async def test_the_same_said_by_two_names_is_each_ones_own(server: RunningServer):
    for name in (CODER, CHATTY):
        talk("The same").ask(server, model=name, temperature=0, session_id="one")
    await durable(server, 2)
    assert {view["model"] for view in listed(server)} == {CODER, CHATTY}
    assert remove(server.home, server, CODER, "admin") == 1
    [left] = listed(server)
    assert left["model"] == CHATTY
    assert left["is_durable"]
    again = talk("The same")
    reply = again.ask(server, model=CHATTY, temperature=0, session_id="one")
    assert reply.num_missing_tokens < 64
