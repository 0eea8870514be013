"""Models that see: mlx-vlm's towers and language models, driven as text models are.

The only file that knows mlx-vlm, but for the cache classes in `kv/layers`. What upstream keeps on
the shared model, positions above all, is never read: every call says where its tokens are.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
from mlx import nn
from numpy.typing import NDArray
from PIL import Image as Pillow

from runtime.kv.media import rope_positions
from runtime.worker.album import Album, Markup, Prepared

_utils: Any = importlib.import_module("mlx_vlm.utils")
_caches: Any = importlib.import_module("mlx_vlm.models.cache")

_WARM_SIDE = 64


class RopeDelta:
    """Rides behind a sequence's layer caches while it decodes: how far positions are from offsets.

    `delta` is int32 [rows, 1]. It has what mlx-lm's BatchGenerator asks of a cache.
    """

    def __init__(self, delta: mx.array) -> None:
        self.delta = delta

    @property
    def state(self) -> list[mx.array]:
        return [self.delta]

    @state.setter
    def state(self, value: list[mx.array]) -> None:
        (self.delta,) = value

    @property
    def nbytes(self) -> int:
        return self.delta.nbytes

    @classmethod
    def merge(cls, caches: Sequence[RopeDelta]) -> RopeDelta:
        return cls(mx.concatenate([one.delta for one in caches]))

    def extend(self, other: RopeDelta) -> None:
        self.delta = mx.concatenate([self.delta, other.delta])

    def filter(self, kept: Any) -> None:
        self.delta = self.delta[mx.array(kept)]

    def extract(self, row: int) -> RopeDelta:
        return RopeDelta(self.delta[row : row + 1])

    def prepare(self, **_: Any) -> None:
        """It has nothing that depends on lengths."""

    def finalize(self) -> None:
        """It has nothing that depends on lengths."""

    def size(self) -> int:
        return 0

    def empty(self) -> bool:
        return False


class SeeingModel(nn.Module):
    """A vision model, called as mlx-lm calls its models: token ids and caches in, logits out."""

    def __init__(self, whole: Any, *, has_rope: bool) -> None:
        super().__init__()
        self.whole = whole
        self.has_rope = has_rope

    @property
    def layers(self) -> Any:
        return self.whole.language_model.layers

    def make_cache(self) -> list[Any]:
        return _caches.make_prompt_cache(self.whole.language_model)

    def __call__(self, inputs: mx.array, cache: list[Any]) -> mx.array:
        language = self.whole.language_model
        if not self.has_rope:
            return language(inputs, cache=cache).logits
        if type(cache[-1]) is not RopeDelta:
            start = _num_held(cache)
            return self.at(inputs, cache, rope_positions((), start, start + inputs.shape[1]))
        kv = cache[:-1]
        logits = language(inputs, cache=kv, rope_deltas=cache[-1].delta).logits
        # Some models put other caches into the list that they are given.
        cache[:-1] = kv
        return logits

    def at(
        self, inputs: mx.array, kv: list[Any], positions: NDArray[np.int32], **more: Any
    ) -> mx.array:
        """Logits of tokens with these positions `[3, tokens]`."""
        position_ids = mx.array(positions)[:, None]
        return self.whole.language_model(inputs, cache=kv, position_ids=position_ids, **more).logits


class _Rows(NamedTuple):
    """What stands in a picture's tokens' places: `[1, tokens, dim]`, and for the first layers."""

    embeddings: mx.array
    deepstack: list[mx.array]


Prepare = Callable[[Any, NDArray[np.uint8]], Prepared]


class _Family(NamedTuple):
    """One kind of models: its processor, how that is used, and what its language model takes.

    With `has_types` that is told which tokens are a picture's.
    """

    processor: Callable[[], Any]
    prepare: Prepare
    markup: Callable[[Any], tuple[str, str]]
    has_types: bool = False


@dataclass(eq=False, slots=True)
class Lens:
    """How pictures are prepared for one model. Belongs to the intake thread."""

    processor: Any
    family: _Family
    markup: Markup
    settings: bytes

    def prepare(self, pixels: NDArray[np.uint8]) -> Prepared:
        return self.family.prepare(self.processor, pixels)


@dataclass(eq=False, slots=True)
class Eyes:
    """How one loaded model sees. Belongs to the mlx thread.

    Without a `lens` it reads text only: nobody has shown that its kind is driven rightly. With
    `is_whole` a picture's tokens attend to each other in both directions: none may be divided.
    """

    model: SeeingModel
    lens: Lens | None = None
    is_whole: bool = False
    num_encoded: int = 0
    """Pictures that went through the tower."""

    def open(self, stream: mx.Stream) -> None:
        """See one small picture, so that no kernel is compiled under a request."""
        if self.lens is None:
            return
        prepared = self.lens.prepare(np.zeros((_WARM_SIDE, _WARM_SIDE, 3), dtype=np.uint8))
        with mx.stream(stream):
            self._encoded(prepared)
        self.num_encoded = 0

    def to_decode(self, kv: list[Any], delta: int) -> list[Any]:
        """These layer caches, and how far this sequence's positions are from their offsets."""
        return [*kv, RopeDelta(mx.array([[delta]], dtype=mx.int32))] if self.model.has_rope else kv

    def from_decode(self, kv: list[Any]) -> list[Any]:
        """The layer caches alone."""
        return kv[:-1] if self.model.has_rope else kv

    def compute(self, token_ids: list[int], kv: list[Any], album: Album, start: int) -> None:
        """Append the KV of the prompt's tokens from `start` on. Lazily."""
        end = start + len(token_ids)
        seen = [n for n, span in enumerate(album.spans) if span.start < end and span.end > start]
        more: dict[str, object] = {}
        for number in seen:
            span = album.spans[number]
            # Upstream treats placeholders in its own ways, and no token is like another here.
            low, high = max(span.start, start) - start, min(span.end, end) - start
            token_ids = [*token_ids[:low], *([0] * (high - low)), *token_ids[high:]]
        inputs = mx.array(token_ids)[None]
        if seen:
            more = self._embedded(inputs, album, seen, start)
        if self.model.has_rope:
            self.model.at(inputs, kv, rope_positions(album.spans, start, end), **more)
        else:
            self.model.whole.language_model(inputs, cache=kv, **more)
        for number in seen:
            if album.spans[number].end <= end:
                album.rows.pop(number, None)

    def _embedded(
        self, inputs: mx.array, album: Album, seen: list[int], start: int
    ) -> dict[str, object]:
        """What the language model is given in the tokens' place: rows of pictures among words."""
        words = self.model.whole.get_input_embeddings(inputs, None).inputs_embeds
        num_tokens = inputs.shape[1]
        pieces: list[mx.array] = []
        deep: list[list[mx.array]] = []
        mask = np.zeros((1, num_tokens), dtype=np.bool_)
        done = 0
        for number in seen:
            rows = self._rows(album, number)
            span = album.spans[number]
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
        assert self.lens is not None
        if self.lens.family.has_types:
            more["mm_token_type_ids"] = mx.array(mask.astype(np.int32).tolist())
        return more

    def _rows(self, album: Album, number: int) -> _Rows:
        if number not in album.rows:
            album.rows[number] = self._encoded(album.shots[number].take())
        return album.rows[number]

    def _encoded(self, prepared: Prepared) -> _Rows:
        """The tower's work, done once for each picture whose KV is not there."""
        assert self.lens is not None
        inputs = {name: mx.array(array) for name, array in prepared.inputs.items()}
        pixels = inputs.pop("pixel_values")
        ids = mx.full((1, prepared.num_tokens), self.lens.markup.placeholder, dtype=mx.int32)
        found = self.model.whole.get_input_embeddings(ids, pixels, mask=mx.ones_like(ids), **inputs)
        deep = found.deepstack_visual_embeds
        rows = _Rows(
            found.inputs_embeds, [deep[i] for i in range(len(deep))] if deep is not None else []
        )
        mx.eval(rows.embeddings, rows.deepstack)
        self.num_encoded += 1
        return rows


