"""The bytes of a slot file: valid safetensors that describe and check themselves.

    8 bytes   length of the JSON, little-endian
    JSON      {"__metadata__": {"format", "digest", "slot", "checksums"}, "tokens": …, …} and spaces
    payload   the tensors one after the other, `tokens` (U32, [n]) first

`slot` is the `SlotHeader` as JSON text; `checksums` holds the xxh3-128 of each tensor in the order
of the file; `digest` is the xxh3-128 of everything before the payload with itself as zeros. There
is one spelling of each file: whatever another JSON parser could read differently is refused.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from typing import Annotated, NamedTuple

import msgspec
from xxhash import xxh3_128

from store.errors import SlotDamaged, SlotForeign
from store.types import MediaSpan, SlotHeader

FORMAT = "hearth-slot/1"
TOKENS = "tokens"
METADATA = "__metadata__"

DTYPE_BYTES = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "U16": 2,
    "I16": 2,
    "F16": 2,
    "BF16": 2,
    "U32": 4,
    "I32": 4,
    "F32": 4,
    "U64": 8,
    "I64": 8,
    "F64": 8,
    "C64": 8,
}

MAX_JSON_BYTES = 16 << 20
MAX_NAME_CHARS = 256
MAX_DIMENSIONS = 16

_LENGTH_BYTES = 8
_ALIGNMENT = 64
_NO_CHECKSUM = "0" * 32
_ANY_VERSION = b'{"__metadata__":{"format":"hearth-slot/'
_BEFORE_DIGEST = f'{{"{METADATA}":{{"format":"{FORMAT}","digest":"'.encode()
_DIGEST_START = _LENGTH_BYTES + len(_BEFORE_DIGEST)
_DIGEST_END = _DIGEST_START + len(_NO_CHECKSUM)
_ID = re.compile(r"[0-9a-f]{32}")
_HASH_BYTES = 16
DIGEST_BYTES = 32
_MAX_MODEL_BYTES = 64

Size = Annotated[int, msgspec.Meta(ge=0)]


class TensorEntry(NamedTuple):
    """One tensor in the file; `start` and `end` count bytes from the payload's beginning."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int
    checksum: str = _NO_CHECKSUM

    @property
    def num_bytes(self) -> int:
        return self.end - self.start


class SlotContents(NamedTuple):
    """What is in a slot file and where; `payload_start` and `file_bytes` count from its first."""

    header: SlotHeader
    tensors: tuple[TensorEntry, ...]
    payload_start: int

    @property
    def file_bytes(self) -> int:
        return self.payload_start + self.tensors[-1].end


