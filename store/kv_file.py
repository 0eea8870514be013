"""Files of KV: valid safetensors that describe and check themselves.

    8 bytes   length of the JSON, little-endian
    JSON      {"__metadata__": {"format", "digest", "about", "checksums"}, NAME: {…}, …} and spaces
    payload   the tensors one after the other, in the order of the JSON

`about` is JSON text that says what the file is of. `checksums` has the xxh3-128 of each tensor, and
`digest` is that of everything before the payload with itself as zeros. There is one spelling of
each file: whatever another JSON parser could read differently is refused.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec
from xxhash import xxh3_128, xxh3_128_hexdigest

from store.disk import READ_BYTES, SequentialReader, new_file, opened, read_into
from store.errors import SlotDamaged, SlotForeign

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
_ALIGNMENT = 64
_LENGTH_BYTES = 8
_NO_DIGEST = "0" * 32


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


class Tensor(NamedTuple):
    """One tensor and its bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: memoryview | bytes


class Front(NamedTuple):
    """What is in a file and where: `payload_start` counts from the file's first byte."""

    about: bytes
    entries: tuple[TensorEntry, ...]
    checksums: tuple[str, ...]
    payload_start: int

    @property
    def file_bytes(self) -> int:
        return self.payload_start + (self.entries[-1].end if self.entries else 0)


