"""An answer that was interrupted is kept as far as it came, and its half goes on from there."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.running_server import CHAT, RunningServer, running, streaming
from tests.waiting import until

ASKED: dict[str, Any] = {"role": "user", "content": "Tell me of the kettle and the stove. " * 20}
GO_ON: dict[str, Any] = {"role": "user", "content": "go on"}
LONG: dict[str, Any] = {"max_tokens": 1500, "ignore_eos": True, "logprobs": True, "stream": True}


CONFIG = 'models_dir = "{}"\ndefault_model = "hearth-tiny"\n'


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, models_dir: Path) -> Iterator[RunningServer]:
    with running(tmp_path_factory.mktemp("home"), config=CONFIG.format(models_dir)) as server:
        yield server


async def interrupted(server: RunningServer, num_events: int, **more: Any) -> tuple[str, int]:
    """What a client that leaves after so many events was told, and in how many tokens."""
    text, num_tokens = "", 0
    body = {"messages": [ASKED]} | LONG | more
    async with streaming(server, CHAT, body) as stream:
        for _ in range(num_events):
            event = await stream.next_event()
            choice = event["choices"][0]
            text += choice["delta"].get("content") or ""
            num_tokens += len((choice.get("logprobs") or {}).get("content") or ())
    await until(lambda: server.figure("hearth_running") == 0, "the request has ended")
    return text, num_tokens


@pytest.mark.parametrize("num_events", [3, 40, 150])
async def test_an_answer_that_its_client_left_is_reused(server: RunningServer, num_events: int):
    more = {"seed": num_events, "session_id": f"left-{num_events}"}
    text, num_tokens = await interrupted(server, num_events, **more)
    half = {"role": "assistant", "content": text}
    body = {"messages": [ASKED, half, GO_ON], "max_tokens": 1} | more
    alone = server.post(CHAT, {"messages": [ASKED], "max_tokens": 1}).json()["usage"]
    usage = server.post(CHAT, body).json()["usage"]
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    assert cached >= alone["prompt_tokens"] + num_tokens - 1


class Protocol(NamedTuple):
    """How a conversation is asked in one protocol, and its answer's text and reuse are read."""

    path: str
    body: Callable[[list[dict[str, Any]]], dict[str, Any]]
    text: Callable[[Any], str]
    cached: Callable[[Any], int]


PROTOCOLS = {
    "chat": Protocol(
        CHAT,
        lambda said: {"messages": said, "ignore_eos": True},
        lambda event: event["choices"][0]["delta"].get("content") or "",
        lambda whole: whole["usage"]["prompt_tokens_details"]["cached_tokens"],
    ),
    "responses": Protocol(
        "/v1/responses",
        lambda said: {"input": said, "ignore_eos": True},
        lambda event: event["delta"] if event["type"] == "response.output_text.delta" else "",
        lambda whole: whole["usage"]["input_tokens_details"]["cached_tokens"],
    ),
    "messages": Protocol(
        "/v1/messages",
        lambda said: {"messages": said, "max_tokens": 1500},
        lambda event: event.get("delta", {}).get("text") or "",
        lambda whole: whole["usage"]["cache_read_input_tokens"],
    ),
    "ollama": Protocol(
        "/api/chat",
        lambda said: {"messages": said},
        lambda event: event["message"]["content"],
        lambda whole: whole["hearth"]["cache"]["cached_tokens"],
    ),
}


def read(line: str) -> Any:
    """The event of one line of a stream, if it is one."""
    data = line.removeprefix("data: ")
    return json.loads(data) if data.startswith("{") else None


async def left_after(
    server: RunningServer, protocol: Protocol, body: dict[str, Any], num_pieces: int
) -> list[str]:
    """What a client read that left after so many pieces of text."""
    pieces: list[str] = []
    async with (
        server.client() as client,
        client.stream("POST", protocol.path, json=body | {"stream": True}) as response,
    ):
        async for line in response.aiter_lines():
            event = read(line)
            if event is not None and (text := protocol.text(event)):
                pieces.append(text)
            if len(pieces) == num_pieces:
                break
    await until(lambda: server.figure("hearth_running") == 0, "the request has ended")
    return pieces


@pytest.mark.parametrize("name", PROTOCOLS)
async def test_half_an_answer_is_reused_in_every_protocol(server: RunningServer, name: str):
    protocol = PROTOCOLS[name]
    asked = ASKED | {"content": f"{name} " + ASKED["content"]}
    body = protocol.body([asked]) | {"model": "tiny"}
    pieces = await left_after(server, protocol, body, 60)
    half = {"role": "assistant", "content": "".join(pieces)}
    # Its worker has let go of the request that was left once it has answered another one.
    alone = server.post(CHAT, {"model": "tiny", "messages": [asked], "max_tokens": 1}).json()
    answer = server.post(protocol.path, body | protocol.body([asked, half, GO_ON]) | SHORT[name])
    cached = protocol.cached(answer.json())
    assert cached >= alone["usage"]["prompt_tokens"] + len(pieces) - 1


SHORT: dict[str, dict[str, Any]] = {
    "chat": {"max_tokens": 1},
    "responses": {"max_output_tokens": 16},
    "messages": {"max_tokens": 1},
    "ollama": {"options": {"num_predict": 1}, "stream": False},
}


