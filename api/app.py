"""The only place where the server's parts are put together."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, NamedTuple

from litestar import Litestar
from litestar.datastructures import State
from litestar.di import Provide
from litestar.handlers import BaseRouteHandler
from litestar.openapi import OpenAPIConfig
from litestar.types import ASGIApp

from api import cache_hints
from api import prewarm as prewarming
from api.admin import cache, crashes, explain, health
from api.admin import history as history_admin
from api.admin import models as model_admin
from api.admin.pools import REFRESH_S
from api.agents import handlers as agent_handlers
from api.agents.expiry import ExpiryJob
from api.agents.service import open_agents
from api.anthropic.errors import anthropic_error, speaks_anthropic
from api.anthropic.messages import count_tokens, delete_thread, messages
from api.anthropic.threads import Threads
from api.application import Application
from api.dashboard import handlers as dashboard_handlers
from api.dashboard import page, sign_in
from api.dashboard.service import Dashboard
from api.http import stream_handlers
from api.http.body import HttpRequest
from api.http.chains import Chains
from api.http.errors import ErrorHandlers
from api.http.gate import Gate
from api.http.guard import Guard, GuardRules, rules_of
from api.http.kv_access import KvAccess
from api.http.limits import Bounds, BoundsByHandler, TimeLimit
from api.http.openapi import SchemaPlugin
from api.jobs import Chore, Jobs
from api.models import get_model, list_models
from api.observe.log import RequestLog
from api.observe.metrics import Metrics
from api.observe.store_metrics import HistoryCollector
from api.observe.trend import SAMPLE_S
from api.ollama import handlers as ollama_handlers
from api.ollama.handlers import ollama_error, speaks_ollama
from api.openai.chat import chat_completions
from api.openai.completions import completions
from api.openai.embeddings import embeddings
from api.openai.tokens import detokenize, tokenize, tokenizer_info
from api.preflight import Preflight
from api.prewarm import PinnedPrompts, PrewarmCollector
from api.responses import conversation_handlers
from api.responses import handlers as responses_handlers
from api.responses.archive import Archive
from api.responses.service import ResponseService
from runtime.cache.contents import KvContents
from runtime.cache.history import History
from runtime.cache.history_figures import HistoryFigures
from runtime.cache.service import KvStore
from runtime.config.limits import RouteKind
from runtime.config.settings import Settings
from runtime.keys import digest_of
from runtime.memory import trim_heap
from runtime.models.catalog import Catalog
from runtime.prewarm.prewarm import PERIOD_S as PREWARM_PERIOD_S
from runtime.prewarm.prewarm import Prewarm
from runtime.supervisor.spawned import WorkerSource
from runtime.supervisor.supervisor import Supervisor
from runtime.version import VERSION

if TYPE_CHECKING:
    from api.observe.traces import OtlpTraces

ROUTES: Mapping[RouteKind, Sequence[BaseRouteHandler]] = {
    "generate": (
        chat_completions,
        completions,
        *responses_handlers.GENERATING,
        messages,
        count_tokens,
        *agent_handlers.GENERATING,
        *ollama_handlers.GENERATING,
    ),
    "embed": (embeddings, tokenize, detokenize),
    "prewarm": (*prewarming.HANDLERS, cache_hints.hint),
    "history": (
        *responses_handlers.KEEPING,
        *conversation_handlers.KEEPING,
        delete_thread,
        *agent_handlers.KEEPING,
        *stream_handlers.HANDLERS,
    ),
    "admin": (
        *cache.HANDLERS,
        *crashes.HANDLERS,
        *explain.HANDLERS,
        *history_admin.HANDLERS,
        *model_admin.HANDLERS,
        *dashboard_handlers.HANDLERS,
    ),
    "read": (
        list_models,
        get_model,
        tokenizer_info,
        health.live,
        health.health,
        health.live_head,
        health.ready,
        health.metrics,
        health.metrics_head,
        *ollama_handlers.READING,
        *page.HANDLERS,
        *sign_in.HANDLERS,
    ),
}


class HearthServer(NamedTuple):
    """A server that is put together but not started."""

    app: ASGIApp
    supervisor: Supervisor
    kv: KvStore
    metrics: Metrics


def build_server(settings: Settings, found: Preflight, workers: WorkerSource) -> HearthServer:
    """Put the server together as the settings say; `workers` is where processes come from."""
    kv = KvStore(settings)
    supervisor = Supervisor(settings, found.catalog, kv, workers)
    kv.ask_requests(supervisor.is_asked)
    rules = rules_of(settings, digest_of(found.home.new_admin_token()))
    app = create_app(settings, found.catalog, supervisor, kv, rules)
    return HearthServer(app, supervisor, kv, app.metrics)


_ERRORS = ErrorHandlers([(speaks_anthropic, anthropic_error), (speaks_ollama, ollama_error)])


def create_app(
    settings: Settings, catalog: Catalog, supervisor: Supervisor, kv: KvStore, rules: GuardRules
) -> RequestLog:
    """The server as an ASGI application; its lifespan starts and stops supervisor and store."""
    metrics = Metrics(supervisor.status, kv.figures)
    prewarm = Prewarm(settings, supervisor, kv, PinnedPrompts(settings, catalog))
    gate = Gate(settings, catalog, supervisor, kv, metrics, prewarm)
    chains = Chains(History(settings.home, settings.history_grace_s), settings, kv.is_deleted)
    cache = KvAccess(catalog, kv, KvContents(kv, settings), prewarm, chains)
    dashboard = Dashboard(gate, cache, chains.history)
    history_figures = HistoryFigures(chains.history)
    metrics.add(PrewarmCollector(prewarm), HistoryCollector(history_figures, settings))
    agents, janitor = open_agents(gate, cache, chains.history)
    responses = ResponseService(Archive(chains))
    chores = _chores(kv, janitor, chains, prewarm, dashboard, supervisor)
    jobs = Jobs(cache.contents.jobs, lambda: supervisor.is_idle, chores)
    traces = _open_traces(settings.otlp_endpoint, kv)

    @asynccontextmanager
    async def supervised(_: Litestar) -> AsyncGenerator[None]:
        for part in (kv, chains.history, prewarm):
            part.start()
        await supervisor.start()
        jobs.start()
        try:
            yield
        finally:
            jobs.stop()
            await prewarm.stop()
            await supervisor.stop()
            await asyncio.gather(responses.close(), gate.streams.close())
            await dashboard.keep()
            await kv.stop()
            await chains.history.close()
            await _close(traces)

    app = Application(
        route_handlers=[one for handlers in ROUTES.values() for one in handlers],
        dependencies=_given(
            gate=gate,
            cache=cache,
            agents=agents,
            responses=responses,
            threads=Threads(chains),
            history=chains.history,
            history_figures=history_figures,
            prewarm=prewarm,
            dashboard=dashboard,
            rules=rules,
        ),
        exception_handlers=_ERRORS.handlers,
        middleware=[TimeLimit],
        lifespan=[supervised],
        request_class=HttpRequest,
        state=_state(gate, settings),
        request_max_body_size=settings.max_image_body_bytes,
        openapi_config=_openapi(),
        logging_config=None,
    )
    return RequestLog(Guard(app, rules, _ERRORS), metrics, traces, kv.receive)


def _state(gate: Gate, settings: Settings) -> State:
    """What is found by whoever has a request, and is given nothing."""
    bounds = _bounds(settings)
    return State({"has_sight": gate.has_sight, "bounds": bounds, "streams": gate.streams})


def _bounds(settings: Settings) -> BoundsByHandler:
    """What bounds the requests to each handler."""
    return {
        handler.fn: Bounds.of(kind, settings)
        for kind, handlers in ROUTES.items()
        for handler in handlers
    }


def _open_traces(endpoint: str | None, kv: KvStore) -> OtlpTraces | None:
    """Where traces go, if anywhere: what is needed for them is large."""
    if endpoint is None:
        return None
    from api.observe.traces import OtlpTraces  # noqa: PLC0415

    traces = OtlpTraces(endpoint)
    kv.listen(traces.wrote)
    return traces


async def _close(traces: OtlpTraces | None) -> None:
    if traces is not None:
        await asyncio.to_thread(traces.close)


def _chores(
    kv: KvStore,
    janitor: ExpiryJob,
    chains: Chains,
    prewarm: Prewarm,
    dashboard: Dashboard,
    supervisor: Supervisor,
) -> list[Chore]:
    """What is done now and then."""
    return [
        Chore("agents", 60.0, janitor.run),
        Chore("responses", 60.0, chains.expire),
        Chore("prewarm", PREWARM_PERIOD_S, prewarm.sweep),
        Chore("dashboard", SAMPLE_S, dashboard.tick),
        Chore("figures", REFRESH_S, kv.refresh),
        Chore("memory", 5.0, supervisor.relieve),
        Chore("heap", 60.0, _trim_heap),
    ]


async def _trim_heap() -> None:
    await asyncio.to_thread(trim_heap)


def _given(**parts: object) -> dict[str, Provide]:
    """The same ones for every handler, by the name of its parameter."""
    return {name: _always(part) for name, part in parts.items()}


def _always(part: object) -> Provide:
    return Provide(lambda: part, use_cache=True, sync_to_thread=False)


def _openapi() -> OpenAPIConfig:
    return OpenAPIConfig(
        title="Hearth",
        version=VERSION,
        path="/schema",
        render_plugins=[SchemaPlugin(path=["/openapi.json", "/"])],
        use_handler_docstrings=True,
    )
