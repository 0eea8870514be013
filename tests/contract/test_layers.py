"""Every cache class of the pinned mlx-lm survives being cut, stored and put together again."""

import inspect
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models import cache as upstream
from mlx_lm.models.cache import (
    ArraysCache,
    CacheList,
    ChunkedKVCache,
    ConcatenateKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
)

from runtime.kv import layers, pack
from runtime.kv.cursor import CacheCursor
from runtime.kv.deletions import Deletions
from runtime.kv.layers import State, UnsupportedCache
from runtime.kv.pack import RunKv
from runtime.kv.parts import Parts, Span
from runtime.kv.state import KvState
from runtime.kv.tiers import Tiers
from store.block_names import HashChain
from store.errors import SlotDamaged
from tests.kv_worker import Caches
from tests.layer_samples import (
    DIM,
    HEADS,
    WINDOW,
    Make,
    assemble,
    check_rows_that_leave,
    check_same_future,
    feed,
    raw,
    runs_of,
    spans_to,
    through_a_file,
)

KNOWN = {
    "ArraysCache",
    "BatchKVCache",
    "BatchRotatingKVCache",
    "CacheList",
    "ChunkedKVCache",
    "ConcatenateKVCache",
    "KVCache",
    "QuantizedKVCache",
    "RotatingKVCache",
}
DTYPES = (mx.float32, mx.bfloat16, mx.float16)


SLICEABLE: dict[str, Make] = {
    "kv": lambda: [KVCache(), KVCache()],
    "one head": lambda: [KVCache()],
    "concatenate": lambda: [ConcatenateKVCache()],
    "quantized 4": lambda: [QuantizedKVCache(group_size=32, bits=4)],
    "quantized 8": lambda: [KVCache(), QuantizedKVCache(group_size=64, bits=8)],
    "list of kv": lambda: [CacheList(KVCache(), KVCache()), KVCache()],
}
CHECKPOINTED: dict[str, Make] = {
    "rotating": lambda: [RotatingKVCache(WINDOW), KVCache()],
    "rotating that keeps": lambda: [RotatingKVCache(WINDOW, keep=4)],
    "chunked": lambda: [ChunkedKVCache(WINDOW), KVCache()],
    "arrays": lambda: [ArraysCache(2), KVCache()],
    "only arrays": lambda: [ArraysCache(1), ArraysCache(3)],
    "list of both": lambda: [CacheList(ArraysCache(2), KVCache()), RotatingKVCache(WINDOW)],
    "list in a list": lambda: [CacheList(CacheList(KVCache(), ArraysCache(1)), KVCache())],
}
BATCHED = ("kv", "list of kv", "rotating", "arrays", "list of both")


def test_the_cache_classes_of_upstream_are_those_that_are_known():
    found = {
        name
        for name, one in inspect.getmembers(upstream, inspect.isclass)
        if issubclass(one, upstream._BaseCache) and one is not upstream._BaseCache
    }
    assert found == KNOWN
    registered = {*layers._REGISTRY[upstream.__name__], "CacheList"}
    assert registered | {*layers._BATCH_FORMS[upstream.__name__]} == KNOWN


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", SLICEABLE)
def test_a_sliceable_cache_is_taken_up_at_any_token(tmp_path: Path, name: str, dtype: mx.Dtype):
    make = SLICEABLE[name]
    how: dict[str, Any] = {"dtype": dtype, "heads": 1 if name == "one head" else HEADS}
    kv = make()
    layout = layers.layout_of(kv)
    assert not layout.needs_state
    assert any(leaf.kind == "sliceable" for leaf in layout.leaves)
    for start, end in spans_to(70, 13):
        feed(kv, start, end, **how)
    runs = runs_of(kv, layout, (0, 32, 61, 70), has_state=False)
    runs = [
        through_a_file(tmp_path, i, run, layout, num_tokens)
        for i, (run, num_tokens) in enumerate(zip(runs, (32, 29, 9), strict=True))
    ]
    for at in (70, 61, 45, 32, 7):
        live = make()
        for start, end in spans_to(at, 13):
            feed(live, start, end, **how)
        borders = ((0, 32), (32, 61), (61, 70))
        pieces = [
            RunKv([one[: at - start] for one in run.slices], None)
            for run, (start, _) in zip(runs, borders, strict=True)
            if start < at
        ]
        check_same_future(assemble(make, pieces), live, at, **how)


