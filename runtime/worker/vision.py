"""Models that see: mlx-vlm's towers and language models, driven as text models are.

Knows how mlx-vlm loads models and what their towers give; `lens` knows its processors, `seeing`
its language models, `kv/layers` its cache classes.
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
from runtime.model_folder import NeedsOwnCode
from runtime.vision_files import BLIND_TYPES, KEPT_TYPES, VLM_TYPES
from runtime.worker.album import Album, Prepared
from runtime.worker.any_lens import UPSTREAM_ERRORS, AnyLens, Unusable, any_lens
from runtime.worker.lens import FAMILIES, Lens, lens_of
from runtime.worker.seeing import RopeDelta, SeeingModel, look_both_ways
from runtime.worker.tower import Look, Rows, Tower
from runtime.worker.trial import try_out

_utils: Any = importlib.import_module("mlx_vlm.utils")

_WARM_SIDE = 64


@dataclass(eq=False, slots=True)
class Eyes:
    """How one loaded model sees. Belongs to the mlx thread.

    Without a `lens` it reads text only, and `blindness` says why. With `is_whole` a picture's
    tokens attend to each other in both directions: none may be divided. `is_proven` says that
    tests show for its kind that KV with pictures is taken up exactly.
    """

    model: SeeingModel
    tower: Tower
    lens: Lens | AnyLens | None = None
    is_whole: bool = False
    is_proven: bool = True
    blindness: str = ""
    num_encoded: int = 0
    """Pictures that went through the tower."""

    def open(self, stream: mx.Stream) -> None:
        """See one small picture, so that no kernel is compiled under a request."""
        if self.lens is None:
            return
        with mx.stream(stream):
            if isinstance(self.lens, AnyLens):
                self._try_out(self.lens)
            else:
                pixels = np.zeros((_WARM_SIDE, _WARM_SIDE, 3), dtype=np.uint8)
                self.encoded(self.lens.prepare(pixels))
        self.num_encoded = 0

    def _try_out(self, lens: AnyLens) -> None:
        why = try_out(self, lens)
        if why is not None:
            self.lens, self.blindness = None, why

    def to_decode(self, kv: list[Any], delta: int) -> list[Any]:
        """These layer caches, and how far this sequence's positions are from their offsets."""
        return [*kv, RopeDelta(mx.array([[delta]], dtype=mx.int32))] if self.model.has_rope else kv

    def from_decode(self, kv: list[Any]) -> list[Any]:
        """The layer caches alone."""
        return kv[:-1] if self.model.has_rope else kv

    def compute(self, token_ids: list[int], kv: list[Any], album: Album, start: int) -> None:
        """Append the KV of the prompt's tokens from `start` on. Lazily."""
        end = start + len(token_ids)
        seen = album.within(start, end)
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
        if self.lens.has_types:
            more["mm_token_type_ids"] = mx.array(mask.astype(np.int32).tolist())
        return more

    def look(self, album: Album, start: int, end: int, budget_s: float) -> bool:
        """Work for about so long on pictures in `[start, end)`; whether all are seen. At least one
        layer of the tower is computed.
        """
        until_s = time.perf_counter() + budget_s
        for number in album.within(start, end):
            if number in album.rows:
                continue
            if number not in album.looks:
                album.looks[number] = self._look(album.shots[number].take())
            if not album.looks[number].go_on(until_s):
                return False
            album.rows[number] = album.looks.pop(number).rows
        return True

    def _rows(self, album: Album, number: int) -> Rows:
        if number not in album.rows:
            album.rows[number] = self.encoded(album.shots[number].take())
        return album.rows[number]

    def encoded(self, prepared: Prepared) -> Rows:
        """The tower's work, done once for each picture whose KV is not there."""
        look = self._look(prepared)
        look.go_on(float("inf"))
        return look.rows

    def _look(self, prepared: Prepared) -> Look:
        self.num_encoded += 1
        return self.tower.look(lambda: self._written_down(prepared))

    def _written_down(self, prepared: Prepared) -> Rows:
        assert self.lens is not None
        if self.lens.has_deepstack:
            # Upstream's own function would evaluate what the deeper layers are given.
            given, tower = self.given(prepared), self.model.whole.vision_tower
            pixels = cast("mx.array", given["pixel_values"])
            pixels = pixels.astype(tower.patch_embed.proj.weight.dtype)
            embeddings, deepstack = tower(pixels, given["image_grid_thw"])
            return Rows(embeddings[None], list(deepstack))
        placeholders = [self.lens.markup.placeholder] * prepared.num_tokens
        found = self.features(list(prepared.token_ids) or placeholders, prepared)
        deep = found.deepstack_visual_embeds
        return Rows(found.inputs_embeds, list(deep) if deep is not None else [])

    def given(self, prepared: Prepared) -> dict[str, object]:
        """What upstream's functions take of a picture."""
        return {name: _given(value) for name, value in prepared.inputs.items()}

    def features(self, token_ids: list[int], prepared: Prepared) -> Any:
        """Upstream's `InputEmbeddingsFeatures` of tokens with one picture among them."""
        inputs = self.given(prepared)
        pixels = inputs.pop("pixel_values", None)
        ids = mx.array([token_ids], dtype=mx.int32)
        return self.model.whole.get_input_embeddings(ids, pixels, mask=mx.ones_like(ids), **inputs)


def load(path: Path) -> tuple[SeeingModel, dict[str, object], Eyes]:
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
            Eyes(model, Tower(whole), lens_of(family, path), look_both_ways(whole)),
        )
    eyes = Eyes(model, Tower(whole), is_proven=config["model_type"] in KEPT_TYPES)
    try:
        eyes.lens = any_lens(path, whole, has_grid=model.has_rope)
    except UPSTREAM_ERRORS as error:
        print(f"no image processor: {error}", file=sys.stderr, flush=True)  # noqa: T201
        said = f"its image processor cannot be loaded ({type(error).__name__})"
        eyes.blindness = str(error) if isinstance(error, Unusable) else said
    return model, config, eyes


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
