"""A tiny model that says what a request tells it to, so that HTTP can be asked for any answer."""

from __future__ import annotations

from itertools import pairwise
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


def write_model_that_says(folder: Path, text: str, template: str) -> Path:
    """A model that knows only what follows on each token of a text, in which none occurs twice."""
    write_model(folder)
    (folder / "chat_template.jinja").write_text(template)
    weights = load_file(folder / "model.safetensors")
    for name, array in weights.items():
        if name.split(".")[-2] in ("embed_tokens", "lm_head", "o_proj", "down_proj"):
            array[:] = 0
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert len(set(ids)) == len(ids)
    for number, (one, following) in enumerate(pairwise(ids)):
        weights["model.embed_tokens.weight"][one, number] = 8
        weights["lm_head.weight"][following, number] = 8
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
