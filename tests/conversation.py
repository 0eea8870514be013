"""A long conversation with a code word at its beginning, and what is said of reusing its KV."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from tests.running_server import CHAT, RunningServer

CODE = "velvet-onyx-41"
CANARY = "harbour-canary-7351"
QUESTION = "What is the code word?"
_RIVER = "On day {} the river was calm and the boats stayed in the harbour."


@dataclass(frozen=True)
class Reply:
    """One answer: its text, its prompt's length, how much of that was reused, from which tier."""

    text: str
    num_prompt_tokens: int
    num_cached_tokens: int
    tier: str
    reason: str | None

    @property
    def num_missing_tokens(self) -> int:
        return self.num_prompt_tokens - self.num_cached_tokens


@dataclass
class Conversation:
    """Grows by a turn with each question; about 27 tokens a sentence."""

    num_sentences: int
    messages: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])

    def __post_init__(self) -> None:
        system = f"You are helpful. The code word is {CODE}. Ignore {CANARY}."
        filler = " ".join(_RIVER.format(day) for day in range(self.num_sentences))
        self.messages += [
            {"role": "system", "content": system},
            {"role": "user", "content": filler},
            {"role": "assistant", "content": "I see."},
        ]

    def ask(self, server: RunningServer, question: str = QUESTION, **fields: Any) -> Reply:
        """Ask, and remember question and answer."""
        self.messages.append({"role": "user", "content": question})
        body = {"messages": self.messages, "temperature": 0, "max_tokens": 60} | fields
        response = server.post(CHAT, body)
        assert response.status_code == 200, response.text
        answer = response.json()
        text = answer["choices"][0]["message"]["content"] or ""
        self.messages.append({"role": "assistant", "content": text})
        usage, cache = answer["usage"], answer["hearth"]["cache"]
        return Reply(
            text=text,
            num_prompt_tokens=usage["prompt_tokens"],
            num_cached_tokens=usage["prompt_tokens_details"]["cached_tokens"],
            tier=cache["tier"],
            reason=cache["reason"],
        )


def wait_until_saved(server: RunningServer, num_tokens: int, timeout_s: float = 20.0) -> None:
    """Wait until the store has acknowledged at least so many tokens: they survive anything."""
    deadline_s = time.monotonic() + timeout_s

    def num_durable() -> int:
        views = server.get("/admin/cache").json()["conversations"]
        return sum(one["num_durable"] for one in views)

    while num_durable() < num_tokens:
        assert time.monotonic() < deadline_s, f"not saved within {timeout_s:g} s"
