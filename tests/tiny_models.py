"""Tiny random models with a real tokenizer and template, generated at test time, no download."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

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

TEXT = (
    "the quick brown fox jumps over the lazy dog while a kettle hums on the hearth and rain falls "
    "def answer(question): return {'text': question, 'number': 42} 你好世界 😀🎉 naïve café"
)

_COMMON: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
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
    "llama4_text": {
        "num_hidden_layers": 4,
        "attention_chunk_size": 64,
        "no_rope_layers": [1, 1, 1, 0],
        "use_qk_norm": True,
        "attention_bias": False,
        "rope_scaling": None,
        "intermediate_size_mlp": 128,
    },
}


def write_tokenizer(directory: Path) -> int:
    """A byte-level BPE tokenizer with a ChatML template in `directory`; its vocabulary size."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT] * 4, trainer)
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "clean_up_tokenization_spaces": False,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return tokenizer.get_vocab_size()


def write_model(directory: Path, family: str = "qwen3", *, seed: int = 0, **changes: Any) -> Path:
    """A random-weight model of `family` that `mlx_lm.load` accepts, in `directory`."""
    import mlx.core as mx
    from mlx.utils import tree_flatten

    directory.mkdir(parents=True, exist_ok=True)
    vocab_size = write_tokenizer(directory)
    config = {"model_type": family, "vocab_size": vocab_size} | _COMMON | FAMILIES[family] | changes
    mx.random.seed(seed)
    module = importlib.import_module(f"mlx_lm.models.{family}")
    model = module.Model(module.ModelArgs.from_dict(config))
    mx.eval(model.parameters())
    weights = dict(tree_flatten(model.parameters()))
    mx.save_safetensors(str(directory / "model.safetensors"), weights, {"format": "mlx"})
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "generation_config.json").write_text(json.dumps({"do_sample": False}))
    return directory
