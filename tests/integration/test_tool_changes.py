"""Tools that come and go within a conversation, and those that Anthropic defines for clients."""

from __future__ import annotations

import json
from collections.abc import Generator
from typing import Any

import pytest

from tests.integration.test_cache_diagnostics import LONG, num_prompt
from tests.running_server import RunningServer, running

SCHEMA: dict[str, Any] = {"type": "object", "properties": {"at": {"type": "string"}}}
LOOK: dict[str, Any] = {"name": "look", "input_schema": SCHEMA}
HEAR: dict[str, Any] = {"name": "hear", "input_schema": SCHEMA}
USER: dict[str, Any] = {"role": "user", "content": f"Who are you? {LONG}"}
SAID: dict[str, Any] = {"role": "assistant", "content": "The keeper."}
AND: dict[str, Any] = {"role": "user", "content": "And now?"}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Generator[RunningServer]:
    with running(tmp_path_factory.mktemp("home")) as server:
        yield server
        assert "Traceback" not in server.stderr


def ask(server: RunningServer, status: int = 200, **fields: Any) -> dict[str, Any]:
    body = {"model": "hearth-tiny", "max_tokens": 60, "temperature": 0, "tools": [LOOK]} | fields
    answer = server.post("/v1/messages", body)
    assert answer.status_code == status, answer.text
    return answer.json()


def count(server: RunningServer, *messages: dict[str, Any], **fields: Any) -> int:
    body = {"model": "hearth-tiny", "tools": [LOOK], "messages": [*messages]} | fields
    answer = server.post("/v1/messages/count_tokens", body)
    assert answer.status_code == 200, answer.text
    return answer.json()["input_tokens"]


def system(*blocks: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"role": "system", "content": [*blocks]} | more


def added(tool: dict[str, Any]) -> dict[str, Any]:
    return {"type": "tool_addition", "tool": {"type": "tool_definition", "definition": tool}}


def named(kind: str, name: str) -> dict[str, Any]:
    return {"type": kind, "tool": {"type": "tool_reference", "name": name}}


@pytest.mark.parametrize(
    ("more", "block"),
    [
        ({}, added(HEAR)),
        ({"tools": [LOOK, HEAR | {"defer_loading": True}]}, named("tool_addition", "hear")),
        ({"tools": [LOOK, HEAR]}, named("tool_addition", "hear")),
    ],
)
def test_a_tool_that_is_added_can_be_called_and_what_was_read_before_it_stays(
    server: RunningServer, more: dict[str, Any], block: dict[str, Any]
) -> None:
    first = ask(server, messages=[USER], max_tokens=1)
    choice = {"type": "tool", "name": "hear"}
    messages = [USER, SAID, system(block), AND]
    then = ask(server, messages=messages, tool_choice=choice, **more)
    assert then["content"][-1]["name"] == "hear"
    # All of the first prompt but how its answer begins, which a template may write otherwise.
    assert then["hearth"]["cache"]["cached_tokens"] >= num_prompt(first) - 8


def test_a_tool_that_is_removed_cannot_be_called_until_it_is_added_again(
    server: RunningServer,
) -> None:
    tools = [LOOK, HEAR]
    first = ask(server, messages=[USER], tools=tools, max_tokens=1)
    gone = [USER, SAID, system(named("tool_removal", "hear")), AND]
    then = ask(server, messages=gone, tools=tools, tool_choice={"type": "any"})
    assert then["content"][-1]["name"] == "look"
    assert then["hearth"]["cache"]["cached_tokens"] >= num_prompt(first) - 8
    choice = {"type": "tool", "name": "hear"}
    refused = ask(server, 400, messages=gone, tools=tools, tool_choice=choice)
    assert refused["error"]["details"]["param"] == "tool_choice.name"
    back = [*gone, SAID, system(named("tool_addition", "hear")), AND]
    assert ask(server, messages=back, tools=tools, tool_choice=choice)["content"][-1]["name"] == (
        "hear"
    )


