"""Server-sent events as they stand on the wire, in good times and in bad ones."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from api.http.sse import told
from api.observe.record import Tally
from api.openai.chat import ChatStream
from api.openai.frame import CompletionEnvelope
from runtime.supervisor.generation import Generation
from tests.asking import PATIENCE_S, request
from tests.lone_worker import Alone
from tests.running_server import (
    CHAT,
    COMPLETIONS,
    RunningServer,
    events_of,
    streaming,
)
from tests.waiting import until

BODY: dict[str, Any] = {
    "model": "tiny",
    "messages": [{"role": "user", "content": "hi 😀"}],
    "max_tokens": 12,
    "ignore_eos": True,
}
LONG: dict[str, Any] = {
    "model": "tiny",
    "prompt": "the fox",
    "max_tokens": 3500,
    "ignore_eos": True,
}


def text_of(events: list[Any], field: str = "content") -> str:
    """The text of all chunks of a chat stream with one choice."""
    choices = [choice for event in events if event != "[DONE]" for choice in event["choices"]]
    return "".join(choice["delta"].get(field, "") for choice in choices)


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_every_event_is_one_line_of_json_between_blank_lines(
    server: RunningServer, path: str
) -> None:
    body = BODY | {"prompt": "hi", "stream": True, "temperature": 1, "seed": 1, "max_tokens": 60}
    response = server.post(path, body)
    assert response.status_code == 200
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.headers["cache-control"] == "no-cache"
    assert response.headers["x-request-id"]
    assert "content-length" not in response.headers
    assert response.content.endswith(b"\n\ndata: [DONE]\n\n")
    *blocks, end = response.content.split(b"\n\n")
    assert end == b""
    for block in blocks[:-1]:
        assert b"\n" not in block
        assert b"\r" not in block
        json.loads(block.removeprefix(b"data: ").decode("utf-8"))  # whole characters only


def test_one_id_belongs_to_all_events_and_to_no_other_answer(server: RunningServer) -> None:
    ids = [
        {event["id"] for event in events_of(server.post(CHAT, BODY | {"stream": True}).text)[:-1]}
        for _ in range(2)
    ]
    assert [len(one) for one in ids] == [1, 1]
    assert ids[0] != ids[1]


async def test_text_arrives_while_it_is_written(server: RunningServer) -> None:
    with server.stream("POST", COMPLETIONS, json=LONG | {"stream": True}) as response:
        pieces = response.iter_raw()
        for _ in range(20):
            next(pieces)
        # Who left before, and what only warms, may have a place for a moment.
        await until(lambda: server.figure("hearth_running", model="tiny") == 1, "only it runs")


def test_reasoning_is_streamed_apart_from_the_answer(server: RunningServer) -> None:
    body = BODY | {"enable_thinking": True, "max_tokens": 30, "temperature": 1, "seed": 2}
    whole = server.post(CHAT, body).json()
    message = whole["choices"][0]["message"]
    events = events_of(server.post(CHAT, body | {"stream": True}).text)
    assert message["reasoning_content"]
    assert text_of(events, "reasoning_content") == message["reasoning_content"]
    assert text_of(events) == message["content"]
    details = whole["usage"]["completion_tokens_details"]
    assert details["reasoning_tokens"] == 30
    plain = server.post(CHAT, body | {"enable_thinking": False}).json()["choices"][0]["message"]
    assert "reasoning_content" not in plain


async def test_comments_keep_a_stream_open_while_its_model_loads(
    slow_narrow_server: RunningServer,
) -> None:
    body = BODY | {"model": slow_narrow_server.cold_model()}
    async with streaming(slow_narrow_server, CHAT, body) as stream:
        events = await stream.rest()
    assert any("loading" in comment for comment in stream.comments), stream.comments
    assert events[-1] == "[DONE]"


async def test_the_first_comment_comes_with_the_headers_not_a_period_later() -> None:
    waiting: Any = Generation(request("a"), Alone())
    stream = ChatStream(CompletionEnvelope("chatcmpl", "tiny"), Tally(), has_usage=False)
    async with asyncio.timeout(PATIENCE_S):
        told_first = await anext(told(waiting, stream, keep_alive_s=100 * PATIENCE_S))
    assert told_first.startswith(b": queued")


async def test_comments_keep_a_stream_open_while_another_is_served(
    narrow_server: RunningServer,
) -> None:
    async with streaming(narrow_server, COMPLETIONS, LONG) as first:
        await first.next_event()
        async with streaming(narrow_server, CHAT, BODY) as second:
            while len(second.comments) < 3:
                assert await second.next()
            assert text_of(second.events) == ""  # there is room for one
            await first.response.aclose()
            assert (await second.rest())[-1] == "[DONE]"


async def test_comments_tell_how_far_a_prefill_is(narrow_server: RunningServer) -> None:
    prompt = [9 + index % 200 for index in range(4000)]
    async with streaming(
        narrow_server, COMPLETIONS, LONG | {"prompt": prompt, "max_tokens": 2}
    ) as s:
        await s.rest()
    done = [int(c.split()[-1].split("/")[0]) for c in s.comments if "/3999" in c]
    assert done, s.comments
    assert done == sorted(done)
    assert all(number % 32 == 0 for number in done)


async def test_a_refusal_after_the_headers_is_an_event_and_the_end(
    slow_narrow_server: RunningServer,
) -> None:
    body = {"model": slow_narrow_server.cold_model(), "prompt": [9] * 5000}
    async with streaming(slow_narrow_server, COMPLETIONS, body) as stream:
        assert stream.response.status_code == 200  # nobody knew better while the model loaded
        (event,) = await stream.rest()
    assert event["error"]["code"] == "context_length_exceeded"
    assert event["error"]["param"] == "prompt"


async def test_workers_that_die_end_a_stream_with_an_error_and_are_replaced(
    narrow_server: RunningServer,
) -> None:
    async with streaming(narrow_server, COMPLETIONS, LONG) as stream:
        rest = asyncio.create_task(stream.rest())
        await narrow_server.lose_workers()
        *_, last = await rest
    assert last["error"]["code"] == "model_crashed"
    assert last["error"]["type"] == "server_error"
    assert narrow_server.post(CHAT, BODY).status_code == 200
    narrow_server.forgive()


async def test_a_whole_answer_that_workers_die_of_ends_in_the_protocols_words(
    narrow_server: RunningServer,
) -> None:
    assert narrow_server.post(CHAT, BODY).status_code == 200
    async with narrow_server.client() as client:
        asked = asyncio.create_task(client.post(COMPLETIONS, json=LONG | {"seed": 4}))
        response = await narrow_server.killed_for(asked)
    code = response.json()["error"]["code"]
    # It is to blame where the second one had begun with it.
    assert (response.status_code, code) in {(503, "model_crashed"), (500, "poison_request")}
    assert ("retry-after" in response.headers) == (code == "model_crashed")
    narrow_server.forgive()