@pytest.mark.parametrize("fields", [{"cache_mode": "off"}, {"cache_mode": "prefix"}])
async def test_what_is_not_to_be_kept_is_not(server: RunningServer, fields: dict[str, Any]):
    asked = ASKED | {"content": f"{fields} " + ASKED["content"]}
    body = {"model": "tiny", "messages": [asked], "ignore_eos": True} | fields
    pieces = await left_after(server, PROTOCOLS["chat"], body, 60)
    half = {"role": "assistant", "content": "".join(pieces)}
    following = {"model": "tiny", "messages": [asked, half, GO_ON], "max_tokens": 1}
    assert PROTOCOLS["chat"].cached(server.post(CHAT, following).json()) < 60


async def test_a_deleted_conversation_keeps_nothing_of_a_request_that_is_cut(
    server: RunningServer,
):
    asked = [ASKED | {"content": "gone " + ASKED["content"]}]
    body = {"messages": asked, "session_id": "gone"} | LONG
    text = ""
    async with streaming(server, CHAT, body) as stream:
        for _ in range(40):
            event = await stream.next_event()
            text += event["choices"][0]["delta"].get("content") or ""
        named = {"conversation": "gone"}
        server.request("DELETE", "/admin/cache/conversations", params=named).raise_for_status()
    await until(lambda: server.figure("hearth_running") == 0, "the request has ended")
    half = {"role": "assistant", "content": text}
    following = {"messages": [*asked, half, GO_ON], "max_tokens": 1, "session_id": "gone"}
    answer = server.post(CHAT, following).json()
    assert PROTOCOLS["chat"].cached(answer) < 60
    assert "healed_turn" not in [one["rule"] for one in answer["hearth"].get("prompt", [])]


async def test_what_was_said_before_a_restart_cut_it_is_reused(tmp_path: Path, models_dir: Path):
    chat, pieces = PROTOCOLS["chat"], list[str]()
    config = CONFIG.format(models_dir) + "stop_timeout_s = 1.0\n"
    body = {"model": "tiny", "messages": [ASKED], "ignore_eos": True, "session_id": "s"}
    with running(tmp_path, config=config) as first:
        async with streaming(first, CHAT, body) as stream:
            while "error" not in (event := await stream.next_event()):
                pieces.append(chat.text(event))
                if len(pieces) == 30:
                    first.process.send_signal(signal.SIGTERM)
        await until(lambda: first.process.poll() is not None, "the server has stopped")
    half = {"role": "assistant", "content": "".join(pieces)}
    with running(tmp_path, config=config) as second:
        following = body | {"messages": [ASKED, half, GO_ON], "max_tokens": 1}
        cached = chat.cached(second.post(CHAT, following).json())
        alone = second.post(CHAT, {"model": "tiny", "messages": [ASKED], "max_tokens": 1}).json()
    num_said = sum(1 for one in pieces if one)
    assert cached >= alone["usage"]["prompt_tokens"] + num_said - 1


async def cut_by_us(
    server: RunningServer, protocol: Protocol, body: dict[str, Any], path: str, method: str = "POST"
) -> list[str]:
    """What a client read whose request was cancelled at that path after 60 pieces; `{}` in it is
    the answer's id.
    """
    pieces: list[str] = []
    is_cut, answer_id = False, ""
    async with (
        server.client() as client,
        client.stream("POST", protocol.path, json=body | {"stream": True}) as response,
    ):
        async for line in response.aiter_lines():
            event = read(line)
            if event is None or "error" in event:
                continue
            answer_id = answer_id or event.get("response", event).get("id", "")
            if event.get("choices") != [] and (text := protocol.text(event)):
                pieces.append(text)
            if len(pieces) >= 60 and not is_cut:
                is_cut = True
                ended = server.request(method, path.format(answer_id), json={})
                assert ended.status_code < 300, ended.text
    assert is_cut
    await until(lambda: server.figure("hearth_running") == 0, "the request has ended")
    return pieces


@pytest.mark.parametrize(
    ("name", "path"),
    [("responses", "/v1/responses/{}/cancel"), ("chat", "/admin/requests/{}/cancel")],
)
async def test_what_was_cancelled_is_reused(server: RunningServer, name: str, path: str):
    protocol = PROTOCOLS[name]
    asked = ASKED | {"content": f"cancelled {name} " + ASKED["content"]}
    body = protocol.body([asked]) | {"model": "tiny"}
    pieces = await cut_by_us(server, protocol, body, path)
    half = {"role": "assistant", "content": "".join(pieces)}
    # Its worker has let go of the request that was left once it has answered another one.
    alone = server.post(CHAT, {"model": "tiny", "messages": [asked], "max_tokens": 1}).json()
    answer = server.post(protocol.path, body | protocol.body([asked, half, GO_ON]) | SHORT[name])
    cached = protocol.cached(answer.json())
    assert cached >= alone["usage"]["prompt_tokens"] + 60 - 1


async def test_what_its_deadline_cut_is_reused(tmp_path: Path, models_dir: Path):
    config = CONFIG.format(models_dir) + "[limits.generate]\ntime_s = 0.5\n"
    protocol = PROTOCOLS["chat"]
    body = protocol.body([ASKED]) | {"model": "tiny"}
    with running(tmp_path, config=config) as server:
        server.post(CHAT, {"model": "tiny", "messages": [GO_ON], "max_tokens": 1})
        pieces = await left_after(server, protocol, body | {"max_tokens": 100_000}, 100_000)
        assert pieces
        half = {"role": "assistant", "content": "".join(pieces)}
        body |= protocol.body([ASKED, half, GO_ON]) | SHORT["chat"]
        usage = server.post(CHAT, body).json()["usage"]
        alone = server.post(CHAT, {"model": "tiny", "messages": [ASKED], "max_tokens": 1}).json()
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        assert cached >= alone["usage"]["prompt_tokens"] + len(pieces) - 2
