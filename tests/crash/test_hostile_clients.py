"""Clients without a key that send heads without an end, by the hundred, and never read or finish.

What is asserted are counts and bytes; the figures of an unbounded server were 5 GB and no answer.
"""

from __future__ import annotations

import concurrent.futures
import socket
from collections.abc import Generator
from contextlib import ExitStack, suppress

import httpx
import psutil
import pytest

from api.http.framing import MAX_HEAD_BYTES, MAX_LINE_BYTES
from runtime.keys import digest_of
from tests.running_server import CHAT, RunningServer, running
from tests.waiting import until

KEY = "alice-key"
MOST = 200
CONFIG = f"""
preload = []
max_connections = {MOST}
[api_keys]
alice = "{digest_of(KEY)}"
"""
SLACK_BYTES = 48 << 20
"""What a server's memory may grow by without any client's doing."""

pytestmark = pytest.mark.soak


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Generator[RunningServer]:
    with running(tmp_path_factory.mktemp("home"), config=CONFIG) as server:
        yield server


def connected(server: RunningServer) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), timeout=30)


def is_served(server: RunningServer) -> bool:
    headers = {"x-api-key": KEY, "connection": "close"}
    return server.request("GET", "/v1/models", headers=headers).status_code == 200


def num_sockets(server: RunningServer) -> int:
    """Connections that the server has open, as the system counts them."""
    process = psutil.Process(server.process.pid)
    return sum(one.laddr.port == server.port for one in process.net_connections("tcp")) - 1


def memory(server: RunningServer) -> int:
    return psutil.Process(server.process.pid).memory_info().rss


@pytest.mark.parametrize(
    "piece",
    [b"a" * 65_536, b"x: 1\r\n" * 10_000, b"\r\n" * 30_000, (b"x: " + b"a" * 9_000 + b"\r\n") * 7],
    ids=["one line", "fields", "empty lines", "long fields"],
)
def test_a_head_without_an_end_ends(server: RunningServer, piece: bytes) -> None:
    """130 MiB on one connection, as far as they are taken."""
    assert is_served(server)
    before = memory(server)
    taken = 0
    with connected(server) as connection, suppress(OSError):
        connection.sendall(b"GET / HTTP/1.1\r\n")
        while taken < 130 << 20:
            taken += connection.send(piece)
    assert taken < 16 << 20, "two sockets hold something, and something is read to be forgotten"
    assert is_served(server)
    assert memory(server) - before < SLACK_BYTES


async def test_unfinished_heads_by_the_hundred_hold_what_was_computed(
    server: RunningServer,
) -> None:
    assert is_served(server)
    before = memory(server)
    part = b"GET / HTTP/1.1\r\n" + (b"x: " + b"a" * (MAX_LINE_BYTES - 10) + b"\r\n") * 3
    with ExitStack() as hostile:
        for _ in range(5 * MOST):
            one = hostile.enter_context(connected(server))
            with suppress(OSError):
                one.sendall(part)
        assert num_sockets(server) <= MOST
        assert is_served(server)
        assert memory(server) - before < MOST * MAX_HEAD_BYTES + SLACK_BYTES
    await until(lambda: num_sockets(server) < 10, "nothing of it is left", 60)


@pytest.mark.parametrize("length", ["content-length: 100000000", "transfer-encoding: chunked"])
async def test_who_was_refused_and_drips_on_is_gone(server: RunningServer, length: str) -> None:
    head = f"POST {CHAT} HTTP/1.1\r\nhost: localhost\r\n{length}\r\n\r\n"
    with ExitStack() as hostile:
        dripping: list[socket.socket] = []
        for _ in range(3 * MOST):
            one = hostile.enter_context(connected(server))
            with suppress(OSError):
                one.sendall(head.encode())
            dripping.append(one)

        def drip() -> bool:
            for one in dripping:
                with suppress(OSError):
                    one.send(b"f")
            return num_sockets(server) < 10

        await until(drip, "the connections are gone", 30)
    assert is_served(server)


@pytest.mark.parametrize("text", ["a", "a b ", "[[[[", '\\"'], ids=["word", "words", "lists", "x"])
def test_a_prompt_of_60_mb_stands_in_nobodys_way(server: RunningServer, text: str) -> None:
    """It is read, and refused for its tokens; meanwhile others are served between its steps."""
    long = (text * (60_000_000 // len(text))).encode()
    body = b'{"messages":[{"role":"user","content":"' + long + b'"}]}'
    headers = {"x-api-key": KEY, "content-type": "application/json"}
    with concurrent.futures.ThreadPoolExecutor() as pool:
        refusal = pool.submit(server.request, "POST", CHAT, content=body, headers=headers)
        num_served = 0
        with httpx.Client(base_url=server.url, trust_env=False, timeout=60) as client:
            while not refusal.done():
                assert client.get("/health/live").status_code == 200
                num_served += 1
    assert refusal.result().status_code == 400
    assert refusal.result().json()["error"]["code"] == "context_length_exceeded"
    assert num_served > 40
