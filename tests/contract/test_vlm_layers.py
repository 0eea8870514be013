"""Every cache class of the pinned mlx-vlm is taken up by another process as it was left."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from runtime.kv import layers
from runtime.kv.layers import UnsupportedCache
from runtime.kv.pack import RunKv
from tests.contract.taken_up import ENDS, MAKERS, SLICEABLE, future_digest
from tests.layer_samples import (
    WINDOW,
    assemble,
    check_rows_that_leave,
    check_same_future,
    feed,
    runs_of,
    spans_to,
)
from tests.layer_samples import through_a_file as stored

upstream: Any = pytest.importorskip("mlx_vlm.models.cache")

TIMEOUT_S = 280
BATCHED = ("kv", "list of kv", "rotating", "arrays", "list of both", "pooling")


def test_the_cache_classes_of_upstream_are_those_that_are_known():
    found = {
        name
        for name, one in inspect.getmembers(upstream, inspect.isclass)
        if issubclass(one, upstream._BaseCache) and one is not upstream._BaseCache
    }
    registered = {*layers._REGISTRY[upstream.__name__], "CacheList"}
    assert found == registered | {*layers._BATCH_FORMS[upstream.__name__]}
    used = {type(leaf) for make in MAKERS.values() for one in make() for leaf in _leaves(one)}
    assert {one.__name__ for one in used} == registered


def _leaves(cache: Any) -> list[Any]:
    return [cache, *(leaf for one in getattr(cache, "caches", ()) for leaf in _leaves(one))]


def test_another_process_goes_on_from_what_was_kept(tmp_path: Path):
    expected: dict[str, str] = {}
    for name, make in MAKERS.items():
        for end, slice_size in ENDS:
            kv = make()
            layout = layers.layout_of(kv)
            for start, stop in spans_to(end, slice_size):
                feed(kv, start, stop)
            (run,) = runs_of(kv, layout, (0, end), has_state=layout.needs_state)
            case = f"{name} {end} {slice_size}"
            (tmp_path / case).mkdir()
            stored(tmp_path / case, 0, run, layout, end)
            expected[case] = future_digest(kv, end)
    done = subprocess.run(
        [sys.executable, "-m", "tests.contract.taken_up", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "found.json").read_text()) == expected


@pytest.mark.parametrize("name", SLICEABLE)
def test_a_sliceable_cache_is_taken_up_at_any_token(name: str):
    make = MAKERS[name]
    kv = make()
    layout = layers.layout_of(kv)
    assert not layout.needs_state
    assert any(leaf.kind == "sliceable" for leaf in layout.leaves)
    for start, end in spans_to(70, 13):
        feed(kv, start, end)
    runs = runs_of(kv, layout, (0, 32, 70), has_state=False)
    for at in (70, 45, 32, 7):
        live = make()
        for start, end in spans_to(at, 13):
            feed(live, start, end)
        pieces = [
            RunKv([one[: at - start] for one in run.slices], None)
            for run, start in zip(runs, (0, 32), strict=True)
            if start < at
        ]
        check_same_future(assemble(make, pieces), live, at)


@pytest.mark.parametrize("name", BATCHED)
def test_a_row_that_leaves_a_batch_is_kept(tmp_path: Path, name: str):
    check_rows_that_leave(tmp_path, MAKERS[name], (9, 30))


def test_caches_that_were_never_used_are_kept_too(tmp_path: Path):
    for number, make in enumerate(MAKERS.values()):
        used = upstream.KVCache()
        feed([used], 0, 5)
        kv = [used, *make()]
        layout = layers.layout_of(kv)
        (run,) = runs_of(kv, layout, (0, 5), has_state=layout.needs_state)
        run = stored(tmp_path, number, run, layout, 5)
        again = assemble(lambda make=make: [upstream.KVCache(), *make()], [run])
        assert [one.empty() for one in again] == [one.empty() for one in kv]
        check_same_future(again, kv, 5)


def test_a_checkpoint_holds_no_more_rows_than_the_window():
    kv: list[Any] = [upstream.RotatingKVCache(WINDOW)]
    for start, end in spans_to(200, 100):
        feed(kv, start, end)
    state = layers.checkpoint(kv, layers.layout_of(kv))
    assert [one.shape[2] for one in state.arrays] == [WINDOW, WINDOW]
    assert kv[0].keys.shape[2] == WINDOW - 1 + 100


def test_slots_of_the_two_packages_are_never_taken_for_one_another():
    from mlx_lm.models.cache import KVCache

    assert layers.layout_of([KVCache()]) != layers.layout_of([upstream.KVCache()])


@pytest.mark.parametrize(
    ("module", "name", "arguments"),
    [
        ("hy_v4.cache", "HyV4KVCache", ()),
        ("unlimited_ocr.language", "RingSlidingKVCache", (8,)),
        ("minimax_m3_vl.language", "MiniMaxM3KVCache", ()),
        ("deepseek_v41.language", "DeepseekV41Cache", None),
    ],
)
def test_a_models_own_class_is_refused_by_name(module: str, name: str, arguments: Any):
    from importlib import import_module

    kind = getattr(import_module(f"mlx_vlm.models.{module}"), name)
    cache = kind.__new__(kind) if arguments is None else kind(*arguments)
    with pytest.raises(UnsupportedCache, match=f"^{name}$"):
        layers.layout_of([upstream.KVCache(), cache])


def test_what_has_to_be_evaluated_can_be_told_of_empty_caches():
    kv = [make() for make in MAKERS.values()]
    mx.eval([layers.arrays_of(one) for one in kv])
