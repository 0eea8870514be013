"""Servers killed while agents generate: a history is whole turns, all acknowledged among them."""

from __future__ import annotations

import random
import sqlite3
import threading
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.agents import AGENTS, Agent
from tests.conversation import QUESTION
from tests.crash.server_store import check_store, kill, wait_until_durable
from tests.running_server import RunningServer, events_of, running

CONFIG = 'default_model = "hearth-tiny"\nstop_timeout_s = 10\n'


def messages(number: int) -> list[dict[str, str]]:
    """What is sent with one turn: of several messages, so that half of them would show."""
    return [
        {"role": "user", "content": f"This is message {number}."},
        {"role": "assistant", "content": "I see."},
        {"role": "user", "content": QUESTION},
    ]


@dataclass
class Client:
    """Sends numbered messages to one agent, streamed and not; `acknowledged` are the answers it
    saw complete, in order. After a kill it looks at the history before it goes on.
    """

    name: str
    chance: random.Random
    acknowledged: list[str] = field(default_factory=list[str])
    num_unseen: int = 0

    def run(self, server: RunningServer) -> None:
        """Until the server is gone."""
        try:
            self.catch_up(server)
            while True:
                self.acknowledged.append(self.ask(server))
        except httpx.TransportError:
            pass

    def ask(self, server: RunningServer) -> str:
        number = len(self.acknowledged)
        is_streamed = self.chance.random() < 0.5
        body: dict[str, Any] = {
            "messages": messages(number),
            "expected_turn": number,
            "stream": is_streamed,
        }
        response = Agent(server, self.name).post("generate", body)
        assert response.status_code == 200, response.text
        if not is_streamed:
            return response.json()["choices"][0]["message"]["content"]
        *events, done = events_of(response.text)
        assert done == "[DONE]", response.text
        deltas = [choice["delta"] for event in events for choice in event["choices"]]
        return "".join(delta.get("content", "") for delta in deltas)

    def catch_up(self, server: RunningServer) -> None:
        """Every acknowledged turn is there as it was, and one whose end nobody saw at most."""
        turns = Agent(server, self.name).turns()
        num_known = len(self.acknowledged)
        assert num_known <= len(turns) <= num_known + 1, (self.name, num_known, len(turns))
        self.num_unseen += len(turns) - num_known
        for number, turn in enumerate(turns):
            assert turn["turn"] == number + 1
            *sent, answer = turn["messages"]
            assert sent == messages(number)
            assert answer["role"] == "assistant"
            assert answer["content"]
            if number < num_known:
                assert answer["content"] == self.acknowledged[number]
        self.acknowledged = [turn["messages"][-1]["content"] for turn in turns]


def run_and_kill(home: Path, clients: list[Client], seconds: float) -> None:
    with running(home, config=CONFIG) as server:
        killer = threading.Timer(seconds, kill, [server])
        threads = [threading.Thread(target=client.run, args=(server,)) for client in clients]
        for thread in (*threads, killer):
            thread.start()
        for thread in (*threads, killer):
            thread.join()
        assert "Traceback" not in server.stderr


def check_history(home: Path) -> None:
    """Nobody has it open: SQLite finds it sound, and nothing was set aside."""
    with closing(sqlite3.connect(home / "history.sqlite3")) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        assert connection.execute("PRAGMA foreign_key_check").fetchall() == []
    assert not list(home.glob("history.sqlite3.aside-*"))


def kill_again_and_again(home: Path, num_kills: int, seed: int) -> list[Client]:
    chance = random.Random(seed)
    clients = [Client(f"agent-{i}", random.Random(seed + i)) for i in range(3)]
    with running(home, config=CONFIG) as server:
        for client in clients:
            Agent.made(server, id=client.name)
            client.acknowledged.append(client.ask(server))
        kill(server)
    for _ in range(num_kills):
        run_and_kill(home, clients, chance.uniform(0.05, 1.0))
    with running(home, config=CONFIG) as server:
        for client in clients:
            client.catch_up(server)
            client.acknowledged.append(client.ask(server))
        assert len(server.get(AGENTS).json()["data"]) == len(clients)
    check_history(home)
    assert check_store(home / "kv") > 0
    return clients


def test_a_history_is_whole_turns_after_kills_at_random_moments(tmp_path: Path):
    clients = kill_again_and_again(tmp_path, 1, seed=11)
    assert all(client.acknowledged for client in clients)


def test_a_deletion_that_was_broken_off_is_finished_when_it_is_asked_for_again(tmp_path: Path):
    """Killed when the history had forgotten the agent, and its KV was not deleted yet."""
    with running(tmp_path, config=CONFIG) as server:
        agent = Agent.made(server)
        said, session = agent.say(), agent.view()["session"]
        wait_until_durable(server, session, said.num_prompt_tokens)
        kill(server)
    with closing(sqlite3.connect(tmp_path / "history.sqlite3")) as connection:
        connection.execute("PRAGMA foreign_keys = ON")
        connection.execute("INSERT INTO left_sessions (session, left_s) VALUES (?, 0)", [session])
        connection.execute("DELETE FROM agents")
        connection.commit()
    with running(tmp_path, config=CONFIG) as server:
        assert server.get("/admin/cache").json()["conversations"]
        assert server.request("DELETE", agent.path).status_code == 404
        assert not server.get("/admin/cache").json()["conversations"]


@pytest.mark.soak
def test_a_lost_turn_is_noticed(tmp_path: Path):
    """The negative control."""
    clients = kill_again_and_again(tmp_path, 1, seed=11)
    with closing(sqlite3.connect(tmp_path / "history.sqlite3")) as connection:
        connection.execute("DELETE FROM turns WHERE number = 1")
        connection.commit()
    with running(tmp_path, config=CONFIG) as server, pytest.raises(AssertionError):
        clients[0].catch_up(server)


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(21, 25))
def test_a_history_is_whole_turns_after_many_kills(tmp_path: Path, seed: int):
    kill_again_and_again(tmp_path, 60, seed)
