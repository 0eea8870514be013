"""Redaction: what a client said or proves who it is with never gets into the log, at any level.

Lines are written by our code and by libraries, which put values into messages of exceptions; so
a traceback here has its frames and the exceptions' types, and the messages of our own errors only.
"""

from __future__ import annotations

import os
import re
import sys
import traceback
from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from types import TracebackType
from typing import cast

from structlog.typing import EventDict, WrappedLogger

from runtime.errors import HearthError
from store.errors import StoreError

SESSION_HEADERS = (
    "x-session-id",
    "thread-id",
    "session-id",
    "session_id",
    "x-session-affinity",
    "x-conversation-id",
    "x-claude-code-session-id",
)
"""Codex sends `thread-id` and `session-id`; sub-threads of a session have their own thread."""

PAGE_TOKEN = "x-hearth-page-token"  # noqa: S105
"""The header by which a page of ours proves that it was given to who signed in."""

HIDDEN = "[redacted]"
MIN_SECRET_CHARS = 4
"""Shorter ones would hide half of every line."""

NAMES = frozenset(
    "api_key arguments authorization body content cookie headers input instructions key messages"
    " password prompt secret session session_id system text token token_ids tools".split()
)
_KEY = re.compile(r"\b(?:hearth-|sk-)[A-Za-z0-9_-]{16,}|(?i:\b(?:bearer|basic)\s+)[^\s'\",]+")
_EXCEPTION = re.compile(r"(exception=\w+)\(.*\)", re.DOTALL)
"""How asyncio shows the exception of a task that nobody waited for."""

_OUR_OWN = (HearthError, StoreError, OSError)
_ExcInfo = tuple[type[BaseException], BaseException, TracebackType | None]
_secrets: ContextVar[tuple[str, ...]] = ContextVar("secrets", default=())


@contextmanager
def hiding(secrets: Iterable[str]) -> Generator[None]:
    """Hide these texts in whatever is logged meanwhile."""
    long = sorted({one for one in secrets if len(one) >= MIN_SECRET_CHARS}, key=len, reverse=True)
    token = _secrets.set((*_secrets.get(), *long))
    try:
        yield
    finally:
        _secrets.reset(token)


def redact(logger: WrappedLogger, method: str, event: EventDict) -> EventDict:
    """The processor: the last one before a line is spelled."""
    del logger, method
    error = _error_of(event.pop("exc_info", None))
    found = {name: HIDDEN if name in NAMES else _shown(event[name]) for name in event}
    if error is not None:
        found["exception"] = _scrubbed(told(error))
    return found


def told(error: BaseException) -> str:
    """An exception with what led to it: frames and types, and of our own errors the message."""
    parts: list[str] = []
    if error.__cause__ is not None:
        parts += [told(error.__cause__), "\nThe cause of:\n"]
    elif error.__context__ is not None and not error.__suppress_context__:
        parts += [told(error.__context__), "\nWhile this was handled:\n"]
    if error.__traceback__ is not None:
        parts += ["Traceback (most recent call last):\n", *traceback.format_tb(error.__traceback__)]
    message = f": {error}" if isinstance(error, _OUR_OWN) else ""
    parts.append(f"{type(error).__module__}.{type(error).__qualname__}{message}")
    if isinstance(error, BaseExceptionGroup):
        for one in cast("BaseExceptionGroup[BaseException]", error).exceptions:
            parts += ["\nOne of a group:\n", told(one)]
    return "".join(parts)


def _error_of(given: object) -> BaseException | None:
    """What `exc_info` means: an exception, the triple of `sys.exc_info()`, or a truth."""
    if isinstance(given, BaseException):
        return given
    if isinstance(given, tuple):
        return cast("_ExcInfo", given)[1]
    return sys.exc_info()[1] if given else None


def _shown(value: object) -> object:
    """A value as it may be seen: names, numbers, and collections of them."""
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, str):
        return _scrubbed(value)
    if isinstance(value, BaseException):
        return _scrubbed(f"{value}") if isinstance(value, _OUR_OWN) else type(value).__name__
    if isinstance(value, Mapping):
        pairs = cast("Mapping[object, object]", value)
        return {str(name): HIDDEN if name in NAMES else _shown(pairs[name]) for name in pairs}
    if isinstance(value, list | tuple | set | frozenset):
        return [_shown(one) for one in cast("Iterable[object]", value)]
    if isinstance(value, os.PathLike):
        return _scrubbed(str(cast("os.PathLike[str]", value)))
    if isinstance(value, bytes | bytearray):
        return f"<{len(value)} bytes>"
    return f"<{type(value).__name__}>"


def _scrubbed(text: str) -> str:
    for secret in _secrets.get():
        text = text.replace(secret, HIDDEN)
    return _EXCEPTION.sub(r"\1(…)", _KEY.sub(HIDDEN, text))
