"""Chat completions and Responses of any parts: answered or refused, and nothing is left behind."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.integration.test_http_errors import error_in
from tests.integration.test_messages_fuzz import ANY_JSON, SCALARS, TEXT
from tests.running_server import CHAT, RunningServer, running
from tests.waiting import until

RESPONSES = "/v1/responses"
JSON = {"content-type": "application/json"}
PARTS = st.fixed_dictionaries(
    {
        "type": st.sampled_from(
            [
                *("text", "input_text", "output_text", "refusal", "image_url", "input_image"),
                *("input_file", "input_audio", "summary_text", "xyz"),
            ]
        )
    },
    optional={"text": TEXT, "refusal": TEXT, "image_url": ANY_JSON, "detail": TEXT},
)
CONTENT = st.one_of(TEXT, st.none(), st.lists(PARTS, max_size=3))
FUNCTIONS = st.fixed_dictionaries(
    {"name": st.sampled_from(["look", "x", ""]), "arguments": TEXT | st.just('{"at": 1}')}
)
CALLS = st.fixed_dictionaries(
    {"id": TEXT, "type": st.just("function"), "function": FUNCTIONS}, optional={"index": SCALARS}
)
TURNS = st.fixed_dictionaries(
    {
        "role": st.sampled_from(
            ["user", "assistant", "system", "developer", "tool", "function", "xyz"]
        ),
        "content": CONTENT,
    },
    optional={
        "tool_calls": st.lists(CALLS, max_size=2),
        "tool_call_id": TEXT,
        "name": TEXT,
        "reasoning_content": TEXT,
        "function_call": FUNCTIONS,
        "anything": ANY_JSON,
    },
)
FINE_TEXT = st.one_of(
    TEXT, st.lists(st.fixed_dictionaries({"type": st.just("text"), "text": TEXT}), max_size=2)
)
FINE_TURNS = st.one_of(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "system", "developer"]), "content": FINE_TEXT}
    ),
    st.fixed_dictionaries(
        {"role": st.just("assistant"), "content": FINE_TEXT | st.none()},
        optional={"tool_calls": st.lists(CALLS, max_size=2), "reasoning_content": TEXT},
    ),
    st.fixed_dictionaries({"role": st.just("tool"), "content": FINE_TEXT, "tool_call_id": TEXT}),
)
ITEM_TYPES = [
    *("message", "function_call", "function_call_output", "reasoning", "item_reference"),
    *("custom_tool_call", "custom_tool_call_output", "web_search_call", "xyz"),
]
ITEMS = st.fixed_dictionaries(
    {"type": st.sampled_from(ITEM_TYPES)},
    optional={
        "role": st.sampled_from(["user", "assistant", "system", "developer"]),
        "content": CONTENT,
        "id": TEXT,
        "call_id": TEXT,
        "name": st.sampled_from(["look", "x"]),
        "arguments": TEXT,
        "input": TEXT,
        "output": CONTENT,
        "summary": st.lists(PARTS, max_size=2) | ANY_JSON,
        "encrypted_content": TEXT | st.none(),
        "anything": ANY_JSON,
    },
)
FINE_ITEMS = st.one_of(
    st.fixed_dictionaries(
        {
            "role": st.sampled_from(["user", "system", "developer", "assistant"]),
            "content": FINE_TEXT,
        },
        optional={"type": st.just("message"), "id": TEXT},
    ),
    st.fixed_dictionaries(
        {
            "type": st.just("function_call"),
            "call_id": TEXT,
            "name": st.just("look"),
            "arguments": TEXT,
        }
    ),
    st.fixed_dictionaries(
        {"type": st.just("function_call_output"), "call_id": TEXT, "output": FINE_TEXT}
    ),
    st.fixed_dictionaries(
        {"type": st.just("reasoning"), "summary": st.just([])},
        optional={"encrypted_content": TEXT},
    ),
)
SCHEMA = {"type": "object", "properties": {"at": {"type": "integer"}}}
CHAT_TOOLS = [{"type": "function", "function": {"name": "look", "parameters": SCHEMA}}]
RESPONSE_TOOLS = [{"type": "function", "name": "look", "parameters": SCHEMA}]
FIELDS = [
    *("tools", "tool_choice", "temperature", "top_p", "stop", "metadata", "reasoning", "n", "seed"),
    *("response_format", "functions", "function_call", "logit_bias", "stream_options", "thinking"),
    *("instructions", "previous_response_id", "text", "include", "truncation", "store", "prompt"),
    *("parallel_tool_calls", "reasoning_effort", "chat_template_kwargs", "user", "logprobs"),
    *("top_logprobs", "extra_body", "prompt_cache_key", "session_id", "background", "anything"),
]
ODD_FIELDS = st.dictionaries(st.sampled_from(FIELDS), ANY_JSON, max_size=2)


def bodies(
    field: str, fine: st.SearchStrategy[Any], odd: st.SearchStrategy[Any], tools: list[Any]
) -> st.SearchStrategy[dict[str, Any]]:
    """Requests that have their conversation in this field."""
    known = st.fixed_dictionaries(
        {},
        optional={
            "tools": st.just(tools),
            "tool_choice": st.sampled_from(["auto", "none"]),
            "continue_final_message": st.booleans(),
            "stream": st.booleans(),
        },
    )
    told = st.lists(fine, min_size=1, max_size=6)
    odder = st.lists(fine | odd, min_size=1, max_size=4) | ANY_JSON
    return st.one_of(
        st.builds(lambda one, some: {field: one} | some, told, known),
        st.builds(lambda one, some, more: {field: one} | some | more, told, known, ODD_FIELDS),
        st.builds(lambda one, some: {field: one} | some, odder, known),
    )


REQUESTS = st.one_of(
    st.tuples(st.just(CHAT), bodies("messages", FINE_TURNS, TURNS, CHAT_TOOLS)),
    st.tuples(st.just(RESPONSES), bodies("input", FINE_ITEMS, ITEMS | TURNS, RESPONSE_TOOLS)),
)


@pytest.fixture(scope="module")
def random_server(
    tmp_path_factory: pytest.TempPathFactory, models_dir: Path
) -> Iterator[RunningServer]:
    """A server with a model that says anything; it has no worker left with work at the end."""
    config = f'models_dir = "{models_dir}"\ndefault_model = "tiny"\n'
    with running(tmp_path_factory.mktemp("random"), config=config) as server:
        yield server
        assert "Traceback" not in server.stderr


def check_served(server: RunningServer, path: str, body: dict[str, Any]) -> None:
    """It is answered to its end, or refused in OpenAI's form."""
    limit = "max_tokens" if path == CHAT else "max_output_tokens"
    body = {"model": "tiny", limit: 2} | body
    if body.get("n") not in (None, 1, 2):
        body["n"] = 1
    response = server.request("POST", path, content=json.dumps(body), headers=JSON)
    if response.status_code != 200:
        assert response.status_code in (400, 404), response.text
        error_in(response)
        return
    if body.get("stream") is not True:
        assert response.json()["object"] in ("chat.completion", "response")
    elif path == CHAT:
        assert response.text.endswith("data: [DONE]\n\n")
        assert '"error"' not in response.text
    else:
        last = response.text.removesuffix("\n\n").rsplit("\n\n", 1)[1]
        assert last.split("\n")[0].removeprefix("event: response.") in ("completed", "incomplete")


