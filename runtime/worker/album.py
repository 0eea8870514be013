"""The pictures of a prompt, from intake to the mlx thread. Knows neither mlx nor Pillow."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from runtime.kv.media import Medium
from runtime.types import ChatPrompt
from store.types import MediaSpan


class Markup(NamedTuple):
    """How a picture is written: templates write `mark`, the model reads `spelled` in its place.

    `spelled` has the token `placeholder` once, which stands for all tokens of the picture.
    """

    mark: str
    spelled: str
    placeholder: int


class Prepared(NamedTuple):
    """A picture as a model's image processor gives it: upstream's names and arrays."""

    num_tokens: int
    grid: tuple[int, ...]
    inputs: dict[str, NDArray[Any]]

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.inputs.values())


class Sight(Protocol):
    """What intake uses of a model that sees. No mlx call is made.

    `settings` names how pictures are prepared.
    """

    markup: Markup
    settings: bytes

    def prepare(self, pixels: NDArray[np.uint8]) -> Prepared:
        """RGB pixels [height, width, 3], cut up as the model wants them.

        Raises:
            ValueError: the model takes no picture of this shape.
        """
        ...


@dataclass(eq=False)
class Shot:
    """One picture. `prepare` makes again what `prepared` no longer holds."""

    medium: Medium
    prepare: Callable[[], Prepared]
    prepared: Prepared | None = None

    def take(self) -> Prepared:
        """What the model's tower is given; it is not held any longer."""
        prepared, self.prepared = self.prepared, None
        return prepared or self.prepare()


class Gallery(Protocol):
    """Where intake has pictures looked at; `runtime.worker.gallery` has one, and imports Pillow."""

    def hang(self, prompt: ChatPrompt) -> tuple[ChatPrompt, Mapping[bytes, Shot]]:
        """The prompt with digests for images, and the pictures by their digests.

        Raises:
            InvalidRequest: one cannot be read, or there are too many.
        """
        ...


@dataclass(eq=False, slots=True)
class Album:
    """A prompt's pictures: `shots[i]` is at `spans[i]`. With `is_whole` none may be divided.

    `rows` holds what the tower made of those that prefill is inside of; it is the mlx thread's.
    """

    spans: tuple[MediaSpan, ...] = ()
    shots: tuple[Shot, ...] = ()
    is_whole: bool = False
    rows: dict[int, Any] = field(default_factory=dict[int, Any])

    def whole_around(self, start: int, end: int) -> int:
        """Where prefill from `start` is to stop instead of at `end`, so as to divide none."""
        if self.is_whole:
            for span in self.spans:
                if span.start < end < span.end:
                    return span.start if span.start > start else span.end
        return end
