"""The pictures of a prompt, from intake to the mlx thread. Knows neither mlx nor Pillow."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, cast

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


Given = NDArray[Any] | list[Any] | tuple[int, ...] | str | float | None
"""What an image processor gives for one name: arrays, lists of them, or plain values."""


class Prepared(NamedTuple):
    """A picture as a model's image processor gives it: upstream's names, and arrays or lists of
    them. `token_ids` is how it is written, where that is not its placeholder again and again.
    """

    num_tokens: int
    grid: tuple[int, ...]
    inputs: Mapping[str, Given]
    token_ids: tuple[int, ...] = ()

    @property
    def nbytes(self) -> int:
        """Of the arrays."""
        return sum(map(_nbytes, self.inputs.values()))


def _nbytes(value: object) -> int:
    if isinstance(value, list):
        return sum(map(_nbytes, cast("list[object]", value)))
    return value.nbytes if isinstance(value, np.ndarray) else 0


class ImagePreparer(Protocol):
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
class PromptImage:
    """One picture. `prepare` makes again what `prepared` no longer holds."""

    medium: Medium
    prepare: Callable[[], Prepared]
    prepared: Prepared | None = None

    def take(self) -> Prepared:
        """What the model's tower is given; it is not held any longer."""
        prepared, self.prepared = self.prepared, None
        return prepared or self.prepare()


class ImageLoader(Protocol):
    """Where intake has pictures looked at; `runtime.worker.vision.image_loader` has one."""

    def hang(
        self, prompt: ChatPrompt, ignored: list[str] | None = None
    ) -> tuple[ChatPrompt, Mapping[bytes, PromptImage]]:
        """The prompt with digests for images, and the pictures by their digests; why some are lost
        is added to `ignored`.

        Raises:
            InvalidRequest: one of the newest input cannot be shown.
        """
        ...


@dataclass(eq=False, slots=True)
class ImageBatch:
    """A prompt's pictures: `prompt_images[i]` is at `spans[i]`. With `is_whole` none is divided.

    `rows` holds what the tower made of those that prefill is inside of, and `looks` those that it
    is at work on; both are the mlx thread's.
    """

    spans: tuple[MediaSpan, ...] = ()
    prompt_images: tuple[PromptImage, ...] = ()
    is_whole: bool = False
    rows: dict[int, Any] = field(default_factory=dict[int, Any])
    looks: dict[int, Any] = field(default_factory=dict[int, Any])

    def within(self, start: int, end: int) -> list[int]:
        """The numbers of those of which something is in `[start, end)`."""
        spans = enumerate(self.spans)
        return [number for number, span in spans if span.start < end and span.end > start]

    def whole_around(self, start: int, end: int) -> int:
        """Where prefill from `start` is to stop instead of at `end`, so as to divide none."""
        if self.is_whole:
            for span in self.spans:
                if span.start < end < span.end:
                    return span.start if span.start > start else span.end
        return end
