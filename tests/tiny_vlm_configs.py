"""What the tiny models that see are told of themselves: family by family."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.tiny_models import SMALL, SPECIAL_TOKENS

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
IDS = {token: number for number, token in enumerate([*SPECIAL_TOKENS, *VISION_TOKENS])}

_TEXT: dict[str, Any] = SMALL | {"tie_word_embeddings": True}

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

_MOE: dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
}

_SIGLIP: dict[str, Any] = {
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 2,
}

QWEN_IDS: dict[str, Any] = {
    "image_token_id": IDS["<|image_pad|>"],
    "video_token_id": IDS["<|video_pad|>"],
    "vision_start_token_id": IDS["<|vision_start|>"],
    "vision_end_token_id": IDS["<|vision_end|>"],
    "eos_token_id": [IDS["<|im_end|>"], IDS["<|endoftext|>"]],
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
        "vision_token_id": IDS["<|vision_pad|>"],
        "vision_config": _TOWER
        | {
            "model_type": "qwen2_5_vl",
            "patch_size": 14,
            "window_size": 56,
            "fullatt_block_indexes": [1],
            "tokens_per_second": 2,
        },
    }


def _qwen2_vl(vocab_size: int) -> dict[str, Any]:
    vision_encoder = {key: value for key, value in _TOWER.items() if key != "out_hidden_size"}
    return _qwen2_5_vl(vocab_size) | {
        "vision_config": vision_encoder
        | {"model_type": "qwen2_vl", "patch_size": 14, "embed_dim": 32, "hidden_size": 64}
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
            "eos_token_id": IDS["<|im_end|>"],
            "rope_parameters": rope,
        },
        "vision_config": _TOWER
        | {
            "model_type": "qwen3_5",
            "num_position_embeddings": 64,
            "deepstack_visual_indexes": [],
        },
    }


def _of_experts(config: dict[str, Any], model_type: str, **more: Any) -> dict[str, Any]:
    """The same with experts in its layers."""
    text = config["text_config"] | _MOE | more | {"model_type": f"{model_type}_text"}
    vision_encoder = config["vision_config"] | {"model_type": model_type}
    return config | {"text_config": text, "vision_config": vision_encoder}


def _qwen3_vl_moe(vocab_size: int) -> dict[str, Any]:
    return _of_experts(_qwen3_vl(vocab_size), "qwen3_vl_moe")


def _qwen3_5_moe(vocab_size: int) -> dict[str, Any]:
    return _of_experts(_qwen3_5(vocab_size), "qwen3_5_moe", shared_expert_intermediate_size=32)


def _gemma3(vocab_size: int) -> dict[str, Any]:
    """Windows of 32 tokens and whole contexts in turn."""
    return {
        "vocab_size": vocab_size,
        "hidden_size": 64,
        "pad_token_id": IDS["<|endoftext|>"],
        "image_token_index": IDS["<image_soft_token>"],
        "eos_token_id": [IDS["<|endoftext|>"], IDS["<end_of_turn>"]],
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
        "pad_token_id": IDS["<|endoftext|>"],
        "image_token_id": IDS["<|image|>"],
        "video_token_id": IDS["<|video|>"],
        "audio_token_id": IDS["<|audio|>"],
        "boi_token_id": IDS["<|image>"],
        "eoi_token_id": IDS["<image|>"],
        "boa_token_id": IDS["<|audio>"],
        "eoa_token_id": IDS["<audio|>"],
        "vision_soft_tokens_per_image": 4,
        "audio_config": None,
        "eos_token_id": [IDS["<|endoftext|>"], IDS["<end_of_turn>"]],
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


def widened(family: str, config: dict[str, Any]) -> dict[str, Any]:
    """The same model with heads of 64 dimensions, whose KV can be quantised."""
    if family == "qwen3_vl":
        rope = config["text_config"]["rope_scaling"] | {"mrope_section": [12, 10, 10]}
        text = config["text_config"] | {"head_dim": 64, "rope_scaling": rope}
        return config | {"text_config": text}
    rope = config["rope_scaling"] | {"mrope_section": [8, 12, 12]}
    vision_encoder = config["vision_config"] | {"out_hidden_size": 256}
    return config | {"hidden_size": 256, "rope_scaling": rope, "vision_config": vision_encoder}


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
VIEWS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2_vl": (_QWEN_IMAGE, _QWEN_IMAGES | {"patch_size": 14}),
    "qwen2_5_vl": (_QWEN_IMAGE, _QWEN_IMAGES | {"patch_size": 14}),
    "qwen3_vl": (_QWEN_IMAGE, _QWEN_IMAGES),
    "qwen3_vl_moe": (_QWEN_IMAGE, _QWEN_IMAGES),
    "qwen3_5": (_QWEN_IMAGE, _QWEN_IMAGES),
    "qwen3_5_moe": (_QWEN_IMAGE, _QWEN_IMAGES),
    "gemma3": ("<start_of_image>", _GEMMA3_IMAGES),
    "gemma4": ("<|image|>", {"patch_size": 8, "max_soft_tokens": 4, "pooling_kernel_size": 2}),
}
"""Family -> how its template writes an image, and what its image processor is told."""

CONFIGS: dict[str, Callable[[int], dict[str, Any]]] = {
    "qwen2_vl": _qwen2_vl,
    "qwen2_5_vl": _qwen2_5_vl,
    "qwen3_vl": _qwen3_vl,
    "qwen3_vl_moe": _qwen3_vl_moe,
    "qwen3_5": _qwen3_5,
    "qwen3_5_moe": _qwen3_5_moe,
    "gemma3": _gemma3,
    "gemma4": _gemma4,
}
