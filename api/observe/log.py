"""The one line that every request leaves behind in the log.

No prompt text and no token ids: what a client says stays out of the log at every level.
"""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Callable, Mapping
from typing import Protocol, cast
from urllib.parse import quote

import structlog
from litestar.datastructures import Headers
from litestar.types import ASGIApp, HTTPScope, Message, Receive, Scope, Send

from api.observe.metrics import Metrics
from api.observe.record import RequestRecord
from api.observe.redact import PAGE_TOKEN, SESSION_HEADERS, hiding
from runtime.cache.deletion_log import Receipt

log = structlog.stdlib.get_logger("hearth.http")

_REQUEST_ID = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")
_SECRET_HEADERS = ("x-api-key", PAGE_TOKEN, *SESSION_HEADERS)
_QUIET_ROUTES = ("/health", "/health/live", "/health/ready", "/metrics")


class Traces(Protocol):
    """Who is told of every request once it is over."""

    def finished(
        self, method: str, route: str, headers: Mapping[str, str], record: RequestRecord
    ) -> None: ...


class RequestLog:
    """The outermost ASGI layer: names each request, counts it, and writes its line when it ends."""

    def __init__(
        self,
        app: ASGIApp,
        metrics: Metrics,
        traces: Traces | None,
        received: Callable[[], Receipt],
    ) -> None:
        self._app = app
        self._received = received
        self.metrics = metrics
        self._traces = traces

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request, or the application's lifespan."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        record = RequestRecord(_request_id(scope), self._received())
        scope.setdefault("state", {})["record"] = record
        # Anthropic's clients know the id by the second name.
        own_id = record.request_id.encode()
        headers = [(b"x-request-id", own_id), (b"request-id", own_id)]

        async def recorded_send(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
                message["headers"] = [*message["headers"], *headers]
            await send(message)

        with (
            hiding(_secrets_of(scope)),
            structlog.contextvars.bound_contextvars(request_id=record.request_id),
        ):
            try:
                await self._app(scope, receive, recorded_send)
            finally:
                self._finish(scope, record)

    def _finish(self, scope: HTTPScope, record: RequestRecord) -> None:
        seconds = time.perf_counter() - record.started_s
        route = str(cast("dict[str, object]", scope).get("path_template", "unmatched"))
        self.metrics.observe_request(route, scope["method"], record.status, seconds)
        facts: dict[str, object] = {"status": record.status, "ms": round(seconds * 1000, 1)}
        facts |= record.facts()
        path = quote(scope["path"][:128]) if route == "unmatched" else route
        write = log.debug if route in _QUIET_ROUTES else log.info
        write(f"{scope['method']} {path}", **facts)
        if self._traces is not None and route not in _QUIET_ROUTES:
            self._traces.finished(scope["method"], route, Headers.from_scope(scope), record)


def _secrets_of(scope: HTTPScope) -> list[str]:
    """Keys and the names of conversations in the headers."""
    headers = Headers.from_scope(scope)
    authorization, cookie = headers.get("authorization", ""), headers.get("cookie", "")
    found = [authorization, authorization.partition(" ")[2], cookie]
    found += filter(None, map(headers.get, _SECRET_HEADERS))
    if cookie:
        found += [part.partition("=")[2].strip() for part in cookie.split(";")]
    return found


def _request_id(scope: HTTPScope) -> str:
    given = Headers.from_scope(scope).get("x-request-id", "")
    return given if _REQUEST_ID.fullmatch(given) else f"req_{secrets.token_hex(12)}"
