"""The model hash: what makes KV reusable, and nothing else (DESIGN section 6).

Never the name, the path, an alias, the context size or the port: two copies share, a model that
was replaced in place does not. What only changes tokens is not part of it either.

Weights are known by every byte. A digest stands for one state of a file: device, inode, size and
both times, of which no program can set back the second. Knows what upstream reads of a directory.
"""

from __future__ import annotations

import errno
import json
import os
import re
import stat
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from hashlib import blake2b, sha256
from importlib.metadata import version
from mmap import mmap
from pathlib import Path
from typing import NamedTuple, Protocol, cast

from blake3 import blake3
from huggingface_hub import constants

from runtime.ranks import KvForm
from store.types import FileStamp

NUMERICS_EPOCH = 2
"""Goes up when the same weights and tokens give other KV than before, or older KV may be wrong.

2: slots could hold room in place of the last token of a prompt that was only prefilled.
"""

AT_REST = "live dtype, lossless"
HASH_BYTES = 32

_PIECE_BYTES = 8 << 20
_NUM_READERS = 4
_MAX_PARTS = 2
_MAX_HASHERS = 8
_FINE_TICK_NS = 20_000_000
_COARSE_TICK_NS = 2_000_000_000
_COARSE_UNIT_NS = 10_000_000
_REMEMBERED_AFTER_S = 60.0
"""Longer than a page that is written through a mapping stays dirty and its file's time the same."""

_READ_WHILE_RUNNING = frozenset({"deepseek_v41", "qwen4_exp"})
"""Types of which upstream maps weights into memory and reads them whenever it computes."""

_SHA256 = re.compile(r"[0-9a-f]{64}")
_IRRELEVANT = re.compile(
    r"_name_or_path|name_or_path|architectures|auto_map|tokenizer_class|transformers_version"
    r"|(bos|eos|pad|sep|unk|cls|mask|decoder_start|forced_bos|forced_eos)_token_id"
    r"|use_cache|max_length|max_new_tokens|mlx_lm_version"
)


class DigestMemo(Protocol):
    """Remembers the digest of exactly one state of a file."""

    def get(self, stamp: FileStamp) -> bytes | None: ...

    def put(self, stamp: FileStamp, digest: bytes) -> None: ...

    def has_other(self, stamp: FileStamp) -> bool:
        """Whether the same file is remembered in another state."""
        ...


class NoMemo:
    """Remembers nothing."""

    def get(self, stamp: FileStamp) -> bytes | None:
        del stamp

    def put(self, stamp: FileStamp, digest: bytes) -> None:
        pass

    def has_other(self, stamp: FileStamp) -> bool:
        del stamp
        return False


class NotIdentified(Exception):
    """What these files hold cannot be known for certain; the message says why."""


class Stopped(Exception):
    """Nobody wants to know any more."""


class WeightFile(NamedTuple):
    """A file of weights, by the name that the model has for it, in the state it was seen in."""

    name: str
    path: Path
    stamp: FileStamp


class ModelFiles(NamedTuple):
    """A model's files at one moment: weights by state, configuration by content and state."""

    weights: tuple[WeightFile, ...]
    configs: tuple[str, ...]
    config_stamps: tuple[tuple[Path, FileStamp], ...]

    def is_unchanged(self) -> bool:
        """Whether every file is still in the state it was seen in."""
        seen = [(one.path, one.stamp) for one in self.weights] + list(self.config_stamps)
        try:
            return all(_stamp(path) == stamp for path, stamp in seen)
        except OSError:
            return False

    def settles_in_s(self, now_s: float) -> float:
        """How long until nothing can be written to these files with the times they have now."""
        times = [one.stamp.ctime_ns for one in self.weights]
        times += [stamp.ctime_ns for _, stamp in self.config_stamps]
        return max((_unsettled_ns(ctime_ns, now_s) for ctime_ns in times), default=0) / 1e9


_PLAIN = KvForm()


