"""Tiny random models that see, with a real tokenizer, template and image processor, no download."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
from PIL import Image

from tests.tiny_models import CHAT_TEMPLATE, SPECIAL_TOKENS, write_tokenizer

VISION_TOKENS = [
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
    "<bos>",
    "<start_of_turn>",
    "<end_of_turn>",
    "<start_of_image>",
    "<end_of_image>",
    "<image_soft_token>",
    "<|image>",
    "<|image|>",
    "<image|>",
    "<|video|>",
    "<|audio>",
    "<|audio|>",
    "<audio|>",
]
_IDS = {token: number for number, token in enumerate([*SPECIAL_TOKENS, *VISION_TOKENS])}

PARTS = """\
{%- macro said(content) %}{% if content is string %}{{ content }}{% else %}\
{% for part in content or [] %}{% if part.type == 'image' %}IMAGE\
{% elif part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %}{% endif %}{% endmacro -%}
"""
"""How templates show images: where each of them is among the text."""

_TEXT: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
}

_TOWER: dict[str, Any] = {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 64,
    "out_hidden_size": 64,
    "num_heads": 2,
    "patch_size": 16,
    "in_channels": 3,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}

_SIGLIP: dict[str, Any] = {
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 2,
}

_QWEN_IDS: dict[str, Any] = {
    "image_token_id": _IDS["<|image_pad|>"],
    "video_token_id": _IDS["<|video_pad|>"],
    "vision_start_token_id": _IDS["<|vision_start|>"],
    "vision_end_token_id": _IDS["<|vision_end|>"],
    "eos_token_id": [_IDS["<|im_end|>"], _IDS["<|endoftext|>"]],
}

_QWEN_IMAGES: dict[str, Any] = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "patch_size": 16,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "min_pixels": 28 * 28,
    "max_pixels": 112 * 112,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}


def _qwen2_5_vl(vocab_size: int) -> dict[str, Any]:
    text = {key: value for key, value in _TEXT.items() if key != "head_dim"}
    return text | {
        "vocab_size": vocab_size,
        "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]},
        "vision_token_id": _IDS["<|vision_pad|>"],
        "vision_config": _TOWER
        | {
            "model_type": "qwen2_5_vl",
            "patch_size": 14,
            "window_size": 56,
            "fullatt_block_indexes": [1],
            "tokens_per_second": 2,
        },
    }


def _qwen3_vl(vocab_size: int) -> dict[str, Any]:
    rope = {"type": "default", "mrope_section": [3, 3, 2], "mrope_interleaved": True}
    return {
        "vocab_size": vocab_size,
        "text_config": _TEXT
        | {
            "model_type": "qwen3_vl_text",
            "num_hidden_layers": 3,
            "vocab_size": vocab_size,
            "rope_scaling": rope,
        },
        "vision_config": _TOWER
        | {
            "model_type": "qwen3_vl",
            "num_position_embeddings": 64,
            "deepstack_visual_indexes": [0, 1],
        },
    }


def _qwen3_5(vocab_size: int) -> dict[str, Any]:
    rope = {
        "type": "default",
        "mrope_section": [2, 1, 1],
        "mrope_interleaved": True,
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.25,
    }
    return {
        "vocab_size": vocab_size,
        "text_config": _TEXT
        | {
            "model_type": "qwen3_5_text",
            "num_hidden_layers": 4,
            "head_dim": 32,
            "vocab_size": vocab_size,
            "linear_num_value_heads": 4,
            "linear_num_key_heads": 2,
            "linear_key_head_dim": 32,
            "linear_value_head_dim": 32,
            "linear_conv_kernel_dim": 4,
            "full_attention_interval": 4,
            "eos_token_id": _IDS["<|im_end|>"],
            "rope_parameters": rope,
        },
        "vision_config": _TOWER
        | {
            "model_type": "qwen3_5",
            "num_position_embeddings": 64,
            "deepstack_visual_indexes": [],
        },
    }


def _gemma3(vocab_size: int) -> dict[str, Any]:
    """Windows of 32 tokens and whole contexts in turn."""
    return {
        "vocab_size": vocab_size,
        "hidden_size": 64,
        "pad_token_id": _IDS["<|endoftext|>"],
        "image_token_index": _IDS["<image_soft_token>"],
        "eos_token_id": [_IDS["<|endoftext|>"], _IDS["<end_of_turn>"]],
        "text_config": _TEXT
        | {
            "model_type": "gemma3_text",
            "num_hidden_layers": 4,
            "vocab_size": vocab_size,
            "query_pre_attn_scalar": 16,
            "sliding_window": 32,
            "sliding_window_pattern": 2,
            "mm_tokens_per_image": 4,
        },
        "vision_config": _SIGLIP
        | {"model_type": "siglip_vision_model", "patch_size": 14, "image_size": 56},
    }


def _gemma4(vocab_size: int) -> dict[str, Any]:
    """As the larger ones: attention inside an image goes both ways, the last layers share KV."""
    return {
        "vocab_size": vocab_size,
        "hidden_size": 64,
        "pad_token_id": _IDS["<|endoftext|>"],
        "image_token_id": _IDS["<|image|>"],
        "video_token_id": _IDS["<|video|>"],
        "audio_token_id": _IDS["<|audio|>"],
        "boi_token_id": _IDS["<|image>"],
        "eoi_token_id": _IDS["<image|>"],
        "boa_token_id": _IDS["<|audio>"],
        "eoa_token_id": _IDS["<audio|>"],
        "vision_soft_tokens_per_image": 4,
        "audio_config": None,
        "eos_token_id": [_IDS["<|endoftext|>"], _IDS["<end_of_turn>"]],
        "text_config": _TEXT
        | {
            "model_type": "gemma4_text",
            "num_hidden_layers": 6,
            "global_head_dim": 32,
            "vocab_size": vocab_size,
            "vocab_size_per_layer_input": vocab_size,
            "hidden_size_per_layer_input": 8,
            "num_kv_shared_layers": 2,
            "sliding_window": 32,
            "sliding_window_pattern": 2,
            "use_bidirectional_attention": "vision",
            "use_double_wide_mlp": False,
        },
        "vision_config": _SIGLIP
        | {
            "model_type": "gemma4_vision",
            "num_key_value_heads": 2,
            "head_dim": 16,
            "global_head_dim": 16,
            "patch_size": 8,
            "pooling_kernel_size": 2,
            "default_output_length": 4,
            "position_embedding_size": 64,
        },
    }


_GEMMA3_IMAGES: dict[str, Any] = {
    "image_processor_type": "Gemma3ImageProcessor",
    "size": {"height": 56, "width": 56},
    "image_seq_length": 4,
    "do_resize": True,
    "do_rescale": True,
    "do_normalize": True,
    "do_convert_rgb": True,
    "rescale_factor": 1 / 255,
    "resample": 2,
    "image_mean": [0.5] * 3,
    "image_std": [0.5] * 3,
}

_QWEN_IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"
_VIEWS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2_5_vl": (_QWEN_IMAGE, _QWEN_IMAGES | {"patch_size": 14}),
    "qwen3_vl": (_QWEN_IMAGE, _QWEN_IMAGES),
    "qwen3_5": (_QWEN_IMAGE, _QWEN_IMAGES),
    "gemma3": ("<start_of_image>", _GEMMA3_IMAGES),
    "gemma4": ("<|image|>", {"patch_size": 8, "max_soft_tokens": 4, "pooling_kernel_size": 2}),
}
"""Family -> how its template writes an image, and what its image processor is told."""

_CONFIGS: dict[str, Callable[[int], dict[str, Any]]] = {
    "qwen2_5_vl": _qwen2_5_vl,
    "qwen3_vl": _qwen3_vl,
    "qwen3_5": _qwen3_5,
    "gemma3": _gemma3,
    "gemma4": _gemma4,
}

VISION_FAMILIES = tuple(_CONFIGS)

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
    template = PARTS.replace("IMAGE", _VIEWS[family][0])
    template += CHAT_TEMPLATE.replace("{{ message.content }}", "{{ said(message.content) }}")
    if family in _GEMMA_TOKENS:
        template = template.replace("<|im_start|>", "<start_of_turn>")
        template = "{{ '<bos>' }}" + template.replace("<|im_end|>", "<end_of_turn>")
    return template


def write_vlm(directory: Path, family: str, *, seed: int = 0, **changes: Any) -> Path:
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
    config = {"model_type": family} | ({} if is_gemma else _QWEN_IDS)
    config |= _CONFIGS[family](vocab_size) | changes
    _write(directory / "config.json", config)
    _write(directory / "preprocessor_config.json", _VIEWS[family][1])
    _write(
        directory / "generation_config.json",
        {"do_sample": False, "eos_token_id": config["eos_token_id"]},
    )
    if family == "gemma3":
        processor = {"processor_class": "Gemma3Processor", "image_seq_length": 4}
        _write(directory / "processor_config.json", processor)
    _write_weights(directory, config, seed)
    return directory


def _write(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content))


def _write_weights(directory: Path, config: dict[str, Any], seed: int) -> None:
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
    model = module.Model(arguments)
    mx.random.seed(seed)
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
