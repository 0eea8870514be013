"""Web pages of listed origins: what their browser must be told before they can read an answer.

Without a word of ours a browser sends nothing that is JSON, and hands over nothing that it gets.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from litestar.types import Message, Scope, Send

Headers = list[tuple[bytes, bytes]]

_ADMIN = ("/admin", "/dashboard")
_BELOW = tuple(f"{one}/" for one in _ADMIN)
METHODS = b"GET, HEAD, POST, PATCH, DELETE"
_REMEMBERED_S = b"600"


def is_admin(path: str) -> bool:
    """What is there administers this server, or is part of the page that does."""
    return path in _ADMIN or path.startswith(_BELOW)


def is_for_people(method: str, headers: Mapping[str, str]) -> bool:
    """A browser that was sent there by its user, and shows what it gets."""
    return method in ("GET", "HEAD") and "text/html" in headers.get("accept", "")


def address_of(scope: Scope) -> str:
    """The network address that a request came from."""
    client = scope["client"]
    return client[0] if client else ""


def leave(path: str, headers: Mapping[str, str], origins: Collection[str]) -> Headers:
    """Headers by which a page may read the answer; none for others, nor for what administers."""
    origin = headers.get("origin", "")
    if origin.lower() not in origins or is_admin(path):
        return []
    return [
        (b"access-control-allow-origin", origin.encode("latin-1")),
        (b"access-control-expose-headers", b"*"),
        (b"vary", b"origin"),
    ]


def is_preflight(method: str, headers: Mapping[str, str]) -> bool:
    """A browser asks first, as it does without the page's key."""
    return method == "OPTIONS" and "access-control-request-method" in headers


def terms(headers: Mapping[str, str]) -> Headers:
    """What the page may send, for a browser that asks first."""
    asked = headers.get("access-control-request-headers", "")
    told = [
        (b"access-control-allow-methods", METHODS),
        (b"access-control-allow-headers", asked.encode("latin-1")),
        (b"access-control-max-age", _REMEMBERED_S),
    ]
    if headers.get("access-control-request-private-network") == "true":
        told.append((b"access-control-allow-private-network", b"true"))
    return told


def telling(send: Send, more: Headers) -> Send:
    """The same `send`, which adds these headers to the answer."""

    async def tell(message: Message) -> None:
        if message["type"] == "http.response.start":
            message["headers"] = [*message["headers"], *more]
        await send(message)

    return tell


async def send_on(send: Send, url: str) -> None:
    """Answer a browser that is to show something else first."""
    headers = [(b"location", url.encode("ascii")), (b"cache-control", b"no-store")]
    await send({"type": "http.response.start", "status": 303, "headers": headers})
    await send({"type": "http.response.body", "body": b"", "more_body": False})


async def grant(send: Send, headers: Headers) -> None:
    """Answer a browser that asks first."""
    await send({"type": "http.response.start", "status": 204, "headers": headers})
    await send({"type": "http.response.body", "body": b"", "more_body": False})
