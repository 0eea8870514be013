"""What a conversation's tools say is on disk for as long as it is kept, and nowhere after that.

The head of a conversation has its tools as text, which no search for tokens sees.
"""

from __future__ import annotations

import asyncio
import base64
from contextlib import suppress
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest

from tests.running_server import CHAT, RunningServer, running
from tests.waiting import until

CONFIG = "prewarm = false\nblock_size = 16\n"
NAMES = ("one", "two", "three")


class Talk:
    """A client's conversation, whose tools say what nobody else's do."""

    def __init__(self, name: str) -> None:
        self.session, self.canary = name, f"zqxv{name}canary"
        self.messages: list[dict[str, str]] = []
        self.is_kept = False

    def ask(self, server: RunningServer, number: int) -> None:
        """A turn; one that goes on is read as what was said."""
        self.messages.append(
            {"role": "user", "content": f"The note of {self.session} is {number}."}
        )
        function = {"name": "look", "description": f"{self.canary} is what it looks at."}
        body: dict[str, Any] = {
            "model": "hearth-tiny",
            "messages": self.messages,
            "tools": [{"type": "function", "function": function}],
            "session_id": self.session,
            "max_tokens": 12,
            "temperature": 0,
        }
        answer = server.post(CHAT, body)
        assert answer.status_code == 200, answer.text
        said = answer.json()
        rules = [one["rule"] for one in said["hearth"].get("prompt", ())]
        assert ("healed_turn" in rules) == self.is_kept
        text = said["choices"][0]["message"]["content"] or ""
        self.messages.append({"role": "assistant", "content": text})
        self.is_kept = True

    def delete(self, server: RunningServer) -> None:
        query = {"conversation": self.session}
        answer = server.request("DELETE", "/admin/cache/conversations", params=query)
        assert answer.status_code == 200, answer.text
        self.messages, self.is_kept = [], False

    def is_in_files(self, home: Path) -> bool:
        """In any of the forms in which text may be there."""
        text = self.canary.encode()
        shifted = [base64.b64encode(b"\0" * n + text)[4 * (n > 0) : -4] for n in range(3)]
        while True:
            with suppress(FileNotFoundError):  # what was renamed meanwhile is looked for again
                found = [path.read_bytes() for path in home.rglob("*") if path.is_file()]
                return any(form in data for data in found for form in (text, *shifted))


@pytest.mark.parametrize("seed", [1, 2])
def test_tools_are_on_disk_while_their_conversation_is_kept_and_then_nowhere(
    tmp_path: Path, seed: int
):
    chance, talks = Random(seed), [Talk(name) for name in NAMES]
    for _ in range(3):  # starts
        with running(tmp_path, config=CONFIG) as server:
            server.wait_for_the_store()
            for number in range(6):
                talk = chance.choice(talks)
                if talk.is_kept and chance.random() < 0.4:
                    talk.delete(server)
                else:
                    talk.ask(server, number)
                for one in talks:
                    if one.is_kept:
                        is_there = partial(one.is_in_files, tmp_path)
                        asyncio.run(until(is_there, f"{one.canary} is there"))
                    else:
                        assert not one.is_in_files(tmp_path)
            assert "Traceback" not in server.stderr, server.stderr
