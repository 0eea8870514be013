"""Whether pictures go through this engine as through upstream's own: tried once, after loading.

Upstream is given a whole prompt at once, we the same prompt as we always do: the picture alone,
then words and its rows in slices. What they say next must be the same.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, cast

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from runtime.kv.media import rope_delta
from runtime.worker.vision.fallback_processor import UPSTREAM_ERRORS, FallbackProcessor
from runtime.worker.vision.images import ImageBatch, Prepared
from store.types import MediaSpan

if TYPE_CHECKING:
    from runtime.worker.vision.model import VisionModel

MAX_DEVIATION = 0.05
"""Of the logits, relative: what 16 bits and other shapes of kernels make of the same numbers."""

_SIDES = (64, 96)
_WHY = {
    "attention_mask_4d": "its prompts attend to themselves in both directions",
    "cross_attention_states": "images enter its layers by cross attention, not among the tokens",
    "decoder_inputs_embeds": "an encoder of its own reads images, not the decoder",
    "per_layer_inputs": "its layers are given more of every token than embeddings",
}


def run_self_test(
    vision_model: VisionModel, image_processor: FallbackProcessor, seed: int = 0
) -> str | None:
    """Why this model cannot be shown pictures here; None if it can."""
    shape = _SIDES if image_processor.has_grid else (_SIDES[0], _SIDES[0])
    pixels = np.random.default_rng(seed).integers(0, 256, (*shape, 3), dtype=np.uint8)
    try:
        if not image_processor.writes_it_anywhere(pixels):
            return "its processor writes an image among words otherwise than alone"
        return _compared(vision_model, image_processor, pixels)
    except UPSTREAM_ERRORS as error:
        print(f"images cannot be tried: {error}", file=sys.stderr, flush=True)  # noqa: T201
        return f"mlx-vlm's code for its images fails ({type(error).__name__})"


def _compared(
    vision_model: VisionModel, image_processor: FallbackProcessor, pixels: NDArray[np.uint8]
) -> str | None:
    prepared = image_processor.prepare(pixels)
    before, after = image_processor.words()
    span = MediaSpan(len(before), len(before) + prepared.num_tokens, b"", prepared.grid)
    said = [*before, *prepared.token_ids, *after]
    features = vision_model.features(said, prepared)
    if features.inputs_embeds.shape[1] != len(said):
        return "mlx-vlm makes more of an image than it says in tokens"
    theirs = _upstream(vision_model, said, prepared, features)
    mx.eval(theirs)  # before others are told of other positions
    rows = vision_model.encoded(prepared)
    if mx.array_equal(
        rows.embeddings, vision_model.encoded(image_processor.prepare(255 - pixels)).embeddings
    ):
        return "mlx-vlm makes the same of all images"
    token_ids = [*before, *([image_processor.markup.placeholder] * prepared.num_tokens), *after]
    for cuts in ((), (span.start + prepared.num_tokens // 2, span.end + 1)):
        image_batch = ImageBatch((span,), rows={0: rows})
        if _deviation(_ours(vision_model, token_ids, image_batch, cuts), theirs) > MAX_DEVIATION:
            found = (why for name, why in _WHY.items() if features.to_dict()[name] is not None)
            return next(found, "mlx-vlm reads an image among words in a way that is not known here")
    return None


def _upstream(
    vision_model: VisionModel, token_ids: list[int], prepared: Prepared, features: Any
) -> mx.array:
    """Logits after the whole prompt."""
    language, cache = vision_model.model.whole.language_model, vision_model.model.make_cache()
    found = {name: one for name, one in features.to_dict().items() if one is not None}
    given = {**vision_model.given(prepared), **found}
    given.pop("pixel_values", None)
    return language(mx.array([token_ids]), cache=cache, **given).logits[0, -1]


def _ours(
    vision_model: VisionModel, token_ids: list[int], image_batch: ImageBatch, cuts: tuple[int, ...]
) -> mx.array:
    """Logits after a prompt in slices that end there, its last token decoded."""
    # As in a process that has seen nothing yet: what upstream keeps on the model must not matter.
    if vision_model.model.has_rope:
        vars(vision_model.model.whole.language_model).update(_rope_deltas=None, _position_ids=None)
    kv, start = vision_model.model.make_cache(), 0
    for end in (*cuts, len(token_ids) - 1):
        vision_model.compute(token_ids[start:end], kv, image_batch, start)
        start = end
    delta = rope_delta(image_batch.spans, len(token_ids))
    return vision_model.model(mx.array([token_ids[-1:]]), vision_model.to_decode(kv, delta))[0, -1]


def _deviation(ours: mx.array, theirs: mx.array) -> float:
    one, other = (logits.astype(mx.float32) for logits in (ours, theirs))
    apart = mx.linalg.norm(one - other) / (mx.linalg.norm(other - other.mean()) + 1e-9)
    # What is not a number is not the same either.
    return cast("float", apart.item()) if mx.isfinite(apart).item() else float("inf")
