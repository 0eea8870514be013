"""A client that leaves frees its place within one step, whatever was going on."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import httpx
import pytest
from litestar.types import ASGIApp

from api.app import create_app
from api.http.guard import rules_of
from runtime.cache.service import KvStore
from runtime.config.settings import load_settings
from runtime.keys import digest_of, new_key
from runtime.models.catalog import Catalog
from runtime.supervisor.supervisor import Supervisor
from tests.asking import PATIENCE_S
from tests.running_server import CHAT, COMPLETIONS, RunningServer, streaming
from tests.waiting import until

SHORT: dict[str, Any] = {"model": "tiny", "prompt": "a kettle", "max_tokens": 2}
LONG: dict[str, Any] = SHORT | {"max_tokens": 3500, "ignore_eos": True}
FEW_STEPS = 300
"""Of the 3500 that it would take: what is decoded until a busy server sees that somebody left."""


def num_running(server: RunningServer) -> float:
    return server.figure("hearth_running", model="tiny")


def num_steps(server: RunningServer) -> float:
    """Tokens that were decoded after the first of their answer."""
    return server.figure("hearth_inter_token_seconds_count", model="tiny")


@pytest.fixture
async def occupied(narrow_server: RunningServer) -> AsyncGenerator[RunningServer]:
    """A server with room for one, its model loaded; idle again in the end."""
    assert narrow_server.post(COMPLETIONS, SHORT).status_code == 200
    yield narrow_server
    await until(lambda: num_running(narrow_server) == 0, "the server is idle again")


async def waiting_request(client: httpx.AsyncClient, server: RunningServer) -> Any:
    """A short request behind the long one that runs."""
    task = asyncio.create_task(client.post(COMPLETIONS, json=SHORT))
    await until(lambda: num_running(server) == 2, "both requests are at the worker")
    return task


async def test_a_stream_that_is_closed_makes_room_for_the_next(occupied: RunningServer) -> None:
    async with occupied.client() as client:
        async with streaming(occupied, COMPLETIONS, LONG) as stream:
            await stream.next_event()
            next_one = await waiting_request(client, occupied)
            for _ in range(100):
                await stream.next_event()
            assert not next_one.done()  # it has no room while the stream runs
        left_at = num_steps(occupied)
        assert (await next_one).status_code == 200
    assert num_steps(occupied) - left_at < FEW_STEPS


async def test_a_whole_answer_that_is_given_up_makes_room_for_the_next(
    occupied: RunningServer,
) -> None:
    def num_left() -> float:
        return occupied.figure("hearth_requests_total", route=COMPLETIONS, status="499")

    before = num_left()
    async with occupied.client() as leaving, occupied.client() as client:
        answer = asyncio.create_task(leaving.post(COMPLETIONS, json=LONG))
        await until(lambda: num_running(occupied) == 1, "the request runs")
        next_one = await waiting_request(client, occupied)
        left_at = num_steps(occupied)
        answer.cancel()
        assert (await next_one).status_code == 200
    assert num_steps(occupied) - left_at < FEW_STEPS
    await until(lambda: num_left() == before + 1, "it is counted as one that left")


async def test_a_client_that_leaves_the_queue_is_never_served(occupied: RunningServer) -> None:
    async with streaming(occupied, COMPLETIONS, LONG) as stream, occupied.client() as client:
        await stream.next_event()
        waiting = await waiting_request(client, occupied)
        left_at = num_steps(occupied)
        waiting.cancel()
        await until(lambda: num_running(occupied) == 1, "the request left the queue")
        assert num_steps(occupied) - left_at < FEW_STEPS


HI = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (COMPLETIONS, LONG),
        ("/api/chat", {"messages": HI, "stream": False}),
        ("/v1/messages/count_tokens", {"messages": HI}),
        ("/v1/responses/input_tokens", {"input": "hi"}),
    ],
)
async def test_a_client_that_leaves_while_its_model_loads_is_forgotten(
    slow_narrow_server: RunningServer, path: str, body: dict[str, Any]
) -> None:
    model = slow_narrow_server.cold_model()

    def num_waiting() -> float:
        return slow_narrow_server.figure("hearth_waiting", model=model)

    async with slow_narrow_server.client() as client:
        answer = asyncio.create_task(client.post(path, json=body | {"model": model}))
        await until(lambda: num_waiting() == 1, "the request waits for its model")
        if path == COMPLETIONS:
            assert slow_narrow_server.figure("hearth_longest_wait_seconds", model=model) > 0
        answer.cancel()
        await until(lambda: num_waiting() == 0, "the request is forgotten")
        assert await state_of(client, model) not in ("ready", "busy"), "nobody waits until then"


async def state_of(client: httpx.AsyncClient, model: str) -> str | None:
    running = (await client.get("/running")).json()["models"]
    return next((one["state"] for one in running if one["id"] == model), None)


async def test_a_client_that_reads_nothing_can_still_leave(server: RunningServer) -> None:
    assert server.post(COMPLETIONS, SHORT).status_code == 200, "its model is loaded"
    await until(lambda: num_running(server) == 0, "nothing is left of the tests before")
    body = LONG | {"n": 16, "logprobs": 5, "stream": True}
    payload = json.dumps(body).encode()
    head = (
        f"POST {COMPLETIONS} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(payload)}\r\n\r\n"
    )

    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(("127.0.0.1", server.port))
        connection.sendall(head.encode() + payload)
        await until(lambda: num_running(server) == 1, "the request runs")
        begun = num_steps(server)
        await until(lambda: num_steps(server) > begun + 20, "the server sends")
    await until(lambda: num_running(server) == 0, "its place is free")
    assert server.post(COMPLETIONS, SHORT).status_code == 200


# The application itself, where a socket cannot show it: `send` that never returns


class HearthServer:
    """The application with a real worker behind it, driven without a server around it."""

    def __init__(self, app: ASGIApp, supervisor: Supervisor) -> None:
        self.app = app
        self.supervisor = supervisor

    @property
    def num_running(self) -> int:
        return sum(status.num_running for status in self.supervisor.status())

    async def begin(self, path: str, body: Any, send: Any) -> tuple[Any, asyncio.Event]:
        """A request under way, and the event that makes its client leave."""
        has_left = asyncio.Event()
        payload = [json.dumps(body).encode()]

        async def receive() -> Any:
            if payload:
                return {"type": "http.request", "body": payload.pop(), "more_body": False}
            await has_left.wait()
            return {"type": "http.disconnect"}

        scope: Any = {"type": "http", "method": "POST", "path": path, "raw_path": path.encode()}
        scope |= {"asgi": {"version": "3.0"}, "http_version": "1.1", "scheme": "http"}
        scope |= {"query_string": b"", "root_path": "", "client": ("test", 1), "server": ("x", 1)}
        scope["headers"] = [(b"content-type", b"application/json")]
        return asyncio.create_task(self.app(scope, receive, send)), has_left  # pyright: ignore[reportArgumentType]


@pytest.fixture
async def house(tmp_path: Path, models_dir: Path) -> AsyncGenerator[HearthServer]:
    flags = {"home": str(tmp_path), "models_dir": str(models_dir), "default_model": "tiny"}
    settings = load_settings(flags | {"max_batch": "1", "kv_disk": "false"}, {})
    catalog, kv = Catalog(settings), KvStore(settings)
    supervisor = Supervisor(settings, catalog, kv)
    kv.start()
    await supervisor.start()
    await until(lambda: supervisor.is_ready, "the model is loaded", 60)
    rules = rules_of(settings, digest_of(new_key()))
    yield HearthServer(create_app(settings, catalog, supervisor, kv, rules), supervisor)
    await supervisor.stop()
    await kv.stop()


async def test_a_send_that_never_returns_holds_no_place(house: HearthServer) -> None:
    for path, body in [
        (COMPLETIONS, LONG | {"stream": True}),
        (CHAT, LONG | {"stream": True, "messages": [{"role": "user", "content": "hi"}]}),
    ]:
        is_blocked = asyncio.Event()

        async def send(message: Any, is_blocked: asyncio.Event = is_blocked) -> None:
            if message["type"] == "http.response.body":
                is_blocked.set()
                await asyncio.Event().wait()

        serving, has_left = await house.begin(path, body, send)
        await asyncio.wait_for(is_blocked.wait(), PATIENCE_S)
        assert house.num_running == 1
        has_left.set()
        await asyncio.wait_for(serving, PATIENCE_S)
        assert house.num_running == 0

    sent: list[Any] = []

    async def record(message: Any) -> None:
        sent.append(message)

    serving, _ = await house.begin(COMPLETIONS, SHORT, record)  # the worker's place is free too
    await asyncio.wait_for(serving, PATIENCE_S)
    assert sent[0]["status"] == 200


async def test_a_client_that_left_gets_no_whole_answer_and_holds_no_place(
    house: HearthServer,
) -> None:
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    serving, has_left = await house.begin(COMPLETIONS, LONG, send)
    await until(lambda: house.num_running == 1, "the request runs")
    has_left.set()
    await asyncio.wait_for(serving, PATIENCE_S)
    assert house.num_running == 0
    assert sent[0]["status"] == 499