def look(model: Path, adapters: Sequence[Path] = ()) -> ModelFiles:
    """What lies in the directory `model`, and in those of adapters in their order.

    Raises:
        OSError: something cannot be read.
        NotIdentified: weights are elsewhere, or are read for as long as the model runs.
    """
    weights: list[WeightFile] = []
    configs: list[str] = []
    stamps: list[tuple[Path, FileStamp]] = []
    for number, folder in enumerate((model, *adapters)):
        files = (folder / name for name in ("config.json", "adapter_config.json"))
        for file in (*files, *sorted(folder.glob("*.safetensors.index.json"))):
            if not file.is_file():
                configs.append("")
                continue
            stamps.append((file, _stamp(file)))
            configs.append(_canonical(file))
        for name in _weight_names(folder):
            path = folder / name
            weights.append(WeightFile(f"{number}/{name}", path, _stamp(path)))
    return ModelFiles(tuple(weights), tuple(configs), tuple(stamps))


def known_digests(
    found: ModelFiles, memo: DigestMemo, hub_cache: Path | None = None
) -> list[bytes | None]:
    """The digest of each file of weights as far as it need not be read: in order, or None.

    The hub's cache names a large file by its SHA-256, which is believed until the file is seen to
    have changed.
    """
    hub = (hub_cache or Path(constants.HF_HUB_CACHE)).resolve()
    digests: list[bytes | None] = []
    for file in found.weights:
        digest = memo.get(file.stamp)
        named = _hub_digest(file.path, hub)
        if digest is None and named is not None and not memo.has_other(file.stamp):
            memo.put(file.stamp, named)
            digest = named
        digests.append(digest)
    return digests


def model_hash(
    found: ModelFiles,
    digests: Sequence[bytes],
    *,
    form: KvForm = _PLAIN,
    package: str = "mlx-lm",
) -> bytes:
    """32 bytes that stand for all that makes KV of a model reusable.

    `digests` are those of its weights. `package` is whose code computes it: another one's layer
    caches are of other classes.
    """
    named = zip(found.weights, digests, strict=True)
    parts = {
        "weights": [f"{file.name} {digest.hex()}" for file, digest in named],
        "configs": found.configs,
        # What computes it, down to its kernels; what it is told is in contract/test_knobs.py.
        "code": version(package) if package == "mlx-lm" else f"{package} {version(package)}",
        "mlx": version("mlx"),
        "kv": _precision(form),
        "at_rest": AT_REST,
        "epoch": NUMERICS_EPOCH,
    }
    if form.num_ranks > 1:
        parts["ranks"] = f"{form.num_ranks} by {form.split or 'what it can'}"
    text = json.dumps(parts, sort_keys=True, separators=(",", ":"))
    return blake2b(text.encode(), digest_size=HASH_BYTES).digest()


def _precision(form: KvForm) -> str:
    if form.kv_bits is None:
        return "live dtype"
    start = f" from {form.kv_start} tokens on" if form.kv_start else ""
    return f"{form.kv_bits} bits in groups of 64{start}"


def read_digests(
    found: ModelFiles,
    memo: DigestMemo,
    *,
    hub_cache: Path | None = None,
    clock: Callable[[], float] = time.time,
    should_stop: Callable[[], bool] = lambda: False,
) -> list[bytes]:
    """The digest of each file of weights; what is not known is read whole, and remembered.

    Raises:
        OSError: something cannot be read.
        NotIdentified: a file is not, or does not stay, in the state it was seen in.
        Stopped: `should_stop` said so.
    """
    hub = (hub_cache or Path(constants.HF_HUB_CACHE)).resolve()
    digests: list[bytes] = []
    for file, digest in zip(found.weights, known_digests(found, memo, hub), strict=True):
        if digest is not None:
            digests.append(digest)
            continue
        is_named = _hub_digest(file.path, hub) is not None
        digests.append(_digest(file, sha256() if is_named else _blake3(), should_stop))
        if clock() - file.stamp.ctime_ns / 1e9 > _REMEMBERED_AFTER_S:
            memo.put(file.stamp, digests[-1])
    return digests


class _Hasher(Protocol):
    def update(self, data: memoryview, /) -> object: ...

    def digest(self) -> bytes: ...


