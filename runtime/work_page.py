"""`WorkPage`: whose work a worker does right now, in memory that it shares with the server.

Whatever a process dies of is one of these requests: others may wait in it, and are innocent. No
message could be told late or not at all when it dies.
"""

from __future__ import annotations

import mmap
import os
import struct
import sys
import tempfile
from collections.abc import Sequence
from typing import Literal

Part = Literal["intake", "engine"]

_PARTS: tuple[Part, ...] = ("intake", "engine")
_PLACE_BYTES = 1 << 14
_SIZE = struct.Struct("<I")
_PAGE_BYTES = 2 * len(_PARTS) * _PLACE_BYTES + mmap.PAGESIZE


def new_page() -> int:
    """The descriptor of a page on which nothing stands, for two processes. Raises OSError."""
    if sys.platform == "linux":
        fd = os.memfd_create("work")
    else:
        with tempfile.TemporaryFile() as file:
            fd = os.dup(file.fileno())
    os.ftruncate(fd, _PAGE_BYTES)
    return fd


class WorkPage:
    """The page behind a descriptor, which may be closed afterwards.

    Each part of the worker has two places. One byte says which of them counts, and the other one is
    written: so what is read is whole, whenever the process dies. One thread of a part writes at a
    time.
    """

    def __init__(self, fd: int) -> None:
        self._page = mmap.mmap(fd, _PAGE_BYTES)

    def say(self, part: Part, request_ids: Sequence[str]) -> None:
        """This part works for these from now on; the first ones, should that be a great many."""
        content = "\0".join(request_ids).encode()[: _PLACE_BYTES - _SIZE.size]
        number = 1 - self._counts(part)
        start = self._start(part, number)
        self._page[start : start + _SIZE.size] = _SIZE.pack(len(content))
        self._page[start + _SIZE.size : start + _SIZE.size + len(content)] = content
        self._page[_PARTS.index(part)] = number

    def read(self, part: Part) -> tuple[str, ...]:
        """For whom this part works, or worked when its process ended."""
        start = self._start(part, self._counts(part))
        (size,) = _SIZE.unpack(self._page[start : start + _SIZE.size])
        content = self._page[start + _SIZE.size : start + _SIZE.size + size]
        return tuple(content.decode(errors="replace").split("\0")) if content else ()

    def close(self) -> None:
        """Nobody reads it any more."""
        self._page.close()

    def _counts(self, part: Part) -> int:
        return self._page[_PARTS.index(part)] & 1

    def _start(self, part: Part, number: int) -> int:
        return mmap.PAGESIZE + (2 * _PARTS.index(part) + number) * _PLACE_BYTES
