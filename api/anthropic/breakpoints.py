"""Cache breakpoints: how many a request has, and how long what is before each is to be kept."""

from __future__ import annotations

from typing import Protocol

from api.anthropic.schemas import CacheControl
from api.http.refusal import refuse
from runtime.types import Breakpoint, Image, ToolCall

MAX_BREAKPOINTS = 4
KEEP_S = {None: 300.0, "5m": 300.0, "1h": 3600.0}


class Writing(Protocol):
    """A message while it is written, behind whose last word a breakpoint may stand."""

    images: list[Image]
    calls: list[ToolCall]
    breakpoints: list[Breakpoint]

    length: int
    """Of its text."""


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

    def meet(self, control: CacheControl | None, path: str, said: Writing) -> None:
        """A breakpoint behind what is written of a message so far.

        Raises:
            InvalidRequest: it is one too many, or its `ttl` is unknown.
        """
        keep_s = self.keep_s(control, path)
        if keep_s is not None:
            point = Breakpoint(
                at=said.length,
                keep_s=keep_s,
                num_images=len(said.images),
                num_calls=len(said.calls),
            )
            said.breakpoints.append(point)
