"""Whatever is wrong with a request: a 4xx in OpenAI's envelope that names the field, no more."""

from __future__ import annotations

import json
import socket
import string
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.running_server import CHAT, COMPLETIONS, RunningServer
from tests.waiting import until

USER = {"role": "user", "content": "hi"}
BODY: dict[str, Any] = {"model": "tiny", "messages": [USER], "max_tokens": 2}
JSON = {"content-type": "application/json"}
LONE_SURROGATE = '{"city": "\\ud800"}'


def called(arguments: str) -> dict[str, Any]:
    """An assistant message with a tool call."""
    function = {"name": "weather", "arguments": arguments}
    return {"role": "assistant", "tool_calls": [{"id": "call_1", "function": function}]}


def error_in(response: httpx.Response) -> dict[str, Any]:
    """The error of an answer that has nothing but the envelope."""
    assert response.headers["content-type"].startswith("application/json")
    body = response.json()
    assert body.keys() == {"error"}
    error = body["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert "Traceback" not in error["message"]
    assert "msgspec" not in error["message"]
    return error


WRONG_CHAT: list[tuple[dict[str, Any], str]] = [
    ({"messages": []}, "messages"),
    ({"messages": None}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": [USER, "hi"]}, "messages[1]"),
    ({"messages": [{"content": "hi"}]}, "messages[0].role"),
    ({"messages": [USER, {"role": "wizard", "content": "hi"}]}, "messages[1].role"),
    ({"messages": [{"role": 1, "content": "hi"}]}, "messages[0].role"),
    ({"messages": [{"role": "user", "content": 1}]}, "messages[0].content"),
    (
        {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
        "messages[0].content[0].text",
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
        "messages[0].content[0]",
    ),
    ({"model": 7}, "model"),
    ({"model": "nobody"}, "model"),
    ({"n": 0}, "n"),
    ({"n": 17}, "n"),
    ({"n": "2"}, "n"),
    ({"stream": "yes"}, "stream"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_completion_tokens": 1.5}, "max_completion_tokens"),
    ({"temperature": "hot"}, "temperature"),
    ({"temperature": 2.1}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"seed": 2**70}, "seed"),
    ({"stop": ["x"] * 17}, "stop"),
    ({"stop": ""}, "stop"),
    ({"stop": {"a": 1}}, "stop"),
    ({"logprobs": 3}, "logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"logit_bias": {"cat": 1}}, "logit_bias"),
    ({"logit_bias": {"99999": 1}}, "logit_bias"),
    ({"logit_bias": {"1": 101}}, "logit_bias[...]"),
    ({"tools": {}}, "tools"),
    ({"tools": [{"type": "function"}]}, "tools[0].function"),
    ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
    (
        {"tools": [{"function": {"name": "f", "parameters": [1]}}]},
        "tools[0].function.parameters",
    ),
    ({"stream_options": 1}, "stream_options"),
    ({"response_format": {"type": "xml"}}, "response_format"),
    ({"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs.tokenize"),
    ({"chat_template_kwargs": {"enable_thinking": 1}}, "chat_template_kwargs.enable_thinking"),
    ({"chat_template_kwargs": []}, "chat_template_kwargs"),
]


@pytest.mark.parametrize(("changes", "param"), WRONG_CHAT)
def test_a_wrong_chat_field_is_refused_by_its_path(
    server: RunningServer, changes: dict[str, Any], param: str
) -> None:
    response = server.post(CHAT, BODY | changes)
    error = error_in(response)
    assert response.status_code == (404 if changes.get("model") == "nobody" else 400), error
    assert error["param"] == param, error
    assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"prompt": None}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt[0]"),
        ({"prompt": ["a", 1]}, "prompt[1]"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [10**6]}, "prompt"),
        ({"prompt": [[2**31]]}, "prompt[0]"),
        ({"prompt": {"a": 1}}, "prompt"),
        ({"prompt": ["a"] * 300}, "prompt"),
        ({"prompt": "a", "logprobs": 6}, "logprobs"),
        ({"prompt": "a", "echo": True, "logprobs": 6}, "logprobs"),
        ({"prompt": "a", "max_tokens": -1}, "max_tokens"),
        ({"prompt": [1, 2], "echo": True}, "echo"),
        ({"prompt": "a", "suffix": "b"}, "suffix"),
        ({"prompt": "a", "best_of": 3}, "best_of"),
        ({"prompt": "a", "n": 17}, "n"),
    ],
)
def test_a_wrong_completion_field_is_refused_by_its_path(
    server: RunningServer, changes: dict[str, Any], param: str
) -> None:
    response = server.post(COMPLETIONS, {"model": "tiny", "max_tokens": 2} | changes)
    error = error_in(response)
    assert response.status_code == 400
    assert error["param"] == param, error


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b'{"model": tiny}',
        b'{"messages": []} trailing',
        b'{"model": "\xff\xfe"}',
        b'{"temperature": NaN}',
        b'{"unknown": ' + b"[" * 5_000 + b"]" * 5_000 + b"}",
    ],
    ids=["empty", "cut", "bare word", "two", "utf-8", "nan", "deep"],
)
def test_a_body_that_is_no_json_is_refused(server: RunningServer, content: bytes) -> None:
    response = server.request("POST", CHAT, content=content, headers=JSON)
    error = error_in(response)
    assert (response.status_code, error["code"]) == (400, "invalid_json"), error


