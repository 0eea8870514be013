"""Whole agents, as their users install them: exactly the requests that their turns need, each of
which finds the one before in the cache.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.clients.conftest import MODEL
from tests.clients.node_clients import Project, installed
from tests.running_server import RunningServer
from tests.waiting import until

pytestmark = [pytest.mark.soak, pytest.mark.timeout(1200)]

CONTEXT = 32768
RECOMPUTED = 32
"""So many tokens of the prompt before may be computed again: the last ones, and a turn's end."""

_LINE = re.compile(
    r"POST (?P<path>/\S+) .*cached_tokens=(?P<cached>\d+) .*prompt_tokens=(?P<prompt>\d+) "
    r".*status=(?P<status>\d+)"
)


class Request(NamedTuple):
    """A request as the server's log tells it."""

    path: str
    cached: int
    prompt: int
    status: int


def requests_of(server: RunningServer) -> list[Request]:
    found = (_LINE.search(line) for line in server.stderr.splitlines())
    return [
        Request(one["path"], int(one["cached"]), int(one["prompt"]), int(one["status"]))
        for one in found
        if one is not None
    ]


def asked_since(server: RunningServer, num_before: int, num_asked: int) -> list[Request]:
    """What was asked after so many requests, once the line of each of `num_asked` is written."""
    num_all = num_before + num_asked
    asyncio.run(until(lambda: len(requests_of(server)) >= num_all, "a line of each request"))
    return requests_of(server)[num_before:]


def check_cached(requests: Sequence[Request]) -> None:
    """Every one succeeded, and had the prompt before it in the cache."""
    assert {one.status for one in requests} == {200}
    for before, after in pairwise(requests):
        assert after.cached >= before.prompt - RECOMPUTED, (before, after)


def lines_of(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines() if line.startswith("{")]


# pi

PI_APIS = {
    "chat": ("openai-completions", "/v1"),
    "messages": ("anthropic-messages", ""),
    "responses": ("openai-responses", "/v1"),
}
PI_CLI = "node_modules/@earendil-works/pi-coding-agent/dist/bundle/cli.js"


def pi_home(folder: Path, url: str) -> Path:
    """A home in which pi knows the server by all three protocols."""
    model = {"id": MODEL, "contextWindow": CONTEXT, "maxTokens": 200}
    providers = {
        name: {"baseUrl": url + path, "api": api, "apiKey": "unused", "models": [model]}
        for name, (api, path) in PI_APIS.items()
    }
    (folder / ".pi" / "agent").mkdir(parents=True)
    config = folder / ".pi" / "agent" / "models.json"
    config.write_text(json.dumps({"providers": providers}))
    return folder


def pi_turn(pi: Project, home: Path, provider: str, *arguments: str) -> int:
    """One question to pi; how many answers of the model it needed."""
    flags = ["--provider", provider, "--model", MODEL, "--mode", "json"]
    cli = pi.folder / PI_CLI
    ended = pi.run(cli, *flags, *arguments, home=home, PI_OFFLINE="1")
    assert ended.returncode == 0, ended.stderr
    ends = [one["message"] for one in lines_of(ended.stdout) if one["type"] == "message_end"]
    answers = [one for one in ends if one["role"] == "assistant"]
    assert answers
    assert all(one["stopReason"] in ("stop", "toolUse", "length") for one in answers), answers
    return len(answers)


@pytest.mark.parametrize("provider", PI_APIS)
def test_pi_asks_once_for_each_turn_and_keeps_its_cache(
    tiny_server: RunningServer, tmp_path: Path, provider: str
) -> None:
    pi = installed("pi", "@earendil-works/pi-coding-agent@0.87.1")
    home = pi_home(tmp_path, tiny_server.url)
    num_before = len(requests_of(tiny_server))
    num_answers = pi_turn(pi, home, provider, "-p", "Say hello.")
    num_answers += pi_turn(pi, home, provider, "-c", "-p", "And once more, please.")
    asked = asked_since(tiny_server, num_before, num_answers)
    assert len(asked) == num_answers
    check_cached(asked)


# Codex

CODEX_CONFIG = """
model = "{model}"
model_provider = "local"
model_context_window = {context}
[model_providers.local]
name = "local"
base_url = "{url}/v1"
env_key = "LOCAL_KEY"
wire_api = "responses"
[analytics]
enabled = false
"""
CODEX_FLAGS = ("--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", "--json")


def codex_turn(codex: Project, home: Path, *arguments: str) -> int:
    """One question to Codex; how many things the model said or called in it."""
    cli = codex.folder / "node_modules" / "@openai" / "codex" / "bin" / "codex.js"
    ended = codex.run(
        cli, "exec", *CODEX_FLAGS, *arguments, home=home, CODEX_HOME=str(home), LOCAL_KEY="unused"
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    events = [one["type"] for one in lines_of(ended.stdout)]
    assert events[-1] == "turn.completed", ended.stdout
    assert "error" not in events, ended.stdout
    return events.count("item.completed")


def test_codex_asks_through_responses_and_keeps_its_cache(
    tiny_server: RunningServer, tmp_path: Path
) -> None:
    codex = installed("codex", "@openai/codex@0.169.0")
    (tmp_path / "config.toml").write_text(
        CODEX_CONFIG.format(model=MODEL, context=CONTEXT, url=tiny_server.url)
    )
    num_before = len(requests_of(tiny_server))
    num_items = codex_turn(codex, tmp_path, "Say hello.")
    num_items += codex_turn(codex, tmp_path, "resume", "--last", "And once more, please.")
    asked = asked_since(tiny_server, num_before, 2)
    assert {one.path for one in asked} == {"/v1/responses"}
    assert 2 <= len(asked) <= num_items
    check_cached(asked)


# Claude Code


def claude_turn(claude: Project, home: Path, url: str, *arguments: str) -> int:
    """One question to Claude Code; how many turns of the model it counts."""
    cli = claude.folder / "node_modules" / "@anthropic-ai" / "claude-code" / "cli-wrapper.cjs"
    ended = claude.run(
        cli,
        *arguments,
        "--output-format",
        "json",
        home=home,
        ANTHROPIC_BASE_URL=url,
        ANTHROPIC_AUTH_TOKEN="unused",
        ANTHROPIC_MODEL=MODEL,
        ANTHROPIC_SMALL_FAST_MODEL=MODEL,
        CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC="1",
        CLAUDE_CODE_MAX_CONTEXT_TOKENS=str(CONTEXT),
        CLAUDE_CODE_MAX_OUTPUT_TOKENS="200",
        DISABLE_AUTOUPDATER="1",
        DISABLE_TELEMETRY="1",
        DISABLE_ERROR_REPORTING="1",
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    result = json.loads(ended.stdout)
    assert not result["is_error"], result
    return int(result["num_turns"])


def test_claude_code_never_repeats_a_request_and_keeps_its_cache(
    tiny_server: RunningServer, tmp_path: Path
) -> None:
    claude = installed("claude", "@anthropic-ai/claude-code@2.1.329")
    num_before = len(requests_of(tiny_server))
    num_turns = claude_turn(claude, tmp_path, tiny_server.url, "-p", "Say hello.")
    num_turns += claude_turn(claude, tmp_path, tiny_server.url, "--continue", "-p", "Once more.")
    asked = asked_since(tiny_server, num_before, num_turns)
    assert {one.path for one in asked} == {"/v1/messages"}
    # Whatever it does not understand in a stream it asks for again without one.
    assert len(asked) == num_turns
    check_cached(asked)
