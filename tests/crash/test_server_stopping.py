"""Row 21: a server that is told to stop leaves in time, and what it acknowledged stays."""

from __future__ import annotations

import signal
import threading
from pathlib import Path

import httpx

from tests.conversation import CODE, Conversation
from tests.crash.server_store import check_store, wait_until_durable
from tests.running_server import CHAT, RunningServer, running
from tests.waiting import PATIENCE_S

GRACE_S = 1.0
"""Far more than the grace, far less than the answer below takes."""

CONFIG = f'default_model = "hearth-tiny"\nstop_timeout_s = {GRACE_S}\n'
ENDLESS = {"max_tokens": 30_000, "ignore_eos": True, "stream": True, "temperature": 0}


class Reader:
    """Reads an answer that does not end by itself, until it ends in some way."""

    def __init__(self, server: RunningServer) -> None:
        self._server = server
        self._has_begun = threading.Event()
        self.lines: list[str] = []
        self._thread = threading.Thread(target=self._read)

    def __enter__(self) -> Reader:
        self._thread.start()
        assert self._has_begun.wait(PATIENCE_S)
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive()

    def _read(self) -> None:
        body = {"messages": [{"role": "user", "content": "Say a lot."}]} | ENDLESS
        try:
            with self._server.stream("POST", CHAT, json=body) as response:
                for line in response.iter_lines():
                    self.lines.append(line)
                    self._has_begun.set()
        except httpx.TransportError:
            self.lines.append("broken off")


def turn(server: RunningServer, conversation: Conversation, num_durable: int = 0) -> int:
    """A turn that reuses what is durable; how much is after it."""
    reply = conversation.ask(server, session_id="s")
    assert CODE in reply.text
    assert reply.num_cached_tokens >= num_durable - 1, reply
    wait_until_durable(server, "s", reply.num_prompt_tokens)
    return reply.num_prompt_tokens


def test_what_was_acknowledged_stays_however_it_is_told_to_stop(tmp_path: Path):
    conversation = Conversation(num_sentences=60)
    with running(tmp_path, config=CONFIG) as server:
        num_durable = turn(server, conversation)
        with Reader(server) as reader:
            assert server.stop(PATIENCE_S) == 0
        assert any('"error"' in line for line in reader.lines[-4:]), reader.lines[-4:]
        assert "Traceback" not in server.stderr
    assert check_store(tmp_path / "kv") > 0
    with running(tmp_path, config=CONFIG + "keep_alive_s = 5\n") as server:
        num_durable = turn(server, conversation, num_durable)
        with Reader(server) as reader:
            server.process.send_signal(signal.SIGINT)
            server.process.send_signal(signal.SIGINT)
            server.process.wait(PATIENCE_S)
    assert check_store(tmp_path / "kv") > 0
    with running(tmp_path, config=CONFIG) as server:
        turn(server, conversation, num_durable)
