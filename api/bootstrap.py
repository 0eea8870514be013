"""What answers first: liveness at once, everything else as soon as the house is built.

Importing and building the application takes most of a second; a probe need not wait for it, and
neither need whoever is told which models there are.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from runtime.errors import HearthError

if TYPE_CHECKING:
    from api.app import HearthServer
    from api.preflight import Preflight

Message = dict[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
AnyApp = Callable[[Any, Any, Any], Awaitable[None]]

_LIVE = b'{"status":"live"}'
_HEADERS = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(_LIVE))]


class BootstrapApp:
    """An ASGI application in front of the one that `build` makes, when it starts, of what `look`
    found before; both in a thread.

    `on_end` is called when the house was closed or could not be built; `failure` then says why.
    """

    def __init__(
        self, look: Callable[[], Preflight], build: Callable[[Preflight], HearthServer]
    ) -> None:
        self._look = look
        self._build = build
        self._found: Preflight | None = None
        self._has_looked = asyncio.Event()
        self._server: HearthServer | None = None
        self._is_settled = asyncio.Event()
        self.on_end: Callable[[], None] = lambda: None
        self.failure: HearthError | None = None
        self._is_hurried = False

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Serve one request, or the lifespan of the house."""
        if scope["type"] == "lifespan":
            await self._live_in(scope, receive, send)
        elif not self._is_settled.is_set() and _is_liveness_probe(scope):
            await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
            await send({"type": "http.response.body", "body": _LIVE, "more_body": False})
        else:
            app: AnyApp = (await self.house()).app
            try:
                await app(scope, receive, send)
            except asyncio.CancelledError:
                if not self._is_hurried:  # else the loop ends, and that is no fault of the request
                    raise

    async def found(self) -> Preflight:
        """What was found before the house is built; cancelled where that failed."""
        await self._has_looked.wait()
        if self._found is None:
            raise asyncio.CancelledError
        return self._found

    async def house(self) -> HearthServer:
        """The house, once it is open; cancelled when it never will be."""
        await self._is_settled.wait()
        if self._server is None:
            raise asyncio.CancelledError
        return self._server

    async def end_answers(self, after_s: float) -> None:
        """In `after_s` seconds, end every answer that is not finished by then."""
        await asyncio.sleep(after_s)
        if self._server is not None:
            await self._server.supervisor.stop()

    def refuse(self) -> None:
        """End the streams that have no end of their own, and what waits for a model."""
        if self._server is not None:
            self._server.supervisor.news.close()
            self._server.supervisor.refuse_waiting()

    def hurry(self) -> None:
        """Do not wait for the workers any longer, nor for requests."""
        self._is_hurried = True
        if self._server is not None:
            self._server.supervisor.kill()

    async def _live_in(self, scope: Message, receive: Receive, send: Send) -> None:
        startup = await receive()
        await send({"type": "lifespan.startup.complete"})
        pending = [startup]

        async def inner_receive() -> Message:
            return pending.pop() if pending else await receive()

        async def inner_send(message: Message) -> None:
            if message["type"] == "lifespan.startup.complete":
                self._is_settled.set()
            elif message["type"] != "lifespan.startup.failed":
                await send(message)

        try:
            self._found = await asyncio.to_thread(self._look)
            self._has_looked.set()
            self._server = await asyncio.to_thread(self._build, self._found)
            app: AnyApp = self._server.app
            await app(scope, inner_receive, inner_send)
        except HearthError as error:
            self.failure = error
        except asyncio.CancelledError:
            pass  # told to hurry: the loop ends without waiting for the lifespan
        finally:
            if self._found is not None:
                self._found.home.listens_no_more()
            self._has_looked.set()
            self._is_settled.set()
            self.on_end()


def _is_liveness_probe(scope: Message) -> bool:
    return scope["path"] in ("/health/live", "/health") and scope.get("method") == "GET"
