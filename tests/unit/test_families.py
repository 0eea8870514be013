"""The tiny models of the tests: small, and together they use every kind of layer cache."""

from pathlib import Path
from typing import Any

import pytest

from runtime.types import ModelSpec
from runtime.worker import model as models
from tests.tiny_models import FAMILIES, write_model

KV, WINDOW, CHUNKED = "KVCache", "RotatingKVCache", "ChunkedKVCache"
CACHES = {
    "qwen3": [KV] * 2,
    "llama": [KV] * 2,
    "qwen3_moe": [KV] * 2,
    "deepseek_v3": [KV] * 2,
    "deepseek_v32": ["CacheList(KVCache, KVCache)"] * 2,
    "gemma3_text": [WINDOW, KV] * 2,
    "gpt_oss": [WINDOW, KV],
    "lfm2": ["ArraysCache[1]", KV],
    "qwen3_5": ["ArraysCache[2]"] * 3 + [KV],
    "qwen3_next": ["ArraysCache[2]"] * 3 + [KV],
    "jamba": ["ArraysCache[2]", KV] * 2,
    "falcon_h1": ["CacheList(ArraysCache[2], KVCache)"] * 2,
    "llama4": [CHUNKED] * 3 + [KV],
}


def kind(cache: Any) -> str:
    name = type(cache).__name__
    if name == "CacheList":
        return f"{name}({', '.join(kind(child) for child in cache.caches)})"
    return f"{name}[{len(cache.cache)}]" if name == "ArraysCache" else name


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_is_small_and_has_these_caches(tmp_path: Path, family: str):
    path = write_model(tmp_path, family)
    nbytes = (path / "model.safetensors").stat().st_size
    assert nbytes <= 2**20
    progress: list[float] = []
    spec = ModelSpec(
        id="m", path=str(path), context=512, model_type=family, nbytes=nbytes, created_s=1
    )
    model = models.load(spec, progress.append)
    assert [kind(cache) for cache in model.new_kv()] == CACHES[family]
    assert model.is_batchable == (family != "llama4")
    assert model.vocab_size == 409
    assert model.eos_token_ids == {2}
    assert progress == [1.0]
    assert (model.dialect.think_start, model.dialect.tool_end) == ("<think>", "</tool_call>")
