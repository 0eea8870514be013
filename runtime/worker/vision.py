"""Models that see: mlx-vlm's towers and language models, driven as text models are.

Knows how mlx-vlm loads models and what their towers give; `lens` knows its processors, `seeing`
its language models, `kv/layers` its cache classes.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from __future__ import annotations

import importlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from runtime.kv.media import rope_positions
from runtime.worker.album import Album, Prepared
from runtime.worker.lens import FAMILIES, Lens, lens_of
from runtime.worker.seeing import RopeDelta, SeeingModel, look_both_ways

_utils: Any = importlib.import_module("mlx_vlm.utils")

_WARM_SIDE = 64


class _Rows(NamedTuple):
    """What stands in a picture's tokens' places: `[1, tokens, dim]`, and for the first layers."""

    embeddings: mx.array
    deepstack: list[mx.array]


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
    family = FAMILIES.get(str(config["model_type"]))
    model = SeeingModel(whole, has_rope="_rope_deltas" in vars(whole.language_model))
    if family is None:
        return model, config, Eyes(model)
    return model, config, Eyes(model, lens_of(family, path), look_both_ways(whole))
