"""OpenAI's cache controls: what a request says of its prefixes, in the runtime's terms."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

from api.openai.fields import CACHE_TTL_S, PromptCacheOptions, Retention, SamplingFields
from runtime.types import CacheMode, Message, Work

MAX_WRITTEN = 4
"""Breakpoints of a request that count; the one that nobody sets takes the place of one."""
RETENTION_S: dict[Retention, float] = {"in_memory": 0.0, "24h": 86_400.0}
_NO_OPTIONS = PromptCacheOptions()


def mode_of(data: SamplingFields) -> CacheMode:
    """How much is kept: `cache_mode` counts before the mode of `prompt_cache_options`."""
    if data.cache_mode is not None:
        return data.cache_mode
    return "breakpoints" if _options(data).mode == "explicit" else "full"


def keep_s_of(data: SamplingFields) -> float | None:
    """How long all of it is kept at least, in seconds; None where nobody says."""
    if data.prompt_cache_options is None:
        return None
    return CACHE_TTL_S[_options(data).ttl]


def ttl_s_of(data: SamplingFields) -> float | None:
    """How long it is kept on disk at most: `ttl` counts before `prompt_cache_retention`."""
    if data.ttl is not None or data.prompt_cache_retention is None:
        return data.ttl
    return RETENTION_S[data.prompt_cache_retention]


def work_of(data: SamplingFields) -> Work:
    """With `prewarm` the prompt is read and nothing is said."""
    return "prefill" if _options(data).prewarm else "generate"


def applied(data: SamplingFields) -> tuple[Literal["implicit", "explicit"], Literal["30m", "12h"]]:
    """The mode and the lifetime that count for a request, as its answer repeats them."""
    options = _options(data)
    return options.mode or "implicit", options.ttl or "30m"


def latest(messages: Sequence[Message], data: SamplingFields) -> tuple[Message, ...]:
    """The messages with their last breakpoints only, as many as count."""
    room = MAX_WRITTEN - (_options(data).mode != "explicit")
    kept: list[Message] = []
    for one in reversed(messages):
        points = one.breakpoints[-room:] if room else ()
        room -= len(points)
        is_same = points == one.breakpoints
        kept.append(one if is_same else msgspec.structs.replace(one, breakpoints=points))
    return tuple(reversed(kept))


def _options(data: SamplingFields) -> PromptCacheOptions:
    return data.prompt_cache_options or _NO_OPTIONS
