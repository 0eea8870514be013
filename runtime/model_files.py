"""What a model's directory says about it, read without loading anything.

Knows the file names of the Hugging Face format and the layout of its cache, which is only read.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import cast

import msgspec

from runtime.checked_tables import kinds_of
from runtime.settings import ModelSettings, SamplingSettings
from runtime.types import ModelSpec, Pooling, SamplingParams
from runtime.vision_files import BLIND_TYPES, image_bytes, is_vision
from store.types import FileStamp

FALLBACK_CONTEXT = 4096
_SCALE_BITS = 0.5
"""Quantised values share a scale and an offset of 16 bits, 64 of them each."""

_SANE_CONTEXTS = range(128, 2**31)
_GENERATION_KEYS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
_SHARD = re.compile(r"-(\d+)-of-(\d+)\.safetensors$")

Json = Mapping[str, object]

Fingerprint = tuple[tuple[str, FileStamp], ...]
"""Every file that matters to a load, in the state that it is in."""


class BrokenModel(Exception):
    """A directory that is meant to be a model and cannot be one; the message says why."""


def read_spec(
    model_id: str, path: Path, settings: ModelSettings, aliases: tuple[str, ...] = ()
) -> ModelSpec:
    """The model in the directory `path`.

    Raises:
        BrokenModel: something is missing or cannot be read.
    """
    config_file = path / "config.json"
    config = _read_json(config_file)
    model_type = config.get("model_type")
    if not isinstance(model_type, str):
        raise BrokenModel(f"{config_file} names no model_type")
    weights = _weights(path)
    try:
        nbytes = sum(file.stat().st_size for file in weights)
        created_s = int(config_file.stat().st_mtime)
    except OSError as error:
        raise BrokenModel(f"{error.filename} cannot be read: {error.strerror}") from error
    may_see = settings.vision and settings.ranks == 1
    is_loaded_to_see = may_see and is_vision(path, model_type, weights)
    sees = is_loaded_to_see and model_type not in BLIND_TYPES
    return ModelSpec(
        id=model_id,
        path=str(path),
        context=settings.context or _context(path, config),
        model_type=model_type,
        nbytes=nbytes,
        created_s=created_s,
        is_vision=is_loaded_to_see,
        image_bytes=image_bytes(path, config) if sees else 0,
        kv_bytes_per_token=_kv_bytes_per_token(config, settings.kv_bits),
        pooling=_pooling(path),
        sampling=settings.sampling.over(_sampling(path)),
        aliases=aliases,
        capabilities=_capabilities(path, sees=sees),
    )


def fingerprint(path: str) -> Fingerprint:
    """The state of a model's files; without those that cannot be looked at."""
    found: list[tuple[str, FileStamp]] = []
    for pattern in ("*.safetensors", "*/*.safetensors", "*.json"):
        for file in Path(path).glob(pattern):
            with contextlib.suppress(OSError):
                found.append((str(file), FileStamp.of(file.stat())))
    return tuple(sorted(found))


def model_directories(folder: Path) -> Iterator[Path]:
    """The subdirectories that have a `config.json`, in order of their names.

    Raises:
        OSError: the folder cannot be listed.
    """
    for path in sorted(folder.iterdir()):
        if path.name.isprintable() and (path / "config.json").is_file():
            yield path


def cached_snapshots(hub_cache: Path) -> dict[str, Path]:
    """Repository -> directory of its newest whole snapshot, for all models in the hub's cache."""
    snapshots: dict[str, Path] = {}
    for folder in sorted(hub_cache.glob("models--*")):
        repo = folder.name.removeprefix("models--").replace("--", "/")
        whole = [path for path in _snapshots(folder) if _is_whole(path)]
        if whole and repo.isprintable():
            snapshots[repo] = whole[0]
    return snapshots


def _snapshots(folder: Path) -> list[Path]:
    """A repository's snapshots: what `main` points at, then the others, newest first."""
    try:
        main = (folder / "refs" / "main").read_text("utf-8").strip()
    except (OSError, ValueError):
        main = ""
    try:
        paths = sorted((folder / "snapshots").iterdir(), key=lambda path: -path.stat().st_mtime)
    except OSError:
        return []
    return sorted(paths, key=lambda path: path.name != main)


def _is_whole(path: Path) -> bool:
    try:
        return (path / "config.json").is_file() and bool(_weights(path))
    except BrokenModel:
        return False


def _weights(path: Path) -> list[Path]:
    """All weight files; a sharded model must have every shard that its index or names promise."""
    found = {file.name: file for file in path.glob("*.safetensors") if file.is_file()}
    if not found:
        raise BrokenModel(f"{path} has no weights (*.safetensors)")
    index = path / "model.safetensors.index.json"
    wanted: set[str] = set()
    if index.is_file():
        names = _table(_read_json(index).get("weight_map")).values()
        wanted = {name for name in names if isinstance(name, str)}
    else:
        wanted = {one for name in found for one in _siblings(name)}
    missing = sorted(wanted - found.keys())
    if missing:
        raise BrokenModel(f"{path} lacks {missing[0]} ({len(missing)} of its weight files missing)")
    return list(found.values())


