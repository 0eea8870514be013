"""A model of random weights that sees, large enough to take time: the tests' tiny one, widened."""

# pyright: reportUnknownMemberType=false

from __future__ import annotations

import json
from pathlib import Path

import mlx.core as mx

from tests.tiny_vlms import encoded, picture, write_vlm

_SIDE = 448
_WIDE = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 6}


def build(directory: Path, model_type: str) -> None:
    """A model of this type in `directory`, that says nothing but plain letters."""
    write_vlm(directory, model_type)
    config = json.loads((directory / "config.json").read_text())
    width, vision_encoder = _WIDE["hidden_size"], config["vision_config"]
    changes = {"text_config": config["text_config"] | _WIDE}
    if "out_hidden_size" in vision_encoder:
        changes["vision_config"] = vision_encoder | {"out_hidden_size": width}
    if "hidden_size" in config:
        changes["hidden_size"] = width
    write_vlm(directory, model_type, **changes)
    processor = directory / "preprocessor_config.json"
    said = json.loads(processor.read_text())
    if "max_pixels" in said:
        processor.write_text(json.dumps(said | {"max_pixels": _SIDE**2}))
    _quieten(directory)


def photograph(seed: int) -> bytes:
    """A PNG of random pixels."""
    return encoded(picture(seed, _SIDE, _SIDE))


def _quieten(directory: Path) -> None:
    """Let no token be said that is not plain text: markers would make another prompt of it."""
    vocabulary = json.loads((directory / "tokenizer.json").read_text())["model"]["vocab"]
    plain = mx.array([n for text, n in vocabulary.items() if text.isascii() and text.isalpha()])
    file = str(directory / "model.safetensors")
    weights = mx.load(file)
    assert isinstance(weights, dict)
    (name,) = (one for one in weights if one.endswith("embed_tokens.weight"))
    kept = mx.zeros((weights[name].shape[0], 1))
    kept[plain] = 1.0
    weights[name] = weights[name] * kept
    mx.eval(weights)
    mx.save_safetensors(file, weights, {"format": "mlx"})