class _Metadata(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    format: str
    digest: str
    about: str
    checksums: str


class _Format(msgspec.Struct, frozen=True):
    format: str


class _Place(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    dtype: str
    shape: tuple[Size, ...]
    data_offsets: tuple[Size, Size]


def write(path: Path, kind: str, about: bytes, tensors: Sequence[Tensor]) -> int:
    """Make the file at `path`, synced, and without a name that anybody else knows; its bytes.

    Raises:
        StoreFull, StoreFailed: as `store.disk.new_file`.
    """
    entries = tuple(place((one.name, one.dtype, one.shape) for one in tensors))
    checksums = tuple(xxh3_128_hexdigest(one.data) for one in tensors)
    front = _pack(kind, about, entries, checksums)
    num_bytes = len(front) + (entries[-1].end if entries else 0)
    with new_file(path, num_bytes) as file:
        file.write(front)
        for one in tensors:
            file.write(memoryview(one.data).cast("B"))
    return num_bytes


def size_of(kind: str, about: bytes, tensors: Sequence[Tensor]) -> int:
    """How large the file is that `write` makes of these."""
    entries = tuple(place((one.name, one.dtype, one.shape) for one in tensors))
    front = _pack(kind, about, entries, (_NO_DIGEST,) * len(entries))
    return len(front) + (entries[-1].end if entries else 0)


def kind_of(path: Path) -> str:
    """What a file says that it is; anything that is no file of KV says something else.

    Raises:
        SlotMissing: there is nothing.
        SlotDamaged: it does not begin as any of them.
        StoreFailed: the system refuses.
    """
    with opened(path) as fd:
        file_bytes = os.fstat(fd).st_size
        length = int.from_bytes(_read(fd, 0, _LENGTH_BYTES, file_bytes), "little")
        if length > MAX_JSON_BYTES:
            raise SlotDamaged("the header cannot be that long")
        front = _read(fd, _LENGTH_BYTES, _LENGTH_BYTES + length, file_bytes)
    try:
        parts = msgspec.json.decode(front, type=dict[str, msgspec.Raw])
        return msgspec.json.decode(parts[METADATA], type=_Format).format
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, KeyError) as error:
        raise SlotDamaged(f"the header cannot be read: {type(error).__name__}") from error


class KvFile:
    """An open file, of that descriptor, whose front is as it was written."""

    def __init__(self, fd: int, front: Front) -> None:
        self.fd = fd
        self.front = front

    def read(
        self,
        names: Collection[str] | None = None,
        into: Callable[[TensorEntry], memoryview] = lambda one: memoryview(
            bytearray(one.num_bytes)
        ),
    ) -> list[Tensor]:
        """These tensors, or all, in their order; `into` gives the place for the bytes of one.

        Raises:
            SlotDamaged: some byte of them is not as it was written.
            StoreFailed: the system refuses.
        """
        found: list[Tensor] = []
        for some in self._at_once(names):
            places = [into(entry) for entry, _ in some]
            read_into(self.fd, places, self.front.payload_start + some[0][0].start)
            for (entry, checksum), data in zip(some, places, strict=True):
                if xxh3_128_hexdigest(data) != checksum:
                    raise SlotDamaged(f"the checksum differs of {entry.name}")
                found.append(Tensor(entry.name, entry.dtype, entry.shape, data))
        return found

    def check(self) -> None:
        """Compare all tensors with their checksums, through one small buffer. Raises as `read`."""
        reader = SequentialReader(self.fd, self.front.payload_start, self.front.file_bytes)
        for entry, checksum in zip(self.front.entries, self.front.checksums, strict=True):
            digest = xxh3_128()
            for piece in reader.take(entry.num_bytes):
                digest.update(piece)
            if digest.hexdigest() != checksum:
                raise SlotDamaged(f"the checksum differs of {entry.name}")

    def _at_once(self, names: Collection[str] | None) -> Iterator[list[tuple[TensorEntry, str]]]:
        """What is read in one call: tensors that follow each other, until they are large enough."""
        some: list[tuple[TensorEntry, str]] = []
        for entry, checksum in zip(self.front.entries, self.front.checksums, strict=True):
            is_meant = names is None or entry.name in names
            if some and (not is_meant or entry.end - some[0][0].start > READ_BYTES):
                yield some
                some = []
            if is_meant:
                some.append((entry, checksum))
        if some:
            yield some


@contextmanager
def open_file(path: Path, kind: str) -> Generator[KvFile]:
    """The file at `path`, once its front is checked.

    Raises:
        SlotMissing: there is nothing.
        SlotForeign: it is of another format version.
        SlotDamaged: it is not what it was, or never was such a file.
        StoreFailed: the system refuses.
    """
    with opened(path) as fd:
        file_bytes = os.fstat(fd).st_size
        length = int.from_bytes(_read(fd, 0, _LENGTH_BYTES, file_bytes), "little")
        if length > MAX_JSON_BYTES:
            raise SlotDamaged("the header cannot be that long")
        front = _read(fd, 0, _LENGTH_BYTES + length, file_bytes)
        yield KvFile(fd, _unpack(kind, front, file_bytes))


def _read(fd: int, start: int, end: int, file_bytes: int) -> bytes:
    if end > file_bytes:
        raise SlotDamaged("the file ends early")
    return b"".join(map(bytes, SequentialReader(fd, start, end).take(end - start)))


def _pack(
    kind: str, about: bytes, entries: Sequence[TensorEntry], checksums: Sequence[str]
) -> bytes:
    metadata = _Metadata(kind, _NO_DIGEST, about.decode(), " ".join(checksums))
    parts: dict[str, _Metadata | _Place] = {METADATA: metadata}
    for entry in entries:
        parts[entry.name] = _Place(entry.dtype, entry.shape, (entry.start, entry.end))
    json = msgspec.json.encode(parts)
    json += b" " * (-(_LENGTH_BYTES + len(json)) % _ALIGNMENT)
    front = len(json).to_bytes(_LENGTH_BYTES, "little") + json
    digest = xxh3_128(front).hexdigest()
    before, after = _around_digest(kind)
    return front[:before] + digest.encode() + front[after:]


def _around_digest(kind: str) -> tuple[int, int]:
    """Where the digest begins and ends in a file."""
    before = _LENGTH_BYTES + len(f'{{"{METADATA}":{{"format":"{kind}","digest":"')
    return before, before + len(_NO_DIGEST)


def _unpack(kind: str, front: bytes, file_bytes: int) -> Front:
    found = unpack_front(kind, front)
    if found.file_bytes != file_bytes:
        raise SlotDamaged(f"{file_bytes} bytes instead of {found.file_bytes}")
    return found


def unpack_front(kind: str, front: bytes) -> Front:
    """What everything before the payload says.

    Raises:
        SlotForeign: it is of another format version.
        SlotDamaged: it is not what it was, or never was such a file.
    """
    try:
        parts = msgspec.json.decode(front[_LENGTH_BYTES:], type=dict[str, msgspec.Raw])
        metadata = msgspec.json.decode(parts.pop(METADATA), type=_Metadata)
        places = {name: msgspec.json.decode(raw, type=_Place) for name, raw in parts.items()}
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, KeyError) as error:
        raise SlotDamaged(f"the header cannot be read: {type(error).__name__}") from error
    if metadata.format != kind:
        is_ours = metadata.format.partition("/")[0] == kind.partition("/")[0]
        error = SlotForeign if is_ours else SlotDamaged
        raise error(f"its format is {metadata.format[:64]!r} instead of {kind}")
    described = [(name, one.dtype, one.shape) for name, one in places.items()]
    for one in described:
        if problem := tensor_problem(*one):
            raise SlotDamaged(problem)
    entries, checksums = tuple(place(described)), tuple(metadata.checksums.split())
    about = metadata.about.encode()
    found = Front(about, entries, checksums, len(front))
    if len(checksums) != len(entries) or _pack(kind, about, entries, checksums) != front:
        raise SlotDamaged("the header is not as it was written")
    return found


def place(tensors: Iterable[tuple[str, str, tuple[int, ...]]]) -> list[TensorEntry]:
    """Names, dtypes and shapes in the order of the file, each given its place."""
    entries: list[TensorEntry] = []
    start = 0
    for name, dtype, shape in tensors:
        end = start + math.prod(shape) * DTYPE_BYTES[dtype]
        entries.append(TensorEntry(name, dtype, shape, start, end))
        start = end
    return entries


def tensor_problem(name: str, dtype: str, shape: tuple[int, ...]) -> str | None:
    """Why this tensor cannot be in a slot, or None."""
    if not name or len(name) > MAX_NAME_CHARS or name == METADATA:
        return f"a tensor cannot be named {name[:MAX_NAME_CHARS]!r}"
    if dtype not in DTYPE_BYTES:
        return f"tensor {name} has the unknown dtype {dtype[:MAX_NAME_CHARS]!r}"
    if len(shape) > MAX_DIMENSIONS:
        return f"tensor {name} has {len(shape)} dimensions"
    return None
