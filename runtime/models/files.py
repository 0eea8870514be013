"""What a model's directory says about it, read without loading anything.

Knows the file names of the Hugging Face format and the layout of its cache, which is only read.
"""

from __future__ import annotations

import contextlib
import json
import re
import sys
from collections.abc import Iterator, Set
from pathlib import Path
from typing import cast

import msgspec

from runtime.config.settings import ModelSettings, SamplingSettings
from runtime.config.tables import kinds_of
from runtime.models.folder import (
    INDEX,
    TEMPLATE,
    BrokenModel,
    Json,
    ModelFolder,
    NeedsOwnCode,
    asked_code,
    open_regular,
    read_json,
    read_table,
    without_code,
)
from runtime.models.vision_files import (
    BLIND_TYPES,
    VLM_TYPES,
    can_see,
    image_bytes,
    is_vision,
    missing_package,
    names_in,
    reads_as_text,
    words_of,
)
from runtime.prompt.call_marks import family_named
from runtime.types import ModelSpec, Pooling, SamplingParams, ToolUse
from store.types import FileStamp

FALLBACK_CONTEXT = 4096
_SCALE_BITS = 0.5
"""Quantised values share a scale and an offset of 16 bits, 64 of them each."""

_SANE_CONTEXTS = range(128, 2**31)
_GENERATION_KEYS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
_SHOWN_CHARACTERS = 80
_PLUG_INS = {
    "tool_parser_type": "mlx_lm/tool_parsers",
    "chat_template_type": "mlx_lm/chat_templates",
}
"""What of a tokenizer's settings mlx-lm imports by name, and where it is."""

_MAX_TEMPLATE_BYTES = 16 << 20
_ANY_TOKENIZER = "PreTrainedTokenizerFast"
_PLACES = frozenset({"name_or_path", "_name_or_path", "tokenizer_file", "vocab_file"})
"""What names places on the disk of whoever saved it."""

_VOCABULARY = re.compile(
    r"^(tokenizer|tekken)\.[\w.]*(json|model)|vocab|\.(model|tiktoken|spm|codes)$"
)
"""Files that a tokenizer has its words from."""

_POINTER = b"version https://git-lfs.github.com/spec/"
_SHARD = re.compile(r"-(\d+)-of-(\d+)\.safetensors$")

Fingerprint = tuple[tuple[str, FileStamp], ...]
"""Every file that matters to a load, in the state that it is in."""


def checked_folder(path: Path, template: Path | None = None) -> ModelFolder:
    """The files of a model that upstream's own code can load. Nothing is loaded without.

    A `template` counts instead of those that it comes with.

    Raises:
        BrokenModel: something is missing or cannot be read.
        NeedsOwnCode: it can only be loaded by code that comes with it.
    """
    folder = ModelFolder.read(path)
    if "config.json" not in folder.tables:
        raise BrokenModel(f"{path / 'config.json'} cannot be read: No such file or directory")
    if not isinstance(folder.table("config.json").get("model_type"), str):
        raise BrokenModel(f"{path / 'config.json'} names no model_type")
    _check_weights(path, folder.weights.keys(), folder.weight_map)
    _check_pointers(folder)
    if (why := own_code(folder)) is not None:
        raise NeedsOwnCode(why)
    if not any(map(_VOCABULARY.search, folder.texts)):
        raise BrokenModel(f"{path} has no tokenizer (tokenizer.json, tokenizer.model or the like)")
    return folder if template is None else folder.with_template(template)


def own_code(folder: ModelFolder) -> str | None:
    """Why this model would have to run code that is not upstream's own; None if it need not.

    That files name such code is not enough: `auto_map` is how other programs find what upstream
    has itself.
    """
    for name, table in folder.tables.items():
        given = next((one for key, one in asked_code(table) if key == "model_file"), None)
        if given is not None:
            return f"its {name} has it computed by code of its own, {_shown(given)}"
    config, tokenizer = folder.table("config.json"), folder.table("tokenizer_config.json")
    model_type = str(config["model_type"])
    is_seen = model_type in VLM_TYPES | BLIND_TYPES.keys()
    if not reads_as_text(model_type) and not (is_seen and can_see()):
        package = "mlx-vlm, which is not installed," if is_seen else "mlx-lm"
        return f"{package} has no code of its own for the type {_shown(model_type)}"
    for key, modules in _PLUG_INS.items():
        given = tokenizer.get(key)
        if given is not None and str(given) not in names_in(modules):
            return f"its tokenizer_config.json wants the {key} {_shown(given)}, which mlx-lm lacks"
    if _maps_tokenizer(tokenizer) and not {model_type, *_tokenizers(config, tokenizer)} & words_of(
        "transformers/models/auto/tokenization_auto.py"
    ):
        return f"its tokenizer, {_shown(tokenizer.get('tokenizer_class'))}, is code of its own"
    return None


