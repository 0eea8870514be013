"""Row 1: a server killed at any moment loses nothing it acknowledged and never answers wrongly."""

from __future__ import annotations

import random
import shutil
import threading
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import mlx.core as mx
import pytest

from tests.conversation import CODE, Conversation, Reply
from tests.crash.server_store import check_store, durable_tokens, kill, wait_until_durable
from tests.running_server import RunningServer, running

CONFIG = 'default_model = "hearth-tiny"\nstop_timeout_s = 10\n'


@dataclass
class Agent:
    """Asks one question after the other, over kills; what was not answered is asked again.

    `num_durable` tokens of its conversation were acknowledged; the last complete prompt, which
    later ones continue, has `num_prompt_tokens`.
    """

    name: str
    conversation: Conversation
    num_durable: int = 0
    num_prompt_tokens: int = 0
    is_after_kill: bool = False
    replies: list[Reply] = field(default_factory=list[Reply])

    def run(self, server: RunningServer) -> None:
        """Until the server is gone."""
        try:
            while True:
                self.turn(server)
        except httpx.TransportError:
            del self.conversation.messages[2 * len(self.replies) + 3 :]
            self.is_after_kill = True

    def turn(self, server: RunningServer) -> None:
        reply = self.conversation.ask(server, session_id=self.name)
        assert CODE in reply.text, reply
        if self.is_after_kill:
            restorable = min(self.num_durable, self.num_prompt_tokens)
            assert reply.num_cached_tokens >= restorable - 1, (self.num_durable, reply)
        self.is_after_kill = False
        self.replies.append(reply)
        self.num_prompt_tokens = reply.num_prompt_tokens
        self.num_durable = max(self.num_durable, durable_tokens(server, self.name))


def run_and_kill(home: Path, agents: list[Agent], seconds: float, config: str = CONFIG) -> None:
    with running(home, config=config) as server:
        killer = threading.Timer(seconds, kill, [server])
        threads = [threading.Thread(target=agent.run, args=(server,)) for agent in agents]
        for thread in threads:
            thread.start()
        killer.start()
        for thread in (*threads, killer):
            thread.join()
        assert "Traceback" not in server.stderr


def kill_again_and_again(
    home: Path, num_kills: int, seed: int, config: str = CONFIG
) -> list[Agent]:
    chance = random.Random(seed)
    agents = [Agent(f"agent {i}", Conversation(num_sentences=60 * (i + 1))) for i in range(2)]
    with running(home, config=config) as server:
        for agent in agents:
            agent.turn(server)
            agent.num_durable = wait_until_durable(server, agent.name, agent.num_prompt_tokens)
            agent.is_after_kill = True
        kill(server)
    for _ in range(num_kills):
        run_and_kill(home, agents, chance.uniform(0.08, 1.2), config)
    with running(home, config=config) as server:
        for agent in agents:
            agent.turn(server)
    assert check_store(home / "kv") > 0
    return agents


def test_killed_at_random_moments(tmp_path: Path):
    kill_again_and_again(tmp_path, 2, seed=1)


@pytest.mark.soak
def test_what_is_acknowledged_and_not_there_is_noticed(tmp_path: Path):
    """The negative control."""
    agent, _ = kill_again_and_again(tmp_path, 1, seed=1)
    shutil.rmtree(tmp_path / "kv" / "slots")
    agent.is_after_kill = True
    with running(tmp_path, config=CONFIG) as server, pytest.raises(AssertionError, match="Reply"):
        agent.turn(server)


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.skipif(not mx.distributed.is_available("ring"), reason="no ring in this build of mlx")
def test_a_model_on_two_ranks_killed_at_random_moments(tmp_path: Path):
    kill_again_and_again(tmp_path, 8, seed=7, config=f"{CONFIG}[models.hearth-tiny]\nranks = 2\n")


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(2, 7))
def test_killed_at_random_moments_for_long(tmp_path: Path, seed: int):
    kill_again_and_again(tmp_path, 60, seed)
