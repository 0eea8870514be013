"""Clients as they are: those that never finish their request are cut off, so that they hold nothing
open; those that would rather speak HTTP/2 are heard all the same, and so are those of HTTP/1.0.
"""

from __future__ import annotations

import asyncio
import re
from typing import TYPE_CHECKING, Any

from typing_extensions import override
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from runtime.errors import RequestTimeout

if TYPE_CHECKING:
    from litestar.types import ASGIApp, HTTPReceiveMessage, Receive, Scope, Send
    from uvicorn._types import ASGISendEvent


_OLD = "1.0"
_OFFER = re.compile(rb"\r\nupgrade:(?=[ \t]*h2c\b)", re.IGNORECASE)


class PatientProtocol(HttpToolsProtocol):
    """Uvicorn's protocol, that closes a connection whose request head does not arrive in time.

    Between two requests the keep-alive timeout counts, as ever. An offer to go on in HTTP/2 is not
    read: uvicorn would decline it and lose the request's body, which Java's clients send with it.
    """

    head_timeout_s = 30.0
    _deadline: asyncio.TimerHandle | None = None
    _is_in_body = False

    @override
    def data_received(self, data: bytes) -> None:
        if not self._is_in_body:
            head, end, body = data.partition(b"\r\n\r\n")
            data = _OFFER.sub(b"\r\nx-offer:", head) + end + body
        super().data_received(data)

    @override
    def on_message_complete(self) -> None:
        self._is_in_body = False
        super().on_message_complete()

    @override
    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        self._wait()

    @override
    def on_message_begin(self) -> None:
        super().on_message_begin()
        if self._deadline is None:
            self._wait()

    @override
    def on_headers_complete(self) -> None:
        self._is_in_body = True
        self._relax()
        super().on_headers_complete()
        if self.scope["http_version"] == _OLD:
            cycle: Any = self.cycle
            cycle.__class__ = _OldCycle
            cycle.waiting_for_100_continue = False  # it is not of that version

    @override
    def connection_lost(self, exc: Exception | None) -> None:
        self._relax()
        super().connection_lost(exc)

    def _wait(self) -> None:
        self._deadline = asyncio.get_running_loop().call_later(self.head_timeout_s, self._give_up)

    def _relax(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _give_up(self) -> None:
        self._deadline = None
        transport: Any = self.transport
        if transport is not None and not transport.is_closing():
            transport.close()


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


def patient_protocol(timeout_s: float) -> type[PatientProtocol]:
    """The protocol whose clients have so long for the head of a request."""
    return type("PatientProtocol", (PatientProtocol,), {"head_timeout_s": timeout_s})


MIN_BYTES_PER_S = 4096
"""Who sends more slowly than any line is only holding on to the connection."""


class PatientReceive:
    """`receive` for a body that must go on arriving: each piece within `timeout_s` seconds.

    All of it has that long as well, and a second more for each `MIN_BYTES_PER_S` that arrived.
    """

    def __init__(self, app: ASGIApp, timeout_s: float) -> None:
        self._app = app
        self._timeout_s = timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request, or the application's lifespan."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        is_whole = False
        num_bytes = 0
        started_s = asyncio.get_running_loop().time()

        async def patient_receive() -> Any:
            nonlocal is_whole, num_bytes
            if is_whole:  # what follows is only the client's leaving
                return await receive()
            try:
                now_s = asyncio.get_running_loop().time()
                over_s = started_s + self._timeout_s + num_bytes / MIN_BYTES_PER_S
                async with asyncio.timeout_at(min(now_s + self._timeout_s, over_s)):
                    message: HTTPReceiveMessage | Any = await receive()
            except TimeoutError:
                raise RequestTimeout(self._timeout_s) from None
            num_bytes += len(message.get("body", b""))
            is_whole = not message.get("more_body", False)
            return message

        await self._app(scope, patient_receive, send)
