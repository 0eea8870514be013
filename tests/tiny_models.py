"""Tiny random models with a real tokenizer and template, generated at test time, no download."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any, cast

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

SPECIAL_TOKENS = [
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
]

CHAT_TEMPLATE = """\
{%- if tools %}<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% endif %}{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}{% for tool_call in message.tool_calls or [] %}<tool_call>
{{ {"name": tool_call.function.name, "arguments": tool_call.function.arguments} | tojson }}
</tool_call>{# tool_call.name #}{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking %}<think>
{% endif %}{% endif %}"""

TOOL_CALL = '{"name":"look","arguments":{"at":7}}'
"""No token of it occurs twice, see `tests.asking.script`."""

TEXT = (
    "the quick brown fox jumps over the lazy dog while a kettle hums on the hearth and rain falls "
    "def answer(question): return {'text': question, 'number': 42} 你好世界 😀🎉 naïve café "
    f"{TOOL_CALL} let me see"
)

SMALL: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}

_MOE: dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
}

_LINEAR_ATTENTION: dict[str, Any] = {
    "num_hidden_layers": 4,
    "full_attention_interval": 4,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
}

_LATENT_ATTENTION: dict[str, Any] = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "q_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
}

FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3": {},
    "llama": {},
    "gemma3_text": {
        "num_hidden_layers": 4,
        "sliding_window": 32,
        "sliding_window_pattern": 2,
        "query_pre_attn_scalar": 16,
        "rope_local_base_freq": 10000.0,
    },
    "gpt_oss": {
        "intermediate_size": 64,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 32,
        "rope_theta": 10000,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "qwen3_moe": _MOE,
    "lfm2": {
        "norm_eps": 1e-6,
        "conv_bias": False,
        "conv_L_cache": 3,
        "block_dim": 64,
        "block_ff_dim": 128,
        "block_multiple_of": 16,
        "block_ffn_dim_multiplier": 1.0,
        "block_auto_adjust_ff_dim": False,
        "layer_types": ["conv", "full_attention"],
        "full_attn_idxs": [1],
    },
    "qwen3_next": _MOE
    | _LINEAR_ATTENTION
    | {"shared_expert_intermediate_size": 32, "partial_rotary_factor": 0.5},
    "qwen3_5": _LINEAR_ATTENTION,
    "falcon_h1": {
        "mamba_d_ssm": 64,
        "mamba_d_head": 16,
        "mamba_n_heads": 4,
        "mamba_d_state": 16,
        "mamba_chunk_size": 16,
        "lm_head_multiplier": 1.0,
        "ssm_out_multiplier": 1.0,
    },
    "jamba": {
        "intermediate_size": 64,
        "num_hidden_layers": 4,
        "attn_layer_offset": 1,
        "attn_layer_period": 2,
        "expert_layer_offset": 1,
        "expert_layer_period": 2,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "mamba_d_conv": 4,
        "mamba_d_state": 8,
        "mamba_expand": 2,
    },
    "deepseek_v3": _LATENT_ATTENTION,
    "deepseek_v32": _LATENT_ATTENTION
    | {"index_head_dim": 16, "index_n_heads": 2, "index_topk": 32},
    "llama4": {
        "text_config": SMALL
        | {
            "model_type": "llama4_text",
            "num_hidden_layers": 4,
            "attention_chunk_size": 64,
            "interleave_moe_layer_step": 2,
            "num_local_experts": 2,
            "num_experts_per_tok": 1,
            "use_qk_norm": True,
            "attention_bias": False,
            "rope_scaling": None,
            "intermediate_size": 64,
            "intermediate_size_mlp": 64,
        },
    },
}
"""Model type -> what its configuration adds; every kind of layer cache that upstream has."""


def write_tokenizer(
    directory: Path,
    *,
    special_tokens: list[str] = SPECIAL_TOKENS,
    template: str = CHAT_TEMPLATE,
    changes: dict[str, Any] | None = None,
) -> int:
    """A byte-level BPE tokenizer with a ChatML template in `directory`; its vocabulary size."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=512,
        special_tokens=special_tokens,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT] * 4, trainer)
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "chat_template.jinja").write_text(template)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "clean_up_tokenization_spaces": False,
        **(changes or {}),
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return tokenizer.get_vocab_size()


def write_model(directory: Path, family: str = "qwen3", *, seed: int = 0, **changes: Any) -> Path:
    """A random-weight model of `family` that `mlx_lm.load` accepts, in `directory`."""
    import mlx.core as mx
    from mlx.utils import tree_flatten

    directory.mkdir(parents=True, exist_ok=True)
    vocab_size = write_tokenizer(directory)
    config: dict[str, Any] = {"model_type": family, "vocab_size": vocab_size}
    config |= SMALL | FAMILIES[family] | changes
    if "text_config" in config:
        config["text_config"] = config["text_config"] | {"vocab_size": vocab_size}
    mx.random.seed(seed)
    module = importlib.import_module(f"mlx_lm.models.{family}")
    model = module.Model(module.ModelArgs.from_dict(config))
    # Quiet embeddings and loud layers: what is said depends on all that was read.
    gains = {"embed_tokens": 0.1, "_proj": 3.0}
    weights = {
        name: cast("mx.array", array) * next((g for k, g in gains.items() if k in name), 1.0)
        for name, array in tree_flatten(model.parameters())
    }
    mx.save_safetensors(str(directory / "model.safetensors"), weights, {"format": "mlx"})
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "generation_config.json").write_text(json.dumps({"do_sample": False}))
    return directory
