"""The calls of the system behind every file of the store, and what their failures mean.

Nothing here knows slots. A file is made by `new_file`: it is whole and synced, or it is not there.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import struct
import sys
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from itertools import islice
from pathlib import Path

from store.errors import SlotDamaged, SlotMissing, StoreFailed, StoreFull

UNIT_BYTES = 4096
"""Files take the disk in units of so much."""

CHUNK_BYTES = 1 << 20
"""Unit of writing and packing, and of the caller's chance to wait or give up."""

READ_BYTES = 256 << 10
"""What is read at once: still in the core's own cache when it is hashed right after."""

_MAX_PLACES = 1024
"""The system fills so many places in one call at the most."""

PRIVATE_FILE = 0o600
PRIVATE_DIRECTORY = 0o700

_NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_CANNOT_RESERVE = frozenset({errno.EOPNOTSUPP, errno.ENOTSUP, errno.EINVAL, errno.ENOSYS})
_NOT_A_FILE = frozenset({errno.ELOOP, errno.ENXIO, errno.EISDIR, errno.ENODEV})

# Absent from Python's fcntl module: <sys/fcntl.h> of Darwin.
_F_PREALLOCATE = 42
_F_ALLOCATEALL = 4
_F_PEOFPOSMODE = 3
_F_FULLFSYNC = 51
_F_BARRIERFSYNC = 85


@contextmanager
def reported(path: Path) -> Generator[None]:
    """Turn an `OSError` of a write into `StoreFull` or `StoreFailed`."""
    try:
        yield
    except OSError as error:
        code = errno.errorcode.get(error.errno or 0, "error")
        kind = StoreFull if error.errno in _NO_ROOM else StoreFailed
        raise kind(f"{code} at {path}") from error


@contextmanager
def opened(path: Path) -> Generator[int]:
    """A descriptor of the regular file at `path`, closed at the end; hangs on nothing.

    Raises:
        SlotMissing: there is nothing.
        SlotDamaged: it is a symbolic link, a directory, a FIFO, a socket or a device.
        StoreFailed: the system refuses.
    """
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY
    try:
        fd = os.open(path, flags)
    except FileNotFoundError as error:
        raise SlotMissing(f"{path} is gone") from error
    except OSError as error:
        if error.errno in _NOT_A_FILE:
            raise SlotDamaged(f"{path} is not a regular file") from error
        raise StoreFailed(f"cannot open {path}: {error.strerror}") from error
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise SlotDamaged(f"{path} is not a regular file")
        yield fd
    finally:
        os.close(fd)


class NewFile:
    """A file that is being written; only its maker knows its name."""

    def __init__(self, path: Path, fd: int) -> None:
        self._path = path
        self._fd = fd
        self._end = 0

    def write(self, data: memoryview | bytes) -> None:
        """Append all of `data`. Raises StoreFull, StoreFailed."""
        self.write_at(data, self._end)
        self._end += len(data)

    def write_at(self, data: memoryview | bytes, offset: int) -> None:
        """Write all of `data` at `offset`, however many calls it takes."""
        view = memoryview(data)
        with reported(self._path):
            while view:
                written = os.pwrite(self._fd, view, offset)
                if not written:
                    raise OSError(errno.EIO, "nothing was written")
                offset += written
                view = view[written:]


@contextmanager
def new_file(path: Path, num_bytes: int) -> Generator[NewFile]:
    """Make the file `path` of `num_bytes`; at the end its data is synced, on any error it is gone.

    One that is there goes first: names of unfinished files belong to one process.

    Raises:
        StoreFull: before the first byte, where the filesystem can reserve.
        StoreFailed: the system refuses. A failed sync is not tried again.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with reported(path):
        try:
            fd = os.open(path, flags, PRIVATE_FILE)
        except FileExistsError:
            path.unlink()
            fd = os.open(path, flags, PRIVATE_FILE)
    with ExitStack() as on_failure:
        on_failure.callback(_drop, path)
        with closing(fd, path):
            with reported(path):
                _reserve(fd, num_bytes)
            yield NewFile(path, fd)
            with reported(path):
                _sync_data(fd)
        on_failure.pop_all()


@contextmanager
def closing(fd: int, path: Path) -> Generator[None]:
    """Close `fd` at the end; where closing fails, the file's data may be gone as well."""
    try:
        yield
    finally:
        with reported(path):
            os.close(fd)


def _drop(path: Path) -> None:
    """Take an unfinished file away; what cannot be removed now is swept after a restart."""
    with suppress(OSError):
        path.unlink()


def _reserve(fd: int, num_bytes: int) -> None:
    """Take the space at once, so that a full disk is noticed before the first byte."""
    if not num_bytes:
        return
    try:
        if sys.platform == "darwin":
            request = struct.pack("=Iiqqq", _F_ALLOCATEALL, _F_PEOFPOSMODE, 0, num_bytes, 0)
            fcntl.fcntl(fd, _F_PREALLOCATE, request)
        else:
            os.posix_fallocate(fd, 0, num_bytes)
    except OSError as error:
        if error.errno not in _CANNOT_RESERVE:
            raise


