"""`prompt_cache_diagnostics`: where a prompt parts from that of an earlier response."""

from __future__ import annotations

from api.http.comparisons import Comparison, Part
from api.responses.output import PromptCacheDiagnostics
from runtime.types import CacheUse

_REASONS: dict[Part, str] = {
    "model": "model_changed",
    "tools": "tools_changed",
    "system": "input_changed",
    "thinking": "reasoning_effort_changed",
    "messages": "input_changed",
}
_NOT_LOST = (None, "first_seen", "diverged")
"""Why no more was reused where all was there that could be."""


def diagnosed(
    found: Comparison | None, use: CacheUse, *, is_compacted: bool
) -> PromptCacheDiagnostics:
    """The comparison in the words of the API. A prompt that goes on from the earlier one, but
    whose KV is not there any more, has no word: `hearth.cache` says why.
    """
    if found is None:
        return PromptCacheDiagnostics("comparison_response_not_found")
    if found.num_missed == 0 or (found.part is None and use.num_tokens and use.reason in _NOT_LOST):
        return PromptCacheDiagnostics("cache_hit")
    reason = None if found.part is None else _REASONS.get(found.part)
    if reason is None:
        return PromptCacheDiagnostics("unavailable")
    if is_compacted and found.part == "messages":
        reason = "context_compacted"
    return PromptCacheDiagnostics("cache_miss", reason, found.num_missed, found.num_tokens)