@pytest.mark.parametrize("name", SLICEABLE | CHECKPOINTED)
def test_blocks_that_are_cut_at_once_are_those_that_are_cut_one_by_one(name: str):
    make = (SLICEABLE | CHECKPOINTED)[name]
    heads = 1 if name == "one head" else HEADS
    parts, kv = Parts(Caches(make)), make()
    feed(kv, 0, 70, heads=heads)
    borders = [*range(0, 65, 4), 70]
    spans = [Span(start, end, end == 70) for start, end in pairwise(borders)]
    apart, together = parts.cut(kv, spans), parts.cut_blocks(kv, spans)
    slabs = [id(one.slab) for one in together if one.slab is not None]
    assert [slabs.count(one) for one in dict.fromkeys(slabs)] == [8, 8]
    for one, other in zip(apart, together, strict=True):
        for run in (other, parts.on_its_own(other)):
            assert raw(run.arrays) == raw(one.arrays)
            assert _packed(parts, run) == _packed(parts, one)
    for begun in (apart, together[:5] + apart[5:7] + together[7:], together):
        for first, num in ((1, 4), (8, 4), (11, 3), (12, 1), (17, 6)):
            pieces = [(one, 4) for one in begun[: first - 1]] + [(begun[first - 1], num)]
            num_tokens = 4 * (first - 1) + num
            if parts.needs_state and num_tokens < 70:
                continue
            live, again = make(), make()
            feed(live, 0, num_tokens, heads=heads)
            parts.assemble(again, pieces, 3)
            check_same_future(again, live, num_tokens, heads=heads)


def _packed(parts: Parts, run: RunKv) -> list[tuple[str, bytes]]:
    return [(one.name, bytes(one.data)) for one in parts.packed(run).tensors]


@pytest.mark.parametrize("name", SLICEABLE)
def test_tokens_that_a_cache_does_not_hold_are_not_cut_out_of_its_room(name: str):
    kv = SLICEABLE[name]()
    layout = layers.layout_of(kv)
    feed(kv, 0, 39)
    with pytest.raises(ValueError, match="40 tokens are asked of a cache that holds 39"):
        layers.cut(kv, layout, 32, 40)


@pytest.mark.parametrize("slice_size", [1, 7, 40])
@pytest.mark.parametrize("at", [WINDOW - 5, WINDOW, WINDOW + 1, 3 * WINDOW + 2])
@pytest.mark.parametrize("name", CHECKPOINTED)
def test_a_checkpointed_cache_is_taken_up_where_it_stood(
    tmp_path: Path, name: str, at: int, slice_size: int
):
    make = CHECKPOINTED[name]
    kv = make()
    layout = layers.layout_of(kv)
    assert layout.needs_state
    for start, end in spans_to(at, slice_size):
        feed(kv, start, end)
    (run,) = runs_of(kv, layout, (0, at), has_state=True)
    run = through_a_file(tmp_path, 0, run, layout, at)
    first, second = assemble(make, [run]), assemble(make, [run])
    check_same_future(first, kv, at)
    again = make()
    for start, end in spans_to(at, slice_size):
        feed(again, start, end)
    check_same_future(second, again, at)


@pytest.mark.parametrize("name", BATCHED)
@pytest.mark.parametrize("lengths", [(9, 9), (9, 30), (50, 33)])
def test_a_row_that_leaves_a_batch_is_kept(tmp_path: Path, name: str, lengths: tuple[int, int]):
    check_rows_that_leave(tmp_path, (SLICEABLE | CHECKPOINTED)[name], lengths)


@pytest.mark.parametrize("name", [*SLICEABLE, *CHECKPOINTED])
def test_caches_that_were_never_used_are_kept_too(tmp_path: Path, name: str):
    make = (SLICEABLE | CHECKPOINTED)[name]
    layout = layers.layout_of(make())
    used = KVCache()
    feed([used], 0, 5)
    kv, wider = [*make(), used], lambda: [*make(), KVCache()]
    if name == "concatenate":
        kv, wider = [used, *make()], lambda: [KVCache(), *make()]
    layout = layers.layout_of(kv)
    (run,) = runs_of(kv, layout, (0, 5), has_state=layout.needs_state)
    again = assemble(wider, [through_a_file(tmp_path, 0, run, layout, 5)])
    assert [one.empty() for one in again] == [one.empty() for one in kv]
    check_same_future(again, kv, 5)


