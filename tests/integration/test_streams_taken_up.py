"""A client that lost its connection reads its stream on where it was."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest

from tests.running_server import CHAT, COMPLETIONS, RunningServer

STAYS = {"hearth-resume": "true"}
HI = [{"role": "user", "content": "hi"}]
FIXED: dict[str, Any] = {"model": "tiny", "temperature": 0, "stream": True, "max_tokens": 60}
ASKED: dict[str, dict[str, Any]] = {
    CHAT: FIXED | {"messages": HI, "ignore_eos": True},
    COMPLETIONS: FIXED | {"prompt": "the fox", "ignore_eos": True},
    "/v1/messages": FIXED | {"messages": HI},
}
Event = tuple[int, str]


async def events_of(response: httpx.Response, most: int | None = None) -> list[Event]:
    """The numbers of events, and the rest of each; comments are none."""
    events: list[Event] = []
    text = ""
    async for piece in response.aiter_text():
        *blocks, text = (text + piece).split("\n\n")
        for block in blocks:
            if not block.startswith(":"):
                number, _, rest = block.removeprefix("id: ").partition("\n")
                events.append((int(number), rest))
        if most is not None and len(events) >= most:
            break
    return events


@pytest.mark.parametrize("path", ASKED)
@pytest.mark.parametrize("num_read", [1, 9])
async def test_a_stream_is_read_on_with_no_event_lost_and_none_twice(
    server: RunningServer, path: str, num_read: int
):
    async with server.client() as client:
        async with client.stream("POST", path, json=ASKED[path], headers=STAYS) as response:
            name = response.headers["hearth-stream"]
            first = (await events_of(response, num_read))[:num_read]
        last = first[-1][0]
        on = {"last-event-id": str(last)}
        async with client.stream("GET", f"/v1/streams/{name}", headers=on) as response:
            assert response.headers["content-type"].startswith("text/event-stream")
            rest = await events_of(response)
        whole = await client.get(f"/v1/streams/{name}", params={"from": 0})
        later = await client.get(f"/v1/streams/{name}", params={"from": last + 1})
        numbers = [number for number, _ in first + rest]
        assert numbers == sorted(set(numbers))
        assert await events_of(whole) == first + rest
        assert await events_of(later) == rest
        assert "stop" in rest[-1][1] or "[DONE]" in rest[-1][1]


async def test_a_stream_that_is_ended_or_unknown_is_not_found(server: RunningServer):
    endless = ASKED[COMPLETIONS] | {"max_tokens": 3000}
    async with server.client() as client:
        async with client.stream("POST", COMPLETIONS, json=endless, headers=STAYS) as response:
            name = response.headers["hearth-stream"]
            assert (await client.delete(f"/v1/streams/{name}")).status_code == 204
            events = await events_of(response)
        assert json.loads(events[-1][1].removeprefix("data: "))["error"]["code"] == "cancelled"
        for unknown in (name, "stream_nobody"):
            answer = await client.get(f"/v1/streams/{unknown}")
            assert answer.status_code == 404
            assert answer.json()["error"]["code"] == "stream_not_found"
        refused = await client.post(COMPLETIONS, json=endless, headers={"hearth-resume": "perhaps"})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "hearth-resume")


async def test_what_was_generated_until_a_stream_was_deleted_is_reused(server: RunningServer):
    asked = {"role": "user", "content": "Tell me of the stream and the mill. " * 20}
    body: dict[str, Any] = {"model": "tiny", "seed": 1, "session_id": "mill", "ignore_eos": True}
    streamed = {"messages": [asked], "max_tokens": 3000, "stream": True, "logprobs": True}
    told: list[Any] = []
    async with (
        server.client() as client,
        client.stream("POST", CHAT, json=body | streamed, headers=STAYS) as response,
    ):
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                told.append(json.loads(line.removeprefix("data: ")))
                if len(told) == 40:
                    url = f"/v1/streams/{response.headers['hearth-stream']}"
                    assert (await client.delete(url)).status_code == 204
    *events, end = told
    assert end["error"]["code"] == "cancelled"
    choices = [event["choices"][0] for event in events]
    text = "".join(one["delta"].get("content") or "" for one in choices)
    num_tokens = sum(len((one.get("logprobs") or {}).get("content") or ()) for one in choices)
    said = [asked, {"role": "assistant", "content": text}, {"role": "user", "content": "go on"}]
    alone = server.post(CHAT, body | {"messages": [asked], "max_tokens": 1}).json()["usage"]
    usage = server.post(CHAT, body | {"messages": said, "max_tokens": 1}).json()["usage"]
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    assert 30 < num_tokens < 3000
    assert cached >= alone["prompt_tokens"] + num_tokens - 1


async def test_a_number_that_is_none_is_refused_by_the_name_it_was_sent_under(
    server: RunningServer,
):
    async with server.client() as client:
        async with client.stream("POST", CHAT, json=ASKED[CHAT], headers=STAYS) as response:
            url = f"/v1/streams/{response.headers['hearth-stream']}"
            await response.aread()
        for number in ("9" * 5000, "9" * 30, "-1", "1.5", "x"):
            answer = await client.get(url, headers={"last-event-id": number})
            error = answer.json()["error"]
            assert (answer.status_code, error["param"]) == (400, "last-event-id")
        for number in ("9" * 5000, "-1", "1.5", "x"):
            answer = await client.get(url, params={"from": number})
            error = answer.json()["error"]
            assert (answer.status_code, error["param"]) == (400, "from")
            assert error["message"].startswith("from: ")


async def test_without_asking_for_it_no_event_has_a_number(server: RunningServer):
    async with server.client() as client:
        answer = await client.post(CHAT, json=ASKED[CHAT])
    assert "hearth-stream" not in answer.headers
    assert not any(line.startswith("id:") for line in answer.text.splitlines())


async def test_a_worker_that_is_lost_while_nobody_reads_changes_nothing(server: RunningServer):
    asked = ASKED[COMPLETIONS] | {"max_tokens": 600}
    undisturbed = await asyncio.to_thread(server.post, COMPLETIONS, asked | {"stream": False})
    async with server.client() as client:
        async with client.stream("POST", COMPLETIONS, json=asked, headers=STAYS) as response:
            name = response.headers["hearth-stream"]
            await events_of(response, 1)
        server.kill_worker()
        whole = await client.get(f"/v1/streams/{name}", timeout=60)
    server.forgive()
    *events, done = await events_of(whole)
    assert done[1] == "data: [DONE]"
    texts = [json.loads(rest.removeprefix("data: "))["choices"][0]["text"] for _, rest in events]
    assert "".join(texts) == undisturbed.json()["choices"][0]["text"]
