"""`POST /v1/messages` on the wire: events, blocks, usage, and what clients were seen to need."""

from __future__ import annotations

import asyncio
import secrets
from typing import Any

import pytest

from api.anthropic.signature import reasoning_in
from api.http.expansion import Expansion
from tests.messages_stream import (
    COUNT,
    MESSAGES,
    TOOLS,
    ask,
    check_order,
    content_of,
    num_prompt_tokens,
    reading,
    stream,
)
from tests.running_server import COMPLETIONS, RunningServer, streaming

USER = {"role": "user", "content": "hi 😀"}
THINK = {"type": "enabled", "budget_tokens": 1024}
CALL: dict[str, Any] = {
    "model": "hearth-tiny",
    "messages": [{"role": "user", "content": "What is the weather in Zurich?"}],
    "tools": TOOLS,
    "max_tokens": 100,
}
LONG: dict[str, Any] = {
    "model": "tiny",
    "prompt": "the fox",
    "max_tokens": 3500,
    "ignore_eos": True,
}


def words(num_words: int = 120) -> str:
    """Text that nobody said before."""
    return " ".join(secrets.token_hex(3) for _ in range(num_words))


# Events and blocks


@pytest.mark.parametrize("thinking", [None, THINK])
def test_a_stream_has_the_documented_order_and_says_what_the_whole_answer_says(
    server: RunningServer, thinking: Any
) -> None:
    given = {"thinking": thinking, "temperature": 1, "top_k": 1, "max_tokens": 30}
    whole, events = ask(server, **given), stream(server, **given)
    assert content_of(events) == whole["content"]
    kinds = [block["type"] for block in whole["content"]]
    assert kinds[0] == ("text" if thinking is None else "thinking")
    first, second, third = (event.name for event in events[:3])
    assert (first, second, third) == ("message_start", "content_block_start", "ping")
    delta = events[-2].data
    assert delta["delta"]["stop_reason"] == whole["stop_reason"]
    assert delta["usage"]["output_tokens"] == whole["usage"]["output_tokens"]


@pytest.mark.parametrize("thinking", [None, THINK])
def test_a_tool_call_is_a_block_whose_input_arrives_in_pieces(
    server: RunningServer, thinking: Any
) -> None:
    given = CALL | {"thinking": thinking}
    whole, events = ask(server, **given), stream(server, **given)
    for content in (whole["content"], content_of(events)):
        call = content[-1]
        assert call.pop("id").startswith("call_")
        assert call == {"type": "tool_use", "name": "get_weather", "input": {"city": "Zurich"}}
        assert [block["type"] for block in content[:-1]] == (["thinking"] if thinking else [])
    assert whole["stop_reason"] == events[-2].data["delta"]["stop_reason"] == "tool_use"
    start = [event.data for event in events if event.name == "content_block_start"][-1]
    assert start["content_block"]["input"] == {}
    pieces = [
        event.data["delta"]["partial_json"]
        for event in events
        if event.data.get("delta", {}).get("type") == "input_json_delta"
    ]
    assert "" not in pieces


def test_thoughts_that_are_not_to_be_shown_come_back_by_their_signature(
    server: RunningServer,
) -> None:
    shown = ask(server, **CALL, thinking=THINK)["content"][0]
    hidden = THINK | {"display": "omitted"}
    whole = ask(server, **CALL, thinking=hidden)
    events = stream(server, **CALL, thinking=hidden)
    for block in (whole["content"][0], content_of(events)[0]):
        assert block["thinking"] == ""
        signed = reasoning_in(block["signature"], Expansion(1 << 20), "p")
        assert signed == shown["thinking"]
    names = [event.name for event in events if event.data.get("index") == 0]
    assert names == ["content_block_start", "content_block_delta", "content_block_stop"]
    counts = {
        name: server.post(
            COUNT, CALL | {"max_tokens": None, "messages": [*CALL["messages"], turn, USER]}
        ).json()
        for name, turn in (
            ("hidden", {"role": "assistant", "content": whole["content"][:1]}),
            ("shown", {"role": "assistant", "content": [shown]}),
            ("without", {"role": "assistant", "content": []}),
        )
    }
    assert counts["hidden"] == counts["shown"] != counts["without"]


def test_an_answer_that_reaches_its_limit_says_so(server: RunningServer) -> None:
    answer = ask(server, max_tokens=3)
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("max_tokens", None)
    assert answer["usage"]["output_tokens"] == 3