async def check_nothing_left(server: RunningServer) -> None:
    """Responses in the background end by themselves."""

    def is_idle() -> bool:
        models = server.get("/running").json()["models"]
        assert models
        return all(one["num_running"] == one["num_waiting"] == 0 for one in models)

    await until(is_idle, "nothing runs any more")
    fine = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
    assert server.post(CHAT, fine).status_code == 200


FUZZ = settings(
    max_examples=300,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


@FUZZ
@given(asked=REQUESTS)
def test_any_requests_are_answered_or_refused(
    random_server: RunningServer, asked: tuple[str, dict[str, Any]]
) -> None:
    check_served(random_server, *asked)


async def test_nothing_is_left_of_any_of_them(random_server: RunningServer) -> None:
    await check_nothing_left(random_server)


@pytest.mark.soak
@pytest.mark.timeout(3600)
@settings(FUZZ, max_examples=10_000, derandomize=False)
@given(asked=REQUESTS)
def test_ten_thousand_requests_are_answered_or_refused(
    random_server: RunningServer, asked: tuple[str, dict[str, Any]]
) -> None:
    check_served(random_server, *asked)


@pytest.mark.soak
async def test_nothing_is_left_of_ten_thousand(random_server: RunningServer) -> None:
    await check_nothing_left(random_server)
