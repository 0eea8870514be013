"""A loaded vision model, called as mlx-lm calls its models, and what its calls carry.

What upstream keeps on the shared model, positions above all, is never read: every call says where
its tokens are.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np
from mlx import nn
from numpy.typing import NDArray

from runtime.kv.media import rope_positions

_caches: Any = importlib.import_module("mlx_vlm.models.cache")


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

    kv_classes = (_caches.KVCache, _caches.QuantizedKVCache)

    def __init__(self, whole: Any, *, has_rope: bool, says_positions: bool = False) -> None:
        super().__init__()
        self.whole = whole
        self.has_rope = has_rope
        self.says_positions = says_positions

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
        kv, delta = cache[:-1], cache[-1].delta
        if self.says_positions:
            # Some kinds take deltas only if the model itself holds some.
            at = _offsets(kv) + delta + mx.arange(inputs.shape[1])
            given = {"position_ids": mx.broadcast_to(at, (3, *inputs.shape))}
        else:
            given = {"rope_deltas": delta}
        logits = language(inputs, cache=kv, **given).logits
        # Some models put other caches into the list that they are given.
        cache[:-1] = kv
        return logits

    def at(
        self, inputs: mx.array, kv: list[Any], positions: NDArray[np.int32], **more: Any
    ) -> mx.array:
        """Logits of tokens with these positions `[3, tokens]`."""
        position_ids = mx.array(positions)[:, None]
        return self.whole.language_model(inputs, cache=kv, position_ids=position_ids, **more).logits


def look_both_ways(whole: Any) -> bool:
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


def _offsets(kv: Sequence[Any]) -> mx.array:
    """How many tokens each row holds `[rows, 1]`; all have the same where a number says it."""
    found = (getattr(cache, "offset", None) for cache in kv)
    offset = next(one for one in found if one is not None)
    return offset[:, None] if isinstance(offset, mx.array) and offset.ndim else mx.array([[offset]])


def _num_held(kv: Sequence[Any]) -> int:
    """How many tokens these caches hold."""
    offsets = (getattr(cache, "offset", 0) for cache in kv)
    return max((one for one in offsets if isinstance(one, int)), default=0)