def _siblings(name: str) -> set[str]:
    """The names of all shards of the set that this file belongs to."""
    shard = _SHARD.search(name)
    if shard is None:
        return set()
    width, total, stem = len(shard[1]), shard[2], name[: shard.start()]
    numbers = range(1, int(total) + 1) if len(total) <= 5 else ()
    return {f"{stem}-{number:0{width}}-of-{total}.safetensors" for number in numbers}


def _pooling(path: Path) -> Pooling | None:
    """What sentence-transformers' files say of the model; None where it makes no embeddings."""
    modules = path / "modules.json"
    if not modules.is_file():
        return None
    try:
        listed: object = json.loads(modules.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise BrokenModel(f"{modules} cannot be read: {error}") from error
    kinds = {
        str(_table(module).get("type", "")).rpartition(".")[2]: str(_table(module).get("path", ""))
        for module in (cast("list[object]", listed) if isinstance(listed, list) else [])
    }
    config = _read_optional(path / kinds.get("Pooling", "1_Pooling") / "config.json")
    is_normalised = "Normalize" in kinds
    if config.get("pooling_mode_lasttoken"):
        return Pooling(kind="last_token", is_normalised=is_normalised)
    if config.get("pooling_mode_mean_tokens"):
        return Pooling(kind="mean", is_normalised=is_normalised)
    return None


def _read_json(file: Path) -> Json:
    if file.exists() and not file.is_file():  # opening a pipe waits for whoever writes
        raise BrokenModel(f"{file} is not a file")
    try:
        value: object = json.loads(file.read_bytes())
    except OSError as error:
        raise BrokenModel(f"{file} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise BrokenModel(f"{file} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise BrokenModel(f"{file} holds no JSON object")
    return cast("Json", value)


def _read_optional(file: Path) -> Json:
    return _read_json(file) if file.is_file() else {}


def _table(value: object) -> Json:
    return cast("Json", value) if isinstance(value, dict) else {}


def _text_config(config: Json) -> Json:
    """What a model that reads more than text says of its decoder."""
    kinds = ("text_config", "language_config", "llm_config")
    return next((table for kind in kinds if (table := _table(config.get(kind)))), _table(None))


def _context(path: Path, config: Json) -> int:
    text_config = _text_config(config)
    tokenizer_config = _read_optional(path / "tokenizer_config.json")
    limits = (
        config.get("max_position_embeddings", text_config.get("max_position_embeddings")),
        tokenizer_config.get("model_max_length"),
    )
    sane = [one for one in limits if isinstance(one, int) and one in _SANE_CONTEXTS]
    return min(sane, default=FALLBACK_CONTEXT)


def _kv_bytes_per_token(config: Json, kv_bits: int | None) -> int | None:
    """What a token takes in all layers if each keeps keys and values of every token.

    A compressed cache (one latent vector per layer) is counted as such.
    """
    text_config = _text_config(config)

    def number(*keys: str) -> int | None:
        values = (config.get(key, text_config.get(key)) for key in keys)
        return next((one for one in values if isinstance(one, int) and one > 0), None)

    layers, heads = number("num_hidden_layers", "n_layer"), number("num_attention_heads", "n_head")
    width, latent = number("hidden_size", "n_embd"), number("kv_lora_rank")
    if layers is None or heads is None or width is None:
        return None
    if latent is not None:
        values = latent + (number("qk_rope_head_dim") or 0)
    else:
        values = (
            2 * (number("num_key_value_heads") or heads) * (number("head_dim") or width // heads)
        )
    dtype = config.get("torch_dtype", config.get("dtype", text_config.get("dtype")))
    bits = 32 if dtype == "float32" else 16
    if kv_bits is not None:
        return int(layers * values * (kv_bits + _SCALE_BITS) / 8)
    return layers * values * bits // 8


def _capabilities(path: Path, *, sees: bool) -> tuple[str, ...]:
    """What the files promise: a template can be talked to, one that knows tools can use them."""
    jinja = path / "chat_template.jinja"
    template = _read_optional(path / "tokenizer_config.json").get("chat_template")
    text = template if isinstance(template, str) else json.dumps(template or "")
    for file in (jinja, path / "chat_template.json"):
        with contextlib.suppress(OSError):
            text += file.read_text("utf-8", errors="replace") if file.is_file() else ""
    promises = {
        "completion": True,
        "chat": len(text) > len('""'),
        "tools": "tools" in text,
        "vision": sees,
    }
    return tuple(name for name, is_promised in promises.items() if is_promised)


def _sampling(path: Path) -> SamplingParams:
    """The defaults that the model's makers give; values that make no sense are left out."""
    given = _read_optional(path / "generation_config.json")
    if given.get("do_sample") is False:
        given = {**given, "temperature": 0.0}
    kinds = kinds_of(SamplingSettings)
    defaults: dict[str, object] = {}
    for key in _GENERATION_KEYS:
        try:
            defaults[key] = msgspec.convert(given.get(key), kinds[key])
        except msgspec.ValidationError:
            continue
    return msgspec.structs.replace(SamplingParams(), **defaults)
