"""The class of a request: a name of ours, or a number as vLLM's."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from runtime.types import Priority

AskedPriority = Priority | Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]


def priority_of(asked: AskedPriority | None) -> Priority | None:
    """The class that a client's `priority` stands for; None leaves it to the model's settings.

    A lower number is earlier and 0 is vLLM's default: negative is `interactive`, positive is
    `background`. Numbers on the same side of 0 are alike.
    """
    if not isinstance(asked, int):
        return asked
    if asked == 0:
        return "default"
    return "interactive" if asked < 0 else "background"
