"""Models that see: mlx-vlm's vision encoders and language models, driven as text models are.

Knows how mlx-vlm loads models and what their vision encoders give; `processors` knows its
processors, `seeing` its language models, `kv/layers` its cache classes.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from __future__ import annotations

import importlib
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import numpy as np

from runtime.kv.media import rope_positions
from runtime.models.folder import NeedsOwnCode
from runtime.models.vision_files import BLIND_TYPES, KEPT_TYPES, VLM_TYPES
from runtime.worker.vision.encoder import ImageEncoding, ImageRows, VisionEncoder
from runtime.worker.vision.fallback_processor import (
    UPSTREAM_ERRORS,
    FallbackProcessor,
    Unusable,
    fallback_processor,
)
from runtime.worker.vision.images import ImageBatch, Prepared
from runtime.worker.vision.processors import FAMILIES, ImageProcessor, image_processor_of
from runtime.worker.vision.seeing import RopeDelta, SeeingModel, look_both_ways
from runtime.worker.vision.self_test import run_self_test

_utils: Any = importlib.import_module("mlx_vlm.utils")

_WARM_SIDE = 64


@dataclass(eq=False, slots=True)
class VisionModel:
    """How one loaded model sees. Belongs to the mlx thread.

    Without an `image_processor` it reads text only, and `blindness` says why. With `is_whole` a
    picture's tokens attend to each other in both directions: none may be divided. `is_proven`
    says that tests show for its kind that KV with pictures is taken up exactly.
    """

    model: SeeingModel
    vision_encoder: VisionEncoder
    image_processor: ImageProcessor | FallbackProcessor | None = None
    is_whole: bool = False
    is_proven: bool = True
    blindness: str = ""
    num_encoded: int = 0
    """Pictures that went through the tower."""

    def open(self, stream: mx.Stream) -> None:
        """See one small picture, so that no kernel is compiled under a request."""
        if self.image_processor is None:
            return
        with mx.stream(stream):
            if isinstance(self.image_processor, FallbackProcessor):
                self._try_out(self.image_processor)
            else:
                pixels = np.zeros((_WARM_SIDE, _WARM_SIDE, 3), dtype=np.uint8)
                self.encoded(self.image_processor.prepare(pixels))
        self.num_encoded = 0

    def _try_out(self, image_processor: FallbackProcessor) -> None:
        why = run_self_test(self, image_processor)
        if why is not None:
            self.image_processor, self.blindness = None, why

    def to_decode(self, kv: list[Any], delta: int) -> list[Any]:
        """These layer caches, and how far this sequence's positions are from their offsets."""
        return [*kv, RopeDelta(mx.array([[delta]], dtype=mx.int32))] if self.model.has_rope else kv

    def from_decode(self, kv: list[Any]) -> list[Any]:
        """The layer caches alone."""
        return kv[:-1] if self.model.has_rope else kv

    def compute(
        self, token_ids: list[int], kv: list[Any], image_batch: ImageBatch, start: int
    ) -> None:
        """Append the KV of the prompt's tokens from `start` on. Lazily."""
        end = start + len(token_ids)
        seen = image_batch.within(start, end)
        more: dict[str, object] = {}
        for number in seen:
            span = image_batch.spans[number]
            # Upstream treats placeholders in its own ways, and no token is like another here.
            low, high = max(span.start, start) - start, min(span.end, end) - start
            token_ids = [*token_ids[:low], *([0] * (high - low)), *token_ids[high:]]
        inputs = mx.array(token_ids)[None]
        if seen:
            more = self._embedded(inputs, image_batch, seen, start)
        if self.model.has_rope:
            self.model.at(inputs, kv, rope_positions(image_batch.spans, start, end), **more)
        else:
            self.model.whole.language_model(inputs, cache=kv, **more)
        for number in seen:
            if image_batch.spans[number].end <= end:
                image_batch.rows.pop(number, None)

    def _embedded(
        self, inputs: mx.array, image_batch: ImageBatch, seen: list[int], start: int
    ) -> dict[str, object]:
        """What the language model is given in the tokens' place: rows of pictures among words."""
        words = self.model.whole.get_input_embeddings(inputs, None).inputs_embeds
        num_tokens = inputs.shape[1]
        pieces: list[mx.array] = []
        deep: list[list[mx.array]] = []
        mask = np.zeros((1, num_tokens), dtype=np.bool_)
        done = 0
        for number in seen:
            rows = self._rows(image_batch, number)
            span = image_batch.spans[number]
            low, high = max(span.start - start, 0), min(span.end - start, num_tokens)
            first, last = low + start - span.start, high + start - span.start
            pieces += [words[:, done:low], rows.embeddings[:, first:last].astype(words.dtype)]
            deep.append([layer[first:last] for layer in rows.deepstack])
            mask[:, low:high] = True
            done = high
        more: dict[str, object] = {
            "inputs_embeds": mx.concatenate([*pieces, words[:, done:]], axis=1)
        }
        if deep[0]:
            more["visual_pos_masks"] = mx.array(mask.tolist())
            columns = zip(*deep, strict=True)
            more["deepstack_visual_embeds"] = [mx.concatenate(list(column)) for column in columns]
        assert self.image_processor is not None
        if self.image_processor.has_types:
            more["mm_token_type_ids"] = mx.array(mask.astype(np.int32).tolist())
        return more

    def look(self, image_batch: ImageBatch, start: int, end: int, budget_s: float) -> bool:
        """Work for about so long on pictures in `[start, end)`; whether all are seen. At least one
        layer of the tower is computed.
        """
        until_s = time.perf_counter() + budget_s
        for number in image_batch.within(start, end):
            if number in image_batch.rows:
                continue
            if number not in image_batch.looks:
                image_batch.looks[number] = self._look(image_batch.prompt_images[number].take())
            if not image_batch.looks[number].go_on(until_s):
                return False
            image_batch.rows[number] = image_batch.looks.pop(number).rows
        return True

    def _rows(self, image_batch: ImageBatch, number: int) -> ImageRows:
        if number not in image_batch.rows:
            image_batch.rows[number] = self.encoded(image_batch.prompt_images[number].take())
        return image_batch.rows[number]

    def encoded(self, prepared: Prepared) -> ImageRows:
        """The tower's work, done once for each picture whose KV is not there."""
        look = self._look(prepared)
        look.go_on(float("inf"))
        return look.rows

    def _look(self, prepared: Prepared) -> ImageEncoding:
        self.num_encoded += 1
        return self.vision_encoder.look(lambda: self._written_down(prepared))

    def _written_down(self, prepared: Prepared) -> ImageRows:
        assert self.image_processor is not None
        if self.image_processor.has_deepstack:
            # Upstream's own function would evaluate what the deeper layers are given.
            given, vision_encoder = self.given(prepared), self.model.whole.vision_tower
            pixels = cast("mx.array", given["pixel_values"])
            pixels = pixels.astype(vision_encoder.patch_embed.proj.weight.dtype)
            embeddings, deepstack = vision_encoder(pixels, given["image_grid_thw"])
            return ImageRows(embeddings[None], list(deepstack))
        placeholders = [self.image_processor.markup.placeholder] * prepared.num_tokens
        found = self.features(list(prepared.token_ids) or placeholders, prepared)
        deep = found.deepstack_visual_embeds
        return ImageRows(found.inputs_embeds, list(deep) if deep is not None else [])

    def given(self, prepared: Prepared) -> dict[str, object]:
        """What upstream's functions take of a picture."""
        return {name: _given(value) for name, value in prepared.inputs.items()}

    def features(self, token_ids: list[int], prepared: Prepared) -> Any:
        """Upstream's `InputEmbeddingsFeatures` of tokens with one picture among them."""
        inputs = self.given(prepared)
        pixels = inputs.pop("pixel_values", None)
        ids = mx.array([token_ids], dtype=mx.int32)
        return self.model.whole.get_input_embeddings(ids, pixels, mask=mx.ones_like(ids), **inputs)


