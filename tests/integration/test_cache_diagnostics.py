"""Cache diagnostics: a request that names an earlier answer is told where their prompts part."""

from __future__ import annotations

import json
from collections.abc import Generator
from typing import Any

import pytest
from anthropic.types import Message
from openai.types.responses import Response

from tests.running_server import RunningServer, running

LONG = "The keeper lights the lamp and writes the weather down. " * 12
LOOK: dict[str, Any] = {"name": "look", "input_schema": {"type": "object"}}
FUNCTION: dict[str, Any] = {"type": "function", "name": "look", "parameters": {"type": "object"}}
NOT_FOUND = {"cache_miss_reason": {"type": "previous_message_not_found"}}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Generator[RunningServer]:
    with running(tmp_path_factory.mktemp("home")) as server:
        yield server
        assert "Traceback" not in server.stderr


def said(server: RunningServer, **fields: Any) -> dict[str, Any]:
    answer = server.post("/v1/messages", message_body(**fields))
    assert answer.status_code == 200, answer.text
    Message.model_validate(answer.json(), strict=False)
    return answer.json()


def message_body(**fields: Any) -> dict[str, Any]:
    return {
        "model": "hearth-tiny",
        "max_tokens": 4,
        "temperature": 0,
        "system": f"Be a keeper. {LONG}",
        "tools": [LOOK],
        "messages": [{"role": "user", "content": f"Who are you? {LONG}"}],
    } | fields


def num_prompt(answer: dict[str, Any]) -> int:
    return sum(n for name, n in answer["usage"].items() if name.endswith("input_tokens"))


def compared(first: dict[str, Any] | None) -> dict[str, Any]:
    return {"previous_message_id": None if first is None else first["id"]}


def test_a_message_that_goes_on_from_the_named_one_has_nothing_to_tell(
    server: RunningServer,
) -> None:
    first = said(server, diagnostics=compared(None))
    assert first["diagnostics"] is None
    messages = [
        *message_body()["messages"],
        {"role": "assistant", "content": first["content"]},
        {"role": "user", "content": "And now?"},
    ]
    assert said(server, messages=messages, diagnostics=compared(first))["diagnostics"] is None
    assert "diagnostics" not in said(server)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"tools": [LOOK, LOOK | {"name": "hear"}]}, "tools_changed"),
        ({"system": f"Be a sailor. {LONG}"}, "system_changed"),
        ({"messages": [{"role": "user", "content": f"Where are you? {LONG}"}]}, "messages_changed"),
    ],
)
def test_a_message_is_told_the_first_part_that_changed_and_what_that_cost(
    server: RunningServer, change: dict[str, Any], reason: str
) -> None:
    first = said(server)
    then = said(server, **change, diagnostics=compared(first))
    missed = num_prompt(first) - then["hearth"]["cache"]["cached_tokens"]
    assert missed > 0
    told = {"type": reason, "cache_missed_input_tokens": missed}
    assert then["diagnostics"] == {"cache_miss_reason": told}


def test_a_stream_says_it_in_its_beginning(server: RunningServer) -> None:
    first = said(server)
    other = [{"role": "user", "content": f"Whither? {LONG}"}]
    body = message_body(messages=other, diagnostics=compared(first), stream=True)
    with server.stream("POST", "/v1/messages", json=body) as events:
        lines = (line[6:] for line in events.iter_lines() if line.startswith("data: "))
        begun = json.loads(next(lines))["message"]
    assert begun["diagnostics"]["cache_miss_reason"]["type"] == "messages_changed"


def test_what_is_not_known_is_not_found_whether_it_was_deleted_or_never_there(
    server: RunningServer,
) -> None:
    kept = said(server, thread={"type": "create"})
    assert said(server, diagnostics=compared(kept))["diagnostics"] is None
    server.request("DELETE", f"/v1/messages/{kept['id']}")
    for one in (kept, {"id": "msg_never"}):
        assert said(server, diagnostics=compared(one))["diagnostics"] == NOT_FOUND


def made(server: RunningServer, **fields: Any) -> dict[str, Any]:
    body = {
        "model": "hearth-tiny",
        "max_output_tokens": 4,
        "instructions": f"Stay a keeper. {LONG}",
        "tools": [FUNCTION],
        "input": f"Who are you? {LONG}",
    }
    answer = server.post("/v1/responses", body | fields)
    assert answer.status_code == 200, answer.text
    Response.model_validate(answer.json())
    return answer.json()


def against(first: dict[str, Any]) -> dict[str, Any]:
    return {"comparison_response_id": first["id"]}


def test_a_response_is_told_where_its_prompt_parts_from_the_named_one(
    server: RunningServer,
) -> None:
    first = made(server, store=False)
    num_tokens = first["usage"]["input_tokens"]
    for change, reason in (
        ({"tools": [FUNCTION, FUNCTION | {"name": "hear"}]}, "tools_changed"),
        ({"instructions": f"Stay a sailor. {LONG}"}, "input_changed"),
        ({"input": f"Where are you? {LONG}"}, "input_changed"),
    ):
        then = made(server, **change, prompt_cache_options=against(first))
        assert then["prompt_cache_diagnostics"] == {
            "type": "cache_miss",
            "reason": reason,
            "cache_missed_tokens": num_tokens - then["hearth"]["cache"]["cached_tokens"],
            "comparison_reusable_tokens": num_tokens,
        }
        assert then["prompt_cache_options"]["comparison_response_id"] == first["id"]


def test_a_response_that_goes_on_is_a_hit_and_a_deleted_one_is_not_found(
    server: RunningServer,
) -> None:
    first = made(server)
    options = against(first)
    more: dict[str, Any] = {"input": "And now?", "previous_response_id": first["id"]}
    then = made(server, **more, prompt_cache_options=options)
    assert then["prompt_cache_diagnostics"] == {"type": "cache_hit"}
    assert server.get(f"/v1/responses/{then['id']}").json() == then
    server.request("DELETE", f"/v1/responses/{first['id']}")
    told = made(server, prompt_cache_options=options)["prompt_cache_diagnostics"]
    assert told == {"type": "comparison_response_not_found"}
