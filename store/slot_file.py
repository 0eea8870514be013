"""The bytes of a slot file: valid safetensors that describe and check themselves.

    8 bytes   length of the JSON, little-endian
    JSON      {"__metadata__": {"format", "digest", "slot", …}, "tokens": …, …} and spaces
    payload   the tensors one after the other, `tokens` (U32, [n]) first

`slot` is the `SlotHeader` as JSON text. Checksums are xxh3-128. Tensors named `kv.…` have the
tokens first, as `tokens` has: of these each block of tokens has a checksum of its own, in `blocks`
over the bytes that all of `kv.…` have of it, in the order of the file, and in `tokens` over its
token ids; so damage costs the block that it is in. `checksums` has one for each other tensor.
`digest` is that of everything before the payload with itself as zeros. There is one spelling of
each file: whatever another JSON parser could read differently is refused.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Annotated, NamedTuple

import msgspec
from xxhash import xxh3_128

from store.errors import SlotDamaged, SlotForeign, SlotObsolete
from store.types import MediaSpan, SlotHeader

FORMAT = "hearth-slot/2"
TOKENS = "tokens"
SLICED = "kv."
"""How the names of tensors begin that have the tokens first."""

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
_EARLIER = (b'{"__metadata__":{"format":"hearth-slot/1"',)
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

    @property
    def num_bytes(self) -> int:
        return self.end - self.start

    @property
    def is_whole(self) -> bool:
        """It is checked as a whole, not block by block."""
        return self.name != TOKENS and not self.name.startswith(SLICED)


class Checksums(msgspec.Struct, frozen=True):
    """Those of a slot: of each block's token ids, of each block's KV, of each whole tensor."""

    tokens: tuple[str, ...]
    blocks: tuple[str, ...]
    whole: tuple[str, ...]

    @staticmethod
    def none(header: SlotHeader, entries: Sequence[TensorEntry]) -> Checksums:
        """As many as there will be."""
        each = (_NO_CHECKSUM,) * (len(bounds(header)) - 1)
        return Checksums(each, each, (_NO_CHECKSUM,) * sum(one.is_whole for one in entries))


class Damage(msgspec.Struct, frozen=True):
    """What of a slot is not as it was written: blocks, counted from its first, and whole tensors.

    A block of which only the token ids are damaged is damaged.
    """

    blocks: tuple[int, ...] = ()
    tensors: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.blocks or self.tensors)

    def __str__(self) -> str:
        blocks = [f"block {one}" for one in self.blocks]
        return "the checksum differs of " + ", ".join([*blocks, *self.tensors])


class SlotContents(NamedTuple):
    """What is in a slot file and where; `payload_start` and `file_bytes` count from its first."""

    header: SlotHeader
    tensors: tuple[TensorEntry, ...]
    payload_start: int
    checksums: Checksums

    @property
    def file_bytes(self) -> int:
        return self.payload_start + self.tensors[-1].end

    def damage(self, found: Checksums) -> Damage:
        """Where the checksums that were found are not those that were written."""
        said = self.checksums
        blocks = zip(said.tokens, said.blocks, found.tokens, found.blocks, strict=True)
        whole = [one.name for one in self.tensors if one.is_whole]
        differ = zip(whole, said.whole, found.whole, strict=True)
        return Damage(
            tuple(number for number, one in enumerate(blocks) if one[:2] != one[2:]),
            tuple(name for name, *two in differ if two[0] != two[1]),
        )


def bounds(header: SlotHeader) -> list[int]:
    """Where blocks begin and end in a slot, in tokens from its start: `[0, …, num_tokens]`."""
    first = header.start - header.start % header.block_size + header.block_size
    inner = range(first, header.end, header.block_size)
    return [*dict.fromkeys([0, *(at - header.start for at in inner), header.num_tokens])]


def whole_spans(header: SlotHeader, damage: Damage) -> list[tuple[int, int]]:
    """The positions `[start, end)` of a slot's blocks that are not damaged, joined where they meet.

    Of the state at its end this says nothing.
    """
    at = [header.start + one for one in bounds(header)]
    spans: list[tuple[int, int]] = []
    for number, (start, end) in enumerate(pairwise(at)):
        if number in damage.blocks:
            continue
        if spans and spans[-1][1] == start:
            spans[-1] = (spans[-1][0], end)
        else:
            spans.append((start, end))
    return spans


class Checker:
    """Computes the checksums of a payload that it is given in the order of the file."""

    def __init__(self, header: SlotHeader) -> None:
        self._bounds = bounds(header)
        num_blocks = len(self._bounds) - 1
        self._tokens = [xxh3_128() for _ in range(num_blocks)]
        self._blocks = [xxh3_128() for _ in range(num_blocks)]
        self._whole: list[xxh3_128] = []

    def tensor(self, entry: TensorEntry) -> Callable[[memoryview | bytes], None]:
        """What takes the bytes of the next tensor, in pieces of any size."""
        if entry.is_whole:
            self._whole.append(xxh3_128())
            return self._whole[-1].update
        hashers = self._tokens if entry.name == TOKENS else self._blocks
        row_bytes = entry.num_bytes // max(self._bounds[-1], 1)
        ends = [end * row_bytes for end in self._bounds[1:]]
        at = number = 0

        def take(piece: memoryview | bytes) -> None:
            nonlocal at, number
            begun, stop = at, at + len(piece)
            while at < stop:
                while ends[number] <= at:
                    number += 1
                end = min(stop, ends[number])
                is_whole = end - at == len(piece)
                part = piece if is_whole else memoryview(piece)[at - begun : end - begun]
                hashers[number].update(part)
                at = end

        return take

    def pieces(self, entry: TensorEntry) -> Iterator[tuple[int, Callable[[memoryview], None]]]:
        """The same, block by block: how many bytes come next, and what takes them."""
        take = self.tensor(entry)
        if entry.is_whole:
            yield entry.num_bytes, take
            return
        row_bytes = entry.num_bytes // max(self._bounds[-1], 1)
        for start, end in pairwise(self._bounds):
            yield (end - start) * row_bytes, take

    def checksums(self) -> Checksums:
        """All of them, when every tensor was taken."""
        every = (self._tokens, self._blocks, self._whole)
        return Checksums(*(tuple(one.hexdigest() for one in some) for some in every))


class _Metadata(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    format: str
    digest: str
    slot: str
    tokens: str
    blocks: str
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


def pack_front(
    header: SlotHeader, entries: Sequence[TensorEntry], checksums: Checksums | None = None
) -> bytes:
    """Everything before the payload; as long without checksums as with them."""
    checksums = checksums or Checksums.none(header, entries)
    return _pack_front(msgspec.json.encode(header).decode(), entries, checksums)


def _pack_front(slot: str, entries: Sequence[TensorEntry], checksums: Checksums) -> bytes:
    joined = map(" ".join, (checksums.tokens, checksums.blocks, checksums.whole))
    parts: dict[str, _Metadata | _Tensor] = {
        METADATA: _Metadata(FORMAT, _NO_CHECKSUM, slot, *joined)
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
        SlotObsolete, SlotForeign: a slot of an earlier format version, or of another one.
        SlotDamaged: not a slot, or a length that cannot be.
    """
    if len(beginning) < min(_DIGEST_END, file_bytes):
        raise SlotDamaged("too little was read")
    length = int.from_bytes(beginning[:_LENGTH_BYTES], "little")
    if file_bytes < _DIGEST_END or length > min(MAX_JSON_BYTES, file_bytes - _LENGTH_BYTES):
        raise SlotDamaged("the header cannot be that long")
    if not beginning.startswith(_BEFORE_DIGEST, _LENGTH_BYTES):
        if beginning.startswith(_EARLIER, _LENGTH_BYTES):
            raise SlotObsolete("a slot of an earlier format version")
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
    entries = _checked_entries(tensors)
    if problem := header_problem(header, entries):
        raise SlotDamaged(problem)
    said = (metadata.tokens, metadata.blocks, metadata.checksums)
    checksums = Checksums(*(tuple(text.split()) for text in said))
    none = Checksums.none(header, entries)
    if any(len(a) != len(b) for a, b in zip(_each(checksums), _each(none), strict=True)):
        raise SlotDamaged("tensors and checksums do not match")
    contents = SlotContents(header, entries, len(front), checksums)
    if _pack_front(metadata.slot, entries, checksums) != front:
        raise SlotDamaged("the header is not spelled as it is written here")
    if file_bytes is not None and contents.file_bytes != file_bytes:
        raise SlotDamaged(f"{file_bytes} bytes instead of {contents.file_bytes}")
    return contents


