"""How pictures are prepared and written for the kinds of models that are known: one processor each.

Of mlx-vlm it knows the processors. Belongs to the intake thread.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image as Pillow

from runtime.worker.vision.images import Markup, Prepared

Prepare = Callable[[Any, NDArray[np.uint8]], Prepared]


class VisionFamily(NamedTuple):
    """One kind of models: its processor, how that is used, and what its language model takes.

    With `has_types` that is told which tokens are a picture's, with `has_deepstack` its first
    layers are given features of the tower as well.
    """

    processor: Callable[[], Any]
    prepare: Prepare
    markup: Callable[[Any], tuple[str, str]]
    has_types: bool = False
    has_deepstack: bool = False


@dataclass(eq=False, slots=True)
class ImageProcessor:
    """How pictures are prepared for one model. Belongs to the intake thread."""

    processor: Any
    family: VisionFamily
    markup: Markup
    settings: bytes

    @property
    def has_types(self) -> bool:
        return self.family.has_types

    @property
    def has_deepstack(self) -> bool:
        return self.family.has_deepstack

    def prepare(self, pixels: NDArray[np.uint8]) -> Prepared:
        return self.family.prepare(self.processor, pixels)


def image_processor_of(family: VisionFamily, path: Path) -> ImageProcessor:
    # Named here, for upstream's `AutoProcessor` would run code that comes with a model.
    processor = family.processor().from_pretrained(str(path), trust_remote_code=False)
    token = int(processor.tokenizer.convert_tokens_to_ids(processor.image_token))
    markup = Markup(*family.markup(processor), token)
    return ImageProcessor(processor, family, markup, _settings(processor))


def _settings(processor: Any) -> bytes:
    """Names how pictures are prepared: with other settings the same pixels are another picture."""
    said = {
        "class": type(processor.image_processor).__name__,
        "settings": vars(processor.image_processor),
        "num_tokens": getattr(processor, "image_seq_length", None),
    }
    text = json.dumps(said, sort_keys=True, default=str)
    return blake2b(text.encode(), digest_size=16).digest()


def _prepare_patches(processor: Any, pixels: NDArray[np.uint8]) -> Prepared:
    """Flat patches and their grid; neighbours are merged into one token."""
    found = processor.image_processor([Pillow.fromarray(pixels)])
    inputs = {"pixel_values": np.asarray(found["pixel_values"])}
    inputs["image_grid_thw"] = np.asarray(found["image_grid_thw"])
    merge = processor.image_processor.merge_size
    frames, height, width = (int(one) for one in inputs["image_grid_thw"][0])
    grid = (frames, height // merge, width // merge)
    return Prepared(grid[0] * grid[1] * grid[2], grid, inputs)


def _prepare_square(processor: Any, pixels: NDArray[np.uint8]) -> Prepared:
    """One size for all, and as many tokens."""
    found = processor.image_processor([Pillow.fromarray(pixels)])
    inputs = {"pixel_values": np.asarray(found["pixel_values"])}
    return Prepared(processor.image_seq_length, (), inputs)


def _prepare_pooled(processor: Any, pixels: NDArray[np.uint8]) -> Prepared:
    """As many tokens as the picture's shape leaves room for."""
    found, num_tokens = processor.image_processor([Pillow.fromarray(pixels)])
    return Prepared(int(num_tokens[0]), (), {"pixel_values": np.asarray(found["pixel_values"])})


def _plain_markup(processor: Any) -> tuple[str, str]:
    return processor.image_token, processor.image_token


def _gemma3_markup(processor: Any) -> tuple[str, str]:
    start, token = processor.boi_token, processor.image_token
    return start, f"\n\n{start}{token}{processor.tokenizer.eoi_token}\n\n"


def _gemma4_markup(processor: Any) -> tuple[str, str]:
    token = processor.image_token
    return token, f"{processor.boi_token}{token}{processor.eoi_token}"


def _upstream(module: str) -> Any:
    return importlib.import_module(f"mlx_vlm.models.{module}")


_QWEN3 = VisionFamily(
    lambda: _upstream("qwen3_vl.processing_qwen3_vl").Qwen3VLProcessor,
    _prepare_patches,
    _plain_markup,
)
FAMILIES: dict[str, VisionFamily] = {
    "qwen2_vl": _QWEN3._replace(
        processor=lambda: _upstream("qwen2_vl.processing_qwen2_vl").Qwen2VLProcessor
    ),
    "qwen2_5_vl": _QWEN3._replace(
        processor=lambda: _upstream("qwen2_5_vl.processing_qwen2_5_vl").Qwen2_5_VLProcessor
    ),
    "qwen3_vl": _QWEN3._replace(has_deepstack=True),
    "qwen3_vl_moe": _QWEN3._replace(has_deepstack=True),
    "qwen3_5": _QWEN3,
    "qwen3_5_moe": _QWEN3,
    "gemma3": VisionFamily(
        lambda: _upstream("gemma3.processing_gemma3").Gemma3Processor,
        _prepare_square,
        _gemma3_markup,
    ),
    "gemma4": VisionFamily(
        lambda: _upstream("gemma4.processing_gemma4").Gemma4Processor,
        _prepare_pooled,
        _gemma4_markup,
        has_types=True,
    ),
}
