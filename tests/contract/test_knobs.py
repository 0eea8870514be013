"""What changes KV is in the model hash: an upgrade that adds something to set fails here first.

Each name below is either never passed by us, or is part of `runtime.models.identity.model_hash`.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from typing import Any

import pytest
from mlx_lm.models import cache
from mlx_lm.utils import load_model

generate: Any = importlib.import_module("mlx_lm.generate")

KNOBS: dict[str, tuple[Callable[..., Any], set[str]]] = {
    # Never given: every token of a prompt stays.
    "caches of a model": (cache.make_prompt_cache, {"model", "max_kv_size"}),
    # In the hash as `kv`; the group size is always 64.
    "quantised KV": (cache.QuantizedKVCache.__init__, {"self", "group_size", "bits"}),
    # What is loaded is in the hash: weights, configs and the package's version.
    "loading": (
        load_model,
        {"model_path", "lazy", "strict", "model_config", "get_model_classes", "trust_remote_code"},
    ),
    # Ours in its place: prefill on a grid of positions, decode by the batch generator.
    "generation": (
        generate.generate_step,
        {
            *("prompt", "model", "max_tokens", "sampler", "logits_processors", "max_kv_size"),
            *("prompt_cache", "prefill_step_size", "kv_bits", "kv_group_size", "input_embeddings"),
            *("quantized_kv_start", "prompt_progress_callback", "stream"),
        },
    ),
}
KINDS = (
    "_BaseCache ArraysCache BatchKVCache BatchRotatingKVCache ChunkedKVCache ConcatenateKVCache"
    " KVCache LRUPromptCache QuantizedKVCache RotatingKVCache"
)


@pytest.mark.parametrize("what", KNOBS)
def test_nothing_can_be_set_that_is_not_known(what: str):
    function, known = KNOBS[what]
    assert set(inspect.signature(function).parameters) == known


def test_no_kind_of_cache_is_new():
    assert {name for name in dir(cache) if name.endswith("Cache")} == set(KINDS.split())
