"""The files of a model's directory that loaders may have, and a copy of them without code.

Upstream's loaders read a directory again and again, import what its files name, and some insist on
it. So they never see the directory: they get a copy that has nothing in it to import.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import shutil
import stat
import tempfile
import time
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, NamedTuple, cast

Json = Mapping[str, object]

_MAX_TABLE_BYTES = 64 << 20
_MAX_FILE_BYTES = 512 << 20
_COPY_BYTES = 1 << 20
_CONFIG = "config.json"
INDEX = "model.safetensors.index.json"
_TEMPLATES = "additional_chat_templates"
TEMPLATE = "chat_template.jinja"
_WEIGHTS = ".safetensors"
_CONSOLIDATED = "consolidated"
_TABLE = re.compile(r"config\.json|\w+_config\.json|chat_template\.json|special_tokens_map\.json")
_NOT_OURS = frozenset({"adapter_config.json", "audio_tokenizer_config.json"})
_TEXT = re.compile(
    r"(tokenizer(\.[\w.]+)?|vocab|added_tokens|normalizer|tekken)\.json"
    r"|tokenizer\.model[\w.]*|[^/]*\.(txt|model|tiktoken|jinja|jsonl|spm|codes|vocab)"
)
_ASKS_FOR_CODE = frozenset(
    """
    auto_map code_revision custom_code custom_pipelines dflash_config fast_tokenizer_files
    init_inputs model_file ple_storage speculators_model_type trust_remote_code
    """.split()
)
"""Keys by which a file has upstream import code, or read what lies elsewhere."""

_KINDS = {
    "tokenizer_class": re.compile(r"[A-Z]\w*(Tokenizer|TokenizerFast|Backend)"),
    "slow_tokenizer_class": re.compile(r"[A-Z]\w*Tokenizer"),
    "processor_class": re.compile(r"[A-Z]\w*Processor"),
    "image_processor_type": re.compile(r"[A-Z]\w*Processor(Fast|Pil)?"),
    "video_processor_type": re.compile(r"[A-Z]\w*Processor"),
    "feature_extractor_type": re.compile(r"[A-Z]\w*(FeatureExtractor|Processor)"),
}
"""What names of classes look like; upstream takes any name that it finds in transformers."""

_PARTS = frozenset("audio_tokenizer feature_extractor image_processor tokenizer".split())
"""Parts of a processor, which are tables: upstream looks for a text like a model's name."""

_ELSEWHERE = "audio_tokenizer_name_or_path"
_COPY = "hearth-model-"
_ABANDONED_S = 60.0
_SPARE_BYTES = 16 << 20


class BrokenModel(Exception):
    """A directory that is meant to be a model and cannot be one; the message says why."""


class NeedsOwnCode(BrokenModel):
    """A model that would have to run code which comes with it, and is not loaded therefore."""


