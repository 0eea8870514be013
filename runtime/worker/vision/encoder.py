"""A vision tower whose work is done in parts, so that what decodes meanwhile need not wait for all.

Upstream's towers write down what is to be computed and compute nothing. What each of their layers
gives is noted here, and evaluated one layer after another; nothing of upstream is replaced.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from __future__ import annotations

import re
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import mlx.core as mx

_LAYER = re.compile(r"(?:^|\.)(?:blocks|layers|resblocks)\.\d+$")
_NOT_ITS_OWN = "language_model"


class ImageRows(NamedTuple):
    """What stands in a picture's tokens' places: `[1, tokens, dim]`, and for the first layers."""

    embeddings: mx.array
    deepstack: list[mx.array]


@dataclass(eq=False, slots=True)
class ImageEncoding:
    """One picture on its way through the tower: what its layers give, the first ones first."""

    layers: deque[mx.array]
    rows: ImageRows

    def go_on(self, until_s: float) -> bool:
        """Evaluate layers until then, at least one; whether the rows are there."""
        while self.layers:
            mx.eval(self.layers.popleft())
            if time.perf_counter() >= until_s:
                return False
        mx.eval(self.rows.embeddings, self.rows.deepstack)
        return True


class VisionEncoder:
    """The layers of a loaded model that are not its language model's."""

    def __init__(self, whole: Any) -> None:
        self._noted: deque[mx.array] | None = None
        kinds: dict[type, type] = {}
        for name, module in whole.named_modules():
            if _LAYER.search(name) and not name.startswith(_NOT_ITS_OWN):
                kind = type(module)
                kinds[kind] = kinds.get(kind) or self._noting(kind)
                module.__class__ = kinds[kind]

    def look(self, write_down: Callable[[], ImageRows]) -> ImageEncoding:
        """What is to be computed, layer by layer; nothing of it is."""
        self._noted = noted = deque[mx.array]()
        try:
            rows = write_down()
        finally:
            self._noted = None
        return ImageEncoding(noted, rows)

    def _noting(self, upstream: type) -> type:
        def call(layer: Any, *args: Any, **kwargs: Any) -> Any:
            found = upstream.__call__(layer, *args, **kwargs)
            first = found[0] if isinstance(found, tuple) else found
            if self._noted is not None and isinstance(first, mx.array):
                self._noted.append(first)
            return found

        return type(upstream.__name__, (upstream,), {"__call__": call})
