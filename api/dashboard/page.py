"""The page itself: files of this package, and nothing from anywhere else."""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from string import Template

from litestar import Response, get
from litestar.di import NamedDependency
from litestar.exceptions import NotFoundException
from litestar.params import FromPath

from api.http.body import HttpRequest
from api.http.guard import GuardRules

_STATIC = files("api.dashboard") / "static"
FILES = {
    "app.js": "text/javascript",
    "charts.js": "text/javascript",
    "chat.js": "text/javascript",
    "conversations.js": "text/javascript",
    "dom.js": "text/javascript",
    "models.js": "text/javascript",
    "tree.js": "text/javascript",
    "theme.js": "text/javascript",
    "style.css": "text/css",
    "icon.svg": "image/svg+xml",
    "uplot.min.js": "text/javascript",
    "uplot.min.css": "text/css",
}
"""Everything that can be asked for, so that no path is ever made of what somebody sent."""

HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-cache",
}


@get("/", include_in_schema=False, sync_to_thread=False)
def front(request: HttpRequest, rules: NamedDependency[GuardRules]) -> Response[bytes]:
    """The dashboard for browsers; for probes, that the server lives."""
    if "text/html" in request.headers.get("accept", ""):
        session = rules.sessions.find(request.headers)
        words = {"page_token": "" if session is None else session.page_token}
        page = Template(content("index.html").decode()).substitute(words).encode()
        headers = {**HEADERS, "vary": "accept, cookie", "cache-control": "no-store"}
        return Response(page, media_type="text/html", headers=headers)
    return Response(b'{"status":"live"}', media_type="application/json", headers={"vary": "accept"})


@get("/dashboard/{name:str}", include_in_schema=False, sync_to_thread=False)
def static_file(name: FromPath[str]) -> Response[bytes]:
    """One of the page's own files."""
    kind = FILES.get(name)
    if kind is None:
        raise NotFoundException
    return Response(content(name), media_type=kind, headers=HEADERS)


@cache
def content(name: str) -> bytes:
    """A file of this package."""
    folder = _STATIC / "vendor" if name.startswith("uplot") else _STATIC
    return (folder / name).read_bytes()


HANDLERS = [front, static_file]