class ModelFolder(NamedTuple):
    """What a model's directory holds for loaders, as it was read once.

    `tables` are the JSON objects by file name, `weights` the *.safetensors, `texts` all else that
    is copied; paths are of the files themselves, behind all links.
    """

    path: Path
    tables: Mapping[str, Json]
    weights: Mapping[str, Path]
    texts: Mapping[str, Path]

    @classmethod
    def read(cls, path: Path) -> ModelFolder:
        """Look at every file that a loader would open, and read those that hold settings.

        Raises:
            BrokenModel: one is no regular file, leads elsewhere, or is not valid.
        """
        try:
            home = path.resolve(strict=True)
            files = {name: real for name, real in _files(path, home) if real is not None}
        except (OSError, RuntimeError) as error:
            raise BrokenModel(f"{path / _CONFIG} cannot be read: {_reason(error)}") from error
        is_table = {name: _TABLE.fullmatch(name) or name == INDEX for name in files}
        found = cls(
            path,
            {name: read_table(path / name) for name in files if is_table[name]},
            {name: real for name, real in files.items() if name.endswith(_WEIGHTS)},
            {
                name: real
                for name, real in files.items()
                if not is_table[name] and not name.endswith(_WEIGHTS)
            },
        )
        return found._replace(weights=found._loaded())

    def with_template(self, file: Path) -> ModelFolder:
        """The same with the chat template in this file instead of all that it has.

        Raises:
            BrokenModel: there is no such file.
        """
        if not file.is_file():
            raise BrokenModel(f"its chat_template {file} is no file: correct it, or leave it out")
        tables = {
            name: {key: value for key, value in table.items() if key != "chat_template"}
            for name, table in self.tables.items()
        }
        texts = {name: real for name, real in self.texts.items() if _TEMPLATES not in name}
        return self._replace(tables=tables, texts=texts | {TEMPLATE: file.resolve()})

    def table(self, name: str) -> Json:
        """The settings in a file; none where there is no such file."""
        return self.tables.get(name, {})

    @property
    def weight_map(self) -> Json:
        """Tensor -> file, as the index of a sharded model says; empty where there is none."""
        found = self.table(INDEX).get("weight_map")
        return cast("Json", found) if isinstance(found, dict) else {}

    def _loaded(self) -> Mapping[str, Path]:
        """The weights without copies of the same: the files that the index names if there is one,
        and nothing `consolidated`, as Mistral has it beside.
        """
        wanted = [name for name in self.weight_map.values() if isinstance(name, str)]
        if named := {name: self.weights[name] for name in wanted if name in self.weights}:
            return named
        weights = self.weights.items()
        others = {name: real for name, real in weights if not name.startswith(_CONSOLIDATED)}
        return others or self.weights

    def write(self, target: Path) -> None:
        """Copy it there without all that asks for code. Weights are linked to.

        Raises:
            OSError: it cannot be written, or a file has become something else.
        """
        for name, real in self.weights.items():
            (target / name).symlink_to(real)
        for name, table in self.tables.items():
            kept = table if name == INDEX else without_code(table)
            (target / name).write_text(json.dumps(kept), "utf-8")
        for name, real in self.texts.items():
            (target / name).parent.mkdir(exist_ok=True)
            _copy(real, target / name)


@contextmanager
def copied(folder: ModelFolder) -> Generator[Path]:
    """A directory of the same name for upstream's loaders, which goes when they are done.

    Raises:
        OSError: it cannot be written.
    """
    _remove_abandoned()
    # Its descriptor is locked, so that a process that was killed leaves it to the next one.
    root = Path(tempfile.mkdtemp(prefix=_COPY, dir=_place(folder)))
    lock = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        target = root / (folder.path.name or "model")
        target.mkdir(mode=0o700)
        folder.write(target)
        yield target
    finally:
        shutil.rmtree(root, ignore_errors=True)
        os.close(lock)


def as_of(text: str, path: Path) -> str:
    """A message of upstream's, with the model's own directory in place of its copy."""
    places = "|".join(re.escape(str(place)) for place in _places())
    return re.sub(rf"({places})/{_COPY}\w+/{re.escape(path.name)}", lambda _: str(path), text)


def without_code(value: object) -> object:
    """The value without what would have upstream import anything, at any depth."""
    if isinstance(value, list):
        return [without_code(one) for one in cast("list[object]", value)]
    if not isinstance(value, dict):
        return value
    table = cast("Json", value)
    return {name: without_code(one) for name, one in table.items() if not _is_code(name, one)}


def asked_code(value: object) -> Iterator[tuple[str, object]]:
    """Every setting, at any depth, that names code: its key and value."""
    if isinstance(value, list):
        for one in cast("list[object]", value):
            yield from asked_code(one)
    elif isinstance(value, dict):
        for name, one in cast("Json", value).items():
            if name in _ASKS_FOR_CODE and one:
                yield name, one
            yield from asked_code(one)


def read_table(file: Path) -> Json:
    """The JSON object in a regular file.

    Raises:
        BrokenModel: there is none; the message names the file.
    """
    value = read_json(file)
    if not isinstance(value, dict):
        raise BrokenModel(f"{file} holds no JSON object")
    return cast("Json", value)


def read_json(file: Path) -> object:
    """The JSON value in a regular file.

    Raises:
        BrokenModel: there is none; the message names the file.
    """
    try:
        with open_regular(file) as opened:
            data = opened.read(_MAX_TABLE_BYTES + 1)
        if len(data) > _MAX_TABLE_BYTES:
            raise BrokenModel(f"{file} is larger than {_MAX_TABLE_BYTES >> 20} MiB")
        # As upstream reads it: in another encoding json would find what upstream does not.
        value: object = json.loads(data.decode("utf-8"))
    except OSError as error:
        raise BrokenModel(f"{file} cannot be read: {_reason(error)}") from error
    except (ValueError, RecursionError) as error:
        raise BrokenModel(f"{file} is not valid JSON: {error}") from error
    return value


