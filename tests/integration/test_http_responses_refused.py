"""Whatever is wrong with a Responses request: a 400 that names the field, never a 500."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.integration.test_http_errors import ANY_JSON, error_in
from tests.integration.test_http_responses import (
    AGENTS_TOOL,
    BODY,
    FUNCTION,
    RESPONSES,
    made,
    text,
)
from tests.running_server import RunningServer

PICTURE = {"type": "input_image", "image_url": "data:image/png;base64,AAAA"}
WRONG: list[tuple[dict[str, Any], str]] = [
    ({"input": None}, "input"),
    ({"input": []}, "input"),
    ({"input": 7}, "input"),
    ({"input": ["hi"]}, "input[0]"),
    ({"input": [{"role": "wizard", "content": "hi"}]}, "input[0].role"),
    ({"input": [{"role": "user", "content": 1}]}, "input[0].content"),
    (
        {"input": [{"role": "user", "content": [{"type": "input_text"}]}]},
        "input[0].content[0].text",
    ),
    ({"input": [{"role": "user", "content": [{"type": "input_file"}]}]}, "input[0].content[0]"),
    ({"input": [{"role": "user", "content": [text("a"), PICTURE]}]}, "input[0].content[1]"),
    ({"input": [{"type": "function_call", "name": "f"}]}, "input[0].call_id"),
    ({"input": [{"type": "item_reference", "id": "msg_0"}]}, "input[0]"),
    ({"previous_response_id": "resp_0"}, "previous_response_id"),
    ({"conversation": "conv_1", "previous_response_id": "resp_1"}, "previous_response_id"),
    ({"prompt": {"id": "pmpt_1"}}, "prompt"),
    ({"metadata": {f"n{i}": "a" for i in range(17)}}, "metadata"),
    ({"metadata": {"n" * 65: "a"}}, "metadata"),
    ({"metadata": {"n": "請" * 513}}, "metadata.n"),
    ({"instructions": "word " * 900_000}, "instructions"),
    ({"user": "x" * 3_000_000, "instructions": "x" * 2_000_000}, "user"),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"truncation": "sometimes"}, "truncation"),
    ({"top_logprobs": 21}, "top_logprobs"),
    ({"background": True, "store": False}, "background"),
    ({"text": {"format": {"type": "xml"}}}, "text.format"),
    ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format"),
    ({"tools": [{"type": "function"}]}, "tools[0].name"),
    ({"tools": [FUNCTION | {"parameters": [1]}]}, "tools[0].parameters"),
    ({"tools": [{"type": "custom", "name": "c", "format": {"type": "x"}}]}, "tools[0].format.type"),
    ({"tools": [AGENTS_TOOL | {"tools": [{"type": "function"}]}]}, "tools[0].tools[0].name"),
    ({"tools": [FUNCTION], "tool_choice": "always"}, "tool_choice"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tools": [FUNCTION], "tool_choice": {"type": "function", "name": "f"}}, "tool_choice"),
    ({"tools": [{"type": "web_search"}], "tool_choice": {"type": "web_search"}}, "tool_choice"),
    ({"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs.tokenize"),
    ({"temperature": 3}, "temperature"),
    ({"thinking": 7}, "thinking"),
]


@pytest.mark.parametrize(("changes", "param"), WRONG)
def test_a_wrong_field_is_refused_by_its_path(
    server: RunningServer, changes: dict[str, Any], param: str
) -> None:
    for path in (RESPONSES, f"{RESPONSES}/input_tokens"):
        response = server.post(path, BODY | changes)
        error = error_in(response)
        assert response.status_code == 400, error
        assert error["param"] == param, error


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ("/resp_1?stream=maybe", "stream"),
        ("/resp_1?stream=true&starting_after=-1", "starting_after"),
        ("/resp_1/input_items?limit=1000", "limit"),
        ("/resp_1/input_items?order=up", "order"),
    ],
)
def test_a_wrong_parameter_is_refused_by_its_name(
    server: RunningServer, query: str, param: str
) -> None:
    response = server.get(RESPONSES + query)
    error = error_in(response)
    assert (response.status_code, error["param"]) == (400, param)
    assert error["message"].startswith(f"{param}: ")


def test_a_forced_hosted_tool_is_refused_by_its_name(server: RunningServer) -> None:
    for kind in ("web_search", "file_search", "code_interpreter", "computer_use_preview", "mcp"):
        body = BODY | {"tools": [{"type": kind}, FUNCTION], "tool_choice": {"type": kind}}
        error = error_in(server.post(RESPONSES, body))
        assert kind in error["message"]
        assert made(server, tools=[{"type": kind}])["hearth"]["ignored"] == [f"tools[0]: {kind}"]


# Any JSON at all

FIELDS = [
    *("input", "instructions", "tools", "tool_choice", "text", "reasoning", "include", "metadata"),
    *("previous_response_id", "truncation", "stream", "store", "thinking", "temperature"),
]
KINDS = [
    *("message", "function_call", "function_call_output", "custom_tool_call", "reasoning"),
    *("custom_tool_call_output", "item_reference", "web_search_call", "compaction"),
]
ITEMS = st.lists(
    st.fixed_dictionaries(
        {"type": st.sampled_from(KINDS)},
        optional={
            "role": st.sampled_from(["system", "developer", "user", "assistant", "tool"]),
            "content": st.one_of(st.text(max_size=8), ANY_JSON),
            "call_id": st.one_of(st.text(min_size=1, max_size=4), ANY_JSON),
            "name": st.one_of(st.text(min_size=1, max_size=4), ANY_JSON),
            "arguments": st.one_of(st.text(max_size=4), ANY_JSON),
            "output": ANY_JSON,
            "input": ANY_JSON,
            "summary": ANY_JSON,
            "encrypted_content": st.one_of(st.text(max_size=4), ANY_JSON),
            "id": st.one_of(st.text(max_size=4), ANY_JSON),
        },
    ),
    max_size=3,
)
BODIES = st.builds(
    lambda items, changes: {"input": items} | changes,
    ITEMS,
    st.dictionaries(st.sampled_from(FIELDS), ANY_JSON, max_size=2),
)


def answered_or_refused(server: RunningServer, body: dict[str, Any]) -> None:
    body |= {"max_output_tokens": 1, "model": "tiny"}
    response: httpx.Response = server.post(RESPONSES, body)
    if response.status_code != 200:
        assert 400 <= response.status_code < 500, response.text
        error_in(response)


@settings(
    max_examples=150,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(body=BODIES)
def test_any_json_is_answered_or_refused(server: RunningServer, body: dict[str, Any]) -> None:
    answered_or_refused(server, body)


@pytest.mark.soak
@pytest.mark.timeout(1800)
@settings(
    max_examples=10_000,
    deadline=None,
    derandomize=False,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(body=BODIES)
def test_ten_thousand_requests_are_answered_or_refused(
    server: RunningServer, body: dict[str, Any]
) -> None:
    answered_or_refused(server, body)
