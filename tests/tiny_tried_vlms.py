"""Tiny random models that see, of kinds without a lens of their own: as upstream's files are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.tiny_models import CHAT_TEMPLATE, SMALL, SPECIAL_TOKENS, write_tokenizer
from tests.tiny_vlms import PARTS, write_weights

_TOKENS = [
    "<image>",
    "<fake_token_around_image>",
    "<end_of_utterance>",
    "<global-img>",
    *(f"<row_{row}_col_{column}>" for row in range(1, 4) for column in range(1, 4)),
    "[IMG]",
    "[IMG_BREAK]",
    "[IMG_END]",
    "<img>",
    "<IMG_CONTEXT>",
    "</img>",
    "<|media_pad|>",
    "<|image_start|>",
    "<|image_end|>",
    "<|image|>",
    "<|begin_of_image|>",
    "<|end_of_image|>",
    "<|video|>",
    "<bos>",
    "<|START_OF_IMG|>",
    "<|IMG_PATCH|>",
    "<|END_OF_IMG|>",
    "<|patch|>",
    "<|tile_x_separator|>",
    "<|tile_y_separator|>",
    "TILE_GLOBAL",
    "TILE_1",
]
_IDS = {token: number for number, token in enumerate([*SPECIAL_TOKENS, *_TOKENS])}
_WRITTEN = {"internvl_chat": "<image>", "aya_vision": "<image>", "llama4": "<|image|>"}
"""How a processor is told of an image, where that is not by its token."""

_FRAMED = {"glm4v": "<|begin_of_image|><|image|><|end_of_image|>"}
"""What a template writes for an image, where that is more."""

_TEXT: dict[str, Any] = SMALL | {"tie_word_embeddings": True}
_TOWER: dict[str, Any] = {
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 2,
    "patch_size": 14,
    "image_size": 56,
    "num_channels": 3,
}
_COLOURS: dict[str, Any] = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}


class _Kind:
    """`text` and `vision_encoder` change what all have; `files` are what the processor is told."""

    def __init__(
        self,
        token: str,
        text: dict[str, Any],
        vision_encoder: dict[str, Any],
        more: dict[str, Any],
        files: tuple[dict[str, Any], dict[str, Any]],
    ) -> None:
        self.token, self.more, self.files = token, more, files
        self.text, self.vision_encoder = _TEXT | text, _TOWER | vision_encoder


KINDS: dict[str, _Kind] = {
    "idefics3": _Kind(
        "<image>",
        {"model_type": "llama"},
        {"model_type": "idefics3"},
        {"scale_factor": 2},
        (
            {
                "image_processor_type": "Idefics3ImageProcessor",
                "size": {"longest_edge": 112},
                "max_image_size": {"longest_edge": 56},
            },
            {"image_seq_len": 4},
        ),
    ),
    "smolvlm": _Kind(
        "<image>",
        {"model_type": "llama"},
        {"model_type": "smolvlm_vision"},
        {"scale_factor": 2},
        (
            {
                "image_processor_type": "SmolVLMImageProcessor",
                "size": {"longest_edge": 112},
                "max_image_size": {"longest_edge": 56},
            },
            {"image_seq_len": 4},
        ),
    ),
    "pixtral": _Kind(
        "[IMG]",
        {"model_type": "mistral"},
        {"model_type": "pixtral", "head_dim": 16},
        {},
        (
            {
                "image_processor_type": "PixtralImageProcessor",
                "size": {"longest_edge": 56},
                "patch_size": {"height": 14, "width": 14},
            },
            {"patch_size": 14},
        ),
    ),
    "mistral3": _Kind(
        "[IMG]",
        {"model_type": "mistral"},
        {"model_type": "pixtral", "head_dim": 16, "image_size": 112},
        {"spatial_merge_size": 2},
        (
            {
                "image_processor_type": "PixtralImageProcessor",
                "size": {"longest_edge": 112},
                "patch_size": 14,
            },
            {"patch_size": 14, "spatial_merge_size": 2},
        ),
    ),
    "internvl_chat": _Kind(
        "<IMG_CONTEXT>",
        {"model_type": "qwen2"},
        {"model_type": "intern_vit_6b"},
        {"downsample_ratio": 0.5},
        ({"size": 56}, {}),
    ),
    "kimi_vl": _Kind(
        "<|media_pad|>",
        {
            "model_type": "deepseek_v3",
            "kv_lora_rank": 32,
            "q_lora_rank": None,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 16,
            "v_head_dim": 16,
            "num_key_value_heads": 4,
        },
        {
            "model_type": "moonvit",
            "depth": 2,
            "embed_dim": 32,
            "num_heads": 2,
            "spatial_patch_size": 14,
            "init_pos_emb_height": 8,
            "init_pos_emb_width": 8,
            "merge_kernel_size": [2, 2],
        },
        {"media_placeholder_token_id": _IDS["<|media_pad|>"]},
        ({"patch_size": 14, "merge_kernel_size": [2, 2], "in_token_limit": 64}, {}),
    ),
    "lfm2_vl": _Kind(
        "<image>",
        {
            "model_type": "lfm2",
            "norm_eps": 1e-6,
            "conv_L_cache": 3,
            "conv_dim": 64,
            "conv_dim_out": 64,
            "block_dim": 64,
            "block_ff_dim": 128,
            "block_multiple_of": 16,
            "layer_types": ["conv", "full_attention"],
            "full_attn_idxs": [1],
            "num_heads": 4,
        },
        {"model_type": "siglip2_vision_model", "patch_size": 16, "num_patches": 64},
        {
            "downsample_factor": 2,
            "projector_hidden_size": 64,
            "tile_size": 64,
            "encoder_patch_size": 16,
        },
        (
            {
                "image_processor_type": "Lfm2VlImageProcessor",
                "tile_size": 64,
                "encoder_patch_size": 16,
                "downsample_factor": 2,
                "min_image_tokens": 4,
                "max_image_tokens": 16,
                "max_num_patches": 64,
            },
            {"processor_class": "Lfm2VlProcessor"},
        ),
    ),
    "aya_vision": _Kind(
        "<|IMG_PATCH|>",
        {
            "model_type": "cohere2",
            "layer_norm_eps": 1e-5,
            "sliding_window": 32,
            "sliding_window_pattern": 2,
        },
        {"model_type": "siglip_vision_model"},
        {"downsample_factor": 2, "alignment_intermediate_size": 64},
        (
            {
                "image_processor_type": "GotOcr2ImageProcessor",
                "size": {"height": 56, "width": 56},
                "crop_to_patches": True,
                "min_patches": 1,
                "max_patches": 4,
            },
            {"patch_size": 28, "img_size": 56},
        ),
    ),
    "glm4v": _Kind(
        "<|image|>",
        {
            "model_type": "glm4v_text",
            "partial_rotary_factor": 0.5,
            "rope_scaling": {"type": "default", "mrope_section": [2, 1, 1]},
            "pad_token_id": 0,
        },
        {
            "model_type": "glm4v",
            "depth": 2,
            "num_heads": 2,
            "image_size": 112,
            "out_hidden_size": 64,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
        },
        {
            "image_token_id": _IDS["<|image|>"],
            "video_token_id": _IDS["<|video|>"],
            "vision_start_token_id": _IDS["<|begin_of_image|>"],
            "vision_end_token_id": _IDS["<|end_of_image|>"],
        },
        (
            {
                "image_processor_type": "Glm4vImageProcessor",
                "merge_size": 2,
                "patch_size": 14,
                "size": {"shortest_edge": 28 * 28, "longest_edge": 112 * 112},
            },
            {},
        ),
    ),
    "llama4": _Kind(
        "<|patch|>",
        {
            "model_type": "llama4_text",
            "num_hidden_layers": 4,
            "head_dim": 16,
            "intermediate_size_mlp": 128,
            "num_local_experts": 2,
            "interleave_moe_layer_step": 2,
            "attention_chunk_size": 48,
        },
        {
            "model_type": "llama4_vision_model",
            "initializer_range": 0.02,
            "norm_eps": 1e-5,
            "projector_dropout": 0.0,
            "projector_input_dim": 64,
            "projector_output_dim": 64,
            "vision_output_dim": 64,
            "vision_feature_layer": -1,
            "vision_feature_select_strategy": "default",
            "pixel_shuffle_ratio": 0.5,
            "rope_theta": 10000,
            "intermediate_size": 128,
        },
        {},
        ({"size": {"height": 56, "width": 56}, "max_patches": 4}, {}),
    ),
    "llava": _Kind(
        "<image>",
        {"model_type": "llama"},
        {"model_type": "clip_vision_model"},
        {},
        (
            {
                "image_processor_type": "CLIPImageProcessor",
                "size": {"shortest_edge": 56},
                "crop_size": {"height": 56, "width": 56},
            },
            {
                "patch_size": 14,
                "vision_feature_select_strategy": "default",
                "num_additional_image_tokens": 1,
            },
        ),
    ),
    "llava_onevision": _Kind(
        "<image>",
        {"model_type": "qwen2"},
        {"model_type": "siglip_vision_model"},
        {"image_grid_pinpoints": [[56, 112], [112, 56], [112, 112]]},
        (
            {
                "image_processor_type": "LlavaOnevisionImageProcessor",
                "size": {"height": 56, "width": 56},
                "image_grid_pinpoints": [[56, 112], [112, 56], [112, 112]],
            },
            {"num_image_tokens": 16, "vision_feature_select_strategy": "full"},
        ),
    ),
    "paligemma": _Kind(
        "<image>",
        {"model_type": "gemma"},
        {"model_type": "siglip_vision_model", "projection_dim": 64},
        {"hidden_size": 64},
        (
            {
                "image_processor_type": "SiglipImageProcessor",
                "size": {"height": 56, "width": 56},
                "image_seq_length": 16,
            },
            {},
        ),
    ),
    "llava_next": _Kind(
        "<image>",
        {"model_type": "llama"},
        {"model_type": "clip_vision_model"},
        {},
        (
            {
                "image_processor_type": "LlavaNextImageProcessor",
                "size": {"shortest_edge": 56},
                "crop_size": {"height": 56, "width": 56},
                "image_grid_pinpoints": [[56, 112], [112, 56], [112, 112]],
            },
            {"patch_size": 14, "vision_feature_select_strategy": "default"},
        ),
    ),
}


def write_tried(directory: Path, kind: str, **changes: Any) -> Path:
    """A random-weight model of this kind, in `directory`."""
    directory.mkdir(parents=True, exist_ok=True)
    made = KINDS[kind]
    shown = _WRITTEN.get(kind, made.token)
    template = PARTS.replace("IMAGE", _FRAMED.get(kind, shown))
    template += CHAT_TEMPLATE.replace("{{ message.content }}", "{{ said(message.content) }}")
    vocab_size = write_tokenizer(
        directory,
        special_tokens=[*SPECIAL_TOKENS, *_TOKENS],
        template=template,
        changes={
            "bos_token": "<bos>",
            "image_token": shown,
            "extra_special_tokens": {"image_token": shown},
        },
    )
    config: dict[str, Any] = {
        "model_type": kind,
        "eos_token_id": [_IDS["<|im_end|>"]],
        "vocab_size": vocab_size,
        "image_token_index": _IDS[made.token],
        "text_config": made.text | {"vocab_size": vocab_size},
        "vision_config": made.vision_encoder,
    }
    if "media_placeholder_token_id" not in made.more:
        config["image_token_id"] = _IDS[made.token]
    config |= made.more | changes
    files = {"config": config, "preprocessor_config": _COLOURS | made.files[0]}
    files |= {"processor_config": made.files[1], "generation_config": {"do_sample": False}}
    for name, content in files.items():
        (directory / f"{name}.json").write_text(json.dumps(content))
    write_weights(directory, config, 0)
    return directory
