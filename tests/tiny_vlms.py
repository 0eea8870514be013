"""Tiny random models that see, with a real tokenizer, template and image processor, no download."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any, cast

import numpy as np
from PIL import Image

from tests.tiny_models import CHAT_TEMPLATE, SPECIAL_TOKENS, write_tokenizer
from tests.tiny_vlm_configs import CONFIGS, QWEN_IDS, VIEWS, VISION_TOKENS, widened

VISION_FAMILIES = tuple(CONFIGS)

PARTS = """\
{%- macro said(content) %}{% if content is string %}{{ content }}{% else %}\
{% for part in content or [] %}{% if part.type == 'image' %}IMAGE\
{% elif part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %}{% endif %}{% endmacro -%}
"""
"""How templates show images: where each of them is among the text."""

_GEMMA_TOKENS: dict[str, dict[str, str]] = {
    "gemma3": {
        "image_token": "<image_soft_token>",
        "boi_token": "<start_of_image>",
        "eoi_token": "<end_of_image>",
    },
    "gemma4": {
        "image_token": "<|image|>",
        "boi_token": "<|image>",
        "eoi_token": "<image|>",
        "audio_token": "<|audio|>",
        "boa_token": "<|audio>",
        "eoa_token": "<audio|>",
        "video_token": "<|video|>",
    },
}


def template_of(family: str) -> str:
    """The template of the tiny models, with the images of this family among the text.

    Gemma-style turns end by their own token, so that the end of a turn ends an answer.
    """
    template = PARTS.replace("IMAGE", VIEWS[family][0])
    template += CHAT_TEMPLATE.replace("{{ message.content }}", "{{ said(message.content) }}")
    if family in _GEMMA_TOKENS:
        template = template.replace("<|im_start|>", "<start_of_turn>")
        template = "{{ '<bos>' }}" + template.replace("<|im_end|>", "<end_of_turn>")
    return template


def write_vlm(
    directory: Path, family: str, *, seed: int = 0, is_wide: bool = False, **changes: Any
) -> Path:
    """A random-weight model of `family` that `mlx_vlm.load` accepts, in `directory`."""
    directory.mkdir(parents=True, exist_ok=True)
    is_gemma = family in _GEMMA_TOKENS
    vocab_size = write_tokenizer(
        directory,
        special_tokens=[*SPECIAL_TOKENS, *VISION_TOKENS],
        template=template_of(family),
        changes={
            "bos_token": "<bos>",
            "eos_token": "<end_of_turn>",
            **_GEMMA_TOKENS[family],
            "extra_special_tokens": _GEMMA_TOKENS[family],
        }
        if is_gemma
        else {},
    )
    config = {"model_type": family} | ({} if is_gemma else QWEN_IDS)
    config |= CONFIGS[family](vocab_size) | changes
    config = widened(family, config) if is_wide else config
    _write(directory / "config.json", config)
    _write(directory / "preprocessor_config.json", VIEWS[family][1])
    _write(
        directory / "generation_config.json",
        {"do_sample": False, "eos_token_id": config["eos_token_id"]},
    )
    if family == "gemma3":
        processor = {"processor_class": "Gemma3Processor", "image_seq_length": 4}
        _write(directory / "processor_config.json", processor)
    write_weights(directory, config, seed)
    return directory


def _write(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content))


def write_weights(directory: Path, config: dict[str, Any], seed: int) -> None:
    """Random weights, made the way in which `mlx_vlm.utils.load_model` makes its model."""
    import mlx.core as mx
    from mlx.utils import tree_flatten
    from mlx_vlm import utils

    upstream = cast("Any", utils)
    config = {"text_config": {}, "audio_config": {}} | config
    module, _ = upstream.get_model_and_args(config)
    arguments = upstream.update_module_configs(
        module.ModelConfig.from_dict(config),
        module,
        config,
        ["text", "vision", "perceiver", "projector", "audio"],
    )
    mx.random.seed(seed)
    model = module.Model(arguments)
    weights = {
        name: _drawn(name, cast("mx.array", array))
        for name, array in tree_flatten(model.parameters())
    }
    mx.save_safetensors(str(directory / "model.safetensors"), weights, {"format": "mlx"})


def _drawn(name: str, array: Any) -> Any:
    """Quiet embeddings and loud layers: what is said depends on all that was read and seen."""
    import mlx.core as mx

    if array.ndim < 2:
        return array.astype(mx.float32)
    gain = 0.05 if "embed_tokens" in name else 1.5 / (array.size // array.shape[0]) ** 0.5
    return mx.random.normal(array.shape) * gain


def picture(seed: int, width: int = 56, height: int = 56) -> Image.Image:
    """Random RGB pixels, the same for the same seed and size."""
    drawn = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(drawn)


def encoded(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    """The bytes of an image file."""
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()
