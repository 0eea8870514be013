"""How pictures are prepared for kinds of models that have no lens of their own: as upstream does.

The model's own processor writes one picture; all the tokens that come of it stand for the picture.
Whether that is what the model was made for `trial` finds out. Belongs to the intake thread.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any, cast

import jinja2
import mlx.core as mx
import numpy as np
from numpy.typing import NDArray
from PIL import Image as Pillow

from runtime.worker.vision.images import Given, Markup, Prepared

_transformers: Any = importlib.import_module("transformers")

UPSTREAM_ERRORS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    ImportError,
    LookupError,
    NotImplementedError,
    OSError,
    RuntimeError,
    TypeError,
    ValueError,
    jinja2.TemplateError,
)
"""What code for another kind of model, or one that lacks a library, has been seen to raise."""

_TURN = [
    {
        "role": "user",
        "content": [
            {"type": "text", "text": "The kettle hums on the hearth. This is"},
            {"type": "image"},
            {"type": "text", "text": "while the rain falls on the roof. What is it, then?"},
        ],
    }
]


class Unusable(ValueError):
    """The message says why this kind of model cannot be shown pictures, and nothing else."""


_PLAIN = (str, int, float, bool, type(None))


@dataclass(eq=False, slots=True)
class FallbackProcessor:
    """`written` is what the processor is told of a picture, as the model's template writes it
    between the two texts of a `frame`; with `has_grid` its tokens have rows and columns as
    positions. `opening` are the tokens that its tokenizer begins every text with.
    """

    processor: Any
    written: str
    frame: tuple[str, str]
    opening: tuple[int, ...]
    markup: Markup
    settings: bytes
    has_grid: bool
    has_types: bool = False
    has_deepstack: bool = False

    def prepare(self, pixels: NDArray[np.uint8]) -> Prepared:
        try:
            inputs = self._processed(self.written, pixels)
        except UPSTREAM_ERRORS as error:
            raise ValueError(f"{type(error).__name__} in its image processor") from error
        token_ids = self._ids(inputs)
        grid = self._grid(inputs, len(token_ids)) if self.has_grid else ()
        return Prepared(len(token_ids), grid, inputs, token_ids)

    def words(self) -> tuple[list[int], list[int]]:
        """The tokens of the frame."""
        encode = self.processor.tokenizer.encode
        before, after = (encode(one, add_special_tokens=False) for one in self.frame)
        return before, after

    def writes_it_anywhere(self, pixels: NDArray[np.uint8]) -> bool:
        """Whether a picture among words is written as it is alone."""
        before, after = self.words()
        among = self._processed(self.written.join(self.frame), pixels)
        return self._ids(among) == (*before, *self.prepare(pixels).token_ids, *after)

    def _processed(self, text: str, pixels: NDArray[np.uint8]) -> dict[str, Given]:
        """As upstream asks for it, but for the padding of several texts, which not all know."""
        process = getattr(self.processor, "process", self.processor)
        # Some processors compute with mlx: not on the device, which belongs to another thread.
        with mx.stream(mx.cpu):
            found = process(text=[text], images=[Pillow.fromarray(pixels)], return_tensors="mlx")
            return {name: _held(value) for name, value in found.items() if value is not None}

    def _ids(self, inputs: dict[str, Given]) -> tuple[int, ...]:
        inputs.pop("attention_mask", None)
        token_ids = tuple(int(one) for one in np.asarray(inputs.pop("input_ids"))[0])
        num_before = len(self.opening)
        return token_ids[num_before:] if token_ids[:num_before] == self.opening else token_ids

    def _grid(self, inputs: Mapping[str, Given], num_tokens: int) -> tuple[int, ...]:
        merge = self.processor.image_processor.merge_size
        frames, height, width = (int(one) for one in np.asarray(inputs["image_grid_thw"])[0])
        grid = (frames, height // merge, width // merge)
        if grid[0] * grid[1] * grid[2] != num_tokens:
            raise ValueError("its grid is not that of its tokens")
        return grid


def fallback_processor(path: Path, whole: Any, *, has_grid: bool) -> FallbackProcessor:
    """The image processor of a loaded model of a kind that nobody has tested.

    Raises:
        Unusable: its template does not show where a picture is.
        UPSTREAM_ERRORS: there is no processor, or it cannot be had without other libraries.
    """
    # A patch of upstream's puts its own processors first, and none runs code beside the model.
    processor = _transformers.AutoProcessor.from_pretrained(str(path), trust_remote_code=False)
    tokenizer = processor.tokenizer
    config = whole.config
    known = (
        getattr(config, "image_token_id", None),
        getattr(config, "image_token_index", None),
        getattr(config, "media_placeholder_token_id", None),
    )
    token = next(one for one in known if isinstance(one, int) and one >= 0)
    spelled = cast("str", tokenizer.convert_ids_to_tokens(token))
    said = getattr(processor, "image_token", None)
    marks = [one for one in (said, "<image>", spelled) if isinstance(one, str)]
    text: str = tokenizer.apply_chat_template(_TURN, tokenize=False, add_generation_prompt=True)
    mark = next((one for one in marks if text.count(one) == 1), None)
    if mark is None:
        raise Unusable("its chat template does not show where an image is")
    before, _, after = text.partition(mark)
    markup = Markup(mark, spelled, token)
    frame, opening = (before, after), tuple(tokenizer("")["input_ids"])
    return FallbackProcessor(
        processor, mark, frame, opening, markup, _settings(processor), has_grid
    )


def _settings(processor: Any) -> bytes:
    """Names how pictures are prepared."""
    said = [vars(one) for one in (processor.image_processor, processor)]
    text = json.dumps(said, sort_keys=True, default=lambda one: type(one).__name__)
    return blake2b(text.encode(), digest_size=16).digest()


def _held(value: Any) -> Given:
    """Arrays as numpy's, so that whoever wants them may make them the device's."""
    if isinstance(value, list):
        return [_held(one) for one in cast("list[Any]", value)]
    return value if isinstance(value, (*_PLAIN, tuple)) else np.asarray(value)
