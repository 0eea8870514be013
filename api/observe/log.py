"""Logging: how lines look, and the one line that every request leaves behind.

No prompt text and no token ids: what a client says stays out of the log at every level.
"""

from __future__ import annotations

import io
import logging
import os
import re
import secrets
import sys
import time
from collections.abc import Mapping
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Literal, Protocol, TextIO, cast
from urllib.parse import quote

import structlog
from litestar.datastructures import Headers
from litestar.types import ASGIApp, HTTPScope, Message, Receive, Scope, Send
from typing_extensions import override

from api.observe.metrics import Metrics
from api.observe.record import RequestRecord
from api.observe.redact import PAGE_TOKEN, SESSION_HEADERS, hiding, redact

Level = Literal["debug", "info", "warning", "error"]
Format = Literal["console", "json"]

log = structlog.stdlib.get_logger("hearth.http")

LOG_FILE_BYTES = 20_000_000
NUM_OLD = 5

_REQUEST_ID = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")
_SECRET_HEADERS = ("x-api-key", PAGE_TOKEN, *SESSION_HEADERS)
_QUIET_ROUTES = ("/health", "/health/live", "/health/ready", "/metrics")


class RotatingFile(io.TextIOBase):
    """A log file that makes room for itself: at most `NUM_OLD` older ones are kept beside it."""

    def __init__(self, path: Path, max_bytes: int = LOG_FILE_BYTES) -> None:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._handler = RotatingFileHandler(
            path, maxBytes=max_bytes, backupCount=NUM_OLD, encoding="utf-8"
        )
        self._handler.namer = self._closed_to_others
        self._handler.setFormatter(logging.Formatter("%(message)s"))
        path.chmod(0o600)

    @override
    def write(self, text: str, /) -> int:
        if line := text.rstrip("\n"):
            self._handler.emit(logging.makeLogRecord({"msg": line}))
        return len(text)

    @staticmethod
    def _closed_to_others(name: str) -> str:
        os.umask(os.umask(0) | 0o077)
        return name


def configure_logging(level: Level, log_format: Format, file: Path | None = None) -> None:
    """Send everything to stderr, or to a file that rotates, in one form: our lines and libraries'.

    Raises:
        OSError: the file cannot be written.
    """
    out: TextIO = cast("TextIO", RotatingFile(file)) if file is not None else sys.stderr
    number = logging.getLevelNamesMapping()[level.upper()]
    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        redact,
    ]
    if log_format == "json":
        finish: list[structlog.typing.Processor] = [structlog.processors.JSONRenderer()]
    else:
        finish = [
            structlog.dev.ConsoleRenderer(
                colors=out.isatty(), exception_formatter=structlog.dev.plain_traceback
            )
        ]
    structlog.configure(
        processors=[*shared, *finish],
        wrapper_class=structlog.make_filtering_bound_logger(number),
        logger_factory=structlog.WriteLoggerFactory(out),
        cache_logger_on_first_use=True,
    )
    handler = logging.StreamHandler(out)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *finish],
        )
    )
    logging.basicConfig(level=max(number, logging.WARNING), handlers=[handler], force=True)


class Traces(Protocol):
    """Who is told of every request once it is over."""

    def finished(
        self, method: str, route: str, headers: Mapping[str, str], record: RequestRecord
    ) -> None: ...


class RequestLog:
    """The outermost ASGI layer: names each request, counts it, and writes its line when it ends."""

    def __init__(self, app: ASGIApp, metrics: Metrics, traces: Traces | None = None) -> None:
        self._app = app
        self.metrics = metrics
        self._traces = traces

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request, or the application's lifespan."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        record = RequestRecord(_request_id(scope))
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
