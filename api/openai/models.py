"""`GET /v1/models` and `/v1/models/{id}`."""

from __future__ import annotations

from pathlib import PurePosixPath

from litestar import get
from litestar.di import NamedDependency
from litestar.params import FromPath

from api.deps import Gate
from api.errors import documented
from api.openai.schemas import ModelCard, ModelList
from runtime.supervisor import ModelStatus


@get("/v1/models", tags=["OpenAI"], sync_to_thread=False)
def list_models(gate: NamedDependency[Gate]) -> ModelList:
    """Every model that a request can name."""
    return ModelList([_card(status) for status in gate.status()])


@get(
    "/v1/models/{model_id:path}",
    tags=["OpenAI"],
    sync_to_thread=False,
    responses=documented(ModelCard),
)
def get_model(model_id: FromPath[PurePosixPath], gate: NamedDependency[Gate]) -> ModelCard:
    """One model, by its name or an alias."""
    spec = gate.spec(str(model_id).removeprefix("/"))
    return next(_card(status) for status in gate.status() if status.spec.id == spec.id)


def _card(status: ModelStatus) -> ModelCard:
    spec = status.spec
    return ModelCard(
        id=spec.id,
        created=spec.created_s,
        state=status.state,
        context=spec.context,
        max_model_len=spec.context,
        size_bytes=spec.nbytes,
        aliases=spec.aliases,
    )