def _each(checksums: Checksums) -> tuple[tuple[str, ...], ...]:
    return checksums.tokens, checksums.blocks, checksums.whole


def _checked_entries(tensors: dict[str, _Tensor]) -> tuple[TensorEntry, ...]:
    if not tensors:
        raise SlotDamaged("there are no tensors")
    described: list[tuple[str, str, tuple[int, ...]]] = []
    for name, tensor in tensors.items():
        if problem := tensor_problem(name, tensor.dtype, tensor.shape):
            raise SlotDamaged(problem)
        described.append((name, tensor.dtype, tensor.shape))
    placed = place(described)
    for entry, tensor in zip(placed, tensors.values(), strict=True):
        if (entry.start, entry.end) != tensor.data_offsets:
            raise SlotDamaged(f"tensor {entry.name} lies where it cannot")
    return tuple(placed)


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
    if not is_slot_id(header.id):
        return "the id is not 32 hex characters"
    if not 0 <= header.start <= header.end or header.block_size < 1:
        return f"tokens {header.start} to {header.end} in blocks of {header.block_size}"
    if (tokens.name, tokens.dtype, tokens.shape) != (TOKENS, "U32", (header.num_tokens,)):
        return "the token ids are not first, or not as many as the header says"
    if any(len(one) != _HASH_BYTES for one in hashes):
        return "a hash is not 16 bytes"
    if len(header.start_hash) != (_HASH_BYTES if header.start else 0):
        return "the hash of what comes before is not 16 bytes, or there is nothing before"
    sliced = (entry for entry in entries if not entry.is_whole)
    if any(entry.shape[:1] != (header.num_tokens,) for entry in sliced):
        return f"a tensor that has the tokens first does not have {header.num_tokens}"
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
