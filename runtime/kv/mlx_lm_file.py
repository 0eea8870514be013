"""Prompt-cache files of stock mlx-lm: written from slots, and cut into slots.

Knows `save_prompt_cache` and `load_prompt_cache` of upstream. Our metadata adds the token ids, so
that our own import needs nothing else; upstream ignores what it does not know.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from __future__ import annotations

import base64
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import msgspec
from mlx_lm.models import cache as upstream

from runtime.kv import layers, pack
from runtime.kv.layers import KvLayout, UnsupportedCache
from runtime.kv.pack import PackedLayout, RunKv
from runtime.mlx_lm_exchange import NOT_STOCK
from store.errors import SlotDamaged
from store.slots import verify

_KV_GROUP = 64
_ROOM = 1
_TOKENS, _MODEL, _MODEL_HASH = "hearth_tokens", "hearth_model", "hearth_model_hash"


class StockFile(NamedTuple):
    """What a file holds. The token ids are None where it does not say them."""

    kv: list[Any]
    token_ids: list[int] | None
    model_hash: str | None


def write(
    file: Path,
    paths: Sequence[Path],
    leaves: Sequence[int],
    model: str,
    model_path: str,
    on_read: Callable[[int], None],
) -> int:
    """Write the slots at `paths`, each up to position `leaves[i]`, as one file; its tokens.

    `on_read` is told how many of them were read. What comes before quantised KV is quantised.

    Raises:
        SlotDamaged, SlotMissing, StoreFailed: a slot cannot be read.
        UnsupportedCache: upstream cannot load such a layer cache.
        ValueError: the slots are of a model that mlx-vlm computes.
    """
    pieces: list[Sequence[mx.array]] = []
    tokens = array("I")
    layout, state, model_hash = KvLayout(()), None, ""
    for number, (path, leave) in enumerate(zip(paths, leaves, strict=True)):
        on_read(number)
        slot = verify(path)
        header = slot.header
        if pack.is_of_ranks(header.layout):
            raise ValueError("it is of a model that is split over ranks; upstream has no such file")
        layout = msgspec.json.decode(header.layout, type=PackedLayout).layout
        loaded = mx.load(str(path))
        assert isinstance(loaded, dict)
        run = pack.unpack(header.layout, loaded, layout, header.num_tokens)
        pieces.append([one[: leave - header.start] for one in run.slices])
        state, model_hash = run.state, header.model.hex()
        tokens += slot.token_ids[: leave - header.start]
    if any(leaf.class_name.startswith(layers.OF_VLM) for leaf in layout.leaves):
        raise ValueError(NOT_STOCK.format(model=model))
    if layout.needs_state and state is None:
        raise SlotDamaged("the last slot holds no state of the layers that cannot be sliced")
    kv = _fresh(layout, pieces[-1:])
    pieces = [layers.as_held(kv, layout, piece) for piece in pieces]
    layers.assemble(kv, layout, pieces, state, _ROOM)
    metadata = {
        "model": model_path,
        "tokenizer_config": "{}",
        _MODEL: model,
        _MODEL_HASH: model_hash,
        _TOKENS: base64.b64encode(tokens.tobytes()).decode(),
    }
    upstream.save_prompt_cache(str(file), kv, metadata)
    return len(tokens)


def read(file: Path) -> StockFile:
    """Load a file, whoever wrote it.

    Raises:
        ValueError: it is no prompt-cache file of mlx-lm, or of one with other caches.
    """
    try:
        kv, metadata = upstream.load_prompt_cache(str(file), return_metadata=True)
        data = base64.b64decode(metadata[_TOKENS]) if _TOKENS in metadata else None
        token_ids = array("I", data).tolist() if data is not None else None
    except (RuntimeError, KeyError, TypeError, IndexError, AttributeError) as error:
        raise ValueError(f"it is no prompt cache of mlx-lm: {error}") from error
    return StockFile(kv, token_ids, metadata.get(_MODEL_HASH) if metadata else None)


def num_tokens(kv: Sequence[Any]) -> int | None:
    """How many tokens the caches hold; None where none of them says."""
    offsets = [
        offset
        for cache in kv
        for one in (cache.caches if type(cache) is upstream.CacheList else (cache,))
        if (offset := _offset(one)) is not None
    ]
    return max(offsets, default=None)


def cut_runs(kv: Sequence[Any], layout: KvLayout, end: int, run_tokens: int) -> list[RunKv]:
    """The caches in pieces of so many tokens, the last with the state at `end`; evaluated."""
    runs: list[RunKv] = []
    for start in range(0, end, run_tokens):
        stop = min(start + run_tokens, end)
        has_state = layout.needs_state and stop == end
        state = layers.checkpoint(kv, layout) if has_state else None
        runs.append(RunKv(layers.cut(kv, layout, start, stop), state))
    mx.eval([one for run in runs for one in run.arrays])
    return runs


def _offset(cache: Any) -> int | None:
    if type(cache) is upstream.ArraysCache:
        return None
    return int(cache.offset)


def _fresh(layout: KvLayout, pieces: Sequence[Sequence[mx.array]]) -> list[Any]:
    """Empty caches of these classes, without the model they belong to."""
    top: dict[int, Any] = {}
    inner: dict[int, list[Any]] = {}
    column = 0
    for leaf in layout.leaves:
        cache, num_columns = _blank(leaf.class_name, pieces[0][column:])
        column += num_columns
        if len(leaf.path) == 1:
            top[leaf.path[0]] = cache
        elif len(leaf.path) == 2:
            inner.setdefault(leaf.path[0], []).append(cache)
        else:
            raise UnsupportedCache(cache)
    top |= {number: upstream.CacheList(*caches) for number, caches in inner.items()}
    return [top[number] for number in sorted(top)]


def _blank(name: str, columns: Sequence[mx.array]) -> tuple[Any, int]:
    """An empty cache, and how many arrays of a run it takes."""
    match name:
        case "KVCache":
            return upstream.KVCache(), 2
        case "ConcatenateKVCache":
            return upstream.ConcatenateKVCache(), 2
        case "QuantizedKVCache":
            packed, scales = columns[0].shape[-1], columns[1].shape[-1]
            bits = packed * 32 // (scales * _KV_GROUP) if scales else 8
            return upstream.QuantizedKVCache(_KV_GROUP, bits), 6
        case "RotatingKVCache":
            return upstream.RotatingKVCache(1), 0
        case "ChunkedKVCache":
            return upstream.ChunkedKVCache(1), 0
        case "ArraysCache":
            return upstream.ArraysCache(1), 0
        case _:
            raise SlotDamaged(f"its layers are of the unknown class {name}")
