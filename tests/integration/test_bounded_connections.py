"""What a connection may hold and how it ends, with each parser that uvicorn has."""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
import resource
import socket
from collections.abc import AsyncGenerator, Coroutine, Generator
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import pytest
import uvicorn
from hypothesis import given, settings
from hypothesis import strategies as st
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from api.http.connection import SlowClientGuard
from api.http.errors import status_of
from api.http.framing import MAX_HEAD_BYTES, Malformed
from api.http.http1 import LINGER_READS, Bounded, Connections, HttpConnection, most_connections
from tests.unit.test_framing import BAD, CHUNKED, GET, NOT_SPOKEN, TOO_LARGE, head, split
from tests.waiting import PATIENCE_S, until

T = TypeVar("T")


class H11Connection(Bounded, H11Protocol):  # pyright: ignore[reportIncompatibleMethodOverride, reportIncompatibleVariableOverride]
    """The same bounds in front of uvicorn's other parser."""


PARSERS: dict[str, type[Bounded]] = {"httptools": HttpConnection, "h11": H11Connection}
EITHER = pytest.mark.parametrize("parser", PARSERS)
LAST = b"GET /last HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"


class HearthServer:
    """An application that tells what it was asked, behind one of the parsers."""

    def __init__(self, parser: str, most: int = 1000, **bounds: float) -> None:
        self.registry = Connections(most)
        self.asked: list[str] = []
        self.num_at_work = 0
        self.most_at_work = 0
        self.may_answer = asyncio.Event()
        config = uvicorn.Config(
            SlowClientGuard(self._app, 30.0), ws="none", lifespan="off", log_config=None
        )
        config.load()
        kind = type("Connection", (PARSERS[parser],), {"registry": self.registry, **bounds})
        state = ServerState()
        self.connect = lambda: kind(config=config, server_state=state, app_state={})

    async def _app(self, scope: Any, receive: Any, send: Any) -> None:
        self.asked.append(scope["path"])
        self.num_at_work += 1
        self.most_at_work = max(self.most_at_work, self.num_at_work)
        try:
            status, body = await self._answer(scope, receive)
        finally:
            self.num_at_work -= 1
        headers = [(b"content-length", b"%d" % len(body))]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    async def _answer(self, scope: Any, receive: Any) -> tuple[int, bytes]:
        if scope["path"] == "/refused":
            return 401, b"no"
        if scope["path"] == "/slow":
            await self.may_answer.wait()
        body, more = b"", True
        try:
            while more:
                message = await receive()
                body, more = body + message.get("body", b""), message.get("more_body", False)
        except Malformed as error:
            return status_of(error).status, b"fault"
        names = {name: value for name, value in scope["headers"] if name == b"host"}
        told = (scope["method"], scope["path"], scope["query_string"].decode(), str(names))
        return 200, json.dumps([*told, len(body), hashlib.sha256(body).hexdigest()]).encode()

    @asynccontextmanager
    async def accepted(self) -> AsyncGenerator[tuple[Any, socket.socket]]:
        """A connection's two ends: the protocol on ours, the client's socket."""
        ours, theirs = socket.socketpair()
        theirs.setblocking(False)
        with theirs:
            _, protocol = await asyncio.get_running_loop().connect_accepted_socket(
                self.connect, ours
            )
            try:
                yield protocol, theirs
            finally:
                protocol.cut()

    @asynccontextmanager
    async def listening(self) -> AsyncGenerator[int]:
        """The port where it listens."""
        server = await asyncio.get_running_loop().create_server(self.connect, "127.0.0.1", 0)
        try:
            yield server.sockets[0].getsockname()[1]
        finally:
            server.close()
            for one in list(self.registry.every()):
                one.cut()


def ran(work: Coroutine[Any, Any, T]) -> T:
    with asyncio.Runner() as runner:
        return runner.run(work)


async def read_all(connection: socket.socket) -> bytes:
    loop, told = asyncio.get_running_loop(), b""
    while piece := await loop.sock_recv(connection, 65_536):
        told += piece
    return told


async def told_to(parser: str, pieces: list[bytes]) -> tuple[bytes, list[str]]:
    """All that is answered to these pieces, up to the end, and what the application was asked."""
    house = HearthServer(parser)
    async with house.accepted() as (protocol, theirs):
        for piece in pieces:
            protocol.data_received(piece)
            await asyncio.sleep(0)
        async with asyncio.timeout(PATIENCE_S):
            answer = await read_all(theirs)
    return answer, house.asked


