"""Model directories of random weights, large enough to take time; their texts mean nothing."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import cast

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.models import qwen3

from runtime.embedded import HEARTH_TINY

_WIDE = {
    "hidden_size": 512,
    "intermediate_size": 2048,
    "num_hidden_layers": 12,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
}
_SLENDER = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
}
_EIGHT = {
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "torch_dtype": "bfloat16",
}
_EIGHT_CONTEXT = 65536
_GROUP_SIZE, _BITS = 64, 4


def write_wide(folder: Path, seed: int, shape: Mapping[str, int] = _WIDE) -> Path:
    """A model with the tiny one's tokenizer and random weights of some hundred megabytes.

    `shape` has other sizes for its config.json.
    """
    config = _begin(folder, shape)
    mx.random.seed(seed)
    weights = dict(tree_flatten(qwen3.Model(qwen3.ModelArgs.from_dict(config)).parameters()))
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})
    return folder


def write_slender(folder: Path, seed: int, context: int) -> Path:
    """A model of one narrow layer, which computes long prompts soon even on a CPU."""
    return write_wide(folder, seed, _SLENDER | {"max_position_embeddings": context})


def write_eight(folder: Path, seed: int, context: int = _EIGHT_CONTEXT) -> Path:
    """A model of the shape of an 8B in 4 bits: 4 GB of random weights, 147 KB of KV per token."""
    quantization = {"group_size": _GROUP_SIZE, "bits": _BITS}
    shape = _EIGHT | {"max_position_embeddings": context, "quantization": quantization}
    config = _begin(folder, shape)
    mx.random.seed(seed)
    model = qwen3.Model(qwen3.ModelArgs.from_dict(config))
    model.set_dtype(mx.bfloat16)
    nn.quantize(model, _GROUP_SIZE, _BITS)
    parameters = cast("list[tuple[str, mx.array]]", tree_flatten(model.parameters()))
    weights = {name: _random(name, array) for name, array in parameters}
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})
    return folder


def _random(name: str, array: mx.array) -> mx.array:
    """Weights of four random bits around zero; what is not quantised stays as it begins."""
    if array.dtype == mx.uint32:
        return mx.random.randint(-(2**31), 2**31 - 1, array.shape).view(mx.uint32)
    if name.endswith(".scales"):
        return mx.full(array.shape, 0.004, array.dtype)
    return mx.full(array.shape, -0.03, array.dtype) if name.endswith(".biases") else array


def _begin(folder: Path, shape: Mapping[str, object]) -> dict[str, object]:
    shutil.copytree(HEARTH_TINY, folder)
    config = json.loads((folder / "config.json").read_text()) | dict(shape)
    (folder / "config.json").write_text(json.dumps(config))
    tokenizer = folder / "tokenizer_config.json"
    longest = {"model_max_length": config["max_position_embeddings"]}
    tokenizer.write_text(json.dumps(json.loads(tokenizer.read_text()) | longest))
    return config
