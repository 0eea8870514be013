"""The arithmetic of `docs/sizing.md` against the caches that upstream's models really make."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import pytest
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load

from ops.docs.sizing import Shape
from runtime.kv import layers
from tests.tiny_models import write_model

WINDOW, TOKENS = 32, 40
SHAPES = {
    "qwen3": Shape(2, 2, 16, item_bytes=4),
    "gemma3_text": Shape(2, 2, 16, item_bytes=4, window_layers=2, window=WINDOW),
    "gpt_oss": Shape(1, 2, 16, item_bytes=4, window_layers=1, window=WINDOW),
    "qwen3_next": Shape(1, 2, 16, item_bytes=4),
    "deepseek_v3": Shape(2, item_bytes=4, latent=32 + 8),
}


@pytest.mark.parametrize("family", SHAPES)
def test_a_token_takes_what_the_formula_says(tmp_path: Path, family: str) -> None:
    model = load(str(write_model(tmp_path / family, family)))[0]
    kv = make_prompt_cache(model)
    mx.eval(model(mx.arange(TOKENS)[None], cache=kv))
    shape, layout = SHAPES[family], layers.layout_of(kv)
    assert layers.bytes_per_token(kv, layout) == shape.bytes_per_token()
    if shape.window_layers:
        kept = layers.checkpoint(kv, layout).nbytes
        assert kept <= shape.state_bytes() * TOKENS / WINDOW


@pytest.mark.parametrize("bits", [4, 8])
def test_quantised_kv_takes_what_the_formula_says(tmp_path: Path, bits: int) -> None:
    model = load(str(write_model(tmp_path / "model", head_dim=64)))[0]
    kv = [one.to_quantized(group_size=64, bits=bits) for one in _fed(model)]
    shape = Shape(2, 2, 64, item_bytes=4)
    assert layers.bytes_per_token(kv, layers.layout_of(kv)) == shape.bytes_per_token(bits)


def _fed(model):
    kv = make_prompt_cache(model)
    mx.eval(model(mx.arange(TOKENS)[None], cache=kv))
    return kv
