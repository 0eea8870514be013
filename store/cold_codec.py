"""How a slot is made small for the cold store and comes back byte for byte.

Within each tensor, MiB by MiB, the first bytes of all values come first, then all second bytes
and so on: exponents repeat, mantissas do not. What follows is one zstd stream after a name for
the format, which zstd itself skips. Figures: docs/decisions, cold compression.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import IO, Protocol, cast

import zstandard

from store.disk import CHUNK_BYTES, SequentialReader, Yield
from store.errors import SlotDamaged, SlotForeign
from store.kv_file import DTYPE_BYTES, MAX_JSON_BYTES, TensorEntry

LEVEL = 1

_MAX_WINDOW_BYTES = 8 << 20
_NAME = b"hearth-cold/1\0\0\0"
_FORMAT = b"\x50\x2a\x4d\x18" + len(_NAME).to_bytes(4, "little") + _NAME
_LENGTH_BYTES = 8

# A block has one table of symbols: exponents and mantissas in one block spoil it for both.
_MIN_FLUSH_BYTES = 1 << 10


class ByteSource(Protocol):
    """Where the packed bytes come from; an empty read is the end."""

    def read(self, size: int = -1, /) -> bytes: ...


class _Chunker(Protocol):
    """What zstandard's chunker does; its own annotations leave that out."""

    def compress(self, data: bytes, /) -> Iterator[bytes]: ...

    def flush(self) -> Iterator[bytes]: ...

    def finish(self) -> Iterator[bytes]: ...


def split_planes(chunk: bytes, item_bytes: int) -> list[bytes]:
    """All first bytes of the items, all second bytes, and so on."""
    if item_bytes == 1:
        return [chunk]
    return [chunk[plane::item_bytes] for plane in range(item_bytes)]


def join_planes(chunk: bytes, item_bytes: int) -> bytes:
    """The items again, from their planes one after the other."""
    if item_bytes == 1:
        return chunk
    num_items = len(chunk) // item_bytes
    joined = bytearray(len(chunk))
    for plane in range(item_bytes):
        joined[plane::item_bytes] = chunk[plane * num_items : (plane + 1) * num_items]
    return bytes(joined)


def _chunk_sizes(entry: TensorEntry) -> Iterator[int]:
    for start in range(0, entry.num_bytes, CHUNK_BYTES):
        yield min(CHUNK_BYTES, entry.num_bytes - start)


def pack(
    fd: int, payload_start: int, entries: Sequence[TensorEntry], yield_: Yield
) -> Iterator[bytes]:
    """The packed bytes of the slot file open at `fd`, about a MiB each.

    `yield_` is called with the bytes read since its last call.

    Raises:
        SlotDamaged: the file is shorter than it says.
        StoreFailed: reading failed.
    """
    yield _FORMAT
    compressor = zstandard.ZstdCompressor(level=LEVEL, write_checksum=True)
    file_bytes = payload_start + (entries[-1].end if entries else 0)
    stream = cast("_Chunker", compressor.chunker(file_bytes, CHUNK_BYTES))
    reader = SequentialReader(fd, 0, file_bytes)
    yield from stream.compress(b"".join(map(bytes, reader.take(payload_start))))
    for entry in entries:
        for size in _chunk_sizes(entry):
            chunk = b"".join(map(bytes, reader.take(size)))
            for plane in split_planes(chunk, DTYPE_BYTES[entry.dtype]):
                yield from stream.compress(plane)
                if len(plane) >= _MIN_FLUSH_BYTES:
                    yield from stream.flush()
            yield_(size)
    yield from stream.finish()


class UnpackedBytes:
    """The bytes of a packed file of KV: first its `front`, then each tensor as it was."""

    def __init__(self, source: ByteSource) -> None:
        """Read as far as the header.

        Raises:
            SlotForeign: another format version.
            SlotDamaged: not a packed slot.
        """
        beginning = _read_exactly(source, len(_FORMAT))
        if beginning != _FORMAT:
            is_ours = beginning.startswith(_FORMAT[:8] + b"hearth-cold/")
            raise (SlotForeign if is_ours else SlotDamaged)("not a packed slot of this format")
        decompressor = zstandard.ZstdDecompressor(max_window_size=_MAX_WINDOW_BYTES)
        packed = cast("IO[bytes]", source)
        self._stream = decompressor.stream_reader(packed, read_size=CHUNK_BYTES)
        self.front = self._read_front()

    def _read_front(self) -> bytes:
        length = self._read(_LENGTH_BYTES)
        num_json_bytes = int.from_bytes(length, "little")
        if num_json_bytes > MAX_JSON_BYTES:
            raise SlotDamaged("the header cannot be that long")
        return length + self._read(num_json_bytes)

    def _read(self, num_bytes: int) -> bytes:
        try:
            return _read_exactly(self._stream, num_bytes)
        except zstandard.ZstdError as error:
            raise SlotDamaged(f"cannot be decompressed: {error}") from error

    def tensor(self, entry: TensorEntry) -> Iterator[bytes]:
        """The bytes of the next tensor, unchecked. Raises SlotDamaged."""
        for size in _chunk_sizes(entry):
            yield join_planes(self._read(size), DTYPE_BYTES[entry.dtype])

    def end(self) -> None:
        """Check that this was all. Raises SlotDamaged."""
        try:
            is_more = bool(self._stream.read(1))
        except zstandard.ZstdError as error:
            raise SlotDamaged(f"cannot be decompressed: {error}") from error
        if is_more:
            raise SlotDamaged("there is more than the slot")


def _read_exactly(source: ByteSource, num_bytes: int) -> bytes:
    parts: list[bytes] = []
    while num_bytes:
        part = source.read(num_bytes)
        if not part:
            raise SlotDamaged("the packed slot ends early")
        parts.append(part)
        num_bytes -= len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)


class ChunkSource:
    """Chunks of any size as something to read from."""

    def __init__(self, chunks: Iterable[memoryview]) -> None:
        self._chunks = iter(chunks)
        self._unread = memoryview(b"")

    def read(self, size: int = -1, /) -> bytes:
        while not self._unread:
            chunk = next(self._chunks, None)
            if chunk is None:
                return b""
            self._unread = chunk
        part = bytes(self._unread[:size] if size >= 0 else self._unread)
        self._unread = self._unread[len(part) :]
        return part