def statuses(answer: bytes) -> list[int]:
    return [int(number) for number in re.findall(rb"HTTP/1\.1 ([0-9]{3}) ", answer)]


@EITHER
@pytest.mark.parametrize("name", [*BAD, *NOT_SPOKEN, *TOO_LARGE])
def test_what_is_refused_is_told_why_and_no_parser_sees_it(parser: str, name: str) -> None:
    (request,) = (kinds[name] for kinds in (BAD, NOT_SPOKEN, TOO_LARGE) if name in kinds)
    expected = 400 if name in BAD else 501 if name in NOT_SPOKEN else 431
    answer, asked = ran(told_to(parser, [request]))
    assert statuses(answer) == [expected]
    assert b"connection: close\r\n" in answer
    is_in_body = request.startswith(CHUNKED)
    assert asked == (["/x"] if is_in_body else [])
    if not is_in_body:
        error = json.loads(answer.partition(b"\r\n\r\n")[2])["error"]
        assert error["code"] in ("malformed_request", "not_implemented", "request_head_too_large")


COMPLETE = [
    GET,
    head(b"Content-Length: 5") + b"hello",
    head(b"Content-Length: 70000") + b"z" * 70_000,
    CHUNKED + b"5;x\r\nhello\r\n2\r\nyo\r\n0\r\na: b\r\n\r\n",
    head(b"Content-Length: 3", line=b"POST /refused HTTP/1.1") + b"abc",
    head(line=b"GET /refused HTTP/1.1"),
    head(b"Connection: Upgrade", b"Upgrade: websocket", line=b"GET /ws HTTP/1.1"),
    head(b"Connection: Upgrade", b"Upgrade: h2c", b"Content-Length: 2") + b"{}",
    head(b"Expect: 100-continue", b"Content-Length: 2") + b"{}",
    head(line=b"GET http://localhost/there?x=%20 HTTP/1.1"),
    head(line=b"OPTIONS * HTTP/1.1"),
    b"\r\n" + GET,
]


@EITHER
@settings(max_examples=60, deadline=None)
@given(
    requests=st.lists(st.sampled_from([*COMPLETE, *BAD.values(), *TOO_LARGE.values()]), max_size=4),
    cuts=st.lists(st.integers(0, 80_000), max_size=8),
)
def test_any_split_into_segments_gives_the_same_answers(
    parser: str, requests: list[bytes], cuts: list[int]
) -> None:
    """Of requests behind each other as well, and of what is refused among them."""
    data = b"".join(requests) + LAST
    whole, asked = ran(told_to(parser, [data]))
    pieces, also_asked = ran(told_to(parser, split(data, cuts)))
    assert _told(whole) == _told(pieces)
    assert asked == also_asked


def _told(answer: bytes) -> list[bytes]:
    """Without what says only that the body may come."""
    return [part for part in answer.split(b"HTTP/1.1 ")[1:] if not part.startswith(b"100 ")]


@EITHER
@pytest.mark.parametrize(
    ("beginning", "status"),
    [
        (head(b"Content-Length: 1000000", line=b"POST /refused HTTP/1.1") + b"{", 401),
        (CHUNKED.replace(b"/x", b"/refused") + b"5\r\nh", 401),
        (CHUNKED + b"zz\r\n", 400),
        (head(*(b"x: 1",) * 200), 431),
    ],
)
async def test_an_answer_before_the_end_of_a_request_ends_the_connection(
    parser: str, beginning: bytes, status: int
) -> None:
    """The client can read it, and what it goes on sending is neither kept nor read for long."""
    house = HearthServer(parser)
    async with house.accepted() as (protocol, theirs):
        protocol.data_received(beginning)
        answer = await read_all(theirs)  # our side ends at once
        assert statuses(answer) == [status]
        assert b"connection: close\r\n" in answer
        assert house.registry.num_open == 1
        for _ in range(LINGER_READS):
            protocol.data_received(b"x" * 100)
            assert house.registry.num_held_bytes == 0
        await until(lambda: not house.registry.num_open, "the connection is gone")
    assert len(house.asked) <= 1


@EITHER
async def test_a_request_that_nobody_reads_is_not_waited_for(
    parser: str,
) -> None:
    house = HearthServer(parser, linger_s=0.05)
    async with house.accepted() as (protocol, theirs):
        protocol.data_received(head(b"Content-Length: 9", line=b"POST /refused HTTP/1.1"))
        assert statuses(await read_all(theirs)) == [401]
        await until(lambda: not house.registry.num_open, "the connection is gone")


