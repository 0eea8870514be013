"""`POST /v1/cache/hints`: what becomes of a conversation, told between two of its requests."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from litestar import Response, post
from litestar.di import NamedDependency
from litestar.params import JSONBody
from msgspec import UNSET, Meta, UnsetType

from api.agents.service import Agents
from api.http.body import HttpRequest
from api.http.caller import tenant_of
from api.http.errors import documented
from api.http.gate import Gate
from api.http.hearth_info import IgnoredInfo, ignored_info
from api.http.hints import PauseS
from api.http.kv_access import KvAccess
from api.http.limits import ModelName
from api.http.refusal import refuse
from runtime.keys import owned
from store.keyed_names import Whom


class HintRequest(msgspec.Struct, gc=False):
    """A conversation, by the `session_id` of its requests or as an agent's, and what is hinted.

    `tool_pause_s`: it goes on in so many seconds. `release`: it does not. `prefetch`: it goes on
    now, and is to be in memory. Without a `model` the default one is meant, or the agent's.
    """

    session_id: Annotated[str, Meta(min_length=1, max_length=256)] | None = None
    agent_id: str | None = None
    model: ModelName | None = None
    tool_pause_s: PauseS | None = None
    release: bool | None = None
    prefetch: bool | None = None


class HintAnswer(msgspec.Struct, gc=False):
    """`prefetched_tokens` are on their way from disk into memory; 0 where none are on disk."""

    model: str
    prefetched_tokens: int = 0
    hearth: IgnoredInfo | UnsetType = UNSET
    object: Literal["cache.hint"] = "cache.hint"


@post("/v1/cache/hints", status_code=202, tags=["Hearth"], responses=documented(HintAnswer))
async def hint(
    data: JSONBody[HintRequest],
    request: HttpRequest,
    gate: NamedDependency[Gate],
    cache: NamedDependency[KvAccess],
    agents: NamedDependency[Agents],
) -> Response[HintAnswer]:
    """Say that a conversation pauses for a tool, is over, or is about to go on."""
    tenant = tenant_of(request.scope)
    if data.release and (data.prefetch or data.tool_pause_s is not None):
        refuse("release", "says that nobody comes back: leave out tool_pause_s and prefetch.")
    name = data.model
    if data.agent_id is not None:
        agent = await agents.desk.kept(owned(tenant, data.agent_id))
        session, name = agent.session, name or agent.model
    elif data.session_id is not None:
        session = owned(tenant, data.session_id)
    else:
        refuse("session_id", "is missing: name the conversation, or an agent_id.")
    spec = gate.spec(name)
    if data.tool_pause_s is not None or data.release:
        whom = Whom(session_id=session, model=spec.id)
        cache.contents.hint(whom, data.tool_pause_s, is_over=bool(data.release))
    num_tokens = await cache.bring(session, spec) if data.prefetch else 0
    ignored = ignored_info(await request.unused_fields(HintRequest))
    return Response(HintAnswer(spec.id, num_tokens, ignored), status_code=202)
