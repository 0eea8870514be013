"""Clients that never finish their request are cut off, so that they hold nothing open; and who is
answered before the whole of it was read is told that the connection ends with the answer.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Protocol

from runtime.errors import HearthError, RequestTimeout

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    Message = dict[str, Any]
    Receive = Callable[[], Awaitable[Message]]
    Send = Callable[[Message], Awaitable[None]]
    AnyApp = Callable[[Any, Any, Any], Awaitable[None]]

MIN_BYTES_PER_S = 4096
"""Who sends more slowly than any line is only holding on to the connection."""
_CLOSE = (b"connection", b"close")


class Faulty(Protocol):
    """Where a body comes from."""

    @property
    def fault(self) -> HearthError | None:
        """Why no more of it will come."""
        ...


class SlowClientGuard:
    """The outermost ASGI layer. A body must go on arriving: each piece within `timeout_s` seconds.

    All of it has that long as well, and a second more for each `MIN_BYTES_PER_S` that arrived.
    """

    def __init__(self, app: AnyApp, timeout_s: float) -> None:
        self._app = app
        self._timeout_s = timeout_s

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Serve one request, or the application's lifespan."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        body = _Body(scope, receive, self._timeout_s)

        async def closing_send(message: Message) -> None:
            if message["type"] == "http.response.start" and not body.is_whole:
                headers = [one for one in message["headers"] if one[0].lower() != _CLOSE[0]]
                message["headers"] = [*headers, _CLOSE]
            await send(message)

        await self._app(scope, body.receive, closing_send)


class _Body:
    """The body of one request, as its application reads it."""

    def __init__(self, scope: Message, receive: Receive, timeout_s: float) -> None:
        names = dict(scope["headers"])
        has_body = names.get(b"content-length", b"0") != b"0" or b"transfer-encoding" in names
        self.is_whole = not has_body
        """Nothing of it is left to be read."""
        self._receive = receive
        self._connection: Faulty | None = scope.get("state", {}).get("connection")
        self._fault: HearthError | None = None
        self._timeout_s = timeout_s
        self._num_bytes = 0
        self._started_s = asyncio.get_running_loop().time()

    async def receive(self) -> Message:
        """The next message.

        Raises:
            RequestTimeout: it did not arrive in time.
            Malformed: it is framed in a way that cannot be read.
        """
        if self.is_whole:  # what follows is only the client's leaving
            return await self._receive()
        try:
            now_s = asyncio.get_running_loop().time()
            over_s = self._started_s + self._timeout_s + self._num_bytes / MIN_BYTES_PER_S
            async with asyncio.timeout_at(min(now_s + self._timeout_s, over_s)):
                message = await self._next()
        except TimeoutError:
            raise RequestTimeout(self._timeout_s) from None
        self._num_bytes += len(message.get("body", b""))
        self.is_whole = not message.get("more_body", False)
        return message

    async def _next(self) -> Message:
        """What arrived, and after the last of it what was wrong with the rest."""
        if self._fault is not None:
            raise self._fault
        message = await self._receive()
        if self._connection is not None:
            self._fault = self._connection.fault
        if self._fault is not None and not message.get("body"):
            raise self._fault
        return message
