"""Refusals in Ollama's words."""

from __future__ import annotations

from litestar import MediaType, Response
from litestar.types import Scope

from api.errors import Refusal
from api.ollama.schemas import Trouble


def speaks_ollama(scope: Scope) -> bool:
    """Whether a request is one of Ollama's clients', by its path."""
    return scope["path"].startswith("/api/") and scope["path"] != "/api/hello"


def ollama_error(refusal: Refusal, _: str) -> Response[Trouble]:
    """The refusal as an HTTP answer."""
    return Response(
        Trouble(error=refusal.message),
        status_code=refusal.status,
        headers=dict(refusal.headers),
        media_type=MediaType.JSON,
    )
