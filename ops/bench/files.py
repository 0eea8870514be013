"""Plain reads and writes of files, for what Hearth reads and writes to be compared with."""

import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path


def read(paths: Sequence[Path], *, keeps: bool = False, buffer_bytes: int = 1 << 20) -> float:
    """Seconds that one file after the other takes: into one buffer, or new memory with `keeps`."""
    buffer = bytearray(buffer_bytes)
    kept: list[bytearray] = []
    start = time.perf_counter()
    for path in paths:
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                if keeps:
                    kept.append(buffer)
                    buffer = bytearray(buffer_bytes)
    return time.perf_counter() - start


def forget_pages(paths: Sequence[Path]) -> None:
    """Have the system read these files from the disk when they are read next, where it can."""
    if sys.platform == "darwin":
        return
    for path in paths:
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def write(folder: Path, sizes: Sequence[int], *, buffer_bytes: int = 1 << 20) -> float:
    """Seconds that writing and syncing one file of each size after the other takes."""
    piece = memoryview(os.urandom(buffer_bytes))
    start = time.perf_counter()
    for number, size in enumerate(sizes):
        with (folder / str(number)).open("xb", buffering=0) as file:
            if sys.platform != "darwin":
                os.posix_fallocate(file.fileno(), 0, size)
            left = size
            while left:
                left -= file.write(piece[:left])
            os.fsync(file.fileno())
    return time.perf_counter() - start
