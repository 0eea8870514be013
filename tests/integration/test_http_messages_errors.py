"""Whatever is wrong with a Messages request: a 4xx in Anthropic's envelope, no more."""

from __future__ import annotations

import concurrent.futures
import time
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from tests.messages_stream import COUNT, MESSAGES, error_in
from tests.running_server import COMPLETIONS, RunningServer

USER = {"role": "user", "content": "hi"}
BODY: dict[str, Any] = {"model": "tiny", "messages": [USER], "max_tokens": 2}
JSON = {"content-type": "application/json"}
VERSION = {"anthropic-version": "2023-06-01"}


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"messages": None}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": [{"content": "hi"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": 1}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [7]}]}, "messages[0].content[0]"),
        ({"model": 7}, "model"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"temperature": 2.1}, "temperature"),
        ({"stream": "yes"}, "stream"),
        ({"tools": {}}, "tools"),
        ({"thinking": {"budget_tokens": 1}}, "thinking.type"),
        ({"metadata": "me"}, "metadata"),
        ({"stop_sequences": "x"}, "stop_sequences"),
        ({"cache_control": {"ttl": "2h"}}, "cache_control.ttl"),
        ({"cache_mode": "sometimes"}, "cache_mode"),
        (
            {"output_format": {"type": "json_schema", "schema": {"type": "nonsense"}}},
            "output_format",
        ),
    ],
)
def test_a_wrong_field_is_refused_by_its_path(
    server: RunningServer, changes: dict[str, Any], param: str
) -> None:
    response = server.post(MESSAGES, BODY | changes)
    assert response.status_code == 400
    error = error_in(response, "invalid_request_error")
    assert error["details"] == {"error_code": "invalid_request", "param": param}
    assert param in error["message"]


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"a": ' + b"[" * 100_000])
def test_a_body_that_is_no_json_object_is_refused(server: RunningServer, content: bytes) -> None:
    for path in (MESSAGES, COUNT):
        response = server.request("POST", path, content=content, headers=JSON)
        assert response.status_code == 400
        error_in(response, "invalid_request_error")


def test_a_body_that_is_not_declared_as_json_is_refused(server: RunningServer) -> None:
    response = server.request("POST", MESSAGES, data={"model": "tiny"})
    assert response.status_code == 415
    error_in(response, "invalid_request_error")


def test_an_unknown_model_is_not_found(server: RunningServer) -> None:
    response = server.post(MESSAGES, BODY | {"model": "tinny"})
    assert response.status_code == 404
    assert "Did you mean tiny" in error_in(response, "not_found_error")["message"]


@pytest.mark.parametrize(
    ("method", "path", "status", "kind"),
    [
        ("POST", "/v1/messages/batches/one", 404, "not_found_error"),
        ("GET", "/v1/messages/nothing", 405, "invalid_request_error"),
        ("GET", MESSAGES, 405, "invalid_request_error"),
        ("DELETE", COUNT, 405, "invalid_request_error"),
    ],
)
def test_what_no_handler_sees_is_refused_in_the_same_words(
    server: RunningServer, method: str, path: str, status: int, kind: str
) -> None:
    response = server.request(method, path)
    assert response.status_code == status
    error_in(response, kind)


def test_anthropics_headers_get_anthropics_words_on_any_route(server: RunningServer) -> None:
    response = server.request("GET", "/v1/models/nobody", headers=VERSION)
    assert response.status_code == 404
    error_in(response, "not_found_error")
    assert server.get("/v1/models/nobody").json()["error"]["code"] == "model_not_found"


def test_a_body_beyond_the_limit_is_refused_unread(narrow_server: RunningServer) -> None:
    content = b" " * 20_000_001
    response = narrow_server.request("POST", MESSAGES, content=content, headers=JSON)
    assert response.status_code == 413
    assert "max_body_bytes" in error_in(response, "request_too_large")["message"]


