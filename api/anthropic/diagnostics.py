"""`diagnostics`: why less was reused than the prompt of an earlier answer had."""

from __future__ import annotations

from collections.abc import Callable

from msgspec import UNSET, UnsetType

from api.anthropic.schemas import CacheMissed, CacheMissReason, Diagnostics, DiagnosticsField
from api.http.comparisons import Comparisons, Part
from runtime.keys import owned
from runtime.types import CacheUse, GenerateRequest

Diagnose = Callable[[CacheUse], Diagnostics | UnsetType | None]
"""Says what is to be said of an answer that reused so much."""

_REASONS: dict[Part, CacheMissReason] = {
    "model": "model_changed",
    "tools": "tools_changed",
    "system": "system_changed",
    "messages": "messages_changed",
}


def diagnosis(
    given: DiagnosticsField | None, comparisons: Comparisons, request: GenerateRequest
) -> Diagnose:
    """The comparison that a request asks for; null says that nothing parted."""

    def diagnose(use: CacheUse) -> Diagnostics | UnsetType | None:
        if given is None:
            return UNSET
        if given.previous_message_id is None:
            return None
        earlier = owned(request.cache.tenant, given.previous_message_id)
        found = comparisons.compared(earlier, request, use)
        if found is None:
            return Diagnostics(CacheMissed("previous_message_not_found"))
        if found.part is None or not found.num_missed:
            return None
        reason = _REASONS.get(found.part)
        if reason is None:
            return Diagnostics(CacheMissed("unavailable"))
        return Diagnostics(CacheMissed(reason, found.num_missed))

    return diagnose
