"""Which program asks, and in which of its conversations."""

from __future__ import annotations

import pytest

from api.http.caller import caller_of
from api.http.clients import client_family


@pytest.mark.parametrize(
    ("user_agent", "family"),
    [
        ("claude-cli/2.1.329 (external, sdk-cli)", "claude-code"),
        ("codex_exec/0.169.0 (Debian 13; x86_64) dumb (codex_exec; 0.169.0)", "codex"),
        ("codex_cli_rs/0.40.0", "codex"),
        ("opencode/1.18.33 ai-sdk/provider-utils/4.0.0 runtime/bun/1.3.0", "opencode"),
        ("ai-sdk/openai-compatible/3.0.92 opencode/1.18.33", "opencode"),
        ("QwenCode/0.24.4 (linux; x64)", "qwen-code"),
        ("Cline/3.0.65", "cline"),
        ("pi/0.87.1", "pi"),
        ("OpenAI/Python 3.52.0", "openai-sdk"),
        ("AsyncOpenAI/Python 3.52.0", "openai-sdk"),
        ("Anthropic/JS 1.11.0", "anthropic-sdk"),
        ("AsyncAnthropic/Python 2.12.0", "anthropic-sdk"),
        ("python-httpx/0.28.1", ""),
        ("pip/26.0", ""),
        ("", ""),
    ],
)
def test_a_program_is_known_by_its_user_agent(user_agent: str, family: str) -> None:
    assert client_family({"user-agent": user_agent}) == family


def test_a_program_is_known_by_headers_that_only_it_sends() -> None:
    sdk = {"user-agent": "Anthropic/JS 1.11.0"}
    assert client_family({**sdk, "x-claude-code-session-id": "s"}) == "claude-code"
    assert client_family({"originator": "codex_exec"}) == "codex"
    assert client_family({"originator": "somebody"}) == ""
    assert client_family({}) == ""


def test_a_sub_agent_has_a_conversation_of_its_own() -> None:
    headers = {"x-claude-code-session-id": "s1"}
    assert caller_of(headers).session == "s1"
    assert caller_of({**headers, "x-claude-code-agent-id": "a7"}).session == "s1/a7"
    assert caller_of({"x-claude-code-agent-id": "a7"}).session is None
