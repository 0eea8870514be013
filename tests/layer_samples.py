"""Layer caches filled with KV that depends on the position only, kept in files and put together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import msgspec

from runtime.kv import layers, pack
from runtime.kv.layers import KvLayout
from runtime.kv.pack import RunKv
from store.kv_file import open_file
from store.slots import SLOT, TOKENS, BlockKey, SlotAbout, Slots

HEADS, DIM, WINDOW = 2, 64, 16

Make = Callable[[], list[Any]]


def values(seed: int, shape: Sequence[int], dtype: mx.Dtype) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(seed)).astype(dtype)


@cache
def table(seed: int, heads: int, dtype: mx.Dtype) -> mx.array:
    return values(seed, (1, heads, 3100, DIM), dtype)


def feed(
    kv: Sequence[Any], start: int, end: int, *, dtype: mx.Dtype = mx.float32, heads: int = HEADS
) -> list[mx.array]:
    """Append the tokens `[start, end)`, whose KV depends on nothing else; what the layers see."""
    seen: list[mx.array] = []
    for number, layer in enumerate(kv):
        kind = type(layer).__name__
        if kind == "CacheList":
            seen += feed(layer.caches, start, end, dtype=dtype, heads=heads)
        elif kind == "PoolingCache":
            seen += _pool(layer, start, end, dtype)
        elif kind == "ArraysCache":
            for slot in range(len(layer.cache)):
                layer[slot] = values(1000 * end + 10 * number + slot, (1, 5, 3), mx.float32)
            seen += cast("list[mx.array]", layer.cache)
        else:
            tables = [table(2 * number + k, heads, dtype) for k in (0, 1)]
            rows = [one[:, :, start:end] for one in tables]
            if kind == "ChunkedKVCache":
                layer.maybe_trim_front()
            for one in layer.update_and_fetch(*rows):
                seen += list(one) if isinstance(one, list | tuple) else [one]
    return seen


def _pool(layer: Any, start: int, end: int, dtype: mx.Dtype) -> list[mx.array]:
    """Compress what has come to be a whole window, as models that pool do."""
    rows = table(0, 1, dtype)[0, :, start:end]
    kv, gate, base = layer.accumulate_windows(rows, rows[..., :1], start)
    windows = kv.reshape(1, -1, layer.ratio, kv.shape[-1])
    pooled = layer.update_and_fetch(windows.mean(axis=2) + base)
    return [kv, gate, pooled]


def raw(arrays: Sequence[mx.array]) -> list[tuple[Any, ...]]:
    """Dtype, shape and bytes."""
    found: list[tuple[Any, ...]] = []
    for one in arrays:
        flat = mx.contiguous(one).reshape(-1).view(mx.uint8) if one.size else mx.zeros(0)
        found.append((str(one.dtype), tuple(one.shape), bytes(memoryview(cast("bytes", flat)))))
    return found


def runs_of(
    kv: Sequence[Any], layout: KvLayout, borders: Sequence[int], *, has_state: bool
) -> list[RunKv]:
    runs: list[RunKv] = []
    for start, end in pairwise(borders):
        state = layers.checkpoint(kv, layout) if has_state and end == borders[-1] else None
        runs.append(RunKv(layers.cut(kv, layout, start, end), state))
    mx.eval([one for run in runs for one in run.arrays])
    return runs


def through_a_file(root: Path, number: int, run: RunKv, layout: KvLayout, num_tokens: int) -> RunKv:
    """Packed, written, verified, loaded, unpacked."""
    key = BlockKey(b"m" * 32, number.to_bytes(16, "little"))
    about, slots = SlotAbout(*key, pack.pack_layout(layout, run)), Slots(root)
    token_ids, tensors = range(num_tokens), pack.pack(run)
    slots.put(about, token_ids, tensors)
    verified = slots.read(key, token_ids)
    assert verified is not None
    assert [one.name for one in verified.tensors] == [one.name for one in tensors]
    again = loaded(slots.path(key), layout, num_tokens)
    assert raw(again.arrays) == raw(run.arrays)
    assert (again.state is None) == (run.state is None)
    if again.state is not None and run.state is not None:
        assert again.state.skeleton == run.state.skeleton
    return again


def loaded(path: Path, layout: KvLayout, num_tokens: int) -> RunKv:
    """What a file has for these layers."""
    with open_file(path, SLOT) as file:
        about = msgspec.json.decode(file.front.about, type=SlotAbout)
    tensors = mx.load(str(path))
    assert isinstance(tensors, dict)
    tensors.pop(TOKENS)
    return pack.unpack(about.layout, tensors, layout, num_tokens)


def assemble(make: Make, runs: Sequence[RunKv], num_room: int = 3) -> list[Any]:
    kv = make()
    layout = layers.layout_of(kv)
    layers.assemble(kv, layout, [run.slices for run in runs], runs[-1].state, num_room)
    mx.eval(layers.arrays_of(kv))
    return kv


def check_same_future(kv: Sequence[Any], other: Sequence[Any], at: int, **how: Any) -> None:
    """Both give the same bytes for a long slice, single tokens and another slice."""
    spans = [(at, at + 19), *((at + 19 + i, at + 20 + i) for i in range(20)), (at + 39, at + 45)]
    for start, end in spans:
        assert raw(feed(kv, start, end, **how)) == raw(feed(other, start, end, **how))


def spans_to(end: int, slice_size: int) -> list[tuple[int, int]]:
    return [(start, min(start + slice_size, end)) for start in range(0, end, slice_size)]


def check_rows_that_leave(tmp_path: Path, make: Make, lengths: tuple[int, int]) -> None:
    """Rows that were one batch are taken out of it, go through a file, and have the same future."""
    rows: list[list[Any]] = []
    for length in lengths:
        kv = make()
        for start, end in spans_to(length, 8):
            feed(kv, start, end)
        rows.append(kv)
    batch = [
        type(one).merge(list(both))
        for one, both in zip(rows[0], zip(*rows, strict=True), strict=True)
    ]
    extracted = [[one.extract(i) for one in batch] for i in (0, 1)]
    layout = layers.layout_of(make())
    for number, (kv, length) in enumerate(zip(extracted, lengths, strict=True)):
        assert layers.layout_of(kv) == layout
        (run,) = runs_of(kv, layout, (0, length), has_state=layout.needs_state)
        run = through_a_file(tmp_path, number, run, layout, length)
        check_same_future(assemble(make, [run]), kv, length)
