"""Cache breakpoints: how many a request has, and how long what is before each is to be kept."""

from __future__ import annotations

from typing import Protocol

from api.anthropic.schemas import CacheControl
from api.http.refusal import refuse

MAX_BREAKPOINTS = 4
KEEP_S = {None: 300.0, "5m": 300.0, "1h": 3600.0}


class Keepable(Protocol):
    """What a breakpoint may stand behind."""

    keep_s: float | None


class Breakpoints:
    """Counts the breakpoints of one request."""

    def __init__(self) -> None:
        self.count = 0

    def keep_s(self, control: CacheControl | None, path: str) -> float | None:
        """How long this breakpoint asks for; None when it is none.

        Raises:
            InvalidRequest: it is one too many, or its `ttl` is unknown.
        """
        if control is None or control.type not in (None, "ephemeral"):
            return None
        field = f"{path}.cache_control".removeprefix(".")
        if control.ttl not in KEEP_S:
            refuse(f"{field}.ttl", f"is {control.ttl!r:.64}: use '5m' or '1h'.")
        self.count += 1
        if self.count > MAX_BREAKPOINTS:
            refuse(
                field,
                f"is one too many: a maximum of {MAX_BREAKPOINTS} blocks with cache_control may "
                "be provided.",
            )
        return KEEP_S[control.ttl]

    def meet(self, control: CacheControl | None, path: str, thing: Keepable) -> None:
        """A breakpoint behind a thing; where there are several, the longest counts.

        Raises:
            InvalidRequest: it is one too many, or its `ttl` is unknown.
        """
        keep_s = self.keep_s(control, path)
        if keep_s is not None:
            thing.keep_s = max(keep_s, thing.keep_s or 0.0)
