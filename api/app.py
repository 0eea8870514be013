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
from litestar.openapi.plugins import JsonRenderPlugin
from litestar.types import ASGIApp

from api import admin, crashes, explain, health, history_desk, model_admin
from api import prewarm as prewarming
from api.agents import handlers as agent_handlers
from api.agents.janitor import Janitor
from api.agents.open import open_agents
from api.anthropic.errors import anthropic_error, speaks_anthropic
from api.anthropic.messages import count_tokens, messages
from api.application import Application
from api.body import HttpRequest
from api.dashboard import handlers as dashboard_handlers
from api.dashboard import page, sign_in
from api.dashboard.desk import Dashboard
from api.dashboard.trend import SAMPLE_S
from api.deps import Gate
from api.errors import ErrorDesk
from api.guard import Guard, Rules, rules_of
from api.history_metrics import HistoryCollector
from api.jobs import Chore, Jobs
from api.limits import Bounds, BoundsByHandler, TimeLimit
from api.log import RequestLog, configure_logging
from api.metrics import Metrics
from api.models import get_model, list_models
from api.ollama import handlers as ollama_handlers
from api.ollama.errors import ollama_error, speaks_ollama
from api.openai import responses as responses_handlers
from api.openai.chat import chat_completions
from api.openai.completions import completions
from api.openai.embeddings import embeddings
from api.openai.response_archive import Archive
from api.openai.response_desk import ResponseDesk
from api.openai.tokens import detokenize, tokenize
from api.prewarm import PinnedPrompts, PrewarmCollector
from api.version import VERSION
from runtime.arrivals import Arrivals
from runtime.catalog import Catalog
from runtime.errors import SettingsError, UnknownModel
from runtime.history import History
from runtime.history_figures import HistoryFigures
from runtime.home import Home
from runtime.keys import digest_of
from runtime.kv_store import KvStore
from runtime.limits import RouteKind
from runtime.newborn import Newborn
from runtime.prewarm import Prewarm
from runtime.settings import Settings, check_places
from runtime.supervisor import Supervisor

if TYPE_CHECKING:
    from api.traces import OtlpTraces

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
    "prewarm": prewarming.HANDLERS,
    "history": (*responses_handlers.KEEPING, *agent_handlers.KEEPING),
    "admin": (
        *admin.HANDLERS,
        *crashes.HANDLERS,
        *explain.HANDLERS,
        *history_desk.HANDLERS,
        *model_admin.HANDLERS,
        *dashboard_handlers.HANDLERS,
    ),
    "read": (
        list_models,
        get_model,
        health.live,
        health.live_head,
        health.ready,
        health.metrics,
        *ollama_handlers.READING,
        *page.HANDLERS,
        *sign_in.HANDLERS,
    ),
}


class House(NamedTuple):
    """A server that is put together but not started. Its home is its own until the process ends."""

    app: ASGIApp
    catalog: Catalog
    supervisor: Supervisor
    kv: KvStore
    metrics: Metrics


def build_house(settings: Settings, first: Newborn | None = None) -> House:
    """Put the server together as the settings say, logging included; `first` may be its worker.

    Raises:
        HomeTaken: another server owns the home.
        SettingsError: the settings name a model or a `models_dir` that does not exist.
    """
    check_places(settings)
    home = Home.take(settings.home)  # before anything is written, the log included
    try:
        configure_logging(settings.log_level, settings.log_format, settings.log_file)
    except OSError as error:
        why = f"log_file {settings.log_file} cannot be written: {error.strerror}."
        raise SettingsError(why) from error
    catalog = Catalog(settings, Arrivals() if settings.allow_download else None)
    named = [("preload", name) for name in settings.preload or ()]
    if settings.default_model is not None:
        named.append(("default_model", settings.default_model))
    for key, name in named:
        try:
            catalog.resolve(name)
        except UnknownModel as error:
            if catalog.may_come(name):
                continue
            raise SettingsError(f"{key} cannot be used: {error.message}") from error
    kv = KvStore(settings)
    supervisor = Supervisor(settings, catalog, kv, first)
    rules = rules_of(settings, digest_of(home.new_admin_token()))
    app = create_app(settings, catalog, supervisor, kv, rules)
    return House(app, catalog, supervisor, kv, app.metrics)