def load(path: Path) -> tuple[SeeingModel, dict[str, object], Eyes]:
    """A model whose weights are not read yet, its configuration, and how it sees.

    Raises:
        FileNotFoundError, ValueError, KeyError: as upstream finds the files.
    """
    config: dict[str, object] = _utils.load_config(path)
    whole = _utils.load_model(path, lazy=True)
    family = _FAMILIES.get(str(config["model_type"]))
    model = SeeingModel(whole, has_rope="_rope_deltas" in vars(whole.language_model))
    if family is None:
        return model, config, Eyes(model)
    return model, config, Eyes(model, _lens(family, path), _look_both_ways(whole))


def _lens(family: _Family, path: Path) -> Lens:
    # Named here, for upstream's `AutoProcessor` would run code that comes with a model.
    processor = family.processor().from_pretrained(str(path), trust_remote_code=False)
    token = int(processor.tokenizer.convert_tokens_to_ids(processor.image_token))
    markup = Markup(*family.markup(processor), token)
    return Lens(processor, family, markup, _settings(processor))


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


_QWEN3 = _Family(
    lambda: _upstream("qwen3_vl.processing_qwen3_vl").Qwen3VLProcessor,
    _prepare_patches,
    _plain_markup,
)
_FAMILIES: dict[str, _Family] = {
    "qwen2_vl": _QWEN3._replace(
        processor=lambda: _upstream("qwen2_vl.processing_qwen2_vl").Qwen2VLProcessor
    ),
    "qwen2_5_vl": _QWEN3._replace(
        processor=lambda: _upstream("qwen2_5_vl.processing_qwen2_5_vl").Qwen2_5_VLProcessor
    ),
    "qwen3_vl": _QWEN3,
    "qwen3_vl_moe": _QWEN3,
    "qwen3_5": _QWEN3,
    "qwen3_5_moe": _QWEN3,
    "gemma3": _Family(
        lambda: _upstream("gemma3.processing_gemma3").Gemma3Processor,
        _prepare_square,
        _gemma3_markup,
    ),
    "gemma4": _Family(
        lambda: _upstream("gemma4.processing_gemma4").Gemma4Processor,
        _prepare_pooled,
        _gemma4_markup,
        has_types=True,
    ),
}


