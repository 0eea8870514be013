"""Directories that look like models and hold no real weights."""

import json
from pathlib import Path

CONFIG = {"model_type": "qwen3", "max_position_embeddings": 2048}


def make_model(path: Path, config: object = CONFIG, **files: object) -> Path:
    """A model directory with 8 bytes of weights; more files as JSON by name without suffix."""
    path.mkdir(parents=True)
    for name, content in {"config": config, "tokenizer": {}, **files}.items():
        (path / f"{name}.json").write_text(json.dumps(content))
    (path / "model.safetensors").write_bytes(b"\0" * 8)
    return path
