"""The only place where the server's parts are put together."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import NamedTuple

from litestar import Litestar
from litestar.di import Provide
from litestar.openapi import OpenAPIConfig
from litestar.openapi.plugins import JsonRenderPlugin
from litestar.types import ASGIApp

from api import admin, health
from api.anthropic.errors import anthropic_error, speaks_anthropic
from api.anthropic.messages import count_tokens, messages
from api.body import HttpRequest
from api.deps import Gate
from api.errors import ErrorDesk
from api.jobs import Jobs
from api.log import RequestLog, configure_logging
from api.metrics import Metrics
from api.models import get_model, list_models
from api.openai.chat import chat_completions
from api.openai.completions import completions
from api.version import VERSION
from runtime.catalog import Catalog
from runtime.errors import SettingsError, UnknownModel
from runtime.history import History
from runtime.kv_store import KvStore
from runtime.settings import Settings
from runtime.supervisor import Supervisor


class House(NamedTuple):
    """A server that is put together but not started."""

    app: ASGIApp
    catalog: Catalog
    supervisor: Supervisor


def build_house(settings: Settings) -> House:
    """Put the server together as the settings say, logging included.

    Raises:
        SettingsError: the settings name a model that does not exist.
    """
    configure_logging(settings.log_level, settings.log_format)
    catalog = Catalog(settings)
    named = [("preload", name) for name in settings.preload or ()]
    if settings.default_model is not None:
        named.append(("default_model", settings.default_model))
    for key, name in named:
        try:
            catalog.resolve(name)
        except UnknownModel as error:
            raise SettingsError(f"{key} cannot be used: {error.message}") from error
    kv = KvStore(settings)
    supervisor = Supervisor(settings, catalog, kv)
    return House(create_app(settings, catalog, supervisor, kv), catalog, supervisor)


def create_app(
    settings: Settings, catalog: Catalog, supervisor: Supervisor, kv: KvStore
) -> ASGIApp:
    """The server as an ASGI application; its lifespan starts and stops supervisor and store."""
    metrics = Metrics(supervisor.status, kv.figures)
    jobs = Jobs(kv, settings, lambda: supervisor.is_idle)
    gate = Gate(settings, catalog, supervisor, kv, metrics)
    history = History(settings.home)

    @asynccontextmanager
    async def supervised(_: Litestar) -> AsyncGenerator[None]:
        kv.start()
        history.start()
        await supervisor.start()
        jobs.start()
        try:
            yield
        finally:
            jobs.stop()
            await supervisor.stop()
            await kv.stop()
            await history.close()

    app = Litestar(
        route_handlers=[
            chat_completions,
            completions,
            messages,
            count_tokens,
            list_models,
            get_model,
            health.live,
            health.live_head,
            health.ready,
            health.metrics,
            *admin.HANDLERS,
        ],
        dependencies={
            "gate": Provide(lambda: gate, use_cache=True, sync_to_thread=False),
            "history": Provide(lambda: history, use_cache=True, sync_to_thread=False),
        },
        exception_handlers=ErrorDesk([(speaks_anthropic, anthropic_error)]).handlers,
        lifespan=[supervised],
        request_class=HttpRequest,
        request_max_body_size=settings.max_body_bytes,
        openapi_config=_openapi(),
        logging_config=None,
    )
    return RequestLog(app, metrics)


def _openapi() -> OpenAPIConfig:
    """JSON only: the pages that render it would be fetched from somebody else's server."""
    return OpenAPIConfig(
        title="Hearth",
        version=VERSION,
        path="/schema",
        render_plugins=[JsonRenderPlugin(path=["/openapi.json", "/"])],
        use_handler_docstrings=True,
    )
