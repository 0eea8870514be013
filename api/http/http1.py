"""Connections of HTTP/1.1: how many there are, how large their heads, and how each of them ends.

What is known here of uvicorn's protocols holds for each of its implementations: they are handed a
connection, then bytes; they write, pause and close the transport; and say when an answer is whole.
"""

from __future__ import annotations

import asyncio
import ipaddress
import resource
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec
from typing_extensions import override
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from api.http.framing import MAX_HEAD_BYTES, Framing, Malformed

if TYPE_CHECKING:
    from uvicorn._types import ASGISendEvent

    _Protocol = HttpToolsProtocol
else:
    _Protocol = object

LINGER_S = 2.0
LINGER_READS = 64
LINGER_BYTES = 1 << 20
"""What of an unread request is still taken, and forgotten, so that its client reads the answer."""
TAKE_S = 120.0
"""A client that takes nothing of its answer for so long is cut off."""
MOST_CONNECTIONS = 1024
_OTHER_FILES = 128
_RESERVED = 8
"""Connections that only clients of this machine get, its operator among them."""
_TOLD = 32
"""So many more than there may be are told that there are too many; the others are just closed."""


def most_connections(asked: int | None) -> int:
    """How many there may be: half of the files that may be open, unless the settings say."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        return asked or MOST_CONNECTIONS
    most = min(MOST_CONNECTIONS, limit // 2) if asked is None else asked
    return max(2, min(most, limit - _OTHER_FILES))


class TooManyConnections(Malformed):
    """All connections that there may be are at work for somebody."""

    code = "too_many_connections"
    status = 503


class Connections:
    """Those that are open, and which of them leaves when there are too many.

    One that waits for its client has nothing to lose: the next request opens another. So the one
    that waited longest makes room, and only when all of them are being answered is one refused. At
    most half of them may be without a complete head.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self.most_without_head = max(1, most // 2)
        self.num_refused = 0
        self.num_evicted = 0
        self.num_malformed = 0
        self._open: set[Bounded] = set()
        self._without_head: dict[Bounded, None] = {}
        self._idle: dict[Bounded, None] = {}

    @property
    def num_open(self) -> int:
        return len(self._open)

    @property
    def num_waiting(self) -> int:
        """Those that wait for their client, in the middle of a head or between two requests."""
        return len(self._without_head) + len(self._idle)

    @property
    def num_held_bytes(self) -> int:
        """Bytes of requests that no parser has seen so far."""
        return sum(one.num_held_bytes for one in self._open)

    def every(self) -> list[Bounded]:
        """Those that are open now."""
        return list(self._open)

    def admit(self, one: Bounded, *, is_near: bool) -> bool:
        """Count it in, if there is or can be made room; `is_near` if its client is on this machine.

        One that is not let in is open all the same, until it was told so.
        """
        most = self.most if is_near else max(1, self.most - _RESERVED)
        while len(self._open) >= most and (self._idle or self._without_head):
            self._evict(self._idle or self._without_head)
        is_let_in = len(self._open) < most
        self._open.add(one)
        self.num_refused += not is_let_in
        return is_let_in

    @property
    def is_overrun(self) -> bool:
        """There are so many that one more is not even told."""
        return len(self._open) > self.most + _TOLD

    def begins(self, one: Bounded) -> None:
        """It waits for a head, of which something may be there."""
        self._settle(one)
        self._without_head[one] = None
        if len(self._without_head) > self.most_without_head:
            self._evict(self._without_head)

    def works(self, one: Bounded) -> None:
        """It has a request that is to be answered."""
        self._settle(one)

    def rests(self, one: Bounded) -> None:
        """It has said everything."""
        self._settle(one)
        if one in self._open:
            self._idle[one] = None

    def forget(self, one: Bounded) -> None:
        """It is closed."""
        self._settle(one)
        self._open.discard(one)

    def _settle(self, one: Bounded) -> None:
        self._without_head.pop(one, None)
        self._idle.pop(one, None)

    def _evict(self, among: dict[Bounded, None]) -> None:
        oldest = next(iter(among))
        self.forget(oldest)
        self.num_evicted += 1
        oldest.cut()


class Line(asyncio.Transport):
    """A transport as a protocol sees it, which closes so that its client reads the last answer.

    A socket that is closed while something unread arrives resets the connection, and the answer is
    lost. So where the request is not whole, our side ends, and the rest is read for a while.
    """

    def __init__(
        self, transport: asyncio.Transport, is_unread: Callable[[], bool], linger_s: float
    ) -> None:
        super().__init__()
        self._linger_s = linger_s
        self.is_closed = False
        self._transport = transport
        self._is_unread = is_unread
        self._end: asyncio.TimerHandle | None = None
        self._num_reads = 0
        self._num_bytes = 0
        self._pauses: set[str] = set()
        self._is_paused = False

    @override
    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self._transport.get_extra_info(name, default)

    @override
    def is_closing(self) -> bool:
        return self.is_closed or self._transport.is_closing()

    @override
    def write(self, data: bytes | bytearray | memoryview[Any]) -> None:
        if not self.is_closed:
            self._transport.write(data)

    @override
    def pause_reading(self) -> None:
        self.pause("parser")

    @override
    def resume_reading(self) -> None:
        self.resume("parser")

    @override
    def close(self) -> None:
        if self.is_closed:
            return
        self.is_closed = True
        if self._transport.is_closing():
            return
        if self._is_unread():
            self._transport.write_eof()
            self._pauses.clear()
            self._apply()
            self._end_in(self._linger_s)
        else:
            self._end_in(TAKE_S)
            self._transport.close()

    @override
    def abort(self) -> None:
        self.is_closed = True
        self._transport.abort()

    @override
    def is_reading(self) -> bool:
        return not self._is_paused and not self.is_closing()

    def pause(self, why: str) -> None:
        """Read nothing until each reason for that is gone."""
        if not self.is_closed:
            self._pauses.add(why)
            self._apply()

    def resume(self, why: str) -> None:
        """Go on reading as far as this reason is concerned."""
        self._pauses.discard(why)
        self._apply()

    def drop(self, num_bytes: int) -> None:
        """Something arrived after the end."""
        self._num_reads += 1
        self._num_bytes += num_bytes
        if self._num_reads >= LINGER_READS or self._num_bytes >= LINGER_BYTES:
            self._transport.abort()

    def lost(self) -> None:
        """The connection is gone."""
        self.is_closed = True
        if self._end is not None:
            self._end.cancel()

    def _apply(self) -> None:
        if bool(self._pauses) == self._is_paused or self._transport.is_closing():
            return
        self._is_paused = bool(self._pauses)
        if self._is_paused:
            self._transport.pause_reading()
        else:
            self._transport.resume_reading()

    def _end_in(self, seconds: float) -> None:
        self._end = asyncio.get_running_loop().call_later(seconds, self._transport.abort)


class Bounded(_Protocol):
    """What is in front of a parser, whichever it is: it is given one bounded request at a time.

    The next one waits until the last is answered; a fault in a body is the answering program's to
    find (`fault_of`). A connection ends with an answer that came before its request was read.
    """

    registry = Connections(MOST_CONNECTIONS)
    head_timeout_s = 30.0
    linger_s = LINGER_S
    _line: Line

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.app_state = {**self.app_state, "connection": self}
        self._framing = Framing()
        self._held = bytearray()
        self._is_answering = False
        self._head_end: asyncio.TimerHandle | None = None
        self._take_end: asyncio.TimerHandle | None = None

    @property
    def fault(self) -> Malformed | None:
        """Why no more of the body will be read."""
        return self._framing.fault

    @property
    def num_held_bytes(self) -> int:
        return len(self._held) + self._framing.num_head_bytes

    @override
    def connection_made(self, transport: asyncio.Transport) -> None:
        self._line = Line(transport, self._is_unread, self.linger_s)
        super().connection_made(self._line)
        if self.registry.admit(self, is_near=_is_near(transport)):
            self._wait_for_head()
        elif self.registry.is_overrun:
            self.cut()
        else:
            most = self.registry.most
            why = f"{most} connections are being answered (max_connections). Try again soon."
            self._held += b" "  # its request is on its way
            self._refuse(TooManyConnections(why))

    @override
    def data_received(self, data: bytes) -> None:
        if self._line.is_closed:
            self._line.drop(len(data))
        elif self._framing.fault is None:
            self._held += data
            self._advance()

    @override
    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._is_answering = False
        self.registry.rests(self)
        if not self._framing.is_between:
            self._line.close()
        elif self._held and not self._line.is_closed:
            self.loop.call_soon(self._advance)

    @override
    def pause_writing(self) -> None:
        super().pause_writing()
        self._take_end = self.loop.call_later(TAKE_S, self.cut)

    @override
    def resume_writing(self) -> None:
        super().resume_writing()
        if self._take_end is not None:
            self._take_end.cancel()

    @override
    def connection_lost(self, exc: Exception | None) -> None:
        self._line.lost()
        self._stop_waiting()
        if self._take_end is not None:
            self._take_end.cancel()
        self.registry.forget(self)
        super().connection_lost(exc)

    def cut(self) -> None:
        """End it without a word."""
        self._line.abort()

    def _is_unread(self) -> bool:
        return bool(self._held) or not self._framing.is_between

    def _advance(self) -> None:
        """Give the parser what it may have now."""
        framing = self._framing
        while self._held and not self._line.is_closed and framing.fault is None:
            if framing.is_between:
                if self._is_answering:
                    break
                self._wait_for_head()
            piece = framing.take(self._held)
            if piece and not self._is_answering:
                self._is_answering = True
                self._stop_waiting()
                self.registry.works(self)
            if piece:
                super().data_received(piece)
            if framing.fault is not None:
                self._on_malformed(framing.fault)
                return
            if not piece:
                break
        if len(self._held) > MAX_HEAD_BYTES:  # it asks on before it was answered
            self._line.pause("ahead")
        else:
            self._line.resume("ahead")

    def _on_malformed(self, error: Malformed) -> None:
        self.registry.num_malformed += 1
        if not self._is_answering:
            self._refuse(error)
            return
        self._line.pause("fault")
        self.cycle.message_event.set()

    def _refuse(self, error: Malformed) -> None:
        """Say why, in what clients of OpenAI's and of Anthropic's both read, and close."""
        kind = "server_error" if error.status == 503 else "invalid_request_error"
        told = {"message": error.message, "type": kind, "param": None, "code": error.code}
        body = msgspec.json.encode({"type": "error", "error": told})
        head = (
            f"HTTP/1.1 {error.status} {_PHRASES[error.status]}\r\ncontent-type: application/json"
            f"\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        self._stop_waiting()
        self._line.write(head.encode() + body)
        self._line.close()
        self.registry.rests(self)
        self._held.clear()

    def _wait_for_head(self) -> None:
        if self._head_end is None:
            self._unset_keepalive_if_required()
            self.registry.begins(self)
            self._head_end = self.loop.call_later(self.head_timeout_s, self._give_up)

    def _give_up(self) -> None:
        self._line.close()
        self.registry.rests(self)
        self._held.clear()
        self._framing = Framing()

    def _stop_waiting(self) -> None:
        if self._head_end is not None:
            self._head_end.cancel()
            self._head_end = None


class HttpConnection(Bounded, HttpToolsProtocol):
    """The protocol that the server speaks."""

    @override
    def on_headers_complete(self) -> None:
        super().on_headers_complete()
        if self.scope["http_version"] == _OLD:
            cycle: Any = self.cycle
            cycle.__class__ = _OldCycle
            cycle.waiting_for_100_continue = False  # it is not of that version


_OLD = "1.0"


class _OldCycle(RequestResponseCycle):
    """An answer to a client of HTTP/1.0, which knows no chunks: what does not say how long it is
    ends with the connection.
    """

    _is_endless = False

    @override
    async def send(self, message: ASGISendEvent) -> None:
        if message["type"] == "http.response.start":
            names = {name.lower() for name, _ in message.get("headers", ())}
            self._is_endless = b"content-length" not in names
            if self._is_endless:
                self.chunked_encoding = False
        elif message["type"] == "http.response.body" and self._is_endless:
            self.expected_content_length = len(message.get("body", b""))
        await super().send(message)


def http_connection(registry: Connections, head_timeout_s: float) -> type[HttpConnection]:
    """The protocol of the connections counted there, which have so long for a request's head."""
    bounds = {"registry": registry, "head_timeout_s": head_timeout_s}
    return type("HttpConnection", (HttpConnection,), bounds)


_PHRASES = {
    400: "Bad Request",
    431: "Request Header Fields Too Large",
    501: "Not Implemented",
    503: "Service Unavailable",
}


def _is_near(transport: asyncio.Transport) -> bool:
    """Whether the client is on this machine."""
    peer = transport.get_extra_info("peername")
    match peer:
        case (str(host), *_):
            return ipaddress.ip_address(host.partition("%")[0]).is_loopback
        case _:
            return True