def test_changes_outlive_the_summary_of_where_they_were_made(server: RunningServer) -> None:
    change = named("tool_removal", "look")
    summary = {"type": "compaction", "content": "We met.", "tool_changes": [added(HEAR), change]}
    messages = [{"role": "assistant", "content": [summary]}, AND]
    then = ask(server, messages=messages, tool_choice={"type": "any"})
    assert then["content"][-1]["name"] == "hear"
    bare = {"role": "assistant", "content": [{"type": "compaction", "content": "We met."}]}
    before = [USER, system(added(HEAR), change), bare, AND]
    assert count(server, *before) == count(server, *messages)


def test_a_change_of_no_tool_is_refused_by_its_place_and_told_once_it_is_past(
    server: RunningServer,
) -> None:
    change, place = system(named("tool_addition", "fly")), "messages[1].content[0].tool.name"
    refused = ask(server, 400, messages=[USER, change])
    assert refused["error"]["details"]["param"] == place
    told = ask(server, messages=[USER, change, AND])["hearth"]["ignored"]
    assert told == [f"{place} is 'fly', which no tool is called."]
    unknown = system({"type": "text", "text": "a"}, clear_at="soon")
    assert ask(server, 400, messages=[USER, unknown])["error"]["details"]["param"] == (
        "messages[1].clear_at"
    )
    assert ask(server, messages=[USER, unknown, AND])["hearth"]["ignored"] == [
        "messages[1].clear_at must be 'next_user_message' or 'never'."
    ]


def test_a_text_that_is_to_be_cleared_is_read_up_to_the_next_user_only(
    server: RunningServer,
) -> None:
    text = {"type": "text", "text": "It is raining."}
    brief = system(text, clear_at="next_user_message")
    kept = system(text, clear_at="never")
    assert count(server, USER, brief) == count(server, USER, kept)
    assert count(server, USER, brief, SAID, AND) == count(server, USER, SAID, AND)
    assert count(server, USER, kept, SAID, AND) > count(server, USER, SAID, AND)


def test_thinking_between_tools_is_none_and_the_tokens_of_thoughts_are_told(
    server: RunningServer,
) -> None:
    off = ask(server, messages=[AND], thinking={"type": "between_tools"}, max_tokens=8)
    assert "ignored" not in off["hearth"]
    assert off["usage"]["output_tokens_details"] == {"thinking_tokens": 0}
    on = ask(server, messages=[AND], thinking={"type": "enabled", "budget_tokens": 4}, max_tokens=8)
    thought = on["usage"]["output_tokens_details"]["thinking_tokens"]
    assert 0 <= thought <= on["usage"]["output_tokens"]
    assert (thought > 0) == (on["content"][0]["type"] == "thinking")


@pytest.mark.parametrize(
    ("tool", "field"),
    [
        ({"type": "bash_20250124", "name": "bash"}, ""),
        ({"type": "text_editor_20250124", "name": "str_replace_editor"}, "command"),
        ({"type": "text_editor_20250728", "name": "str_replace_based_edit_tool"}, "command"),
        ({"type": "memory_20250818", "name": "memory"}, "command"),
        (
            {
                "type": "computer_20251124",
                "name": "computer",
                "display_width_px": 1024,
                "display_height_px": 768,
                "enable_zoom": True,
            },
            "action",
        ),
    ],
)
def test_a_tool_that_anthropic_defines_for_clients_is_shown_and_called_by_its_schema(
    server: RunningServer, tool: dict[str, Any], field: str
) -> None:
    choice = {"type": "tool", "name": tool["name"]}
    strict = tool | {"strict": True}
    answer = ask(server, messages=[AND], tools=[strict], tool_choice=choice, max_tokens=400)
    call = answer["content"][-1]
    assert (call["type"], call["name"]) == ("tool_use", tool["name"])
    assert answer["stop_reason"] == "max_tokens" or not field or field in call["input"]
    assert count(server, AND, tools=[tool]) > count(server, AND, tools=[]) + 40
    result = {"type": "tool_result", "tool_use_id": call["id"], "content": "done"}
    more = [AND, {"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}]
    assert ask(server, messages=more, tools=[tool], max_tokens=4)["type"] == "message"


def test_a_tool_of_anthropics_servers_is_refused_by_name(server: RunningServer) -> None:
    tool = {"type": "web_search_20250305", "name": "web_search"}
    refused = ask(server, 400, messages=[AND], tools=[tool])
    assert refused["error"]["details"]["param"] == "tools[0]"
    assert json.dumps(refused).count("web_search_20250305") == 1
