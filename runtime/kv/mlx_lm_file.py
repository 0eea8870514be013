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
from runtime.kv.layers import KvLayout, State, UnsupportedCache
from runtime.kv.pack import PackedLayout, RunKv
from runtime.mlx_lm_exchange import NOT_STOCK
from store.errors import SlotDamaged
from store.head_file import HEAD, read_end, read_head
from store.kv_file import kind_of, open_file
from store.slots import SLOT, STATE, TOKENS, SlotAbout

_KV_GROUP = 64
_ROOM = 1
_TOKENS, _MODEL, _MODEL_HASH = "hearth_tokens", "hearth_model", "hearth_model_hash"


class StockFile(NamedTuple):
    """What a file holds. The token ids are None where it does not say them."""

    kv: list[Any]
    token_ids: list[int] | None
    model_hash: str | None


class _Kept(NamedTuple):
    """What was read of a conversation: pieces of consecutive tokens, each with its layout, and the
    state at the end of the last one, if there is any.
    """

    model_hash: str
    layouts: list[KvLayout]
    pieces: list[list[mx.array]]
    state: State | None
    token_ids: array[int]


def write(
    file: Path,
    paths: Sequence[Path],
    leaves: Sequence[int],
    model: str,
    model_path: str,
    on_read: Callable[[int], None],
) -> int:
    """Write what lies at `paths`, each up to position `leaves[i]`, as one file; its tokens.

    They are slots, of which each may be followed by its states, and at last a head. `on_read` is
    told how many of them were read. What comes before quantised KV is quantised. Where a state is
    needed and blocks have one before their end, that is the end.

    Raises:
        SlotDamaged, SlotMissing, SlotForeign, StoreFailed: something cannot be read.
        UnsupportedCache: upstream cannot load such a layer cache.
        ValueError: the slots are of a model that mlx-vlm computes.
    """
    kept = _read_files(paths, leaves, on_read)
    layout = kept.layouts[-1] if kept.layouts else KvLayout(())
    if any(leaf.class_name.startswith(layers.OF_VLM) for leaf in layout.leaves):
        raise ValueError(NOT_STOCK.format(model=model))
    if not kept.pieces or (layout.needs_state and kept.state is None):
        raise SlotDamaged(
            "no file of it has the state of the layers that cannot be sliced; an end that is not "
            "written yet has it once its model rests"
        )
    kv = _fresh(layout, kept.pieces[-1:])
    pieces = [layers.as_held(kv, layout, piece) for piece in kept.pieces]
    layers.assemble(kv, layout, pieces, kept.state, _ROOM)
    metadata = {
        "model": model_path,
        "tokenizer_config": "{}",
        _MODEL: model,
        _MODEL_HASH: kept.model_hash,
        _TOKENS: base64.b64encode(kept.token_ids.tobytes()).decode(),
    }
    upstream.save_prompt_cache(str(file), kv, metadata)
    return len(kept.token_ids)


def _read_files(
    paths: Sequence[Path], leaves: Sequence[int], on_read: Callable[[int], None]
) -> _Kept:
    kept = _Kept("", [], [], None, array("I"))
    num_with_state, state_at = 0, 0
    for number, (path, leave) in enumerate(zip(paths, leaves, strict=True)):
        on_read(number)
        one, start = _read_block_file(path, kept.token_ids), len(kept.token_ids)
        layout, rest = _layout_of(one.layout), one.token_ids
        run = pack.unpack(one.layout, _loaded(path), layout, len(rest))
        if rest:
            kept.layouts.append(layout)
            kept.pieces.append([column[: leave - start] for column in run.slices])
            kept.token_ids.extend(rest[: leave - start])
        if run.state is not None:
            num_with_state, state_at = len(kept.pieces), len(kept.token_ids)
        kept = kept._replace(model_hash=one.model.hex(), state=run.state or kept.state)
    if kept.state is not None:
        del kept.layouts[num_with_state:], kept.pieces[num_with_state:], kept.token_ids[state_at:]
    return kept


class _BlockFile(NamedTuple):
    """What a file of blocks says of itself, and the tokens whose KV it has."""

    model: bytes
    layout: str
    token_ids: array[int]


def _read_block_file(path: Path, before: array[int]) -> _BlockFile:
    """A slot, the states at its end, or a head, behind these tokens; every byte is compared."""
    kind = kind_of(path)
    if kind == HEAD:
        head, token_ids, _ = read_head(path)
        read_end(path)
        if array("I", token_ids[: len(before)]) != before:
            raise SlotDamaged("the head is not of these blocks")
        return _BlockFile(head.model, head.layout, array("I", token_ids[len(before) :]))
    with open_file(path, STATE if kind == STATE else SLOT) as file:
        try:
            about = msgspec.json.decode(file.front.about, type=SlotAbout)
        except msgspec.MsgspecError as error:
            raise SlotDamaged("it does not say of what it is") from error
        ids = b"".join(bytes(one.data) for one in file.read() if one.name == TOKENS)
    return _BlockFile(about.model, about.layout, array("I", ids))


def _layout_of(text: str) -> KvLayout:
    if pack.is_of_ranks(text):
        raise ValueError("it is of a model that is split over ranks; upstream has no such file")
    try:
        return msgspec.json.decode(text, type=PackedLayout).layout
    except msgspec.MsgspecError as error:
        raise SlotDamaged(f"its layout cannot be read: {error}") from error


def _loaded(path: Path) -> dict[str, mx.array]:
    loaded = mx.load(str(path))
    assert isinstance(loaded, dict)
    return loaded


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