@pytest.mark.parametrize("path", [CHAT, "/v1/messages", "/v1/responses", "/v1/agents"])
@pytest.mark.parametrize("part", [b'"\xff": 1', b'"metadata": {"a": "\xff"}'])
def test_what_is_no_text_is_refused_wherever_it_stands(
    server: RunningServer, path: str, part: bytes
) -> None:
    content = b'{"messages": [{"role": "user", "content": "?"}], "input": "?", "max_tokens": 1, '
    response = server.request("POST", path, content=content + part + b"}", headers=JSON)
    assert response.status_code == 400, response.content
    assert "not UTF-8" in response.text


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (CHAT, {"messages": [{"role": "user", "content": "?"}], "max_tokens": 1}),
        (COMPLETIONS, {"prompt": "?", "max_tokens": 1}),
        ("/v1/responses", {"input": "?", "max_output_tokens": 16, "store": False}),
    ],
)
@pytest.mark.parametrize("is_streamed", [False, True])
def test_fields_of_tomorrow_are_ignored_and_named(
    server: RunningServer, path: str, fields: Any, is_streamed: bool
) -> None:
    body = {"glow": 3, "aura": {}, "mood": None, "loud": False, "stream": is_streamed}
    response = server.post(path, fields | body)
    assert response.status_code == 200, response.text
    assert '"ignored":["glow","aura"]' in response.text


@pytest.mark.parametrize("content", [b"null", b"[]", b"7", b'"hi"'])
def test_a_body_that_is_no_object_is_refused(server: RunningServer, content: bytes) -> None:
    response = server.request("POST", CHAT, content=content, headers=JSON)
    assert response.status_code == 400
    assert "expected `object`" in error_in(response)["message"]


def test_a_body_that_is_not_declared_as_json_is_refused(server: RunningServer) -> None:
    response = server.request("POST", CHAT, data={"model": "tiny"})
    assert response.status_code == 415
    assert "application/json" in error_in(response)["message"]


def test_an_unknown_model_is_answered_with_the_nearest_names(server: RunningServer) -> None:
    error = error_in(server.post(CHAT, BODY | {"model": "tinny"}))
    assert error["code"] == "model_not_found"
    assert "Did you mean tiny" in error["message"]


NAMES = ["..", "../../etc/passwd", "/etc/passwd", "a\0b", "tiny\0", "tiny/../tiny", "x" * 500]


@pytest.mark.parametrize("name", NAMES, ids=lambda name: repr(name[:16]))
def test_a_name_that_is_a_path_is_only_an_unknown_name(server: RunningServer, name: str) -> None:
    response = server.post(CHAT, BODY | {"model": name})
    error = error_in(response)
    assert (response.status_code, error["code"], error["param"]) == (
        404,
        "model_not_found",
        "model",
    )
    assert len(error["message"]) < 400


@pytest.mark.parametrize(
    "path", ["..%2f..%2fetc%2fpasswd", "%2fetc%2fpasswd", "tiny%00", "%ff%fe", "x" * 5000]
)
def test_a_model_page_with_such_a_name_is_not_found(server: RunningServer, path: str) -> None:
    response = server.get(f"/v1/models/{path}")
    assert response.status_code == 404
    assert error_in(response)["code"] == "model_not_found"


def test_a_prompt_beyond_the_context_is_refused_with_both_numbers(server: RunningServer) -> None:
    for prompt in ([9] * 4096, [9] * 4097):
        response = server.post(COMPLETIONS, {"model": "tiny", "prompt": prompt})
        error = error_in(response)
        assert (response.status_code, error["param"]) == (400, "prompt")
        assert error["code"] == "context_length_exceeded"
        assert f"{len(prompt)} tokens" in error["message"]
        assert "4096 tokens" in error["message"]
    fits = server.post(COMPLETIONS, {"model": "tiny", "prompt": [9] * 4095, "max_tokens": 50})
    assert fits.status_code == 200
    assert fits.json()["usage"]["completion_tokens"] == 1
    assert fits.json()["choices"][0]["finish_reason"] == "length"


def test_a_prompt_of_more_tokens_than_any_context_has_is_refused_for_them(
    server: RunningServer,
) -> None:
    response = server.post(COMPLETIONS, {"model": "tiny", "prompt": [100] * 500_000})
    assert response.status_code == 400
    error = error_in(response)
    assert error["code"] == "context_length_exceeded"
    assert "500000 tokens" in error["message"]
    response = server.post(COMPLETIONS, {"model": "tiny", "prompt": [100] * 2_500_000})
    assert len(response.request.content) > 10_000_000
    assert response.status_code == 400
    assert error_in(response)["code"] == "too_many_parts"


