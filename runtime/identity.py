"""The model hash: what makes KV reusable, and nothing else (DESIGN section 6).

Never the name, the path, an alias, the context size or the port: two copies share, a model that
was replaced in place does not. What only changes tokens is not part of it either.
"""

from __future__ import annotations

import json
import re
import stat
import time
from collections.abc import Callable, Sequence
from hashlib import blake2b
from importlib.metadata import version
from pathlib import Path
from typing import BinaryIO, Protocol, cast

from runtime.ranks import KvForm
from store.types import FileStamp

NUMERICS_EPOCH = 2
"""Goes up when the same weights and tokens give other KV than before, or older KV may be wrong.

2: slots could hold room in place of the last token of a prompt that was only prefilled.
"""

AT_REST = "live dtype, lossless"
HASH_BYTES = 32

_WHOLE_BYTES = 64 << 20
_PIECE_BYTES = 64 << 10
_NUM_PIECES = 64
_CHUNK_BYTES = 1 << 20
_MAX_HEADER_BYTES = 128 << 20
_SETTLED_S = 2.0
_SHA256 = re.compile(r"[0-9a-f]{64}")
_IRRELEVANT = re.compile(
    r"_name_or_path|name_or_path|architectures|auto_map|.*_token_id|tokenizer_class"
    r"|transformers_version|use_cache|max_length|max_new_tokens|mlx_lm_version"
)


class DigestMemo(Protocol):
    """Remembers the digest of exactly one state of a file."""

    def get(self, stamp: FileStamp) -> bytes | None: ...

    def put(self, stamp: FileStamp, digest: bytes) -> None: ...


class NoMemo:
    """Remembers nothing."""

    def get(self, stamp: FileStamp) -> bytes | None:
        del stamp

    def put(self, stamp: FileStamp, digest: bytes) -> None:
        pass


_PLAIN = KvForm()


def model_hash(
    model: Path,
    *,
    form: KvForm = _PLAIN,
    adapters: Sequence[Path] = (),
    package: str = "mlx-lm",
    memo: DigestMemo | None = None,
    clock: Callable[[], float] = time.time,
) -> bytes:
    """32 bytes that stand for all that makes KV of the model in the directory `model` reusable.

    `package` is whose code computes it: another one's layer caches are of other classes.

    Reads whole files up to 64 MiB and samples of larger ones, unless `memo` knows them.

    Raises:
        OSError: something cannot be read.
    """
    memo = memo or NoMemo()
    digests = [_weights_digest(folder, memo, clock()) for folder in (model, *adapters)]
    configs = [_canonical_config(model / "config.json")]
    configs += [_canonical_config(folder / "adapter_config.json") for folder in adapters]
    parts = {
        "weights": [digest.hex() for digest in digests],
        "configs": configs,
        "code": version(package) if package == "mlx-lm" else f"{package} {version(package)}",
        "kv": "live dtype" if form.kv_bits is None else f"{form.kv_bits} bits in groups of 64",
        "at_rest": AT_REST,
        "epoch": NUMERICS_EPOCH,
    }
    if form.num_ranks > 1:
        parts["ranks"] = f"{form.num_ranks} by {form.split or 'what it can'}"
    text = json.dumps(parts, sort_keys=True, separators=(",", ":"))
    return blake2b(text.encode(), digest_size=HASH_BYTES).digest()


def _canonical_config(file: Path) -> str:
    """Everything the configuration says of the computation, spelled in one way."""
    if not file.is_file():
        return ""
    data = file.read_bytes()
    try:
        return json.dumps(_relevant(json.loads(data)), sort_keys=True, separators=(",", ":"))
    except (ValueError, RecursionError):
        return blake2b(data).hexdigest()


def _relevant(value: object) -> object:
    if isinstance(value, dict):
        table = cast("dict[str, object]", value)
        return {k: _relevant(one) for k, one in table.items() if not _IRRELEVANT.fullmatch(k)}
    if isinstance(value, list):
        return [_relevant(one) for one in cast("list[object]", value)]
    return value


def _weights_digest(folder: Path, memo: DigestMemo, now_s: float) -> bytes:
    hasher = blake2b(digest_size=HASH_BYTES)
    for file in sorted(folder.glob("*.safetensors")):
        hasher.update(_hub_digest(file) or _file_digest(file, memo, now_s))
    return hasher.digest()


def _hub_digest(file: Path) -> bytes | None:
    """The SHA-256 that the Hugging Face cache names large files by."""
    blob = file.resolve()
    if file.is_symlink() and blob.parent.name == "blobs" and _SHA256.fullmatch(blob.name):
        return bytes.fromhex(blob.name)
    return None


def _file_digest(file: Path, memo: DigestMemo, now_s: float) -> bytes:
    status = file.stat()
    if not stat.S_ISREG(status.st_mode):
        raise OSError(f"{file} is not a regular file")
    stamp = FileStamp(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)
    known = memo.get(stamp)
    if known is not None:
        return known
    with file.open("rb") as opened:
        digest = _content_digest(opened, status.st_size)
    # A file that was changed just now may change once more within one tick of its clock.
    if now_s - status.st_mtime > _SETTLED_S:
        memo.put(stamp, digest)
    return digest


def _content_digest(file: BinaryIO, num_bytes: int) -> bytes:
    hasher = blake2b(num_bytes.to_bytes(8, "little"), digest_size=HASH_BYTES)
    if num_bytes <= _WHOLE_BYTES:
        while chunk := file.read(_CHUNK_BYTES):
            hasher.update(chunk)
        return hasher.digest()
    length = file.read(8)
    hasher.update(length)
    hasher.update(file.read(min(int.from_bytes(length, "little"), _MAX_HEADER_BYTES)))
    start = file.tell()
    step = (num_bytes - _PIECE_BYTES - start) / (_NUM_PIECES - 1)
    for number in range(_NUM_PIECES):
        file.seek(start + int(number * step))
        hasher.update(file.read(_PIECE_BYTES))
    return hasher.digest()
