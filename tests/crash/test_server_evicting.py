"""Row 14: what is deleted, evicted or verified while it is being restored is a miss at worst."""

from __future__ import annotations

import random
import threading
from pathlib import Path

import pytest

from tests.conversation import CODE, Conversation, Reply
from tests.crash.server_store import check_store
from tests.running_server import RunningServer, running

PEACE = 5

CONFIG = """
default_model = "hearth-tiny"
hot_bytes = 100000
prewarm_share = 0
cache_max_bytes = 70000000
"""
"""Nothing stays in memory, so every turn reads slots; the disk does not hold all of them either."""


class Crowd:
    """Agents that go on with their conversations while a stranger deletes some of them."""

    def __init__(self, server: RunningServer, num_agents: int, seed: int) -> None:
        self._server = server
        self._chance = random.Random(seed)
        self._agents = {f"agent {i}": Conversation(40 + 20 * i) for i in range(num_agents)}
        for name, conversation in self._agents.items():
            conversation.messages[0]["content"] = f"{name}. {conversation.messages[0]['content']}"
        self._news = threading.Condition()
        self._num_talking = num_agents
        self.replies: list[Reply] = []
        self.num_deleted = 0

    def run(self, num_turns: int) -> None:
        """So many turns each."""
        threads = [
            threading.Thread(target=self._talk, args=(name, num_turns)) for name in self._agents
        ]
        threads.append(threading.Thread(target=self._meddle))
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def count(self, **wanted: str) -> int:
        return sum(all(getattr(reply, k) == v for k, v in wanted.items()) for reply in self.replies)

    def _talk(self, name: str, num_turns: int) -> None:
        try:
            for _ in range(num_turns):
                reply = self._agents[name].ask(self._server, session_id=name)
                assert CODE in reply.text, (name, reply)
                with self._news:
                    self.replies.append(reply)
                    self._news.notify()
        finally:
            with self._news:
                self._num_talking -= 1
                self._news.notify()

    def _meddle(self) -> None:
        """Some conversation goes after a few answers, in the midst of the next ones."""
        num_seen = 0
        while self._num_talking:
            with self._news:
                while self._num_talking and len(self.replies) < num_seen + PEACE:
                    self._news.wait()
                num_seen = len(self.replies)
            query = {"conversation": self._chance.choice(list(self._agents))}
            answer = self._server.request("DELETE", "/admin/cache/conversations", params=query)
            assert answer.status_code in (200, 404), answer.text
            self.num_deleted += answer.json().get("num_slots", 0)
            assert self._server.request("POST", "/admin/cache/verify").json()["num_damaged"] == 0


def scenario(home: Path, num_agents: int, num_turns: int) -> None:
    with running(home, config=CONFIG) as server:
        crowd = Crowd(server, num_agents, seed=3)
        crowd.run(num_turns)
        assert len(crowd.replies) == num_agents * num_turns
        assert crowd.count(tier="warm") > 0, "nothing was restored"
        assert crowd.num_deleted > 0
        assert crowd.count(reason="damaged") == 0
        assert "Traceback" not in server.stderr
    check_store(home / "kv")


def test_conversations_go_on_while_they_are_deleted(tmp_path: Path):
    scenario(tmp_path, num_agents=3, num_turns=8)


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_conversations_go_on_while_they_are_deleted_for_long(tmp_path: Path):
    """Sixty turns end below the 8,000 tokens over which hearth-tiny is known to recall."""
    scenario(tmp_path, num_agents=8, num_turns=60)