def test_a_stop_sequence_ends_the_answer_and_is_named(server: RunningServer) -> None:
    text = ask(server, max_tokens=40)["content"][0]["text"]
    stop = text[10:13]
    for answer in (
        ask(server, max_tokens=40, stop_sequences=["never to be seen", stop]),
        stream(server, max_tokens=40, stop_sequences=[stop])[-2].data["delta"],
    ):
        assert (answer["stop_reason"], answer["stop_sequence"]) == ("stop_sequence", stop)


# Usage and cache


def test_counts_are_disjoint_and_those_of_count_tokens(server: RunningServer) -> None:
    system = [{"type": "text", "text": words()}]
    asked: dict[str, Any] = {"system": system, "tools": TOOLS, "thinking": THINK}
    counted = server.post(COUNT, asked | {"model": "tiny", "messages": [USER]}).json()
    first, again = ask(server, **asked)["usage"], ask(server, **asked)["usage"]
    assert counted == {"input_tokens": num_prompt_tokens(first)}
    assert num_prompt_tokens(again) == num_prompt_tokens(first)
    assert again["cache_read_input_tokens"] == counted["input_tokens"] - 1
    assert again["cache_creation_input_tokens"] == 0
    assert again["input_tokens"] == 1


def test_with_a_breakpoint_what_was_computed_counts_as_written(server: RunningServer) -> None:
    system = [{"type": "text", "text": words(), "cache_control": {"type": "ephemeral"}}]
    first, again = (ask(server, system=system)["usage"] for _ in range(2))
    assert first["input_tokens"] == again["input_tokens"] == 1
    assert first["cache_creation_input_tokens"] > 100
    assert again["cache_creation_input_tokens"] == 0
    assert again["cache_read_input_tokens"] == num_prompt_tokens(first) - 1


def test_a_stream_tells_its_counts_at_the_start_and_at_the_end(server: RunningServer) -> None:
    asked: dict[str, Any] = {"system": words()}
    ask(server, **asked)
    events = stream(server, **asked)
    start, end = events[0].data["message"]["usage"], events[-2].data["usage"]
    assert (start.pop("output_tokens"), start.pop("service_tier")) == (0, "standard")
    by_ttl = start.pop("cache_creation")
    assert by_ttl == {"ephemeral_5m_input_tokens": 0, "ephemeral_1h_input_tokens": 0}
    assert end.pop("output_tokens") > 0
    assert end.pop("output_tokens_details") == {"thinking_tokens": 0}
    assert start == end
    assert end["cache_read_input_tokens"] > 100


def test_what_was_reused_is_told_as_in_every_protocol(server: RunningServer) -> None:
    asked: dict[str, Any] = {"system": words()}
    body = {"model": "tiny", "messages": [USER], "max_tokens": 2} | asked
    server.post(MESSAGES, body)
    whole = server.post(MESSAGES, body)
    cache = whole.json()["hearth"]["cache"]
    assert (cache["tier"], cache["reason"]) == ("hot", None)
    assert whole.json()["usage"]["cache_read_input_tokens"] == cache["cached_tokens"]
    planned = f"tier=hot; cached={cache['cached_tokens']}"
    assert whole.headers["x-hearth-cache"].startswith(planned)
    streamed = server.post(MESSAGES, body | {"stream": True})
    assert streamed.headers["x-hearth-cache"].startswith(planned)
    assert stream(server, **asked)[-2].data["hearth"]["cache"]["tier"] == "hot"


def test_neither_the_form_of_a_text_nor_breakpoints_change_the_prompt(
    server: RunningServer,
) -> None:
    said = words()
    breakpoint_ = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
    forms: list[Any] = [
        said,
        [{"type": "text", "text": said}],
        [{"type": "text", "text": said, **breakpoint_}],
    ]
    usages = [
        ask(server, system=form, messages=[{"role": "user", "content": form}])["usage"]
        for form in forms
    ]
    num_tokens = num_prompt_tokens(usages[0])
    assert [usage["cache_read_input_tokens"] for usage in usages[1:]] == [num_tokens - 1] * 2


def test_with_no_tokens_to_generate_a_prompt_is_only_prepared(server: RunningServer) -> None:
    asked: dict[str, Any] = {"system": words()}
    prepared = ask(server, **asked, max_tokens=0)
    assert (prepared["content"], prepared["stop_reason"]) == ([], "max_tokens")
    assert prepared["usage"]["output_tokens"] == 0
    assert ask(server, **asked)["usage"]["cache_read_input_tokens"] > 100


