"""Requests in the shape that Claude Code sends, with text of our own."""

from __future__ import annotations

from typing import Any

from api.anthropic.signature import reasoning_in
from api.http.expansion import Expansion
from tests.messages_stream import (
    MESSAGES,
    TOOLS,
    check_order,
    content_of,
    events_in,
    num_prompt_tokens,
)
from tests.running_server import RunningServer


def claude_code(*turns: Any, **changes: Any) -> dict[str, Any]:
    """A request in the shape that Claude Code sends, with text of our own."""
    reminder = {"type": "text", "text": "Skills: none.", "cache_control": {"type": "ephemeral"}}
    first = [
        {"type": "text", "text": "<system-reminder>\nBranch: main\n</system-reminder>\n"},
        {"type": "text", "text": "Read the file src/kettle/main.py."},
    ]
    deferred = {"name": "DeferredToolPlaceholder", "description": "More.", "defer_loading": True}
    return {
        "model": "hearth-tiny",
        "messages": [
            {"role": "user", "content": first},
            {"role": "system", "content": [reminder]},
            *turns,
        ],
        "system": [
            {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1.329.ec4;"},
            {"type": "text", "text": "You are an agent.", "cache_control": {"type": "ephemeral"}},
            {
                "type": "text",
                "text": "Memory: ~/.memory/",
                "cache_control": {"type": "ephemeral", "ttl": "1h", "scope": "global"},
            },
        ],
        "tools": [*TOOLS, deferred | {"input_schema": {"type": "object", "properties": {}}}],
        "metadata": {"user_id": '{"device_id":"d","account_uuid":"","session_id":"0f-1"}'},
        "max_tokens": 200,
        "thinking": {"type": "adaptive", "display": "omitted"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "high"},
        "temperature": 0,
        "stream": True,
    } | changes


HEADERS = {
    "user-agent": "claude-cli/2.1.329 (external, sdk-cli)",
    "authorization": "Bearer x",
    "anthropic-version": "2023-06-01",
    "anthropic-beta": "claude-code-20250219,interleaved-thinking-2025-05-14",
    "x-claude-code-session-id": "0f-1",
    "x-stainless-timeout": "600",
}


def run(server: RunningServer, body: dict[str, Any], **headers: str) -> list[Any]:
    response = server.request("POST", f"{MESSAGES}?beta=true", json=body, headers=HEADERS | headers)
    assert response.status_code == 200, response.text
    events = events_in(response.text)
    check_order(events)
    return events


def test_an_agents_tool_turns_build_on_one_another(server: RunningServer) -> None:
    events = run(server, claude_code())
    usage = events[-2].data["usage"]
    assert "ignored" not in events[-2].data["hearth"]
    thoughts, *said = content_of(events)
    assert (thoughts["type"], thoughts["thinking"]) == ("thinking", "")
    assert reasoning_in(thoughts["signature"], Expansion(1 << 20), "p")
    call = {
        "type": "tool_use",
        "id": "toolu_1",
        "name": "read_file",
        "input": {"path": "src/kettle/main.py"},
    }
    result = {
        "type": "tool_result",
        "tool_use_id": "toolu_1",
        "content": [{"type": "text", "text": "print('kettle')"}],
        "cache_control": {"type": "ephemeral"},
    }
    turns = [
        {"role": "assistant", "content": [thoughts, *said, call]},
        {"role": "user", "content": [result]},
    ]
    second = claude_code(*turns)
    # In a later request the reminder is a plain text, and no breakpoint stands behind it.
    second["messages"][1]["content"] = "Skills: none."
    reused = run(server, second)[-2].data["usage"]["cache_read_input_tokens"]
    assert reused >= num_prompt_tokens(usage) + usage["output_tokens"] - 4  # its own words too