def test_a_text_far_too_long_is_not_counted_to_its_end_and_the_refusal_says_so(
    server: RunningServer,
) -> None:
    long = "a kettle hums " * 20_000
    for path, body in (
        (COMPLETIONS, {"prompt": long}),
        (CHAT, {"messages": [{"role": "user", "content": long}]}),
        ("/v1/responses", {"input": long}),
    ):
        response = server.post(path, body | {"model": "tiny"})
        error = error_in(response)
        assert (response.status_code, error["code"]) == (400, "context_length_exceeded")
        assert (
            "maximum context length is 4096 tokens, but the prompt has at least"
            in (error["message"])
        )


def test_a_body_beyond_the_limit_is_refused_unread(narrow_server: RunningServer) -> None:
    response = narrow_server.request("POST", CHAT, content=b" " * 20_000_001, headers=JSON)
    assert response.status_code == 413
    assert "max_body_bytes" in error_in(response)["message"]


def test_a_body_without_a_length_is_held_to_the_limit_too(narrow_server: RunningServer) -> None:
    pieces = (b" " * 1_000_000 for _ in range(21))
    response = narrow_server.request("POST", CHAT, content=pieces, headers=JSON)
    assert response.status_code == 413


def test_an_unknown_route_says_so(server: RunningServer) -> None:
    for method, path in [("GET", "/v1/nothing"), ("POST", "/v2/chat"), ("GET", "/..%2fetc")]:
        response = server.request(method, path)
        assert response.status_code == 404
        assert error_in(response)["code"] == "route_not_found"


@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE", "PATCH", "TRACE", "PROPFIND"])
def test_a_wrong_method_says_which_is_right(server: RunningServer, method: str) -> None:
    response = server.request(method, CHAT)
    assert response.status_code == 405
    assert "POST" in response.headers["allow"]
    assert error_in(response)["code"] == "method_not_allowed"


async def test_a_client_that_leaves_inside_its_body_is_no_error_of_the_server(
    server: RunningServer,
) -> None:
    def num_left() -> float:
        return server.figure("hearth_requests_total", route=CHAT, status="499")

    before = num_left()
    head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    with socket.create_connection(("127.0.0.1", server.port), 10) as connection:
        connection.sendall(head.encode() + b"Content-Length: 1000\r\n\r\n{")
        connection.shutdown(socket.SHUT_WR)
        assert connection.recv(1000) == b""
    await until(lambda: num_left() == before + 1, "it is counted")
    assert "unexpected error" not in server.stderr


def test_half_a_character_in_a_calls_arguments_is_read_and_told(server: RunningServer) -> None:
    answer = server.post(CHAT, BODY | {"messages": [called(LONE_SURROGATE)]})
    assert answer.status_code == 200, answer.text
    (told,) = answer.json()["hearth"]["ignored"]
    assert told.startswith("messages[0].tool_calls[0].function.arguments (1 half")


# Any JSON at all

FIELDS = [
    *("messages", "prompt", "temperature", "top_p", "top_k", "n", "stop", "stream", "seed"),
    *("logprobs", "top_logprobs", "logit_bias", "tools", "tool_choice", "response_format"),
    *("stream_options", "chat_template_kwargs", "enable_thinking", "reasoning_effort", "echo"),
]
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 3),
    st.integers(),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(max_size=6),
)
ANY_JSON = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.text(string.ascii_letters, max_size=6), inner, max_size=3),
    ),
    max_leaves=6,
)
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["system", "user", "assistant", "tool"])},
        optional={
            "content": st.one_of(st.text(max_size=8), ANY_JSON),
            "tool_calls": ANY_JSON,
            "reasoning_content": st.text(max_size=4),
            "name": ANY_JSON,
        },
    ),
    max_size=3,
)
BODIES = st.one_of(
    ANY_JSON,
    st.builds(
        lambda base, changes: base | changes,
        st.fixed_dictionaries({"messages": MESSAGES, "prompt": st.text(min_size=1, max_size=5)}),
        st.dictionaries(st.sampled_from(FIELDS), ANY_JSON, max_size=2),
    ),
)


@settings(
    max_examples=100,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(body=BODIES, path=st.sampled_from([CHAT, COMPLETIONS]))
def test_any_json_is_answered_or_refused(server: RunningServer, body: Any, path: str) -> None:
    if isinstance(body, dict):
        body |= {"max_tokens": 2, "model": "tiny"}
    response = server.request("POST", path, content=json.dumps(body), headers=JSON)
    if response.status_code != 200:
        assert 400 <= response.status_code < 500, response.text
        error_in(response)