def _blake3() -> _Hasher:
    # A pool of its own: the one that all share does not survive a fork.
    return blake3(max_threads=max(1, min(_MAX_HASHERS, (os.cpu_count() or 2) // 2)))


def _digest(file: WeightFile, hasher: _Hasher, should_stop: Callable[[], bool]) -> bytes:
    """Of every byte: a few threads read ahead, in order, while what they read is hashed."""
    size = file.stamp.size_bytes
    # Mapped, so that the system has them back at the end, whatever the allocator would keep.
    piece_bytes = max(1, min(_PIECE_BYTES, size))
    buffers = [memoryview(mmap(-1, piece_bytes)) for _ in range(_NUM_READERS + 1)]
    pieces = deque(range(0, size, _PIECE_BYTES))
    under_way: deque[Future[memoryview]] = deque()
    with file.path.open("rb", buffering=0) as opened, ThreadPoolExecutor(_NUM_READERS) as readers:
        fd = opened.fileno()
        if FileStamp.of(os.fstat(fd)) != file.stamp:
            raise NotIdentified(f"{file.path} was changed")
        while pieces or under_way:
            while pieces and len(under_way) < _NUM_READERS:
                start = pieces.popleft()
                buffer = buffers[start // _PIECE_BYTES % len(buffers)]
                piece = buffer[: min(_PIECE_BYTES, size - start)]
                under_way.append(readers.submit(_read, fd, piece, start))
            hasher.update(under_way.popleft().result())
            if should_stop():
                raise Stopped
        if FileStamp.of(os.fstat(fd)) != file.stamp or _stamp(file.path) != file.stamp:
            raise NotIdentified(f"{file.path} was changed while it was read")
    return hasher.digest()


def _read(fd: int, piece: memoryview, start: int) -> memoryview:
    """Fill `piece` from there. Not through a mapping: a file that is cut would end the process."""
    done = 0
    while done < len(piece):
        count = os.preadv(fd, [piece[done:]], start + done)
        if not count:
            raise NotIdentified("a file was cut while it was read")
        done += count
    return piece


def _stamp(path: Path) -> FileStamp:
    """Raises OSError: it is not there, or is none that holds anything."""
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "is not a regular file", str(path))
    return FileStamp.of(status)


def _unsettled_ns(ctime_ns: int, now_s: float) -> int:
    """A file that was changed just now may change once more within one tick of its clock."""
    tick_ns = _FINE_TICK_NS if ctime_ns % _COARSE_UNIT_NS else _COARSE_TICK_NS
    age_ns = int(now_s * 1e9) - ctime_ns
    return tick_ns - age_ns if abs(age_ns) < tick_ns else 0


def _hub_digest(file: Path, hub: Path) -> bytes | None:
    """The SHA-256 by which the Hugging Face cache names this file; None where it is not in it."""
    blob = file.resolve()
    is_named = blob.parent.name == "blobs" and _SHA256.fullmatch(blob.name)
    repo = blob.parent.parent
    if is_named and repo.name.startswith("models--") and repo.parent == hub:
        return bytes.fromhex(blob.name)
    return None


def _weight_names(folder: Path) -> list[str]:
    """All that a loader may take for weights: what lies there, and what an index names."""
    names = {file.name for file in folder.glob("*.safetensors")}
    for index in folder.glob("*.safetensors.index.json"):
        for name in map(Path, _indexed(index)):
            is_near = len(name.parts) <= _MAX_PARTS and ".." not in name.parts
            if name.is_absolute() or not is_near:
                raise NotIdentified(f"{index} names weights elsewhere: {name}")
            if (folder / name).exists():
                names.add(name.as_posix())
    return sorted(names)


def _indexed(index: Path) -> set[str]:
    try:
        content: object = json.loads(index.read_bytes())
    except (ValueError, RecursionError):
        return set()
    table = cast("dict[str, object]", content).get("weight_map") if isinstance(content, dict) else 0
    names = cast("dict[str, object]", table).values() if isinstance(table, dict) else ()
    return {name for name in names if isinstance(name, str)}


def _canonical(file: Path) -> str:
    """Everything a configuration says of the computation, spelled in one way.

    Raises NotIdentified: it says that the computation goes on reading files.
    """
    data = file.read_bytes()
    try:
        content: object = json.loads(data)
        text = json.dumps(_relevant(content), sort_keys=True, separators=(",", ":"))
    except (ValueError, RecursionError):
        return blake2b(data).hexdigest()
    if isinstance(content, dict):
        kind = cast("dict[str, object]", content).get("model_type")
        if kind in _READ_WHILE_RUNNING:
            raise NotIdentified(f"weights of a model of type {kind} are read while it runs")
    return text


def _relevant(value: object) -> object:
    if isinstance(value, dict):
        table = cast("dict[str, object]", value)
        return {k: _relevant(one) for k, one in table.items() if not _IRRELEVANT.fullmatch(k)}
    if isinstance(value, list):
        return [_relevant(one) for one in cast("list[object]", value)]
    return value
