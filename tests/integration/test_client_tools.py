"""Tools of the Responses API that the client runs: shown, called by their own items, answered."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import pytest
from openai import OpenAI
from openai.types.responses import Response

from tests.running_server import RunningServer, running

SEARCH: dict[str, Any] = {
    "type": "tool_search",
    "execution": "client",
    "parameters": {"type": "object", "properties": {"query": {"type": "string"}}},
}
WEATHER: dict[str, Any] = {
    "type": "function",
    "name": "weather",
    "parameters": {"type": "object", "properties": {"town": {"type": "string"}}},
}
USER: dict[str, Any] = {"role": "user", "content": "List the folder."}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Generator[RunningServer]:
    with running(tmp_path_factory.mktemp("home")) as server:
        yield server
        assert "Traceback" not in server.stderr


def ask(server: RunningServer, **fields: Any) -> dict[str, Any]:
    body = {"model": "hearth-tiny", "input": [USER], "max_output_tokens": 300, "temperature": 0}
    answer = server.post("/v1/responses", body | fields)
    assert answer.status_code == 200, answer.text
    Response.model_validate(answer.json())
    return answer.json()


def count(server: RunningServer, *items: dict[str, Any], **fields: Any) -> int:
    body = {"model": "hearth-tiny", "input": [USER, *items]} | fields
    answer = server.post("/v1/responses/input_tokens", body)
    assert answer.status_code == 200, answer.text
    return answer.json()["input_tokens"]


OUTPUTS: dict[str, dict[str, Any]] = {
    "shell": {
        "type": "shell_call_output",
        "output": [
            {"stdout": "a.txt\n", "stderr": "", "outcome": {"type": "exit", "exit_code": 0}},
            {"stdout": "", "stderr": "no\n", "outcome": {"type": "exit", "exit_code": 2}},
            {"stdout": "", "stderr": "", "outcome": {"type": "timeout"}},
        ],
    },
    "local_shell": {"type": "local_shell_call_output", "output": "a.txt"},
    "apply_patch": {"type": "apply_patch_call_output", "status": "failed", "output": "no such"},
}


@pytest.mark.parametrize("kind", OUTPUTS)
def test_a_tool_that_the_client_runs_is_called_by_its_own_item_and_answered(
    server: RunningServer, kind: str
) -> None:
    tools = [{"type": kind}]
    forced = {"type": "allowed_tools", "mode": "required", "tools": tools}
    made = ask(server, tools=tools, tool_choice=forced)
    assert "ignored" not in made["hearth"]
    assert made["tools"] == tools
    call = made["output"][-1]
    assert call["type"] == f"{kind}_call"
    output = OUTPUTS[kind] | {"call_id": call["call_id"]}
    if kind == "local_shell":
        output = OUTPUTS[kind] | {"id": call["call_id"]}
    then = ask(server, input=[USER, call, output], tools=tools, max_output_tokens=2)
    stored = ask(
        server, input=[output], tools=tools, max_output_tokens=2, previous_response_id=made["id"]
    )
    assert "ignored" not in then["hearth"]
    assert then["usage"]["input_tokens"] == stored["usage"]["input_tokens"]
    assert then["usage"]["input_tokens"] > made["usage"]["input_tokens"]


UNTYPED = {
    "response.apply_patch_call_operation_diff.delta",
    "response.apply_patch_call_operation_diff.done",
}
"""Events of the vendor's that its Python package has no types for."""


@pytest.mark.parametrize("kind", OUTPUTS)
def test_the_vendors_client_reads_such_a_call_as_it_is_written(
    server: RunningServer, kind: str
) -> None:
    client = OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    tools: Any = [{"type": kind}]
    choice: Any = {"type": "allowed_tools", "mode": "required", "tools": tools}
    asked: Any = [USER]
    with client.responses.create(
        model="hearth-tiny",
        input=asked,
        tools=tools,
        tool_choice=choice,
        max_output_tokens=300,
        temperature=0,
        stream=True,
    ) as stream:
        read: list[Any] = list(stream)
    for event in read:
        if event.type not in UNTYPED:
            type(event).model_validate(event.to_dict())
    told = [event.to_dict() for event in read]
    done = [one["item"] for one in told if one["type"] == "response.output_item.done"]
    assert done[-1]["type"] == f"{kind}_call"
    assert told[-1]["response"]["output"] == done
    begun = [one["item"] for one in told if one["type"] == "response.output_item.added"]
    if kind == "shell":
        commands = done[-1]["action"]["commands"]
        assert [joined(told, command_index=i) for i in range(len(commands))] == commands
        assert [one["command"] for one in told if one["type"].endswith("command.done")] == commands
    elif kind == "apply_patch":
        operation = done[-1]["operation"]
        assert begun[-1]["operation"] == operation | ({"diff": ""} if "diff" in operation else {})
        assert joined(told, item_id=done[-1]["id"]) == operation.get("diff", "")


def joined(told: list[dict[str, Any]], **where: Any) -> str:
    deltas = (one for one in told if one["type"].endswith(("command.delta", "diff.delta")))
    return "".join(one["delta"] for one in deltas if where.items() <= one.items())


def test_what_a_command_gave_is_read_with_how_it_ended(server: RunningServer) -> None:
    tools = [{"type": "shell"}]
    call = {"type": "shell_call", "call_id": "c", "action": {"commands": ["ls", "cat b"]}}
    output = OUTPUTS["shell"] | {"call_id": "c"}
    named = WEATHER | {"name": "shell"}
    as_call = {
        "type": "function_call",
        "call_id": "c",
        "name": "shell",
        "arguments": '{"commands":["ls","cat b"]}',
    }
    text = "a.txt\nno\n[exit code 2]\n[timed out]"
    as_output = {"type": "function_call_output", "call_id": "c", "output": text}
    same = count(server, as_call, as_output, tools=[named]) - count(server, tools=[named])
    assert count(server, call, output, tools=tools) - count(server, tools=tools) == same


def test_a_tool_that_a_search_found_is_shown_there_and_can_be_called(
    server: RunningServer,
) -> None:
    made = ask(server, tools=[SEARCH], tool_choice="required")
    call = made["output"][-1]
    assert (call["type"], call["execution"]) == ("tool_search_call", "client")
    found = {
        "type": "tool_search_output",
        "execution": "client",
        "call_id": call["call_id"],
        "tools": [WEATHER],
    }
    choice = {"type": "function", "name": "weather"}
    then = ask(server, input=[USER, call, found], tools=[SEARCH], tool_choice=choice)
    assert (then["output"][-1]["type"], then["output"][-1]["name"]) == ("function_call", "weather")
    assert then["tools"] == [SEARCH]
    cached = then["hearth"]["cache"]["cached_tokens"]
    assert cached >= made["usage"]["input_tokens"] - 8


def test_what_runs_on_openais_machines_is_still_named(server: RunningServer) -> None:
    tools = [
        {"type": "shell", "environment": {"type": "container_auto"}},
        {"type": "tool_search"},
    ]
    assert ask(server, tools=tools, max_output_tokens=2)["hearth"]["ignored"] == [
        "tools[0].environment: container_auto",
        "tools[1]: tool_search",
    ]
