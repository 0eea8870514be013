"""A model that says what a script has it say, whatever program asks: real weights, written here.

The pieces of a script are tokens of their own. One attention head finds the last thing in the
prompt that calls a step of the script: a cue somewhere in the text, or the end of the step before,
as the model has generated it. A conversation that comes back with other tokens, or with KV of
another one, therefore goes astray. Tokenizer and template are those of hearth-tiny.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from runtime.embedded import HEARTH_TINY

Array = np.ndarray[Any, np.dtype[np.float32]]

HIDDEN = 256
HEAD = 128
LAYERS = 2
MAX_STEPS = 96
SHARPNESS = 40.0
"""What is found scores so much more than what would be found without it."""

# Dimensions: what the last token has follow it, how late in the script its step is, and which one.
THOUGHT, THINK_END, BLANK, ANSWER, CALL, BODY, CALL_END, TURN_END = range(8)
LEVEL, ONE, PAD = 8, 9, 10
CALLS = 11
FOUND = CALLS + MAX_STEPS
NOISE = FOUND + MAX_STEPS
NORM = math.sqrt(6)
"""Of every embedding, so that a layer's normalisation does the same to each."""
_UNIT = math.sqrt(HIDDEN) / NORM
"""What normalisation makes of 1."""

LINE_END, BLANK_LINE = "Ċ", "ĊĊ"
"""As the tokenizer's file writes them: the ends of prompts with and without thinking."""


@dataclass(frozen=True)
class Step:
    """One answer: its text and its calls, each the name of a tool and its arguments.

    It is said when its `cue` stands in the prompt, or without a cue when the step before was said;
    of several steps the last in the script. The first one is said when nothing calls any. What
    a step before `says` may be a cue too, for whoever reads it.
    """

    says: str = ""
    calls: tuple[tuple[str, dict[str, Any]], ...] = ()
    cue: str = ""


@dataclass(frozen=True)
class _Pieces:
    """The tokens of a step; those it does not have are None."""

    thought: int
    said: int | None
    body: int | None
    cue: int | None

    @property
    def last(self) -> int:
        last = self.said if self.body is None else self.body
        assert last is not None
        return last


class _Vocabulary:
    """hearth-tiny's tokens, and those of a script."""

    def __init__(self) -> None:
        self.file = json.loads((HEARTH_TINY / "tokenizer.json").read_text())
        self._ids: dict[str, int] = {one["content"]: one["id"] for one in self.file["added_tokens"]}
        self._ids |= self.file["model"]["vocab"]

    def __len__(self) -> int:
        return len(self._ids)

    def __getitem__(self, text: str) -> int:
        return self._ids[text]

    def add(self, text: str) -> int:
        """A token of this text, which stands for nothing else."""
        assert text not in self._ids, text
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
        self._ids[text] = token_id = len(self)
        self.file["added_tokens"].append({"id": token_id, "content": text} | flags)
        return token_id

    def pieces(self, number: int, step: Step) -> _Pieces:
        calls = [json.dumps({"name": name, "arguments": given}) for name, given in step.calls]
        body = "\n</tool_call>\n<tool_call>\n".join(calls)
        return _Pieces(
            thought=self.add(f"Now step {number} of the script.\n"),
            said=self.add(step.says) if step.says else None,
            body=self.add(f"\n{body}\n") if body else None,
            cue=self._ids.get(step.cue) or self.add(step.cue) if step.cue else None,
        )


def write_scripted(directory: Path, steps: Sequence[Step]) -> Path:
    """A model in `directory` that says these steps."""
    assert len(steps) <= MAX_STEPS
    directory.mkdir(parents=True)
    vocabulary = _Vocabulary()
    pieces = [vocabulary.pieces(number, step) for number, step in enumerate(steps)]
    (directory / "tokenizer.json").write_text(json.dumps(vocabulary.file))
    for name in ("chat_template.jinja", "tokenizer_config.json"):
        shutil.copy(HEARTH_TINY / name, directory)
    config = {
        "model_type": "llama",
        "vocab_size": len(vocabulary),
        "hidden_size": HIDDEN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 1,
        "head_dim": HEAD,
        "intermediate_size": HIDDEN,
        "rms_norm_eps": 1e-9,
        # So slowly turns the last pair of dimensions that a step is found at any distance.
        "rope_theta": 1e15,
        "max_position_embeddings": 131_072,
        "tie_word_embeddings": False,
        "eos_token_id": vocabulary["<|im_end|>"],
    }
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "generation_config.json").write_text(json.dumps({"do_sample": False}))
    weights = _layers() | {
        "model.embed_tokens.weight": _embeddings(vocabulary, pieces),
        "model.norm.weight": np.ones(HIDDEN, np.float32),
        "lm_head.weight": _head(vocabulary, pieces),
    }
    save_file(weights, directory / "model.safetensors", {"format": "mlx"})
    return directory


