"""Hints about a conversation's KV: a tool runs now, or the conversation is over.

A request may give them as fields, or any client's proxy as headers; both hold when it is answered.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, NamedTuple

import msgspec
from msgspec import Meta

from api.http.refusal import refuse
from runtime.types import CacheParams

PAUSE_HEADER = "x-hearth-tool-pause"
RELEASE_HEADER = "x-hearth-release"
MAX_PAUSE_S = 3600.0
PauseS = Annotated[float, Meta(ge=0, le=MAX_PAUSE_S)]
_SAID = {"true": True, "1": True, "false": False, "0": False}


class Hints(NamedTuple):
    """For how long its client is away, in seconds, and whether it comes back at all."""

    pause_s: float | None = None
    is_last: bool = False


def hints_in(headers: Mapping[str, str]) -> Hints:
    """What the headers of a request say.

    Raises:
        InvalidRequest: one of them is not understood; `param` is its name.
    """
    pause_s = None
    if (said := headers.get(PAUSE_HEADER)) is not None:
        try:
            pause_s = msgspec.json.decode(said, type=PauseS)
        except msgspec.DecodeError:
            refuse(PAUSE_HEADER, f"is {said[:32]!r}: give seconds, {MAX_PAUSE_S:.0f} at most.")
    said = headers.get(RELEASE_HEADER, "false").lower()
    if said not in _SAID:
        refuse(RELEASE_HEADER, f"is {said[:32]!r}: it is true or false.")
    return Hints(pause_s, _SAID[said])


def with_hints(cache: CacheParams, hints: Hints) -> CacheParams:
    """The wishes of a request, with what its fields do not say taken from its headers."""
    pause_s = hints.pause_s if cache.pause_s is None else cache.pause_s
    return msgspec.structs.replace(cache, pause_s=pause_s, is_last=cache.is_last or hints.is_last)
