"""Who looks at a store's folder from outside, while it is used, and knows nothing of its sums."""

from __future__ import annotations

import os
import threading
from pathlib import Path


def bytes_at_once(folder: Path) -> int:
    """The disk blocks of files that were all there at one moment, each once.

    A walk takes time: a file that left and one that came later were never there together. So all
    are opened first; those that still have a name when the last one is open were there then.
    """
    opened: dict[int, tuple[int, int]] = {}
    try:
        for parent, _, names in os.walk(folder):
            for name in names:
                _open(Path(parent, name), opened)
        total = 0
        for fd, num_bytes in opened.values():
            stat = os.fstat(fd)
            total += min(num_bytes, stat.st_blocks * 512) if stat.st_nlink else 0
        return total
    finally:
        for fd, _ in opened.values():
            os.close(fd)


def _open(path: Path, opened: dict[int, tuple[int, int]]) -> None:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return
    stat = os.fstat(fd)
    if stat.st_ino in opened:
        os.close(fd)
    else:
        opened[stat.st_ino] = fd, stat.st_blocks * 512


class Observer:
    """Looks again and again for as long as the block lasts; `most_bytes` is what it saw."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._look)
        self.most_bytes = 0
        self.num_looks = 0

    def __enter__(self) -> Observer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._is_over.is_set():
            self.most_bytes = max(self.most_bytes, bytes_at_once(self._folder))
            self.num_looks += 1
