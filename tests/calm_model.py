"""A tiny model that says what a request tells it to, so that HTTP can be asked for any answer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer

from tests.tiny_models import write_model

END = "<|im_end|>"


def write_calm_model(folder: Path) -> Path:
    """A model whose own opinion is so weak that the biases of `saying` decide."""
    write_model(folder)
    weights = load_file(folder / "model.safetensors")
    weights["lm_head.weight"] *= 1e-3
    save_file(weights, folder / "model.safetensors", {"format": "mlx"})
    return folder


def saying(folder: Path, text: str) -> dict[str, Any]:
    """Fields of a request that have the model say this text, in which no token occurs twice."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert len(set(ids)) == len(ids)
    # What was said once loses 4, so that every token is the likeliest until it is said.
    biases = {str(one): 100 - 3.9 * i / len(ids) for i, one in enumerate(ids)}
    return {
        "logit_bias": biases,
        "presence_penalty": 2,
        "frequency_penalty": 2,
        "temperature": 0,
    }