def test_a_checkpoint_holds_no_more_rows_than_the_window():
    kv: list[Any] = [RotatingKVCache(WINDOW)]
    for start, end in spans_to(200, 100):
        feed(kv, start, end)
    assert kv[0].keys.shape[2] == WINDOW - 1 + 100
    state = layers.checkpoint(kv, layers.layout_of(kv))
    assert [one.shape[2] for one in state.arrays] == [WINDOW, WINDOW]
    assert kv[0].keys.shape[2] == WINDOW - 1 + 100


@pytest.mark.parametrize("heads", [1, 2])
def test_what_is_kept_holds_no_larger_array_alive(heads: int):
    kv = [KVCache(), RotatingKVCache(WINDOW), ArraysCache(1)]
    layout = layers.layout_of(kv)
    for start, end in spans_to(3000, 1000):
        feed(kv, start, end, heads=heads)
    mx.eval(layers.arrays_of(kv))
    (run,) = runs_of(kv, layout, (0, 3000), has_state=True)
    (small,) = runs_of(kv, layout, (100, 110), has_state=True)
    mx.eval(small.arrays)
    before = mx.get_active_memory()
    del kv, run
    freed = before - mx.get_active_memory()
    assert freed > 2 * 2 * 3000 * heads * DIM * 4
    assert mx.get_array_buffer_size(small.arrays) < 2 * small.nbytes + 16384 * len(small.arrays)


def test_bytes_per_token_are_those_of_the_sliceable_leaves():
    kv = [KVCache(), RotatingKVCache(WINDOW), QuantizedKVCache(group_size=64, bits=8)]
    feed(kv, 0, 5, dtype=mx.bfloat16)
    layout = layers.layout_of(kv)
    quantized = HEADS * 2 * (DIM + 2 + 2)
    assert layers.bytes_per_token(kv, layout) == 2 * HEADS * DIM * 2 + quantized


class NewKind(KVCache):
    """A class that upstream might add."""


class NoSuchModel:
    """Served, though nobody knows its caches."""

    stream = mx.default_stream(mx.cpu)
    kv_start = 0

    def new_kv(self, num_tokens: int = 0) -> list[Any]:
        return [KVCache(), CacheList(KVCache(), NewKind())]


def test_an_unknown_class_is_refused_by_name_and_its_model_is_served():
    with pytest.raises(UnsupportedCache, match=r"^NewKind$"):
        layers.layout_of([NewKind()])
    state = KvState.of(NoSuchModel(), HashChain(b"", b""), 1 << 20)
    assert state.unsupported == "NewKind"
    tiers = Tiers(state, None, Deletions(), lambda _: None)
    for _ in range(2):
        cursor = CacheCursor(token_ids=list(range(9)))
        tiers.begin(cursor)
        kv, num_tokens = tiers.restore(cursor)
        assert [type(one).__name__ for one in kv] == ["KVCache", "CacheList"]
        assert (num_tokens, cursor.use.reason, cursor.use.tier) == (0, "unsupported", "none")
        feed(kv, 0, 9)
        tiers.on_prefill(cursor, kv, (0, 8), 0.1)
        tiers.on_finished(cursor, [9], kv)
    assert (tiers.memory.num_bytes, len(tiers.memory)) == (0, 0)


def test_a_state_that_cannot_be_said_is_refused_by_name():
    cache = ArraysCache(1)
    cache[0] = KVCache()
    with pytest.raises(UnsupportedCache, match=r"^KVCache$"):
        layers.checkpoint([cache], layers.layout_of([cache]))


@pytest.mark.parametrize(
    "damage",
    [
        lambda text, tensors: ("{", tensors),
        lambda text, tensors: ('{"layout":{"leaves":[]},"num_slices":0,"skeleton":null}', tensors),
        lambda text, tensors: (text, {}),
        lambda text, tensors: (text, {name: one[:3] for name, one in tensors.items()}),
    ],
)
def test_a_slot_for_other_layers_is_damaged(damage: Callable[[str, Any], tuple[str, Any]]):
    kv = [KVCache(), ArraysCache(1)]
    feed(kv, 0, 5)
    layout = layers.layout_of(kv)
    (run,) = runs_of(kv, layout, (0, 5), has_state=True)
    assert isinstance(run.state, State)
    text = pack.pack_layout(layout, run)
    tensors = {f"kv.{i}": one for i, one in enumerate(run.slices)} | {
        "state.0": run.state.arrays[0]
    }
    assert raw(pack.unpack(text, tensors, layout, 5).arrays) == raw(run.arrays)
    with pytest.raises(SlotDamaged):
        pack.unpack(*damage(text, tensors), layout, 5)
