"""What keeps the store's directories in order: quarantine, abandoned files, ballast, free space."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from store.disk import (
    CHUNK_BYTES,
    PRIVATE_DIRECTORY,
    make_directory,
    new_file,
    reported,
    sync_directories,
)
from store.errors import StoreFull
from store.prefixes import PREFIXES
from store.slot_file import is_slot_id
from store.slots import SLOTS
from store.temp_names import SUFFIX, TEMPORARY, is_abandoned, tells_no_writer, temp_name
from store.turns import TURNS

COLD = "cold"
QUARANTINE = "quarantine"
MAX_QUARANTINE_BYTES = 1 << 30
MAX_QUARANTINE_AGE_S = 86_400.0

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


class DiskRoom(NamedTuple):
    """The filesystem of a store, in bytes. `floor_bytes` are to stay free for everyone else."""

    total_bytes: int
    free_bytes: int

    @property
    def floor_bytes(self) -> int:
        return max(MIN_FREE_BYTES, int(MIN_FREE_FRACTION * self.total_bytes))


def disk_room(root: Path) -> DiskRoom:
    """What the filesystem holds and what is free of it. Raises StoreFailed."""
    with reported(root):
        figures = os.statvfs(root)
    return DiskRoom(figures.f_blocks * figures.f_frsize, figures.f_bavail * figures.f_frsize)


def prepare(root: Path) -> None:
    """Make the store's directories, private and durable; what exists stays. Raises StoreFailed."""
    make_directory(root)
    for name in (SLOTS, QUARANTINE):
        make_directory(root / name)
    slots = root / SLOTS
    with reported(slots):
        for number in range(256):
            (slots / f"{number:02x}").mkdir(PRIVATE_DIRECTORY, exist_ok=True)
    sync_directories([slots])


def slot_files(root: Path) -> Iterator[Path]:
    """Whatever bears the name of a published slot, in its place; of any kind and content."""
    for directory in _fan_out(root / SLOTS):
        for path in _entries(directory):
            name = path.name.removesuffix(SUFFIX)
            if is_slot_id(name) and path.name != name and directory.name == name[:2]:
                yield path


def sweep_temp(root: Path) -> int:
    """Remove unfinished files of processes that are dead, wherever in a store they may be.

    Returns how many. Raises StoreFailed.
    """
    num_swept = _sweep([root]) + sum(map(sweep_fan_out, (root / SLOTS, root / COLD)))
    return num_swept + _sweep_text(root / TURNS) + _sweep_text(root / PREFIXES)


def _sweep_text(directory: Path) -> int:
    """The same of turns or prefixes, and the folders that held nothing else."""
    with reported(directory):
        paths = list(directory.glob(f"*/{TEMPORARY}*")) + list(directory.glob(f"*/*/{TEMPORARY}*"))
    abandoned = [path for path in paths if is_abandoned(path.name) or tells_no_writer(path.name)]
    for path in abandoned:
        with reported(path):
            path.unlink(missing_ok=True)
        with suppress(OSError):
            path.parent.rmdir()
    return len(abandoned)


def sweep_fan_out(directory: Path) -> int:
    """The same in the directories `00` to `ff` of another one. Raises StoreFailed."""
    return _sweep(_fan_out(directory))


def sweep_staged(directories: Iterable[Path], before_s: float) -> int:
    """The same of what lies right in these directories, and was written before that time of the
    wall clock: a head that was staged may be published after its writer has ended.
    """
    return _sweep(directories, before_s)


def _sweep(directories: Iterable[Path], before_s: float = float("inf")) -> int:
    paths = [path for directory in directories for path in _entries(directory)]
    abandoned = [path for path in paths if is_abandoned(path.name) and _written_s(path) < before_s]
    for path in abandoned:
        with reported(path):
            path.unlink(missing_ok=True)
    return len(abandoned)


def _written_s(path: Path) -> float:
    with suppress(FileNotFoundError):
        return path.lstat().st_mtime
    return 0.0


def _fan_out(directory: Path) -> list[Path]:
    with reported(directory):
        return sorted(directory.glob("[0-9a-f][0-9a-f]"))


def _entries(directory: Path) -> list[Path]:
    with reported(directory):
        return sorted(directory.iterdir()) if directory.is_dir() else []


def quarantine(root: Path, path: Path) -> Path:
    """Move a damaged file out of the way, keeping it for a day. Returns where it is now.

    Raises:
        StoreFailed: it cannot be moved, or is gone.
    """
    directory = root / QUARANTINE
    make_directory(directory)
    moved = directory / f"{time.time_ns():020d}-{path.name}"
    with reported(path):
        path.rename(moved)
    trim_quarantine(root)
    return moved


def quarantined(root: Path) -> dict[str, int]:
    """The files in quarantine, by their paths below the root: when they changed. Raises
    StoreFailed.
    """
    directory = root / QUARANTINE
    with reported(directory):
        kept = sorted(directory.iterdir()) if directory.is_dir() else []
        return {f"{QUARANTINE}/{path.name}": path.lstat().st_mtime_ns for path in kept}


def trim_quarantine(
    root: Path, max_bytes: int = MAX_QUARANTINE_BYTES, old: Collection[str] = ()
) -> int:
    """Remove what is `old`, by its path below the root, and the oldest until the rest is small
    enough; returns how many. `max_bytes=0` empties it. Raises StoreFailed.
    """
    directory = root / QUARANTINE
    with reported(directory):
        kept = sorted(directory.iterdir()) if directory.is_dir() else []
        sizes = [path.lstat().st_blocks * 512 for path in kept]
        too_much = sum(sizes) - max_bytes
        num_removed = 0
        for path, size in zip(kept, sizes, strict=True):
            is_old = f"{QUARANTINE}/{path.name}" in old
            if too_much <= 0 and not is_old and max_bytes:
                continue
            _remove_anything(path)
            too_much -= size
            num_removed += 1
    return num_removed


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


def _remove_anything(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def probe(root: Path) -> None:
    """Write a small file as slots are written: beside them, renamed when it is whole, synced.

    It is removed again, and no name it ever has is a slot's. Raises StoreFull, StoreFailed.
    """
    directory = root / SLOTS / _PROBE_ID[:2]
    make_directory(directory)
    path, renamed = (directory / temp_name(_PROBE_ID, suffix) for suffix in _PROBE_SUFFIXES)
    with new_file(path, _PROBE_BYTES) as file:
        file.write(bytes(_PROBE_BYTES))
    with reported(path):
        try:
            path.rename(renamed)
            sync_directories([directory])
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
