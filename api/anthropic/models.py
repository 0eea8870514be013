"""The list of models in Anthropic's form."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime

from api.anthropic.schemas import ModelInfo, ModelPage
from api.http.refusal import refuse
from runtime.types import ModelSpec

MAX_PAGE = 1000


def model_page(
    specs: Sequence[ModelSpec], limit: str | None, after_id: str | None, before_id: str | None
) -> ModelPage:
    """A part of the models: those after one, or the last ones before one, at most `limit`.

    Raises:
        InvalidRequest: `limit` is out of range, or there is no model of such an id.
    """
    size = _size(limit)
    ids = [spec.id for spec in specs]
    start = _place(ids, after_id, "after_id") + 1 if after_id else 0
    end = _place(ids, before_id, "before_id") if before_id else len(ids)
    chosen = specs[start:end]
    page = chosen[-size:] if before_id else chosen[:size]
    return ModelPage(
        data=[model_info(spec) for spec in page],
        first_id=page[0].id if page else None,
        last_id=page[-1].id if page else None,
        has_more=len(page) < len(chosen),
    )


def model_info(spec: ModelSpec) -> ModelInfo:
    """One model."""
    created = datetime.fromtimestamp(spec.created_s, UTC).isoformat().replace("+00:00", "Z")
    return ModelInfo(
        id=spec.id,
        display_name=spec.id,
        created_at=created,
        max_input_tokens=spec.context,
        max_tokens=spec.context,
    )


def _size(limit: str | None) -> int:
    if not limit:
        return MAX_PAGE
    size = int(limit) if limit.isdecimal() and len(limit) < 8 else 0
    if not 1 <= size <= MAX_PAGE:
        refuse("limit", f"is {limit[:64]}: use a number from 1 to {MAX_PAGE}.")
    return size


def _place(ids: Sequence[str], model_id: str, field: str) -> int:
    if model_id not in ids:
        refuse(field, f"is {model_id[:64]!r}, and no model has that id: take one from the list.")
    return ids.index(model_id)