def create_app(
    settings: Settings, catalog: Catalog, supervisor: Supervisor, kv: KvStore, rules: Rules
) -> RequestLog:
    """The server as an ASGI application; its lifespan starts and stops supervisor and store."""
    metrics = Metrics(supervisor.status, kv.figures)
    prewarm = Prewarm(settings, supervisor, kv, PinnedPrompts(settings, catalog))
    gate = Gate(settings, catalog, supervisor, kv, metrics, prewarm)
    history = History(settings.home, settings.history_grace_s)
    dashboard = Dashboard(gate, history)
    history_figures = HistoryFigures(history)
    metrics.add(PrewarmCollector(prewarm), HistoryCollector(history_figures, settings))
    agents, janitor = open_agents(gate, history)
    responses = ResponseDesk(Archive(history, settings))
    chores = _chores(janitor, responses, prewarm, dashboard, supervisor)
    jobs = Jobs(kv, settings, lambda: supervisor.is_idle, chores)
    traces = _open_traces(settings.otlp_endpoint, kv)
    desk = ErrorDesk([(speaks_anthropic, anthropic_error), (speaks_ollama, ollama_error)])

    @asynccontextmanager
    async def supervised(_: Litestar) -> AsyncGenerator[None]:
        kv.start()
        history.start()
        prewarm.start()
        await supervisor.start()
        jobs.start()
        try:
            yield
        finally:
            jobs.stop()
            await prewarm.stop()
            await supervisor.stop()
            await responses.close()
            await dashboard.keep()
            await kv.stop()
            await history.close()
            if traces is not None:
                await asyncio.to_thread(traces.close)

    app = Application(
        route_handlers=[one for handlers in ROUTES.values() for one in handlers],
        dependencies=_given(
            gate=gate,
            agents=agents,
            responses=responses,
            history=history,
            history_figures=history_figures,
            prewarm=prewarm,
            dashboard=dashboard,
            rules=rules,
        ),
        exception_handlers=desk.handlers,
        middleware=[TimeLimit],
        lifespan=[supervised],
        request_class=HttpRequest,
        state=State({"has_sight": gate.has_sight, "bounds": _bounds(settings)}),
        request_max_body_size=settings.max_image_body_bytes,
        openapi_config=_openapi(),
        logging_config=None,
    )
    return RequestLog(Guard(app, rules, desk), metrics, traces)


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
    from api.traces import OtlpTraces  # noqa: PLC0415

    traces = OtlpTraces(endpoint)
    kv.publisher.listen(traces.wrote)
    return traces


def _chores(
    janitor: Janitor,
    responses: ResponseDesk,
    prewarm: Prewarm,
    dashboard: Dashboard,
    supervisor: Supervisor,
) -> list[Chore]:
    """What is done now and then."""
    return [
        Chore("agents", 60.0, janitor.run),
        Chore("responses", 60.0, responses.archive.expire),
        Chore("prewarm", prewarm.period_s, prewarm.sweep),
        Chore("dashboard", SAMPLE_S, dashboard.tick),
        Chore("memory", 5.0, supervisor.relieve),
    ]


def _given(**parts: object) -> dict[str, Provide]:
    """The same ones for every handler, by the name of its parameter."""
    return {name: _always(part) for name, part in parts.items()}


def _always(part: object) -> Provide:
    return Provide(lambda: part, use_cache=True, sync_to_thread=False)


def _openapi() -> OpenAPIConfig:
    """JSON only: the pages that render it would be fetched from somebody else's server."""
    return OpenAPIConfig(
        title="Hearth",
        version=VERSION,
        path="/schema",
        render_plugins=[JsonRenderPlugin(path=["/openapi.json", "/"])],
        use_handler_docstrings=True,
    )
