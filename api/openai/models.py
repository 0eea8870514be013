"""The list of models in OpenAI's form."""

from __future__ import annotations

from collections.abc import Iterable

from api.openai.schemas import ModelCard, ModelList
from runtime.model_status import ModelStatus


def model_list(statuses: Iterable[ModelStatus]) -> ModelList:
    """All models."""
    return ModelList([model_card(status) for status in statuses])


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
        vision=status.sight.can_see,
        vision_reason=status.sight.why or None,
        pinned=status.is_pinned,
    )
