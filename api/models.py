"""`GET /v1/models` and `/v1/models/{id}`, in the form of the protocol that the client speaks."""

from __future__ import annotations

from pathlib import PurePosixPath

from litestar import get
from litestar.di import NamedDependency
from litestar.params import FromPath, FromQuery

from api.anthropic.errors import speaks_anthropic
from api.anthropic.models import model_info, model_page
from api.anthropic.schemas import ModelInfo, ModelPage
from api.http.body import HttpRequest
from api.http.errors import documented
from api.http.gate import Gate
from api.openai.models import model_card, model_list
from api.openai.schemas import ModelCard, ModelList


@get("/v1/models", tags=["Models"], sync_to_thread=False)
def list_models(
    request: HttpRequest,
    gate: NamedDependency[Gate],
    limit: FromQuery[str | None] = None,
    after_id: FromQuery[str | None] = None,
    before_id: FromQuery[str | None] = None,
) -> ModelList | ModelPage:
    """Every model that a request can name. With an `anthropic-version` header in pages."""
    if not speaks_anthropic(request.scope):
        return model_list(gate.status_for(request.scope), gate.refused_for(request.scope))
    return model_page([one.spec for one in gate.supervisor.status()], limit, after_id, before_id)


@get(
    "/v1/models/{model_id:path}",
    tags=["Models"],
    sync_to_thread=False,
    responses=documented(ModelCard),
)
def get_model(
    model_id: FromPath[PurePosixPath], request: HttpRequest, gate: NamedDependency[Gate]
) -> ModelCard | ModelInfo:
    """One model, by its name or an alias."""
    spec = gate.spec(str(model_id).removeprefix("/"))
    if speaks_anthropic(request.scope):
        return model_info(spec)
    status = gate.status_for(request.scope)
    return next(model_card(one) for one in status if one.spec.id == spec.id)