def _embeddings(vocabulary: _Vocabulary, pieces: Sequence[_Pieces]) -> Array:
    """For each token what is to follow it, and which step of the script it calls."""
    table = np.zeros((len(vocabulary), HIDDEN), np.float32)
    noise = np.random.default_rng(1).standard_normal((len(vocabulary), HIDDEN - NOISE))
    table[:, NOISE:] = noise / np.linalg.norm(noise, axis=1, keepdims=True)
    table[:, ONE] = 1
    for text, what in (
        (LINE_END, THOUGHT),
        ("</think>", BLANK),
        (BLANK_LINE, ANSWER),
        ("<tool_call>", BODY),
        ("</tool_call>", TURN_END),
    ):
        table[vocabulary[text], what] = 1
    for number, step in enumerate(pieces):
        table[step.thought, THINK_END] = 1
        if step.said is not None:
            table[step.said, TURN_END if step.body is None else CALL] = 1
        if step.body is not None:
            table[step.body, CALL_END] = 1
        caller = pieces[number - 1].last if step.cue is None and number else step.cue
        if caller is not None:
            assert not table[caller, LEVEL], f"two steps follow the same as step {number}"
            table[caller, LEVEL] = (number + 1) / MAX_STEPS
            table[caller, CALLS + number] = 1
    table[:, PAD] = np.sqrt(NORM**2 - np.square(table).sum(axis=1))
    return table


def _head(vocabulary: _Vocabulary, pieces: Sequence[_Pieces]) -> Array:
    """What is to follow decides what kind of token comes next, and the step that is found which."""
    table = np.zeros((len(vocabulary), HIDDEN), np.float32)
    kind, which, otherwise = 200, 100, 10
    for text, what in (
        ("</think>", THINK_END),
        (BLANK_LINE, BLANK),
        ("<tool_call>", CALL),
        ("</tool_call>", CALL_END),
        ("<|im_end|>", TURN_END),
    ):
        table[vocabulary[text], what] = kind
    table[vocabulary["<tool_call>"], ANSWER] = kind
    for number, step in enumerate(pieces):
        first = vocabulary["<tool_call>"] if step.said is None else step.said
        table[first, ANSWER] = table[step.thought, THOUGHT] = kind
        table[first, FOUND + number] = table[step.thought, FOUND + number] = which
        if step.body is not None:
            table[step.body, BODY] = kind
            table[step.body, FOUND + number] = which
    table[pieces[0].thought, ONE] = otherwise
    if pieces[0].said is not None:
        table[pieces[0].said, ONE] = otherwise
    return table


def _layers() -> dict[str, Array]:
    """The first layer finds the step, the others make something of all that was read."""
    weights: dict[str, Array] = {}
    random = np.random.default_rng(2)

    def some(rows: int, columns: int) -> Array:
        return (random.standard_normal((rows, columns)) / math.sqrt(columns)).astype(np.float32)

    for number in range(LAYERS):
        layer = {f"self_attn.{name}_proj": some(HEAD, HIDDEN) for name in "qkv"}
        layer |= {f"mlp.{name}_proj": some(HIDDEN, HIDDEN) for name in ("gate", "up", "down")}
        layer["self_attn.o_proj"] = some(HIDDEN, HEAD)
        # The dimensions that decide what is said are written by the first layer only.
        layer["self_attn.o_proj"][:NOISE] = 0
        layer["mlp.down_proj"][:NOISE] = 0
        if number == 0:
            layer |= _finding()
        weights |= {f"model.layers.{number}.{name}.weight": one for name, one in layer.items()}
        for norm in ("input_layernorm", "post_attention_layernorm"):
            weights[f"model.layers.{number}.{norm}.weight"] = np.ones(HIDDEN, np.float32)
    return weights


def _finding() -> dict[str, Array]:
    """A head that reads from the caller of the latest step which one it is."""
    query, key, value = (np.zeros((HEAD, HIDDEN), np.float32) for _ in range(3))
    output = np.zeros((HIDDEN, HEAD), np.float32)
    score = SHARPNESS * MAX_STEPS * math.sqrt(HEAD) / _UNIT**2
    unturned = HEAD // 2 - 1
    query[unturned, ONE] = key[unturned, LEVEL] = math.sqrt(score)
    steps = np.arange(MAX_STEPS)
    value[steps, CALLS + steps] = 1 / _UNIT
    output[FOUND + steps, steps] = 1
    names = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
    return dict(zip(names, (query, key, value, output), strict=True))