@EITHER
async def test_a_head_that_does_not_arrive_in_time_is_not_waited_for(parser: str) -> None:
    """Nor the head of a second request, whose client had all the time before it."""
    house = HearthServer(parser, head_timeout_s=0.05, linger_s=0.05)
    for beginning in (b"", b"GET / HT", GET + b"GET / HT", b"\r\n\r\n"):
        async with house.accepted() as (protocol, theirs):
            protocol.data_received(beginning)
            assert statuses(await read_all(theirs)) == [200] * beginning.count(GET)
            assert house.registry.num_held_bytes == 0
    await until(lambda: not house.registry.num_open, "the connections are gone")
    assert house.asked == ["/v1/models"]


@EITHER
async def test_a_request_that_was_read_leaves_its_connection_to_the_next(parser: str) -> None:
    house = HearthServer(parser)
    async with house.accepted() as (protocol, theirs):
        for _ in range(3):
            protocol.data_received(head(b"Content-Length: 5") + b"hello")
            answer = await asyncio.get_running_loop().sock_recv(theirs, 65_536)
            assert statuses(answer) == [200]
            assert b"connection: close" not in answer


@EITHER
async def test_requests_behind_each_other_are_answered_in_turn_and_one_at_a_time(
    parser: str,
) -> None:
    house = HearthServer(parser)
    async with house.accepted() as (protocol, theirs):
        slow = head(line=b"GET /slow HTTP/1.1")
        protocol.data_received(slow + GET * 1500 + LAST)
        await until(lambda: house.asked == ["/slow"], "the first is asked")
        assert house.num_at_work == 1
        assert not protocol.transport.is_reading(), "what is held is enough"
        house.may_answer.set()
        answer = await read_all(theirs)
    assert statuses(answer) == [200] * 1502
    assert house.asked == ["/slow", *["/v1/models"] * 1500, "/last"]
    assert house.most_at_work == 1


async def connected(port: int, said: bytes) -> socket.socket:
    one = socket.socket()
    one.setblocking(False)
    loop = asyncio.get_running_loop()
    await loop.sock_connect(one, ("127.0.0.1", port))
    await loop.sock_sendall(one, said)
    return one


@EITHER
async def test_however_many_connect_what_they_hold_is_bounded_and_others_are_served(
    parser: str,
) -> None:
    """Unfinished heads as large as they may be, and connections that were answered and stay."""
    house, most = HearthServer(parser, most=40), 40
    part = b"GET / HTTP/1.1\r\n" + (b"x: " + b"a" * 16_000 + b"\r\n") * 4
    bound = most * MAX_HEAD_BYTES
    async with house.listening() as port:
        hostile: list[socket.socket] = []
        for number in range(3 * most):
            hostile.append(await connected(port, part if number % 3 else GET))
            assert house.registry.num_open <= most
            assert house.registry.num_held_bytes <= bound
            ours = await connected(port, LAST)
            with ours:
                assert statuses(await read_all(ours)) == [200]
        without_head = house.registry.most_without_head
        await until(lambda: house.registry.num_held_bytes >= 20 * 60_000, "heads are held")
        assert house.registry.num_held_bytes <= without_head * MAX_HEAD_BYTES
        assert house.registry.num_evicted >= 2 * most
        assert house.registry.num_refused == 0
        for one in hostile:
            one.close()
        await until(lambda: not house.registry.num_open, "nothing of it is left")


@EITHER
async def test_when_all_are_being_answered_the_next_is_told_so(parser: str) -> None:
    house = HearthServer(parser, most=4)
    async with house.listening() as port:
        slow = head(b"Connection: close", line=b"GET /slow HTTP/1.1")
        busy = [await connected(port, slow) for _ in range(4)]
        await until(lambda: house.num_at_work == 4, "all are at work")
        for number in range(50):
            with await connected(port, LAST) as refused:
                answer = await read_all(refused)
                assert statuses(answer) == [503], number
                assert b"max_connections" in answer
                assert b"connection: close" in answer
        assert house.registry.num_refused == 50
        house.may_answer.set()
        for one in busy:
            assert statuses(await read_all(one)) == [200]
            one.close()
        with await connected(port, LAST) as served:
            assert statuses(await read_all(served)) == [200]


def test_there_are_no_more_connections_than_files_that_may_be_open(
    limited_files: int,
) -> None:
    assert most_connections(None) == limited_files // 2
    assert most_connections(10) == 10
    assert most_connections(10**6) < limited_files


@pytest.fixture
def limited_files() -> Generator[int]:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = min(600, before[0])
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, before[1]))
    yield limit
    resource.setrlimit(resource.RLIMIT_NOFILE, before)