def test_a_full_queue_is_a_rate_limit_that_says_when_to_come_back(
    narrow_server: RunningServer,
) -> None:
    long: dict[str, Any] = {"model": "tiny", "max_tokens": 3000, "ignore_eos": True}
    body = long | {"prompt": ["a"] * 4, "stream": True}
    with narrow_server.stream("POST", COMPLETIONS, json=body):
        response = narrow_server.post(MESSAGES, BODY)
        assert response.status_code == 429
        error_in(response, "rate_limit_error")
        assert int(response.headers["retry-after"]) >= 1
        assert response.headers["x-should-retry"] == "true"


def test_a_model_that_cannot_be_loaded_is_not_worth_a_retry(narrow_server: RunningServer) -> None:
    response = eventually(
        lambda: narrow_server.post(MESSAGES, BODY | {"model": "broken"}),
        lambda answer: answer.status_code != 429,
    )
    assert response.status_code == 500
    error = error_in(response, "api_error")
    assert error["details"]["error_code"] == "model_load_failed"
    assert response.headers["x-should-retry"] == "false"


def eventually(
    ask: Callable[[], httpx.Response], is_good: Callable[[httpx.Response], bool]
) -> httpx.Response:
    """Ask until the places of those who left before are free, which takes a step."""
    deadline_s = time.monotonic() + 20
    response = ask()
    while not is_good(response) and time.monotonic() < deadline_s:
        response = ask()
    return response


def test_a_prompt_of_10_mb_is_counted_and_refused_while_others_are_served(
    server: RunningServer,
) -> None:
    body = BODY | {"messages": [{"role": "user", "content": "the fox " * 1_300_000}]}
    # To make a client takes as long as to be served several times.
    with (
        httpx.Client(base_url=server.url, trust_env=False, timeout=5) as client,
        concurrent.futures.ThreadPoolExecutor() as pool,
    ):
        refusal = pool.submit(server.post, MESSAGES, body)
        num_served = 0
        while not refusal.done():
            assert client.get("/health/live").status_code == 200
            num_served += 1
    assert len(refusal.result().request.content) > 10_000_000
    assert refusal.result().status_code == 400
    message = error_in(refusal.result(), "invalid_request_error")["message"]
    assert message.startswith("prompt is too long: ")
    assert message.endswith(" tokens > 4095 maximum")
    assert num_served > 3


# Models


def test_models_are_pages_for_anthropics_clients_and_a_list_for_all_others(
    server: RunningServer,
) -> None:
    listed = server.get("/v1/models").json()
    assert listed["object"] == "list"
    ids = [card["id"] for card in listed["data"]]
    for query in ("limit=", "limit=x", "after_id=nobody", "what[is]=this&what=that"):
        assert server.get(f"/v1/models?{query}").json() == listed, query
    whole = server.request("GET", "/v1/models?limit=", headers=VERSION).json()
    page = server.request("GET", "/v1/models?limit=1000", headers=VERSION).json()
    assert page == whole
    assert [model["id"] for model in page["data"]] == ids
    assert (page["first_id"], page["last_id"], page["has_more"]) == (ids[0], ids[-1], False)
    first = server.request("GET", "/v1/models?limit=1", headers=VERSION).json()
    assert (first["first_id"], first["last_id"], first["has_more"]) == (ids[0], ids[0], True)
    rest = server.request("GET", f"/v1/models?after_id={ids[0]}", headers=VERSION).json()
    assert [model["id"] for model in rest["data"]] == ids[1:]
    last = server.request("GET", f"/v1/models?before_id={ids[-1]}&limit=1", headers=VERSION)
    assert [model["id"] for model in last.json()["data"]] == ids[-2:-1]
    assert last.json()["has_more"]


@pytest.mark.parametrize("query", ["limit=0", "limit=1001", "limit=x", "after_id=nobody"])
def test_a_page_that_cannot_be_is_refused(server: RunningServer, query: str) -> None:
    response = server.request("GET", f"/v1/models?{query}", headers=VERSION)
    assert response.status_code == 400
    error_in(response, "invalid_request_error")
