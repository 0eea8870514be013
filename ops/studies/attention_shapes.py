"""What a step takes on a GPU by the mask and the shapes that attention is given.

`python -m ops.studies.attention_shapes` has rows of a model of the shape of an 8B in 4 bits decode
one token, or verify several, while their KV grows: with a mask and without, and with arrays that
are as long as their tokens or as their room. It needs a GPU, and writes `attention_shapes.json`.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any, Literal

import mlx.core as mx
import msgspec
from mlx_lm.models.cache import BatchKVCache, KVCache
from mlx_lm.utils import load_model

from api.bench.machine import Environment, environment
from ops.bench.random_models import write_eight
from runtime.kv.layers import handed_over, merged
from runtime.worker.linear import choose_forms, gains_from_forms

Attention = Literal["mask", "no mask", "as long as the tokens", "as long as the room"]
_REPORT = Path(__file__).parent / "attention_shapes.json"
_STEPS = 12
_LAYERS, _HEADS, _DIM = 36, 8, 128
_ROOM = 1024


class Step(msgspec.Struct):
    """The median of some steps, the first two left out."""

    attention: Attention
    num_rows: int
    num_tokens: int
    width: int
    ms: float


class Report(msgspec.Struct):
    environment: Environment
    model: str
    steps: list[Step]


def main() -> None:
    """Measure and write, after each step."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, default=_REPORT)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model: Any = load_model(write_eight(Path(folder) / "eight", seed=1))[0]
        if gains_from_forms():
            choose_forms(model)
        mx.eval(model)
        report = Report(environment(), "qwen3 of the shape of an 8B, 4 bits, random weights", [])
        cases = [(rows, tokens) for tokens in (2048, 16384) for rows in (1,)]
        for num_rows, num_tokens in [*cases, (4, 8192), (16, 2048)]:
            for width in (1, 2, 4, 8, 16):
                ways: tuple[Attention, ...] = ("as long as the tokens", "as long as the room")
                for attention in ("mask", "no mask") if width == 1 else ways:
                    caches = _caches(attention, num_rows, num_tokens)
                    ms = _step_ms(model, caches, num_rows, width)
                    report.steps.append(Step(attention, num_rows, num_tokens, width, ms))
                    print(report.steps[-1])
                    formatted = msgspec.json.format(msgspec.json.encode(report))
                    arguments.json.write_bytes(formatted + b"\n")
                    del caches
                    mx.clear_cache()


def _caches(attention: Attention, num_rows: int, num_tokens: int) -> list[Any]:
    """Of upstream's class, which always has a mask and never gives room, or of ours."""
    shape = (1, _HEADS, num_tokens + _ROOM, _DIM)
    kv: list[KVCache] = []
    for _ in range(_LAYERS):
        cache = KVCache()
        cache.keys, cache.values = (mx.random.normal(shape).astype(mx.bfloat16) for _ in range(2))
        cache.offset = num_tokens
        kv.append(cache)
    mx.eval([cache.state for cache in kv])
    if attention in ("mask", "as long as the tokens"):
        return [BatchKVCache.merge([cache] * num_rows) for cache in kv]
    if num_rows == 1:
        return handed_over(kv, keeps_shapes=True)
    return merged([kv] * num_rows, keeps_shapes=True)


def _step_ms(model: Any, caches: list[Any], num_rows: int, width: int) -> float:
    """One token more is kept after each step."""
    token_ids = mx.zeros((num_rows, width), mx.int32)
    taken: list[float] = []
    for _ in range(_STEPS):
        begun_s = time.perf_counter()
        mx.eval(mx.argmax(model(token_ids, cache=caches), axis=-1))
        taken.append((time.perf_counter() - begun_s) * 1000)
        for cache in caches:
            cache.trim(width - 1)
    return round(statistics.median(taken[2:]), 1)


if __name__ == "__main__":
    main()
