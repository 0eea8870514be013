"""A compact Qwen3 decoder in PyTorch, saved in the layout that mlx-lm loads."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.functional import linear, scaled_dot_product_attention, silu


@dataclass(frozen=True)
class Shape:
    """Sizes of the model; the fields are named as in Hugging Face's config.json."""

    vocab_size: int = 4096
    hidden_size: int = 192
    num_hidden_layers: int = 5
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 64
    intermediate_size: int = 448
    rms_norm_eps: float = 1e-6
    rope_theta: float = 1000000.0


class Attention(nn.Module):
    """Grouped-query attention with normalised queries and keys."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        width = shape.num_attention_heads * shape.head_dim
        narrow = shape.num_key_value_heads * shape.head_dim
        self.q_proj = nn.Linear(shape.hidden_size, width, bias=False)
        self.k_proj = nn.Linear(shape.hidden_size, narrow, bias=False)
        self.v_proj = nn.Linear(shape.hidden_size, narrow, bias=False)
        self.o_proj = nn.Linear(width, shape.hidden_size, bias=False)
        self.q_norm = nn.RMSNorm(shape.head_dim, eps=shape.rms_norm_eps)
        self.k_norm = nn.RMSNorm(shape.head_dim, eps=shape.rms_norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """`x` [batch, tokens, hidden]; `cos` and `sin` [tokens, head_dim], float32."""
        batch, tokens, _ = x.shape
        split = (batch, tokens, -1, self.shape.head_dim)
        queries = rotate(self.q_norm(self.q_proj(x).view(split).float()).transpose(1, 2), cos, sin)
        keys = rotate(self.k_norm(self.k_proj(x).view(split).float()).transpose(1, 2), cos, sin)
        values = self.v_proj(x).view(split).transpose(1, 2)
        out = scaled_dot_product_attention(
            queries.to(values.dtype), keys.to(values.dtype), values, is_causal=True, enable_gqa=True
        )
        return self.o_proj(out.transpose(1, 2).reshape(batch, tokens, -1))


class MLP(nn.Module):
    """Gated feed-forward layer."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """One decoder layer."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(shape.hidden_size, eps=shape.rms_norm_eps)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = nn.RMSNorm(shape.hidden_size, eps=shape.rms_norm_eps)
        self.mlp = MLP(shape)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class Decoder(nn.Module):
    """Embedding, layers and final norm; the output head is the embedding itself."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.num_hidden_layers))
        self.norm = nn.RMSNorm(shape.hidden_size, eps=shape.rms_norm_eps)

    def forward(self, token_ids: Tensor) -> Tensor:
        """Hidden states [batch, tokens, hidden] for `token_ids` [batch, tokens]."""
        cos, sin = angles(token_ids.shape[1], self.shape, token_ids.device)
        x = self.embed_tokens(token_ids)
        for layer in self.layers:
            x = layer(x, cos, sin)
        return self.norm(x)

    def logits(self, hidden: Tensor) -> Tensor:
        """Scores [..., vocabulary] for hidden states."""
        return linear(hidden, self.embed_tokens.weight)


def angles(tokens: int, shape: Shape, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosines and sines [tokens, head_dim] of the rotary positions, float32."""
    steps = torch.arange(0, shape.head_dim, 2, device=device, dtype=torch.float32) / shape.head_dim
    angle = torch.outer(
        torch.arange(tokens, device=device, dtype=torch.float32), shape.rope_theta**-steps
    )
    angle = torch.cat((angle, angle), dim=-1)
    return angle.cos(), angle.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of `x` [batch, heads, tokens, head_dim] in float32."""
    left, right = x.float().chunk(2, dim=-1)
    return x.float() * cos + torch.cat((-right, left), dim=-1) * sin


def initialise(model: Decoder, vocab: dict[str, int]) -> None:
    """Small random weights; a spaced word starts as the word's embedding plus the space's."""
    for name, parameter in model.named_parameters():
        if parameter.dim() == 2:
            scale = 0.02
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                scale /= (2 * model.shape.num_hidden_layers) ** 0.5
            nn.init.normal_(parameter, std=scale if "embed" in name else scale * 2)
    with torch.no_grad():
        weight = model.embed_tokens.weight
        for token, index in vocab.items():
            if len(token) > 1 and token[0] == "Ġ" and token[1:] in vocab:
                weight[index] = 0.7 * (weight[vocab[token[1:]]] + weight[vocab["Ġ"]])


def save(model: Decoder, out: Path) -> None:
    """Writes model.safetensors (float32) and config.json under `out`."""
    out.mkdir(parents=True, exist_ok=True)
    tensors = {
        f"model.{name}": value.detach().float().cpu().contiguous()
        for name, value in model.state_dict().items()
    }
    save_file(tensors, str(out / "model.safetensors"), metadata={"format": "pt"})
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        **vars(model.shape),
        "attention_bias": False,
        "attention_dropout": 0.0,
        "hidden_act": "silu",
        "max_position_embeddings": 32768,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "torch_dtype": "float32",
        "use_cache": True,
    }
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    generation = {"do_sample": False, "eos_token_id": 2, "pad_token_id": 0}
    (out / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")


def load(model: Decoder, path: Path) -> None:
    """Loads weights that `save` wrote."""
    model.load_state_dict(
        {name.removeprefix("model."): value for name, value in load_file(str(path)).items()}
    )