def _sync_data(fd: int) -> None:
    """Data and size before anything that is synced later; on Darwin `fsync` promises neither."""
    if sys.platform != "darwin":
        os.fdatasync(fd)
        return
    try:
        fcntl.fcntl(fd, _F_BARRIERFSYNC)
    except OSError as error:
        if error.errno not in _CANNOT_RESERVE:
            raise
        fcntl.fcntl(fd, _F_FULLFSYNC)


def sync_directories(paths: Iterable[Path]) -> None:
    """Make names in these directories durable, each once, and what was synced before them.

    Raises:
        StoreFailed: a name may not survive a power loss.
    """
    distinct = sorted(set(paths))
    for path in distinct:
        with reported(path):
            fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        with closing(fd, path), reported(path):
            os.fsync(fd)
            if sys.platform == "darwin" and path == distinct[-1]:
                fcntl.fcntl(fd, _F_FULLFSYNC)


def make_directory(path: Path) -> None:
    """Make a private directory durable, and its parents; what exists is made private.

    Raises:
        StoreFailed: the system refuses, or something else is in its place.
    """
    with reported(path):
        missing = [one for one in (path, *path.parents) if not one.exists()]
        for directory in reversed(missing):
            directory.mkdir(PRIVATE_DIRECTORY, exist_ok=True)
            sync_directories([directory.parent])
        mode = path.lstat().st_mode
        if not stat.S_ISDIR(mode):
            raise OSError(errno.ENOTDIR, "not a directory")
        if stat.S_IMODE(mode) != PRIVATE_DIRECTORY:
            path.chmod(PRIVATE_DIRECTORY)


def disk_bytes(path: Path) -> int:
    """Bytes of disk that the file occupies; 0 where there is none.

    Raises:
        StoreFailed: the system refuses to say.
    """
    try:
        return path.lstat().st_blocks * 512
    except FileNotFoundError:
        return 0
    except OSError as error:
        raise StoreFailed(f"cannot stat {path}: {error.strerror}") from error


def bytes_below(*folders: Path) -> int:
    """Bytes of disk that all files below take, each once, however many names it has.

    What leaves meanwhile counts as nothing. Raises StoreFailed.
    """
    found: dict[int, int] = {}
    for folder in folders:
        with reported(folder):
            _note_bytes(os.fspath(folder), found)
    return sum(found.values())


def _note_bytes(folder: str, found: dict[int, int]) -> None:
    with suppress(FileNotFoundError, NotADirectoryError), os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                _note_bytes(entry.path, found)
                continue
            with suppress(FileNotFoundError):
                stat = entry.stat(follow_symlinks=False)
                found[stat.st_ino] = stat.st_blocks * 512


class SequentialReader:
    """The bytes of a file in order, from `start`, through one reused buffer."""

    def __init__(self, fd: int, start: int, file_bytes: int) -> None:
        self._fd = fd
        self._position = start
        self._buffer = memoryview(bytearray(min(READ_BYTES, max(file_bytes - start, 1))))
        self._unread = self._buffer[:0]
        if sys.platform == "linux":
            os.posix_fadvise(fd, start, 0, os.POSIX_FADV_SEQUENTIAL)

    def take(self, num_bytes: int) -> Iterator[memoryview]:
        """The next `num_bytes` in pieces, each valid until the next is asked for.

        What is asked for is read in as few pieces as there can be, if it is not small.

        Raises:
            SlotDamaged: the file ends before.
            StoreFailed: reading failed.
        """
        while num_bytes:
            if not self._unread:
                self._refill(num_bytes if num_bytes > READ_BYTES // 2 else READ_BYTES)
            piece = self._unread[:num_bytes]
            self._unread = self._unread[len(piece) :]
            num_bytes -= len(piece)
            yield piece

    def _refill(self, num_bytes: int) -> None:
        try:
            num_read = os.preadv(self._fd, [self._buffer[:num_bytes]], self._position)
        except OSError as error:
            raise StoreFailed(f"reading failed: {error.strerror}") from error
        if not num_read:
            raise SlotDamaged(f"the file ends at byte {self._position}")
        self._position += num_read
        self._unread = self._buffer[:num_read]


def read_into(fd: int, places: Sequence[memoryview], position: int) -> None:
    """Fill these places, one after the other, with the bytes of a file from `position` on.

    Raises:
        SlotDamaged: the file ends before.
        StoreFailed: reading failed.
    """
    left = deque(one for one in places if one.nbytes)
    while left:
        try:
            num_read = os.preadv(fd, list(islice(left, _MAX_PLACES)), position)
        except OSError as error:
            raise StoreFailed(f"reading failed: {error.strerror}") from error
        if not num_read:
            raise SlotDamaged(f"the file ends at byte {position}")
        position += num_read
        while left and num_read >= left[0].nbytes:
            num_read -= left.popleft().nbytes
        if num_read:
            left[0] = left[0][num_read:]


Yield = Callable[[int], None]
"""Called with the bytes moved since the last call; may wait, or raise to give up."""


def keep_going(num_bytes: int) -> None:
    """Neither wait nor give up."""
    del num_bytes


Reserve = Callable[[int], None]
"""Called with the bytes of a file before it is made; raises OverCap where that must not be."""


def file_bytes(num_bytes: int) -> int:
    """What a file of that size takes of an allowance: whole units, and one for where it lies."""
    return (-(-num_bytes // UNIT_BYTES) + 1) * UNIT_BYTES
