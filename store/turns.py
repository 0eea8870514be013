"""Files of generated turns: workers write them, whoever deletes a conversation removes them here.

`turns/MODEL/CONVERSATION.NAME/TURN.turn`, all of them keyed hashes in hex: NAME stands for the name
by which the model was asked; folders without one are from before. A conversation without a session
id has a folder that begins with `u-`.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from store.disk import reported

TURNS = "turns"
SUFFIX = ".turn"
UNNAMED = "u-"


class Folders(NamedTuple):
    """The folders of a conversation, of all that was asked by one name, or of both; or all."""

    conversation: str | None = None
    name: str | None = None

    def __contains__(self, folder: object) -> bool:
        conversation, _, name = str(folder).partition(".")
        is_its = self.conversation in (None, conversation)
        return is_its and (self.name is None or name in ("", self.name))


EVERYBODYS = Folders()


def folder_name(conversation: str, name: str) -> str:
    """Where the turns of a conversation with a model that was asked by this name lie."""
    return f"{conversation}.{name}" if name else conversation


class TurnFolder(NamedTuple):
    """A conversation's turns; `mtime_ns` changes when one comes."""

    path: Path
    mtime_ns: int

    @property
    def model(self) -> str:
        return self.path.parent.name

    @property
    def conversation(self) -> str:
        return self.path.name.partition(".")[0]


def turns_root(root: Path, model: bytes) -> Path:
    """Where the turns of a model lie."""
    return root / TURNS / model.hex()


def turn_bytes(root: Path) -> int:
    """What they take of the disk; what leaves meanwhile counts as nothing. Raises StoreFailed."""
    with reported(root / TURNS):
        return _bytes_in(os.fspath(root / TURNS))


def _bytes_in(folder: str) -> int:
    num_bytes = 0
    with suppress(FileNotFoundError), os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                num_bytes += _bytes_in(entry.path)
            elif entry.name.endswith(SUFFIX):
                with suppress(FileNotFoundError):
                    num_bytes += entry.stat(follow_symlinks=False).st_blocks * 512
    return num_bytes


def drop_folders(root: Path, whose: Folders) -> None:
    """Remove the turns of these conversations, with all models. Raises StoreFailed."""
    _remove([one.path for one in folders(root) if one.path.name in whose])


def drop_unnamed(root: Path, model: bytes, name: str) -> None:
    """Remove the turns of a model's conversations without a session id that were asked by a name.

    Raises StoreFailed.
    """
    for one in turns_root(root, model).glob(f"{UNNAMED}*"):
        if one.name in Folders(name=name):
            _remove([one])


def folders(root: Path) -> list[TurnFolder]:
    """Those of all conversations, with all models. Raises StoreFailed."""
    found: list[TurnFolder] = []
    with reported(root / TURNS):
        for path in (root / TURNS).glob("*/*"):
            with suppress(FileNotFoundError):
                found.append(TurnFolder(path, path.stat(follow_symlinks=False).st_mtime_ns))
    return found


def drop_folder(folder: TurnFolder) -> None:
    """Remove a conversation's turns, and what is then empty. Raises StoreFailed."""
    _remove([folder.path])
    with suppress(OSError):
        folder.path.parent.rmdir()


def drop_turns(root: Path, model: bytes | None = None) -> None:
    """Remove all turns of a model, or of any. Raises StoreFailed."""
    _remove([turns_root(root, model) if model is not None else root / TURNS])


def _remove(folders: Iterator[Path] | list[Path]) -> None:
    for folder in folders:
        with reported(folder):
            if folder.is_dir():
                shutil.rmtree(folder, onerror=_unless_gone)


def _unless_gone(_: object, path: str, failure: tuple[object, BaseException, object]) -> None:
    """A worker that hears of it removes the same. Raises OSError where it is still there."""
    if os.path.lexists(path):
        raise failure[1]