def _maps_tokenizer(tokenizer: Json) -> bool:
    given = tokenizer.get("auto_map")
    return bool(given) and (isinstance(given, list) or "AutoTokenizer" in _table(given))


def _tokenizers(config: Json, tokenizer: Json) -> Iterator[str]:
    for given in (tokenizer.get("tokenizer_class") or config.get("tokenizer_class"),):
        if isinstance(given, str):
            yield from (given, given.removesuffix("Fast"), f"{given}Fast")


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[: _SHOWN_CHARACTERS - 1]}…"


def read_spec(
    model_id: str, path: Path, settings: ModelSettings, most_context: int | None = None
) -> ModelSpec:
    """The model in the directory `path`. Its own context counts up to `most_context`.

    Raises:
        BrokenModel: something is missing or cannot be read.
        NeedsOwnCode: it can only be loaded by code that comes with it.
    """
    folder = checked_folder(path, settings.chat_template)
    config = folder.table("config.json")
    model_type = str(config["model_type"])
    try:
        nbytes = sum(file.stat().st_size for file in folder.weights.values())
        created_s = int((path / "config.json").stat().st_mtime)
    except OSError as error:
        raise BrokenModel(f"{error.filename} cannot be read: {error.strerror}") from error
    may_see = settings.vision and settings.ranks == 1
    is_loaded_to_see = may_see and is_vision(folder, model_type)
    if is_loaded_to_see and (package := missing_package(model_type)) is not None:
        what = f"models of type {model_type} need the Python package {package}"
        raise BrokenModel(f"{what}: install it beside Hearth")
    tool_use = _tool_use(folder)
    sees = is_loaded_to_see and model_type not in BLIND_TYPES
    context = settings.context or min(_context(folder), most_context or sys.maxsize)
    return ModelSpec(
        id=model_id,
        path=str(path),
        context=context,
        model_type=model_type,
        nbytes=nbytes,
        created_s=created_s,
        chat_template=str(settings.chat_template or ""),
        is_vision=is_loaded_to_see,
        image_bytes=image_bytes(folder) if sees else 0,
        kv_bytes_per_token=_kv_bytes_of(config, settings, context),
        pooling=_pooling(path),
        sampling=settings.sampling.over(_sampling(folder)),
        capabilities=_capabilities(chats=tool_use != "no", sees=sees),
        tool_use=tool_use,
    )


def fingerprint(path: str) -> Fingerprint:
    """The state of a model's files; without those that cannot be looked at."""
    found: list[tuple[str, FileStamp]] = []
    for pattern in ("*.safetensors", "*/*.safetensors", "*.json"):
        for file in Path(path).glob(pattern):
            with contextlib.suppress(OSError):
                found.append((str(file), FileStamp.of(file.stat())))
    return tuple(sorted(found))


def model_directories(folder: Path) -> Iterator[tuple[str, Path]]:
    """The subdirectories that have a `config.json` or weights, by their names: NAME, or
    PUBLISHER/NAME where a subdirectory is none itself and has such, as LM Studio lays them out.

    Raises:
        OSError: the folder cannot be listed.
    """
    for path in sorted(folder.iterdir()):
        if not path.name.isprintable():
            continue
        if _is_meant(path):
            yield path.name, path
            continue
        with contextlib.suppress(OSError):
            for inner in sorted(path.iterdir()) if path.is_dir() else ():
                if inner.name.isprintable() and _is_meant(inner):
                    yield f"{path.name}/{inner.name}", inner


def _is_meant(path: Path) -> bool:
    return (path / "config.json").is_file() or any(path.glob("model*.safetensors"))


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
    """Whether all is there that was to be fetched; what it is like is looked at afterwards."""
    found = {file.name for file in path.glob("*.safetensors") if file.is_file()}
    try:
        index = _table(read_table(path / INDEX) if (path / INDEX).is_file() else None)
        _check_weights(path, found, _table(index.get("weight_map")))
    except BrokenModel:
        return False
    return (path / "config.json").is_file()


def _check_weights(path: Path, found: Set[str], weight_map: Json) -> None:
    """All weight files are there: every shard that the index or the names promise."""
    if not found:
        raise BrokenModel(f"{path} has no weights (*.safetensors)")
    wanted = {name for name in weight_map.values() if isinstance(name, str)}
    if not weight_map:
        wanted = {one for name in found for one in _siblings(name)}
    missing = sorted(wanted - found)
    if missing:
        others = f"{len(missing)} of its weight files missing"
        raise BrokenModel(f"{path} lacks {missing[0][:_SHOWN_CHARACTERS]} ({others})")