def load(path: Path) -> tuple[SeeingModel, dict[str, object], VisionModel]:
    """A model whose weights are not read yet, its configuration, and how it sees.

    Raises:
        FileNotFoundError, ValueError, KeyError: as upstream finds the files.
    """
    config: dict[str, object] = _utils.load_config(path)
    _check_type(config)
    whole = _utils.load_model(path, lazy=True)
    family = FAMILIES.get(str(config["model_type"]))
    has_rope = "_rope_deltas" in vars(whole.language_model)
    model = SeeingModel(whole, has_rope=has_rope, says_positions=family is None)
    if family is not None:
        return (
            model,
            config,
            VisionModel(
                model, VisionEncoder(whole), image_processor_of(family, path), look_both_ways(whole)
            ),
        )
    vision_model = VisionModel(
        model, VisionEncoder(whole), is_proven=config["model_type"] in KEPT_TYPES
    )
    try:
        vision_model.image_processor = fallback_processor(path, whole, has_grid=model.has_rope)
    except UPSTREAM_ERRORS as error:
        print(f"no image processor: {error}", file=sys.stderr, flush=True)  # noqa: T201
        said = f"its image processor cannot be loaded ({type(error).__name__})"
        vision_model.blindness = str(error) if isinstance(error, Unusable) else said
    return model, config, vision_model


def _check_type(config: dict[str, object]) -> None:
    """Upstream takes other fields than the type for a reason to import another module."""
    named = str(config["model_type"])
    found = _utils.get_model_type(config)
    if named not in VLM_TYPES | BLIND_TYPES.keys() or found != _utils.MODEL_REMAPPING.get(
        named, named
    ):
        raise NeedsOwnCode(f"mlx-vlm would load it as {found}, which is not for {named}")


def _given(value: Any) -> Any:
    """Numpy's arrays as the device's."""
    if isinstance(value, list):
        return [_given(one) for one in cast("list[Any]", value)]
    return mx.array(value) if isinstance(value, np.ndarray) else value