def _look_both_ways(whole: Any) -> bool:
    """Have a picture's tokens attend to each other in any slice; whether this model wants that.

    Upstream does it only for a whole prompt from its first token on.
    """
    language = whole.language_model
    if getattr(language.config, "use_bidirectional_attention", None) != "vision":
        return False
    text = language.model
    text.__class__ = _both_ways(type(text))
    return True


def _both_ways(upstream: type) -> type:
    def overlay(self: Any, base_mask: mx.array, mm_token_type_ids: mx.array | None) -> mx.array:
        if mm_token_type_ids is None or mm_token_type_ids.shape[1] != base_mask.shape[-2]:
            return base_mask
        numbers = self._block_sequence_ids_for_mask(mm_token_type_ids)
        same = (numbers[:, :, None] != -1) & (numbers[:, :, None] == numbers[:, None, :])
        earlier = base_mask.shape[-1] - mm_token_type_ids.shape[1]
        same = mx.pad(same, [(0, 0), (0, 0), (earlier, 0)], constant_values=False)
        return base_mask | same[:, None]

    return type(upstream.__name__, (upstream,), {"_apply_blockwise_bidirectional_overlay": overlay})


def _num_held(kv: Sequence[Any]) -> int:
    """How many tokens these caches hold."""
    offsets = (getattr(cache, "offset", 0) for cache in kv)
    return max((one for one in offsets if isinstance(one, int)), default=0)
