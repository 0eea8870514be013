"""The `x-hearth-cache` header: what a request reused, in one line."""

from __future__ import annotations

from runtime.types import CacheUse, Usage

NAME = "x-hearth-cache"


def cache_header(usage: Usage | None) -> dict[str, str]:
    """Of a finished answer; nothing when none of it was finished."""
    if usage is None:
        return {}
    use = usage.cache
    times = f"; restore_ms={use.restore_ms:.1f}; prefill_ms={usage.prefill_ms:.1f}"
    return {NAME: _plan(use) + times + _reason(use)}


def planned_cache_header(use: CacheUse) -> dict[str, str]:
    """Of an answer that begins: what is about to be reused. Times are not known yet."""
    return {NAME: _plan(use) + _reason(use)}


def _plan(use: CacheUse) -> str:
    return f"tier={use.tier}; cached={use.num_tokens}"


def _reason(use: CacheUse) -> str:
    return f"; reason={use.reason}; at={use.at}" if use.reason is not None else ""
