"""Layer caches of sequences as those of a batch, handed over without a copy where that can be."""

# pyright: reportUnknownMemberType=false

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from mlx_lm.models.cache import BatchKVCache, CacheList, KVCache


class _Rows(BatchKVCache):
    """A batch that begins with one row, in that one's own arrays and the room behind its tokens."""

    @classmethod
    def of(cls, cache: KVCache) -> _Rows:
        rows = cls([0])
        rows.keys, rows.values = cache.keys, cache.values
        rows.offset, rows._idx = rows.offset + cache.offset, cache.offset
        return rows

    def extract(self, idx: int) -> KVCache:
        """One row as a view: whoever keeps its KV copies what is new in it."""
        assert self.keys is not None
        assert self.values is not None
        row = KVCache()
        padding = cast("list[int]", self.left_padding.tolist())[idx]
        row.keys = self.keys[idx : idx + 1, :, padding : self._idx]
        row.values = self.values[idx : idx + 1, :, padding : self._idx]
        row.offset = self._idx - padding
        return row


def handed_over(kv: Sequence[Any]) -> list[Any]:
    """The caches of one sequence as those of a batch, which writes behind their tokens.

    Upstream's `merge` copies, and so does the first token after it, as it leaves no room.
    """
    return [_handed_over(cache) for cache in kv]


def merged(kvs: Sequence[Sequence[Any]]) -> list[Any]:
    """Copies of several sequences' caches as those of one batch."""
    return [caches[0].merge(list(caches)) for caches in zip(*kvs, strict=True)]


def _handed_over(cache: Any) -> Any:
    if type(cache) is CacheList:
        children = cast("Sequence[Any]", cache.caches)
        return CacheList(*map(_handed_over, children))
    if type(cache) is KVCache and cache.keys is not None:
        return _Rows.of(cache)
    return cache.merge([cache])
