"""KV of an earlier form of the store, which this one does not read.

Its index and its slots are moved aside once, and removed when they lay there for long or something
is deleted: what is deleted may be in them as well, and nobody looks.
"""

from __future__ import annotations

import shutil
import time
from contextlib import suppress
from pathlib import Path

import structlog

from store.disk import PRIVATE_DIRECTORY, disk_bytes, reported
from store.errors import StoreError

ASIDE = "format-2"
KEPT_S = 14 * 86_400.0
"""So long somebody may go back to the release that reads it."""

_INDEX = "index.db"
_APPLICATION_ID, _HEADER_BYTES = b"HRTH", 72
"""By these the header of a file of SQLite ends."""
_FOLDERS = ("slots", "quarantine")
_REPLACED = ("prefixes", "turns")
"""What was learned of prompts, and turns: both are known by heads now."""

log = structlog.stdlib.get_logger("store.earlier")


def set_aside(root: Path) -> None:
    """Move what an earlier release left at `root` aside, if there is any, and say what it takes.

    Raises:
        StoreFailed: the system refuses.
    """
    for name in _REPLACED:
        with reported(root), suppress(FileNotFoundError):
            shutil.rmtree(root / name)
    if not _is_earlier(root):
        return
    aside = root / ASIDE
    with reported(root):
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(PRIVATE_DIRECTORY)
        indexes = sorted(root.glob(f"{_INDEX}*"), reverse=True)  # no log is left without its file
        for path in [*(root / one for one in _FOLDERS), *indexes]:
            if path.exists():
                path.rename(aside / path.name)
    log.warning(
        "earlier_store_set_aside",
        path=str(aside),
        num_bytes=num_bytes(root),
        remedy="it is of a form that is no longer read: remove it to free that, or in two weeks "
        "it is removed",
    )


def num_bytes(root: Path) -> int:
    """What is set aside takes of the disk."""
    total = 0
    for path in (root / ASIDE).glob("**/*"):
        with suppress(StoreError):
            total += disk_bytes(path)
    return total


def remove(root: Path, older_than_s: float = 0.0) -> None:
    """Have nothing set aside that has been for so long. Raises StoreFailed."""
    aside = root / ASIDE
    with reported(aside), suppress(FileNotFoundError):
        if time.time() - aside.stat().st_mtime >= older_than_s:
            shutil.rmtree(aside)


def _is_earlier(root: Path) -> bool:
    """Whether the index there, or a folder of slots, is of the earlier form."""
    path = root / _INDEX
    if path.is_file():
        with reported(path), path.open("rb") as file:
            return file.read(_HEADER_BYTES).endswith(_APPLICATION_ID)
    return (root / "slots" / "00").is_dir()