class _Metadata(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    format: str
    digest: str
    slot: str
    checksums: str


class _Tensor(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    dtype: str
    shape: tuple[Size, ...]
    data_offsets: tuple[Size, Size]


def is_slot_id(text: str) -> bool:
    return _ID.fullmatch(text) is not None


def place(tensors: Iterable[tuple[str, str, tuple[int, ...]]]) -> list[TensorEntry]:
    """Names, dtypes and shapes in the order of the file, each given its place."""
    entries: list[TensorEntry] = []
    start = 0
    for name, dtype, shape in tensors:
        end = start + math.prod(shape) * DTYPE_BYTES[dtype]
        entries.append(TensorEntry(name, dtype, shape, start, end))
        start = end
    return entries


def pack_front(header: SlotHeader, entries: Sequence[TensorEntry]) -> bytes:
    """Everything before the payload; as long for any checksums as for others."""
    return _pack_front(msgspec.json.encode(header).decode(), entries)


def _pack_front(slot: str, entries: Sequence[TensorEntry]) -> bytes:
    checksums = " ".join(entry.checksum for entry in entries)
    parts: dict[str, _Metadata | _Tensor] = {
        METADATA: _Metadata(FORMAT, _NO_CHECKSUM, slot, checksums)
    }
    for entry in entries:
        parts[entry.name] = _Tensor(entry.dtype, entry.shape, (entry.start, entry.end))
    json = msgspec.json.encode(parts)
    json += b" " * (-(_LENGTH_BYTES + len(json)) % _ALIGNMENT)
    front = len(json).to_bytes(_LENGTH_BYTES, "little") + json
    return front[:_DIGEST_START] + _digest(front) + front[_DIGEST_END:]


def _digest(front: bytes) -> bytes:
    hasher = xxh3_128(front[:_DIGEST_START])
    hasher.update(_NO_CHECKSUM.encode())
    hasher.update(memoryview(front)[_DIGEST_END:])
    return hasher.hexdigest().encode()


def front_bytes(beginning: bytes, file_bytes: int) -> int:
    """How many bytes come before the payload, from the first ones of a file of `file_bytes`.

    Raises:
        SlotForeign: a slot of another format version.
        SlotDamaged: not a slot, or a length that cannot be.
    """
    if len(beginning) < min(_DIGEST_END, file_bytes):
        raise SlotDamaged("too little was read")
    length = int.from_bytes(beginning[:_LENGTH_BYTES], "little")
    if file_bytes < _DIGEST_END or length > min(MAX_JSON_BYTES, file_bytes - _LENGTH_BYTES):
        raise SlotDamaged("the header cannot be that long")
    if not beginning.startswith(_BEFORE_DIGEST, _LENGTH_BYTES):
        if beginning.startswith(_ANY_VERSION, _LENGTH_BYTES):
            raise SlotForeign("a slot of another format version")
        raise SlotDamaged("not a slot file")
    return _LENGTH_BYTES + length


def unpack_front(front: bytes, file_bytes: int | None) -> SlotContents:
    """Check and read everything before the payload of a file of `file_bytes`, where that is known.

    Raises:
        SlotDamaged: any byte of it is not as written, or it says what cannot be.
    """
    if front[_DIGEST_START:_DIGEST_END] != _digest(front):
        raise SlotDamaged("the header's digest differs")
    try:
        parts = msgspec.json.decode(front[_LENGTH_BYTES:], type=dict[str, msgspec.Raw])
        metadata = msgspec.json.decode(parts.pop(METADATA), type=_Metadata)
        tensors = {name: msgspec.json.decode(raw, type=_Tensor) for name, raw in parts.items()}
        header = msgspec.json.decode(metadata.slot, type=SlotHeader)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, KeyError) as error:
        raise SlotDamaged(f"the header cannot be read: {type(error).__name__}") from error
    entries = _checked_entries(tensors, metadata.checksums.split(" "))
    contents = SlotContents(header, entries, len(front))
    if _pack_front(metadata.slot, entries) != front:
        raise SlotDamaged("the header is not spelled as it is written here")
    if problem := header_problem(header, entries):
        raise SlotDamaged(problem)
    if file_bytes is not None and contents.file_bytes != file_bytes:
        raise SlotDamaged(f"{file_bytes} bytes instead of {contents.file_bytes}")
    return contents


def _checked_entries(tensors: dict[str, _Tensor], checksums: list[str]) -> tuple[TensorEntry, ...]:
    if not tensors or len(checksums) != len(tensors):
        raise SlotDamaged("tensors and checksums do not match")
    described: list[tuple[str, str, tuple[int, ...]]] = []
    for name, tensor in tensors.items():
        if problem := tensor_problem(name, tensor.dtype, tensor.shape):
            raise SlotDamaged(problem)
        described.append((name, tensor.dtype, tensor.shape))
    placed = place(described)
    for entry, tensor in zip(placed, tensors.values(), strict=True):
        if (entry.start, entry.end) != tensor.data_offsets:
            raise SlotDamaged(f"tensor {entry.name} lies where it cannot")
    return tuple(
        entry._replace(checksum=checksum) for entry, checksum in zip(placed, checksums, strict=True)
    )


def tensor_problem(name: str, dtype: str, shape: tuple[int, ...]) -> str | None:
    """Why this tensor cannot be in a slot, or None."""
    if not name or len(name) > MAX_NAME_CHARS or name == METADATA:
        return f"a tensor cannot be named {name[:MAX_NAME_CHARS]!r}"
    if dtype not in DTYPE_BYTES:
        return f"tensor {name} has the unknown dtype {dtype[:MAX_NAME_CHARS]!r}"
    if len(shape) > MAX_DIMENSIONS:
        return f"tensor {name} has {len(shape)} dimensions"
    return None


def header_problem(header: SlotHeader, entries: Sequence[TensorEntry]) -> str | None:
    """Why this header cannot be that of a slot with these tensors, or None."""
    tokens = entries[0]
    hashes = (*header.block_hashes, header.end_hash)
    parent_is_id = header.parent is None or is_slot_id(header.parent)
    if not is_slot_id(header.id) or not parent_is_id or header.parent == header.id:
        return "an id is not 32 hex characters, or the slot is its own parent"
    if not 0 <= header.start <= header.end or header.block_size < 1:
        return f"tokens {header.start} to {header.end} in blocks of {header.block_size}"
    if (tokens.name, tokens.dtype, tokens.shape) != (TOKENS, "U32", (header.num_tokens,)):
        return "the token ids are not first, or not as many as the header says"
    if any(len(one) != _HASH_BYTES for one in hashes):
        return "a hash is not 16 bytes"
    if len(header.root) not in (0, _HASH_BYTES):
        return "the root is not 16 bytes"
    if not 0 < len(header.model) <= _MAX_MODEL_BYTES:
        return "the model hash has an impossible length"
    if any(_is_odd(header, span) for span in header.media):
        return "a picture is where it cannot be"
    return None


def _is_odd(header: SlotHeader, span: MediaSpan) -> bool:
    overlaps = 0 <= span.start < span.end and span.start < header.end and span.end > header.start
    fits = not span.grid or math.prod(span.grid) == span.end - span.start
    return not (overlaps and fits and len(span.digest) == DIGEST_BYTES)
