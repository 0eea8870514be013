"""How far long work has come, for whoever waits for it."""

from __future__ import annotations

from collections.abc import Callable

from runtime.types import Struct


class Progress(Struct, frozen=True, tag="progress"):
    """`num_done` of `num_total` in the step that is being done; no total while none is known."""

    step: str
    num_done: int = 0
    num_total: int = 0


Watch = Callable[[Progress], None]


def unwatched(_: Progress) -> None:
    """Nobody waits."""
