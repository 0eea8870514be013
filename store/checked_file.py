"""A slot file as whoever loads tensors from it wants it, each tensor hashed on its way into memory.

So what is in memory is what was compared with its checksum, and the bytes are moved once.
"""

from __future__ import annotations

import os
import threading
from array import array
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from xxhash import xxh3_128

from store.disk import READ_BYTES, opened
from store.errors import SlotDamaged, StoreError, StoreFailed
from store.slot_format import SlotContents, TensorEntry
from store.slots import named, read_front


class _Place(threading.local):
    """Where a thread reads next."""

    position = 0


class CheckedFile:
    """A binary file that can be read from several threads at once: `seek`, `tell`, `readinto`.

    A tensor must be read in one call. Reading never raises, as its caller may be unable to hear:
    `check` says what went wrong, and nothing that was read may be used before.
    """

    closed = False

    def __init__(self, fd: int, front: bytes, contents: SlotContents) -> None:
        """`front` is everything before the payload, checked."""
        self.contents = contents
        self._fd = fd
        self._front = front
        self._place = _Place()
        self._checksums: dict[tuple[int, int], str] = {}
        self._error: StoreError | None = None

    def tell(self) -> int:
        return self._place.position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        starts = {os.SEEK_CUR: self.tell(), os.SEEK_END: self.contents.file_bytes}
        self._place.position = offset + starts.get(whence, 0)
        return self._place.position

    def readinto(self, buffer: memoryview) -> int:
        view = memoryview(buffer)
        start = self.tell()
        self._place.position = start + view.nbytes
        if view.nbytes and start + view.nbytes <= len(self._front):
            view.cast("B")[:] = self._front[start : start + view.nbytes]
        elif view.nbytes:
            self._take(view.cast("B"), start)
        return view.nbytes

    def token_ids(self) -> array[int]:
        """The slot's token ids, to be used once checked."""
        entry = self.contents.tensors[0]
        ids = array("I", bytes(entry.num_bytes))
        if ids:
            self._take(memoryview(ids).cast("B"), self.contents.payload_start + entry.start)
        return ids

    def check(self) -> None:
        """All tensors were read, and every byte of them is as written.

        Raises:
            SlotDamaged: the file ends before, or a checksum differs.
            StoreFailed: reading failed, or a tensor was not read in one piece.
        """
        if self._error is not None:
            raise self._error
        for entry in self.contents.tensors:
            if self._checksum(entry) != entry.checksum:
                raise SlotDamaged(f"the checksum of {entry.name} differs")

    def _checksum(self, entry: TensorEntry) -> str:
        if not entry.num_bytes:
            return xxh3_128().hexdigest()
        start = self.contents.payload_start
        found = self._checksums.get((start + entry.start, start + entry.end))
        if found is None:
            raise StoreFailed(f"{entry.name} was not read in one piece")
        return found

    def _take(self, view: memoryview, start: int) -> None:
        try:
            self._checksums[start, start + len(view)] = self._read(view, start)
        except StoreError as error:
            self._error = error

    def _read(self, view: memoryview, position: int) -> str:
        hasher = xxh3_128()
        while view:
            try:
                num_read = os.preadv(self._fd, [view[:READ_BYTES]], position)
            except OSError as error:
                raise StoreFailed(f"reading failed: {error.strerror}") from error
            if not num_read:
                raise SlotDamaged(f"the file ends at byte {position}")
            hasher.update(view[:num_read])
            position += num_read
            view = view[num_read:]
        return hasher.hexdigest()


@contextmanager
def checked(path: Path) -> Generator[CheckedFile]:
    """The slot file at `path`, to load tensors from; its header is checked already.

    Raises:
        SlotMissing, SlotDamaged, StoreFailed: as `store.slots.verify`.
    """
    with opened(path) as fd:
        front, contents = read_front(fd)
        yield CheckedFile(fd, front, named(path, contents))
