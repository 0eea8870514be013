"""An agent on a running server, as its client sees it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tests.conversation import CODE, QUESTION
from tests.running_server import RunningServer

AGENTS = "/v1/agents"
FILLER = " ".join(f"On day {day} the river was calm." for day in range(40))
SLACK = 12
"""Tokens around a new message: its role, its end, and where the answer is opened."""
SYSTEM = f"You are helpful. The code word is {CODE}."


@dataclass(frozen=True)
class Said:
    """One answer and what it says of itself."""

    text: str
    reasoning: str | None
    tool_calls: list[Any]
    turn: int
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    finish_reason: str

    @property
    def num_computed_tokens(self) -> int:
        return self.num_prompt_tokens - self.num_cached_tokens


@dataclass(frozen=True)
class Agent:
    """Makes requests for one agent; each fails the test unless it succeeds."""

    server: RunningServer
    id: str

    @staticmethod
    def made(server: RunningServer, **fields: Any) -> Agent:
        """A new agent that knows the code word and always says the same."""
        body = {"system": SYSTEM, "temperature": 0, "max_tokens": 60} | fields
        response = server.post(AGENTS, body)
        assert response.status_code == 201, response.text
        return Agent(server, response.json()["id"])

    @property
    def path(self) -> str:
        return f"{AGENTS}/{self.id}"

    def post(self, action: str, body: Any) -> Any:
        return self.server.post(f"{self.path}/{action}", body)

    def say(self, content: str = QUESTION, **fields: Any) -> Said:
        """Send one user message."""
        return self.send([{"role": "user", "content": content}], **fields)

    def send(self, messages: list[Any], **fields: Any) -> Said:
        response = self.post("generate", {"messages": messages} | fields)
        assert response.status_code == 200, response.text
        return said(response.json())

    def view(self) -> Any:
        response = self.server.get(self.path)
        assert response.status_code == 200, response.text
        return response.json()

    def turns(self, **query: Any) -> list[Any]:
        """All turns, or a page of them."""
        response = self.server.request(
            "GET", f"{self.path}/history", params={"limit": 1000} | query
        )
        assert response.status_code == 200, response.text
        return response.json()["data"]

    def fork(self, **fields: Any) -> Agent:
        response = self.post("fork", fields)
        assert response.status_code == 201, response.text
        return Agent(self.server, response.json()["id"])

    def on(self, server: RunningServer) -> Agent:
        """The same agent after a restart."""
        return Agent(server, self.id)


def said(body: Any) -> Said:
    """What a whole answer says."""
    (choice,) = body["choices"]
    usage, message = body["usage"], choice["message"]
    return Said(
        text=message["content"] or "",
        reasoning=message.get("reasoning_content"),
        tool_calls=message.get("tool_calls", []),
        turn=body["agent"]["turn"],
        num_prompt_tokens=usage["prompt_tokens"],
        num_cached_tokens=usage["prompt_tokens_details"]["cached_tokens"],
        num_output_tokens=usage["completion_tokens"],
        finish_reason=choice["finish_reason"],
    )


def refusal(response: Any, status: int) -> dict[str, Any]:
    """The error of a request that was refused with this status."""
    assert response.status_code == status, response.text
    return response.json()["error"]
