"""Files of learned prefixes: text that prompts begin with, so that it can be computed again.

`prefixes/MODEL/PREFIX.NAME`, keyed hashes in hex, private like slots: NAME stands for the name by
which the model was asked; files without one are from before and anybody's. Each names the
conversations that used it, as keyed hashes, and goes with the last of them. Those without a session
id are "" together: which of them used it is seen by the tokens that it begins a prompt with.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import NamedTuple

import msgspec

from store.disk import PRIVATE_DIRECTORY, PRIVATE_FILE, reported
from store.keyed_names import Chain
from store.temp_names import PART, TEMPORARY, temp_name
from store.types import UNKNOWN_HEAD, PromptHead

PREFIXES = "prefixes"


class StoredPrefix(msgspec.Struct, frozen=True):
    """`payload` is its writer's own, `head` what it is as tokens."""

    sessions: tuple[str, ...]
    payload: bytes
    head: PromptHead = UNKNOWN_HEAD


class PrefixFiles(NamedTuple):
    """Where the files of learned prefixes lie, and what keys their names.

    `room` says whether there is room for so many bytes, and keeps it as long as it is held.
    """

    root: Path
    secret: bytes
    room: Callable[[int], AbstractContextManager[bool]]


def goes_with(head: PromptHead, chain: Chain) -> bool:
    """Whether of all conversations without a session id only this one has said a prefix.

    Also where its tokens are not known: it is learned anew if somebody else asks with it.
    """
    if not head.num_tokens:
        return True
    return chain.num_alike < head.num_tokens and head.begins(chain.token_ids)


def write(root: Path, model: bytes, asked: str, name: str, prefix: StoredPrefix) -> None:
    """Keep a prefix of a model that is asked by the name `asked` stands for. Raises StoreError."""
    with reported(root / PREFIXES):
        folder = root / PREFIXES / model.hex()
        _write(folder / f"{name}.{asked}", prefix)
        (folder / name).unlink(missing_ok=True)


def read(root: Path, model: bytes, asked: str) -> dict[str, StoredPrefix]:
    """All prefixes of a model as it is asked by one name; what cannot be read is removed.

    Raises StoreError.
    """
    with reported(root / PREFIXES):
        found = _each(root / PREFIXES / model.hex())
        return {path.stem: one for path, one in found if path.suffix in ("", f".{asked}")}


def remove(root: Path, model: bytes, asked: str, name: str) -> None:
    """Remove one. Raises StoreError."""
    with reported(root / PREFIXES):
        for one in (name, f"{name}.{asked}"):
            (root / PREFIXES / model.hex() / one).unlink(missing_ok=True)


def remove_asked(root: Path, asked: str) -> None:
    """Remove those of all models that are asked by one name. Raises StoreError."""
    with reported(root / PREFIXES):
        for path in (root / PREFIXES).glob("*/*"):
            if path.suffix in ("", f".{asked}"):
                path.unlink(missing_ok=True)


def remove_session(root: Path, session: str) -> None:
    """Remove what only this conversation used, with every model. Raises StoreError."""
    with reported(root / PREFIXES):
        for folder in (root / PREFIXES).glob("*"):
            for path, one in _each(folder):
                _leave(path, one, session)


def remove_chain(root: Path, model: bytes, asked: str, chain: Chain) -> None:
    """Remove what only a conversation without a session id used, with a model that was asked by
    one name. Raises StoreError.
    """
    with reported(root / PREFIXES):
        for path, one in _each(root / PREFIXES / model.hex()):
            if path.suffix in ("", f".{asked}") and goes_with(one.head, chain):
                _leave(path, one, "")


def remove_model(root: Path, model: bytes | None) -> None:
    """Remove those of a model, or all. Raises StoreError."""
    with reported(root / PREFIXES):
        for path in (root / PREFIXES).glob(f"{model.hex() if model is not None else '*'}/*"):
            path.unlink(missing_ok=True)


def _leave(path: Path, prefix: StoredPrefix, session: str) -> None:
    left = tuple(name for name in prefix.sessions if name != session)
    if not left:
        path.unlink(missing_ok=True)
    elif left != prefix.sessions:
        _write(path, msgspec.structs.replace(prefix, sessions=left))


def _write(path: Path, prefix: StoredPrefix) -> None:
    for directory in (path.parent.parent, path.parent):
        directory.mkdir(PRIVATE_DIRECTORY, exist_ok=True)
    temporary = path.with_name(temp_name(path.name, PART))
    flags = os.O_CREAT | os.O_WRONLY | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        with os.fdopen(os.open(temporary, flags, PRIVATE_FILE), "wb") as file:
            file.write(msgspec.msgpack.encode(prefix))
        temporary.rename(path)
    except OSError:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


def _each(folder: Path) -> Iterator[tuple[Path, StoredPrefix]]:
    for path in sorted(folder.glob("*")):
        with suppress(msgspec.MsgspecError, FileNotFoundError):
            if path.name.startswith(TEMPORARY):
                continue
            yield path, msgspec.msgpack.decode(path.read_bytes(), type=StoredPrefix)
            continue
        path.unlink(missing_ok=True)