def open_regular(file: Path) -> BinaryIO:
    """Open for reading what is a regular file while it is open; no pipe is waited for.

    Raises:
        OSError: there is none, or it is something else.
    """
    opened = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(opened).st_mode):
        os.close(opened)
        raise OSError(errno.EINVAL, "it is not a regular file", str(file))
    return os.fdopen(opened, "rb")


def _is_code(name: str, value: object) -> bool:
    if name in _ASKS_FOR_CODE:
        return True
    kind = _KINDS.get(name)
    if kind is not None and value is not None:
        return not (isinstance(value, str) and kind.fullmatch(value))
    if name.endswith("_file"):  # upstream takes one of special_tokens_map.json wherever it lies
        return isinstance(value, str)
    if name in _PARTS:
        return isinstance(value, str) or (isinstance(value, dict) and _ELSEWHERE in value)
    return False


def _files(path: Path, home: Path) -> Iterator[tuple[str, Path | None]]:
    """Everything a loader would open, with the file behind all links."""
    for entry in sorted(os.listdir(path)):  # noqa: PTH208  (names, also of what cannot be looked at)
        is_ours = _TABLE.fullmatch(entry) or _TEXT.fullmatch(entry) or entry == INDEX
        if (is_ours or entry.endswith(_WEIGHTS)) and entry not in _NOT_OURS:
            yield entry, _real(path / entry, home)
    templates = path / _TEMPLATES
    if templates.is_dir():
        for file in sorted(templates.glob("*.jinja")):
            yield f"{_TEMPLATES}/{file.name}", _real(file, home)


def _real(file: Path, home: Path) -> Path | None:
    """The regular file behind all links, None where they lead to nothing.

    The hub's cache links into its blobs, and people link to another copy of a file. A link to
    anything of another name is not for a model: what a template is would be told to the model.

    Raises:
        BrokenModel: it is something else, or lies where no model's file would.
    """
    try:
        real = file.resolve(strict=True)
        mode = real.stat().st_mode
    except FileNotFoundError:
        return None
    except (OSError, RuntimeError) as error:
        raise BrokenModel(f"{file} cannot be read: {_reason(error)}") from error
    if not stat.S_ISREG(mode):
        raise BrokenModel(f"{file} is not a file")
    is_blob = real.parent.name == "blobs" and real.parent.parent.name.startswith("models--")
    is_copy = real.name == file.name or real.suffix == file.suffix == _WEIGHTS
    if not (real.is_relative_to(home) or is_blob or is_copy):
        raise BrokenModel(f"{file} is a link to {real}, which is no file of a model")
    return real


def _copy(real: Path, target: Path) -> None:
    """Copy a regular file of a bounded size."""
    left = _MAX_FILE_BYTES
    with open_regular(real) as source, target.open("xb") as copy:
        while chunk := source.read(_COPY_BYTES):
            left -= len(chunk)
            if left < 0:
                raise OSError(errno.EFBIG, f"it is over {_MAX_FILE_BYTES >> 20} MiB", str(real))
            copy.write(chunk)


def _places() -> tuple[Path, ...]:
    """Where a copy may lie: in memory, which a full disk leaves alone, or with temporary files."""
    return Path("/dev/shm"), Path(tempfile.gettempdir())  # noqa: S108  (mkdtemp makes it ours)


def _place(folder: ModelFolder) -> Path:
    """The first that can be written and has room."""
    wanted = _SPARE_BYTES
    for real in folder.texts.values():
        with suppress(OSError):  # it is said when it is copied
            wanted += real.stat().st_size
    *memory, disk = _places()
    fitting = (
        place
        for place in memory
        if os.access(place, os.W_OK) and shutil.disk_usage(place).free > wanted
    )
    return next(fitting, disk)


def _remove_abandoned() -> None:
    """Copies of ours whose process was killed while it loaded."""
    for root in [root for place in _places() for root in place.glob(f"{_COPY}*")]:
        with suppress(OSError):
            lock = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                status = os.fstat(lock)
                is_old = time.time() - status.st_mtime > _ABANDONED_S
                if is_old and status.st_uid == os.getuid():
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(root, ignore_errors=True)
            finally:
                os.close(lock)


def _reason(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or "its links lead in a circle"
