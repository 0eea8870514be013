"""What differs between a GGUF file and a folder as Hugging Face has it: names, order, offsets."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Weight = NDArray[np.float32]

LLAMA_PARTS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
GEMMA_PARTS = LLAMA_PARTS | {
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_WHOLE = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_OF_A_BLOCK = re.compile(r"blk\.(\d+)\.(\w+)\.weight")

BYTE_PIECE = 6
"""The type of a vocabulary's piece that is one byte."""


class Piece(NamedTuple):
    """A piece of a SentencePiece vocabulary; its id is its place."""

    text: str
    kind: int
    score: float


def hub_name(name: str, parts: Mapping[str, str]) -> str:
    """The name of a tensor in a Hugging Face folder.

    Raises:
        ValueError: the tensor is of no known kind.
    """
    if name in _WHOLE:
        return _WHOLE[name]
    found = _OF_A_BLOCK.fullmatch(name)
    if found is None or found[2] not in parts:
        raise ValueError(f"the tensor {name} is of no known kind")
    return f"model.layers.{found[1]}.{parts[found[2]]}.weight"


def halves_apart(weight: Weight, num_heads: int) -> Weight:
    """Rows of a query or key projection in the order that rotates halves of a head.

    GGUF has the pairs that are rotated together side by side.
    """
    rows, columns = weight.shape
    pairs = weight.reshape(num_heads, rows // num_heads // 2, 2, columns)
    return np.ascontiguousarray(pairs.swapaxes(1, 2).reshape(rows, columns))


def merges_of(pieces: Sequence[Piece]) -> list[tuple[str, str]]:
    """The merges of byte pair encoding that give what the pieces' scores give, best first."""
    ids = {piece.text: number for number, piece in enumerate(pieces)}
    found: list[tuple[float, int, int, str, str]] = []
    for piece in pieces:
        if piece.kind == BYTE_PIECE:
            continue
        for cut in range(1, len(piece.text)):
            left, right = piece.text[:cut], piece.text[cut:]
            if left in ids and right in ids:
                found.append((-piece.score, ids[left], ids[right], left, right))
    return [(left, right) for *_, left, right in sorted(found)]
