"""Claude Code behind LiteLLM's proxy: its billing line arrives without the headers that tell it.

The bodies have the shapes that LiteLLM 1.106.2 was recorded to send, with text of our own.
"""

from __future__ import annotations

from collections.abc import Callable
from hashlib import blake2b
from itertools import pairwise
from typing import Any, NamedTuple

import pytest

from tests.running_server import CHAT, RunningServer

HEADERS = {"user-agent": "litellm/1.106.2", "authorization": "Bearer unused"}
RULES = "You are an agent. " + " ".join(
    f"Rule {number}: say what was done, then go on to what is next." for number in range(20)
)
MEMORY = "Memory: ~/.memory/"
SCHEMA = {"type": "object", "properties": {"at": {"type": "integer"}}}
SEAM_TOKENS = 4
"""How much of the end of the prompt before may be computed again."""


class Told(NamedTuple):
    """What an answer says."""

    text: str
    num_prompt: int
    num_cached: int
    rules: dict[str, int]


def billing(request: str) -> str:
    """Its line, which is another one at every request."""
    nonce = blake2b(request.encode(), digest_size=3).hexdigest()[:5]
    return (
        f"x-anthropic-billing-header: cc_version=2.1.329.ec4; cc_entrypoint=sdk-cli; cch={nonce};"
    )


def chat(server: RunningServer, session: str, said: list[tuple[str, str]], line: str) -> Told:
    """As with `hosted_vllm/NAME`, which sends chat completions."""
    parts = [{"type": "text", "text": text} for text in (line, RULES, MEMORY)]
    turns = [{"role": role, "content": text} for role, text in said]
    function = {"name": "look", "description": "Look.", "parameters": SCHEMA}
    answer = asked(
        server,
        CHAT,
        messages=[{"role": "system", "content": parts}, *turns],
        tools=[{"type": "function", "function": function}],
        max_tokens=20,
        reasoning_effort="high",
        prompt_cache_key=session,
    )
    usage = answer["usage"]
    return Told(
        answer["choices"][0]["message"]["content"],
        usage["prompt_tokens"],
        usage["prompt_tokens_details"]["cached_tokens"],
        rules_of(answer),
    )


def responses(server: RunningServer, session: str, said: list[tuple[str, str]], line: str) -> Told:
    """As with `openai/NAME`."""
    kinds = {"user": "input_text", "assistant": "output_text"}
    items = [
        {"type": "message", "role": role, "content": [{"type": kinds[role], "text": text}]}
        for role, text in said
    ]
    tool = {"type": "function", "name": "look", "strict": False, "description": "Look."}
    answer = asked(
        server,
        "/v1/responses",
        instructions=f"{line}\n{RULES}\n{MEMORY}",
        input=items,
        tools=[tool | {"parameters": SCHEMA}],
        max_output_tokens=20,
        include=["reasoning.encrypted_content"],
        prompt_cache_key=session,
        user=f'{{"session_id":"{session}"}}',
    )
    texts = [one for one in answer["output"] if one["type"] == "message"]
    usage = answer["usage"]
    return Told(
        "".join(part["text"] for one in texts for part in one["content"]),
        usage["input_tokens"],
        usage["input_tokens_details"]["cached_tokens"],
        rules_of(answer),
    )


def messages(server: RunningServer, session: str, said: list[tuple[str, str]], line: str) -> Told:
    """As with `anthropic/NAME`."""
    marked = {"type": "text", "text": RULES, "cache_control": {"type": "ephemeral"}}
    answer = asked(
        server,
        "/v1/messages",
        system=[{"type": "text", "text": line}, marked, {"type": "text", "text": MEMORY}],
        messages=[{"role": role, "content": text} for role, text in said],
        tools=[{"name": "look", "description": "Look.", "input_schema": SCHEMA}],
        max_tokens=20,
        metadata={"user_id": f'{{"session_id":"{session}"}}'},
    )
    usage = answer["usage"]
    num_cached = usage["cache_read_input_tokens"]
    num_new = usage["input_tokens"] + usage["cache_creation_input_tokens"]
    text = "".join(one["text"] for one in answer["content"] if one["type"] == "text")
    return Told(text, num_new + num_cached, num_cached, rules_of(answer))


def asked(server: RunningServer, path: str, **body: Any) -> dict[str, Any]:
    body |= {"model": "hearth-tiny", "temperature": 0}
    response = server.request("POST", path, json=body, headers=HEADERS)
    assert response.status_code == 200, response.text
    return response.json()


def rules_of(answer: dict[str, Any]) -> dict[str, int]:
    return {one["rule"]: one["num_places"] for one in answer["hearth"].get("prompt", ())}


Route = Callable[[RunningServer, str, list[tuple[str, str]], str], Told]


@pytest.mark.parametrize("route", [chat, responses, messages])
def test_each_of_three_turns_goes_on_from_the_one_before(
    server: RunningServer, route: Route
) -> None:
    said: list[tuple[str, str]] = []
    turns: list[Told] = []
    for number in range(3):
        said.append(("user", f"Do step {number} of {route.__name__}."))
        turns.append(route(server, f"behind-{route.__name__}", said, billing(f"{number} {route}")))
        said.append(("assistant", turns[-1].text))
    for before, after in pairwise(turns):
        assert after.num_cached >= before.num_prompt - SEAM_TOKENS
    assert {turn.rules.get("billing_header") for turn in turns} == {1}


@pytest.mark.parametrize("route", [chat, responses, messages])
def test_a_line_that_only_resembles_it_is_read_by_the_model(
    server: RunningServer, route: Route
) -> None:
    said = [("user", "Hi")]
    told = route(server, f"resembling-{route.__name__}", said, f"{billing('1')} Be brief.")
    bare = route(server, f"resembled-{route.__name__}", said, billing("1"))
    assert "billing_header" not in told.rules
    assert told.num_prompt > bare.num_prompt
