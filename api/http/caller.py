"""Who asks, and which conversation a request belongs to, as far as its client says so.

The first name that is given counts, from the most to the least precise: ids in the body
(`session_id`, `conversation_id`, `thread_id`, `chat_id`, `agent_id`; then the same ones in
`extra_body` and `metadata`), ids in headers (in the order of `SESSION_HEADERS`), then what several
conversations may share (`prompt_cache_key`, `user`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import NamedTuple, cast

from litestar.types import Scope

from api.http.body import HttpRequest
from api.http.clients import client_family
from api.observe.redact import SESSION_HEADERS
from runtime import keys

AGENT_HEADER = "x-claude-code-agent-id"
"""Claude Code's sub-agents run beside the main loop, in its session; each has a name of its own."""

MAX_CHARS = 256


class Caller(NamedTuple):
    """The program that asks: its family, the conversation's name in its headers, whose key."""

    client: str = ""
    session: str | None = None
    tenant: str = ""

    def session_id(self, ids: Iterable[str | None], fallbacks: Iterable[str | None]) -> str | None:
        """The conversation's name: of `ids`, of the headers, of `fallbacks`; None without any.

        One that is longer than 256 characters is replaced by its digest. Tenants share none.
        """
        given = next(filter(None, (*ids, self.session, *fallbacks)), None)
        if given is None:
            return None
        if len(given) > MAX_CHARS:
            given = hashlib.blake2b(given.encode(errors="replace"), digest_size=16).hexdigest()
        return keys.owned(self.tenant, given)


def caller_in(scope: Scope) -> keys.Principal:
    """Who the guard let in with this request."""
    return cast("keys.Principal", scope["state"]["caller"])


def tenant_of(scope: Scope) -> str:
    """Whose key let this request in; "" where none is asked for."""
    return caller_in(scope).tenant


def asker_of(request: HttpRequest) -> Caller:
    """Who sent this request."""
    return caller_of(request.headers, tenant_of(request.scope))


def caller_of(headers: Mapping[str, str], tenant: str = "") -> Caller:
    """Who sent these headers, with a key of that tenant."""
    session = next(filter(None, map(headers.get, SESSION_HEADERS)), None)
    if session is not None and (agent := headers.get(AGENT_HEADER)):
        session = f"{session}/{agent}"
    return Caller(client_family(headers), session, tenant)
