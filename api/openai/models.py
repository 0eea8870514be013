"""The list of models in OpenAI's form."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from api.openai.schemas import ModelCard, ModelList, RefusedModel
from runtime.models.catalog import Refused
from runtime.supervisor.status import ModelStatus


def model_list(statuses: Iterable[ModelStatus], refused: Mapping[str, Refused]) -> ModelList:
    """All models, and those that cannot be used with the reason."""
    return ModelList(
        [model_card(status) for status in statuses],
        refused=tuple(RefusedModel(name, one.code, one.reason) for name, one in refused.items()),
    )


def model_card(status: ModelStatus) -> ModelCard:
    """One model."""
    spec = status.spec
    return ModelCard(
        id=spec.id,
        created=spec.created_s,
        state=status.state,
        context=spec.context,
        max_model_len=spec.context,
        size_bytes=spec.nbytes,
        aliases=spec.aliases,
        capabilities=status.capabilities,
        tools=status.tool_use,
        template=status.template,
        vision=status.sight.can_see,
        vision_reason=status.sight.why or None,
        pinned=status.is_pinned,
    )
