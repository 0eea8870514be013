"""What a token of KV takes, by the shape of a model: the arithmetic behind `docs/sizing.md`."""

from __future__ import annotations

from typing import NamedTuple

from store.room import MAX_STATES

GROUP = 64
"""So many values share a scale and a bias in quantised KV."""


class Shape(NamedTuple):
    """What of a model's config decides how large its KV is; `item_bytes` is of its own dtype.

    `full_layers` remember every token, `window_layers` the last `window` of them. With `latent` a
    layer keeps so many values for each token instead of keys and values (MLA). `recurrent_bytes`
    are those of the states of all linear-attention layers. `source` is where all that was read.
    """

    full_layers: int
    kv_heads: int = 0
    head_dim: int = 0
    item_bytes: int = 2
    window_layers: int = 0
    window: int = 0
    latent: int = 0
    recurrent_bytes: int = 0
    source: str = ""

    def bytes_per_token(self, bits: int | None = None) -> int:
        """Of the layers that remember every token."""
        values = self.latent or 2 * self.kv_heads * self.head_dim
        return int(self.full_layers * values * self._value_bytes(bits))

    def state_bytes(self) -> int:
        """Of what does not grow: all sliding windows when they are full, and recurrent states."""
        per_token = self.window_layers * 2 * self.kv_heads * self.head_dim * self.item_bytes
        return per_token * self.window + self.recurrent_bytes

    def _value_bytes(self, bits: int | None) -> float:
        if bits is None:
            return self.item_bytes
        return bits / 8 + 2 * self.item_bytes / GROUP


CONFIG = "`config.json`"
CODE = "its makers' code"
"""Where a shape was read: see the page."""

FAMILIES: dict[str, Shape] = {
    "hearth-tiny (float32)": Shape(5, 2, 64, item_bytes=4, source=CONFIG),
    "Llama 3.1 8B": Shape(32, 8, 128, source=CODE),
    "Llama 3.3 70B": Shape(80, 8, 128, source=CODE),
    "Qwen3 4B, 8B": Shape(36, 8, 128, source=CONFIG),
    "Qwen3 32B": Shape(64, 8, 128, source=CONFIG),
    "Qwen3 30B-A3B": Shape(48, 4, 128, source=CONFIG),
    "Mistral Small 24B": Shape(40, 8, 128, source=CONFIG),
    "GLM-4.5 Air": Shape(46, 8, 128, source=CONFIG),
    "gpt-oss 20B": Shape(12, 8, 64, window_layers=12, window=128, source=CONFIG),
    "gpt-oss 120B": Shape(18, 8, 64, window_layers=18, window=128, source=CODE),
    "Gemma 3 4B": Shape(5, 4, 256, window_layers=29, window=1024, source=CODE),
    "Gemma 3 27B": Shape(10, 16, 128, window_layers=52, window=1024, source=CODE),
    "Qwen3-Next 80B-A3B": Shape(
        12, 2, 256, recurrent_bytes=36 * (32 * 128 * 128 * 4 + 3 * 8192 * 2), source=CODE
    ),
    "DeepSeek V3 (MLA)": Shape(61, latent=576, source=CODE),
}
_CONTEXTS = (8_192, 32_768, 131_072)


def table() -> str:
    """The families as Markdown."""
    head = " | ".join(f"{tokens // 1024}k tokens" for tokens in _CONTEXTS)
    lines = [
        f"| model | KV of one token | {head} | state | states on disk | 32k at 8 bits | read in |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, shape in FAMILIES.items():
        token = shape.bytes_per_token()
        cells = [f"{token:,} B", *(_size(token * tokens) for tokens in _CONTEXTS)]
        state = shape.state_bytes()
        states = f"{_size(state)} | {_size(MAX_STATES * state)}" if state else " | "
        eighth = "" if shape.latent else _size(shape.bytes_per_token(8) * _CONTEXTS[1])
        lines.append(f"| {name} | {' | '.join(cells)} | {states} | {eighth} | {shape.source} |")
    return "\n".join(lines)


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.1f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.0f} MB"