# Waiting and failing


async def test_a_ping_comes_with_the_headers_while_a_model_loads(
    slow_narrow_server: RunningServer,
) -> None:
    async with reading(slow_narrow_server, model=slow_narrow_server.cold_model()) as answer:
        first = await answer.next_event()
        assert first is not None
        assert first.name == "ping"
        events = await answer.rest()
    check_order(events)
    assert any("loading" in comment for comment in answer.comments)
    assert events[-1].name == "message_stop"


async def test_pings_keep_a_stream_open_while_another_is_served(
    narrow_server: RunningServer,
) -> None:
    async with streaming(narrow_server, COMPLETIONS, LONG) as first:
        await first.next_event()
        async with reading(narrow_server) as second:
            while len(second.events) < 4:
                assert await second.next_event()
            assert {event.name for event in second.events} == {"message_start", "ping"}
            await first.response.aclose()  # there is room for one
            check_order(await second.rest())


async def test_workers_that_die_end_a_stream_with_an_error_event(
    narrow_server: RunningServer,
) -> None:
    async with reading(narrow_server, max_tokens=3500, stop_sequences=["\0"]) as answer:
        rest = asyncio.create_task(answer.rest())
        await narrow_server.lose_workers()
        *_, last = await rest
    assert last.name == "error"
    assert last.data["error"]["type"] == "overloaded_error"
    assert last.data["error"]["details"]["error_code"] == "model_crashed"
    assert last.data["request_id"] == answer.response.headers["request-id"]
    narrow_server.forgive()


async def test_a_whole_answer_that_workers_die_of_ends_in_the_protocols_words(
    narrow_server: RunningServer,
) -> None:
    assert narrow_server.post(MESSAGES, {"messages": [USER], "max_tokens": 2}).status_code == 200
    body = {"model": "tiny", "messages": [USER], "max_tokens": 3500}
    async with narrow_server.client() as client:
        asked = asyncio.create_task(client.post(MESSAGES, json=body))
        response = await narrow_server.killed_for(asked)
    error = response.json()["error"]
    # It is to blame where the second one had begun with it.
    is_to_blame = error["details"]["error_code"] == "poison_request"
    wanted = (500, "api_error", "false") if is_to_blame else (529, "overloaded_error", "true")
    headers = response.headers
    assert (response.status_code, error["type"], headers["x-should-retry"]) == wanted
    assert is_to_blame or int(headers["retry-after"]) >= 1
    narrow_server.forgive()


async def test_a_prompt_that_is_too_long_is_an_event_once_the_headers_are_out(
    narrow_server: RunningServer,
) -> None:
    turn = {"role": "user", "content": "fox " * 5000}
    model = narrow_server.cold_model()
    async with reading(narrow_server, model=model, messages=[turn]) as answer:
        events = await answer.rest()
    (error,) = [event for event in events if event.name != "ping"]
    assert error.name == "error"
    assert error.data["error"]["message"].startswith("prompt is too long: ")


# Tomorrow


def test_fields_of_tomorrow_are_ignored_and_named(server: RunningServer) -> None:
    said = {"type": "text", "text": "hi", "glow": 3}
    turn = {"role": "user", "content": [said], "mood": "good"}
    answer = ask(
        server,
        messages=[turn],
        safeguards=[{"type": "dangerous_tool_use"}],
        mcp_servers=[],
        service_tier="auto",
        tools=[TOOLS[0] | {"eager_input_streaming": True, "allowed_callers": ["direct"]}],
    )
    assert answer["hearth"]["ignored"] == [
        "safeguards",
        "mcp_servers",
        "messages[0].mood",
        "messages[0].content[0].glow",
        "tools[0].allowed_callers",
    ]
    hologram = {"type": "hologram", "data": {"x": [1]}}
    body = {"model": "tiny", "messages": [{"role": "user", "content": [hologram, said]}]}
    refused = server.post("/v1/messages", body | {"max_tokens": 1})
    assert refused.status_code == 400
    assert refused.json()["error"]["details"]["param"] == "messages[0].content[0]"


@pytest.mark.parametrize("path", ["/", "/api/hello"])
def test_what_clients_probe_is_there(server: RunningServer, path: str) -> None:
    assert server.request("HEAD", path).status_code == 200
