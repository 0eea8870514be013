"""Whether the server lives, whether it is ready, and its figures."""

from __future__ import annotations

from typing import Literal

import msgspec
from litestar import MediaType, Response, get, head
from litestar.di import NamedDependency
from msgspec import UNSET, UnsetType
from prometheus_client import CONTENT_TYPE_LATEST

from api.admin.pools import TierUse, pools_of
from api.agents.service import Agents
from api.http.body import HttpRequest
from api.http.caller import tenant_of
from api.http.gate import Gate
from api.http.kv_access import KvAccess
from runtime.cache.history import History
from runtime.cache.history_figures import HistoryFigures
from runtime.machine_limits import limits_here, too_low


class ModelState(msgspec.Struct, gc=False):
    """Where a model stands; `error` is why it failed last."""

    id: str
    state: str
    error: str | None = None


class AgentsState(msgspec.Struct, gc=False):
    """So many agents are being answered, and so many of their requests wait behind these."""

    active: int
    waiting: int


class Live(msgspec.Struct, gc=False, omit_defaults=True):
    """The server answers. Whoever may ask `/health/ready` is told at `/health` of its `models`,
    `agents` and `pools` too, as there.
    """

    models: list[ModelState] | UnsetType = UNSET
    agents: AgentsState | UnsetType = UNSET
    pools: list[TierUse] | UnsetType = UNSET
    status: Literal["live"] = msgspec.field(default_factory=lambda: "live")


class Readiness(msgspec.Struct, gc=False):
    """`ready` once every model to be loaded at boot was dealt with.

    `cache` says whether KV is kept on disk: `degraded` for `cache_reason`, `off` when that was
    asked for. `cold` is the cold store: what it has is computed anew while it is `away`, or
    `foreign`, which is another Hearth's, and it takes nothing while it is `full`; `cold_reason`
    says why. `history` says the same of what clients asked the server to remember, and is
    `degraded` for `set_aside` after a damaged one was, until that is acknowledged. `machine` says
    which limits of this account (ulimit) are too low, and what to do. Requests
    that need none of them are answered all the same. `agents` are those of who asks, `pools` what
    all conversations take; one of several tenants is not told the latter.
    """

    status: Literal["ready", "loading"]
    models: list[ModelState]
    agents: AgentsState
    pools: list[TierUse] | UnsetType = UNSET
    cache: Literal["ok", "opening", "degraded", "off"] = "ok"
    cache_reason: str | None = None
    cold: Literal["off", "ok", "away", "foreign", "full"] = "off"
    cold_reason: str | None = None
    history: Literal["ok", "opening", "degraded"] = "ok"
    history_reason: str | None = None
    history_message: str | None = None
    machine: list[str] = []


@get("/health/live", tags=["Health"], sync_to_thread=False)
def live() -> Live:
    """The server process runs; says nothing about models."""
    return Live()


@get("/health", tags=["Health"], sync_to_thread=False)
def health(
    request: HttpRequest,
    gate: NamedDependency[Gate],
    cache: NamedDependency[KvAccess],
    agents: NamedDependency[Agents],
) -> Live:
    """The server process runs, with what it does for whoever may know. Nothing is waited for."""
    if not gate.is_let_in(request.scope):
        return Live()
    return Live(_models(gate, request), _agents(agents, request), _pools(gate, cache, request))


@head(
    ["/health/live", "/health", "/", "/api/hello"],
    tags=["Health"],
    media_type=MediaType.TEXT,
    sync_to_thread=False,
)
def live_head() -> None:
    """What clients probe before they talk."""


@get("/health/ready", tags=["Health"], sync_to_thread=False)
def ready(
    request: HttpRequest,
    gate: NamedDependency[Gate],
    cache: NamedDependency[KvAccess],
    history: NamedDependency[History],
    agents: NamedDependency[Agents],
) -> Response[Readiness]:
    """200 when requests need not wait for a model to load, else 503. Nothing is waited for."""
    is_ready = gate.supervisor.is_ready
    stored, cold = cache.kv.status, cache.kv.cold
    kept = history.health
    readiness = Readiness(
        status="ready" if is_ready else "loading",
        models=_models(gate, request),
        agents=_agents(agents, request),
        pools=_pools(gate, cache, request),
        cache=stored.state,
        cache_reason=stored.reason,
        cold=cold.state,
        cold_reason=cold.message,
        history=kept.state,
        history_reason=kept.reason,
        history_message=kept.message,
        machine=[one.text for one in too_low(limits_here())],
    )
    return Response(readiness, status_code=200 if is_ready else 503)


def _models(gate: Gate, request: HttpRequest) -> list[ModelState]:
    status = gate.status_for(request.scope)
    return [ModelState(one.spec.id, one.state, one.last_error) for one in status]


def _agents(agents: Agents, request: HttpRequest) -> AgentsState:
    activity = agents.activity(tenant_of(request.scope))
    return AgentsState(activity.num_active, activity.num_waiting)


def _pools(gate: Gate, cache: KvAccess, request: HttpRequest) -> list[TierUse] | UnsetType:
    return pools_of(gate, cache) if gate.may_see_sums(request.scope) else UNSET


@head("/metrics", tags=["Health"], media_type=MediaType.TEXT, sync_to_thread=False)
def metrics_head() -> Response[None]:
    """That there are figures, for who probes before scraping; none is computed."""
    headers = {"content-type": CONTENT_TYPE_LATEST}
    return Response(None, headers=headers, media_type=MediaType.TEXT)


@get("/metrics", tags=["Health"], media_type=MediaType.TEXT)
async def metrics(
    gate: NamedDependency[Gate],
    cache: NamedDependency[KvAccess],
    history_figures: NamedDependency[HistoryFigures],
) -> Response[bytes]:
    """Figures for Prometheus."""
    await cache.kv.refresh()
    await history_figures.refresh()
    headers = {"content-type": CONTENT_TYPE_LATEST}
    return Response(gate.metrics.exposition(), headers=headers, media_type=MediaType.TEXT)
