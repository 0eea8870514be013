"""Messages requests of any blocks: answered or refused, and nothing is left behind."""

from __future__ import annotations

import json
import string
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.messages_stream import COUNT, MESSAGES, check_message, check_order, error_in, events_in
from tests.running_server import RunningServer
from tests.waiting import until

BODY: dict[str, Any] = {
    "model": "tiny",
    "messages": [{"role": "user", "content": "hi"}],
    "max_tokens": 2,
}
JSON = {"content-type": "application/json"}
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
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
TEXT = st.text(max_size=8)
KINDS = [
    *("text", "thinking", "redacted_thinking", "tool_use", "tool_result", "image", "document"),
    *("tool_reference", "search_result", "server_tool_use", "web_search_tool_result", "xyz"),
]
PARTS = ("text", "thinking", "input", "name", "id", "content", "source", "tool_name")
BREAKPOINTS = st.fixed_dictionaries({"type": st.just("ephemeral")}, optional={"ttl": st.just("1h")})
TEXT_BLOCKS = st.fixed_dictionaries(
    {"type": st.just("text"), "text": TEXT}, optional={"cache_control": BREAKPOINTS}
)
CALLS = st.fixed_dictionaries(
    {
        "type": st.just("tool_use"),
        "id": TEXT,
        "name": st.sampled_from(["look", "x"]),
        "input": st.dictionaries(TEXT, ANY_JSON, max_size=2),
    }
)
THOUGHTS = st.fixed_dictionaries({"type": st.just("thinking"), "thinking": TEXT, "signature": TEXT})
RESULTS = st.fixed_dictionaries(
    {
        "type": st.just("tool_result"),
        "tool_use_id": TEXT,
        "content": st.one_of(TEXT, st.lists(TEXT_BLOCKS, max_size=2)),
    },
    optional={"is_error": st.booleans()},
)
ODD_BLOCKS = st.fixed_dictionaries(
    {"type": st.one_of(st.sampled_from(KINDS), SCALARS)},
    optional=dict.fromkeys(PARTS, ANY_JSON),
)


def turn(role: str, *blocks: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """A turn of this role with blocks that belong there."""
    content = st.one_of(TEXT, st.lists(st.one_of(TEXT_BLOCKS, *blocks), max_size=3))
    return st.fixed_dictionaries({"role": st.just(role), "content": content})


TURNS = st.one_of(turn("user", RESULTS), turn("assistant", THOUGHTS, CALLS), turn("system"))
ODD_TURNS = st.fixed_dictionaries(
    {
        "role": st.sampled_from(["user", "assistant", "system", "tool"]),
        "content": st.lists(
            st.one_of(TEXT_BLOCKS, CALLS, THOUGHTS, RESULTS, ODD_BLOCKS), max_size=3
        )
        | ANY_JSON,
    }
)
TOOLS = [{"name": "look", "input_schema": {"type": "object"}}]
FIELDS = [
    *("system", "tools", "tool_choice", "thinking", "output_config", "output_format", "top_k"),
    *("cache_control", "context_management", "metadata", "stop_sequences", "temperature"),
    *("stream", "service_tier", "max_tokens", "anything"),
]
ALL_WELL: dict[str, Any] = {}
BODIES = st.builds(
    lambda messages, changes: {"messages": messages} | changes,
    st.one_of(
        st.lists(TURNS, min_size=1, max_size=6), st.lists(TURNS | ODD_TURNS, min_size=1, max_size=4)
    ),
    st.one_of(
        st.sampled_from([ALL_WELL, {"tools": TOOLS}, {"stream": True}]),
        st.dictionaries(st.sampled_from(FIELDS), ANY_JSON, max_size=2),
    ),
)


def check_served(server: RunningServer, body: dict[str, Any], path: str) -> None:
    """It is answered or refused in the protocol's form, whatever it is."""
    body = {"max_tokens": 2, "model": "tiny"} | body
    if not isinstance(body["max_tokens"], int) or body["max_tokens"] > 2:
        body["max_tokens"] = 2
    response = server.request("POST", path, content=json.dumps(body), headers=JSON)
    if response.status_code != 200:
        assert response.status_code in (400, 404), response.text
        kind = "not_found_error" if response.status_code == 404 else "invalid_request_error"
        error_in(response, kind)
    elif path == COUNT:
        assert response.json()["input_tokens"] > 0
    elif body.get("stream") is True:
        check_order(events_in(response.text))
    else:
        check_message(response.json())


async def check_nothing_left(server: RunningServer) -> None:
    for figure in ("hearth_running", "hearth_waiting"):
        await until(lambda name=figure: server.figure(name, model="tiny") == 0, f"no {figure}")
    assert server.post(MESSAGES, BODY).status_code == 200


FUZZ = settings(
    max_examples=300,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


@FUZZ
@given(body=BODIES, path=st.sampled_from([MESSAGES, MESSAGES, COUNT]))
def test_any_blocks_are_answered_or_refused(
    server: RunningServer, body: dict[str, Any], path: str
) -> None:
    check_served(server, body, path)


async def test_nothing_is_left_of_any_of_them(server: RunningServer) -> None:
    await check_nothing_left(server)


@pytest.mark.soak
@pytest.mark.timeout(3600)
@settings(FUZZ, max_examples=10_000, derandomize=False)
@given(body=BODIES, path=st.sampled_from([MESSAGES, MESSAGES, COUNT]))
def test_ten_thousand_requests_of_any_blocks_are_answered_or_refused(
    server: RunningServer, body: dict[str, Any], path: str
) -> None:
    check_served(server, body, path)
