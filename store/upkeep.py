"""What keeps the store's directories in order: abandoned files, ballast, free space."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from store.disk import (
    CHUNK_BYTES,
    new_file,
    reported,
    sync_directories,
)
from store.errors import StoreFull
from store.temp_names import (
    SUFFIX,
    TEMPORARY,
    is_abandoned,
    is_from_before,
    temp_name,
)

BALLAST = "ballast"
BALLAST_BYTES = 32 << 20
"""Four times SQLite's journal limit of 8 MiB, so that deleting rows always finds room."""

_BALLAST_SHARE = 16
"""A store that may take little has a small index, whose rows need less room to go."""

MAX_ASIDES = 2
_LOGS = ("-journal", "-wal", "-shm")

_PROBE_BYTES = 64 << 10
_PROBE_ID = "0" * 32
_PROBE_SUFFIXES = (SUFFIX, f"{SUFFIX}.zst")

MIN_FREE_BYTES = 10 << 30
MIN_FREE_FRACTION = 0.05
MAX_FLOOR_SHARE = 0.1


class DiskRoom(NamedTuple):
    """The filesystem of a store, in bytes. `floor_bytes` are to stay free for everyone else; on a
    small disk fewer.
    """

    total_bytes: int
    free_bytes: int

    @property
    def floor_bytes(self) -> int:
        least = max(MIN_FREE_BYTES, int(MIN_FREE_FRACTION * self.total_bytes))
        return min(least, int(self.total_bytes * MAX_FLOOR_SHARE))


def disk_room(root: Path) -> DiskRoom:
    """What the filesystem holds and what is free of it. Raises StoreFailed."""
    with reported(root):
        figures = os.statvfs(root)
    return DiskRoom(figures.f_blocks * figures.f_frsize, figures.f_bavail * figures.f_frsize)


def sweep_temp(root: Path) -> int:
    """Remove unfinished files of processes that are dead, but for those of slots and heads.

    Returns how many. Raises StoreFailed.
    """
    return _sweep([root])


def sweep_fan_out(directory: Path) -> int:
    """The same in the directories `00` to `ff` of another one. Raises StoreFailed."""
    return _sweep(_fan_out(directory))


def sweep_staged(directories: Iterable[Path], before_s: float) -> int:
    """The same of what lies right in these directories, and was written before that time of the
    wall clock or for an earlier server, and whose writer has ended: a head that was staged for this
    one may still be published.
    """
    paths = [path for directory in directories for path in _unfinished(directory)]
    old = [one for one in paths if is_abandoned(one.name) and _written_s(one) < before_s]
    return _remove({*old, *(path for path in paths if is_from_before(path.name))})


def _sweep(directories: Iterable[Path]) -> int:
    paths = [path for directory in directories for path in _unfinished(directory)]
    return _remove({path for path in paths if is_abandoned(path.name)})


def _remove(paths: Collection[Path]) -> int:
    for path in paths:
        with reported(path):
            path.unlink(missing_ok=True)
    return len(paths)


def _written_s(path: Path) -> float:
    with suppress(FileNotFoundError):
        return path.lstat().st_mtime
    return 0.0


def _fan_out(directory: Path) -> list[Path]:
    with reported(directory):
        return sorted(directory.glob("[0-9a-f][0-9a-f]"))


def _unfinished(directory: Path) -> list[Path]:
    gone = suppress(FileNotFoundError, NotADirectoryError)
    with reported(directory), gone, os.scandir(directory) as entries:
        return [directory / one.name for one in entries if one.name.startswith(TEMPORARY)]
    return []


def asides(root: Path, name: str) -> list[Path]:
    """Databases of that name that were put aside, with their logs. Raises StoreFailed."""
    with reported(root):
        return sorted(root.glob(f"{name}.aside-*"))


def trim_asides(root: Path, name: str) -> int:
    """Remove all but the newest of them, with their logs; returns how many. Raises StoreFailed."""
    kept = asides(root, name)
    with reported(root):
        whole = [path for path in kept if not path.name.endswith(_LOGS)]
        whole.sort(key=lambda path: path.stat().st_mtime_ns, reverse=True)
        for path in whole[MAX_ASIDES:]:
            for part in (path, *(path.with_name(path.name + log) for log in _LOGS)):
                part.unlink(missing_ok=True)
    return len(whole[MAX_ASIDES:])


def remove_asides(root: Path, name: str) -> None:
    """Remove all of them. Raises StoreFailed."""
    for path in asides(root, name):
        with reported(path):
            path.unlink(missing_ok=True)


def probe(root: Path) -> None:
    """Write a small file as slots are written: renamed when it is whole, synced, removed again.

    No name that it ever has is a slot's. Raises StoreFull, StoreFailed.
    """
    path, renamed = (root / temp_name(_PROBE_ID, suffix) for suffix in _PROBE_SUFFIXES)
    with new_file(path, _PROBE_BYTES) as file:
        file.write(bytes(_PROBE_BYTES))
    with reported(path):
        try:
            path.rename(renamed)
            sync_directories([root])
        finally:
            path.unlink(missing_ok=True)
            renamed.unlink(missing_ok=True)


def ballast_bytes(cap_bytes: int | None) -> int:
    """What may be held back of a store that takes so much: its ballast counts against its cap."""
    if cap_bytes is None:
        return BALLAST_BYTES
    return min(BALLAST_BYTES, cap_bytes // _BALLAST_SHARE // CHUNK_BYTES * CHUNK_BYTES)


def keep_ballast(root: Path, num_bytes: int = BALLAST_BYTES) -> bool:
    """Hold some disk that can be given up when it is full; False where there is no room for it.

    One that is larger is cut.

    Raises:
        StoreFailed: the system refused for another reason.
    """
    ballast = root / BALLAST
    with reported(ballast):
        if ballast.exists():
            if ballast.stat().st_size > num_bytes:
                os.truncate(ballast, num_bytes)
            return True
    if disk_room(root).free_bytes < 4 * num_bytes:
        return False
    temporary = root / temp_name("0" * 32)
    chunk = os.urandom(CHUNK_BYTES)
    try:
        with new_file(temporary, num_bytes) as file:
            for _ in range(num_bytes // CHUNK_BYTES):
                file.write(chunk)
    except StoreFull:
        return False
    with reported(ballast):
        temporary.rename(ballast)
    return True


def drop_ballast(root: Path) -> bool:
    """Give the ballast up, so that rows can be deleted on a full disk; False without one.

    Raises:
        StoreFailed: the system refused.
    """
    ballast = root / BALLAST
    with reported(ballast):
        existed = ballast.exists()
        ballast.unlink(missing_ok=True)
    return existed