def _check_pointers(folder: ModelFolder) -> None:
    """No file is what git leaves in place of a large one that it did not fetch."""
    for name, real in {**folder.weights, **folder.texts}.items():
        try:
            with open_regular(real) as opened:
                is_pointer = opened.read(len(_POINTER)) == _POINTER
        except OSError:
            continue  # whoever loads it says so
        if is_pointer:
            raise BrokenModel(
                f"{folder.path / name} is a pointer of Git LFS and not the file itself: "
                f"run `git lfs pull` in {folder.path}"
            )


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
    if not (path / "modules.json").exists():
        return None
    listed = read_json(path / "modules.json")
    kinds = {
        str(_table(module).get("type", "")).rpartition(".")[2]: str(_table(module).get("path", ""))
        for module in (cast("list[object]", listed) if isinstance(listed, list) else [])
    }
    pooling = path / Path(kinds.get("Pooling", "1_Pooling")).name / "config.json"
    config = _table(read_table(pooling) if pooling.exists() else None)
    is_normalised = "Normalize" in kinds
    if config.get("pooling_mode_lasttoken"):
        return Pooling(kind="last_token", is_normalised=is_normalised)
    if config.get("pooling_mode_mean_tokens"):
        return Pooling(kind="mean", is_normalised=is_normalised)
    return None


def _table(value: object) -> Json:
    return cast("Json", value) if isinstance(value, dict) else {}


def _text_config(config: Json) -> Json:
    """What a model that reads more than text says of its decoder."""
    kinds = ("text_config", "language_config", "llm_config")
    return next((table for kind in kinds if (table := _table(config.get(kind)))), _table(None))


def _context(folder: ModelFolder) -> int:
    config, tokenizer_config = folder.table("config.json"), folder.table("tokenizer_config.json")
    text_config = _text_config(config)
    limits = (
        config.get("max_position_embeddings", text_config.get("max_position_embeddings")),
        tokenizer_config.get("model_max_length"),
    )
    sane = [one for one in limits if isinstance(one, int) and one in _SANE_CONTEXTS]
    return min(sane, default=FALLBACK_CONTEXT)


def _kv_bytes_of(config: Json, settings: ModelSettings, context: int) -> int | None:
    """The share of a token in the most that one conversation of up to `context` tokens takes:
    just before it is quantised, or at its end.
    """
    num_bytes = _kv_bytes_per_token(config, settings.kv_bits)
    start, plain = settings.quantized_kv_start, _kv_bytes_per_token(config, None)
    if not start or num_bytes is None or plain is None:
        return num_bytes
    return max(num_bytes, -(-plain * min(start, context) // context))


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


def tokenizer_info(path: Path) -> Json:
    """The settings of a model's tokenizer as its files say them, with its chat template.

    Where the files do not say the class, it is the one that reads any `tokenizer.json`.

    Raises:
        BrokenModel: its directory cannot be read any more.
    """
    folder = ModelFolder.read(path)
    given = without_code(folder.table("tokenizer_config.json"))
    assert isinstance(given, dict)
    info = {key: value for key, value in cast("Json", given).items() if key not in _PLACES}
    info.setdefault("tokenizer_class", _ANY_TOKENIZER)
    template = _text_of(folder.texts.get(TEMPLATE)) or folder.table("chat_template.json").get(
        "chat_template"
    )
    return {**info, "chat_template": template} if template else info


def _text_of(file: Path | None) -> str:
    """The beginning of a file, which is all of a template; empty where it cannot be read."""
    if file is not None:
        with contextlib.suppress(OSError), open_regular(file) as opened:
            return opened.read(_MAX_TEMPLATE_BYTES).decode("utf-8", errors="replace")
    return ""


def _templates(folder: ModelFolder) -> list[object]:
    """Its chat templates, each a text, or several by their names."""
    tables = (folder.table("tokenizer_config.json"), folder.table("chat_template.json"))
    given = [table.get("chat_template") for table in tables]
    given += (_text_of(file) for name, file in folder.texts.items() if name.endswith(".jinja"))
    return [one for number, one in enumerate(given) if one and one not in given[:number]]


def _tool_use(folder: ModelFolder) -> ToolUse:
    """As far as its chat template's text tells it, which upstream's code may stand in for."""
    if folder.table("tokenizer_config.json").get("chat_template_type"):
        return "untried"
    match _templates(folder):
        case []:
            return "no"
        case [str() as text] if "tools" in text and family_named(text) is not None:
            return "native"
        case templates:
            return "untried" if "tools" in json.dumps(templates) else "generic"


def _capabilities(*, chats: bool, sees: bool) -> tuple[str, ...]:
    """What the files promise: a template can be talked to."""
    promises = {"completion": True, "chat": chats, "vision": sees}
    return tuple(name for name, is_promised in promises.items() if is_promised)


def _sampling(folder: ModelFolder) -> SamplingParams:
    """The defaults that the model's makers give; values that make no sense are left out."""
    given = folder.table("generation_config.json")
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
