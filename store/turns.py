"""Files of generated turns: workers write them, whoever deletes a conversation removes them here.

`turns/MODEL/CONVERSATION/TURN.turn`, all of them keyed hashes in hex. A conversation without a
session id has a folder that begins with `u-`.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

from store.disk import reported

TURNS = "turns"
SUFFIX = ".turn"
UNNAMED = "u-"


def turns_root(root: Path, model: bytes) -> Path:
    """Where the turns of a model lie."""
    return root / TURNS / model.hex()


def turn_files(root: Path) -> Iterator[Path]:
    """All that there are. Raises StoreFailed."""
    with reported(root / TURNS):
        yield from (root / TURNS).glob(f"*/*/*{SUFFIX}")


def drop_conversation(root: Path, key: str) -> None:
    """Remove the turns of a named conversation, with all models. Raises StoreFailed."""
    _remove((root / TURNS).glob(f"*/{key}"))


def drop_unnamed(root: Path, model: bytes) -> None:
    """Remove the turns of a model's conversations without a name. Raises StoreFailed."""
    _remove(turns_root(root, model).glob(f"{UNNAMED}*"))


def drop_turns(root: Path, model: bytes | None = None) -> None:
    """Remove all turns of a model, or of any. Raises StoreFailed."""
    _remove([turns_root(root, model) if model is not None else root / TURNS])


def _remove(folders: Iterator[Path] | list[Path]) -> None:
    for folder in folders:
        with reported(folder):
            if folder.is_dir():
                shutil.rmtree(folder)
