"""Files of generated turns: workers write them, whoever deletes a conversation removes them here.

`turns/MODEL/CONVERSATION.NAME/KEY-TURN-BARE-ASKED.turn`, all of them keyed hashes in hex: NAME
stands for the name by which the model was asked, KEY for the conversation up to the turn and TURN
for this one of its answers. What was asked with tools has BARE, which stands for the same
conversation whatever its tools are. ASKED stands for the conversation up to the question: half of
the answer is found by that. A conversation without a session id has a folder that begins with
`u-`, and then with what stands for its tenant if that has a name.

A file belongs to its content. Every conversation that a turn is part of has a hard link to it in
its own folder, so the file system counts who needs it, also where a process is killed.
"""

from __future__ import annotations

import errno
import os
import shutil
from array import array
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import cached_property
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple

import msgspec

from store.disk import PRIVATE_DIRECTORY, reported
from store.keyed_names import keyed_hash

TURNS = "turns"
SUFFIX = ".turn"
UNNAMED = "u-"
_CHECK_BYTES = 16
_NAME_CHARACTERS = 32
_TENANT_CHARACTERS = 16
_TOKEN_BYTES = 4


class Turn(msgspec.Struct, frozen=True, array_like=True, dict=True):
    """A generated turn: the tokens from `start`, where its parent turn ends, to its own end.

    `key` names the conversation up to it, `parent` is its parent's `id`. `ends` are positions at
    which messages end, `prefix_end` where tools and system prompt do. `thoughts` names what was
    thought before the answer. Asked with tools, it has these packed in `tools`, unless they are
    its parent's, and `bare` names the conversation up to it whatever its tools are. `asked` names
    the conversation up to its question, and the answer begins at token `said_at`. An answer that
    was cut inside of thoughts or of a call has no key: only what comes before may be gone on from.
    A `summary` is no turn, but what stands for several; it is kept as they are, under its own key.
    """

    key: bytes
    parent: bytes
    start: int
    token_ids: bytes
    ends: tuple[int, ...] = ()
    prefix_end: int = 0
    thoughts: bytes = b""
    bare: bytes = b""
    tools: bytes = b""
    summary: str = ""
    asked: bytes = b""
    said_at: int = 0

    @cached_property
    def id(self) -> bytes:
        """Names this turn among all that may have the same key: by all of its tokens."""
        hashed = blake2b(self.key + self.parent, digest_size=_CHECK_BYTES)
        hashed.update(self.start.to_bytes(8) + self.token_ids)
        return hashed.digest()

    @property
    def end(self) -> int:
        return self.start + len(self.token_ids) // _TOKEN_BYTES


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Turn).decode


def packed(turn: Turn) -> bytes:
    """A turn as the bytes of its file."""
    payload = _encode(turn)
    return blake2b(payload, digest_size=_CHECK_BYTES).digest() + payload


def read_turn(path: Path) -> Turn | None:
    """The turn of a file; None where there is none, or a damaged one."""
    with suppress(OSError, msgspec.DecodeError):
        data = path.read_bytes()
        check, payload = data[:_CHECK_BYTES], data[_CHECK_BYTES:]
        if check == blake2b(payload, digest_size=_CHECK_BYTES).digest():
            return _decode(payload)
    return None


class Named(NamedTuple):
    """What stands for a turn in the names of files: itself, and its keys as far as it has them."""

    key: str
    turn: str
    bare: str = ""
    asked: str = ""

    @property
    def file(self) -> str:
        return "-".join(self).rstrip("-") + SUFFIX


def name_of_key(secret: bytes, key: bytes) -> str:
    """What stands for a turn's key."""
    return keyed_hash(secret, "turn", key).hex()


def name_of_turn(secret: bytes, turn_id: bytes) -> str:
    """What stands for a turn."""
    return keyed_hash(secret, "turn itself", turn_id).hex()


def named(file: str) -> Named | None:
    """What a file is called; None where that is no turn's name."""
    parts = file.removesuffix(SUFFIX).split("-")
    return (
        Named(*parts) if 2 <= len(parts) <= len(Named._fields) and file.endswith(SUFFIX) else None
    )


class Folders(NamedTuple):
    """The folders of a conversation, of all that was asked by one name, or of both; or all."""

    conversation: str | None = None
    name: str | None = None

    def __contains__(self, folder: object) -> bool:
        conversation, _, name = str(folder).partition(".")
        is_its = self.conversation in (None, conversation)
        return is_its and (self.name is None or name in ("", self.name))


def unnamed_folder(secret: bytes, beginning: bytes, tenant: bytes = b"") -> str:
    """What stands for a conversation without a session id, by what names its beginning.

    A `tenant` is told by where its hashes begin, the one without a name by nothing.
    """
    return UNNAMED + _tag(tenant) + keyed_hash(secret, "unnamed", beginning).hex()


def _tag(tenant: bytes) -> str:
    return tenant.hex()[:_TENANT_CHARACTERS]


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


def drop_folders(root: Path, whose: Folders) -> None:
    """Remove the turns of these conversations, with all models. Raises StoreFailed."""
    _remove([one.path for one in folders(root) if one.path.name in whose])


class TurnTokens(NamedTuple):
    """The tokens of a chain of KV; not `is_whole` where its end could not be read."""

    token_ids: array[int]
    is_whole: bool = True


def drop_chain(
    root: Path, model: bytes, name: str, chain: TurnTokens, tenant: bytes | None = None
) -> None:
    """Remove the turns that only this chain without a session id is made of, asked by a name.

    Those of a `tenant`, as `unnamed_folder` has it, or of any. A turn that something else goes on
    from stays, with all before it. Whose a damaged one was nobody can tell, and nobody can use it:
    it goes. Raises StoreFailed.
    """
    for path, turns in _unnamed(root, model, name, tenant):
        mine = _on_way(turns, chain)
        with reported(path):
            for file in set(path.glob(f"*{SUFFIX}")) - turns.keys():
                if read_turn(file) is None:  # it has not come just now
                    file.unlink(missing_ok=True)
            for file in sorted(mine, key=lambda one: turns[one].end, reverse=True):
                turn_id = turns.pop(file).id
                if all(other.parent != turn_id for other in turns.values()):
                    file.unlink(missing_ok=True)
                else:
                    break
        with suppress(OSError):
            path.rmdir()


def folders_of(
    root: Path, model: bytes, name: str, chain: TurnTokens, tenant: bytes
) -> tuple[str, ...]:
    """The folders with turns that a chain without a session id is made of, as by `drop_chain`."""
    unnamed = _unnamed(root, model, name, tenant)
    return tuple(path.name for path, turns in unnamed if _on_way(turns, chain))


def branch(root: Path, model: bytes, source: str, copy: str, chain: TurnTokens, end: int) -> None:
    """Let the conversation `copy` have those turns of another that end on a chain's way to `end`.

    Raises StoreFailed.
    """
    for path in turns_root(root, model).glob(f"{source}*"):
        if path.name not in Folders(conversation=source):
            continue
        folder = path.with_name(copy + path.name.removeprefix(source))
        turns = _turns_in(path)
        with reported(folder):
            for file in _on_way(turns, chain):
                if turns[file].end <= end:
                    folder.mkdir(PRIVATE_DIRECTORY, exist_ok=True)
                    link(file, folder / file.name)


def link(source: Path, target: Path) -> None:
    """One more name for a file, or a copy where the file system has no such links.

    Raises OSError.
    """
    try:
        os.link(source, target, follow_symlinks=False)
    except FileExistsError:
        return
    except FileNotFoundError:
        raise
    except OSError:
        shutil.copy(source, target, follow_symlinks=False)


def _unnamed(
    root: Path, model: bytes, name: str, tenant: bytes | None
) -> Iterator[tuple[Path, dict[Path, Turn]]]:
    """The folders of what a tenant asked by a name without a session id, with their turns.

    Those that name no tenant are among them: they may be from before tenants were named there.
    """
    for path in turns_root(root, model).glob(f"{UNNAMED}*"):
        conversation, _, _ = path.name.partition(".")
        tag = conversation.removeprefix(UNNAMED)[:-_NAME_CHARACTERS]
        if path.name in Folders(name=name) and (tenant is None or tag in ("", _tag(tenant))):
            yield path, _turns_in(path)


def _turns_in(folder: Path) -> dict[Path, Turn]:
    read = ((path, read_turn(path)) for path in sorted(folder.glob(f"*{SUFFIX}")))
    return {path: turn for path, turn in read if turn is not None}


def _on_way(turns: Mapping[Path, Turn], chain: TurnTokens) -> list[Path]:
    """The turns whose tokens, with all before them, are those of the chain as far as it goes.

    The KV of an answer may end before its last token, or lack it altogether.
    """
    found: dict[bytes, Path] = {}
    for path, turn in sorted(turns.items(), key=lambda one: one[1].start):
        there = chain.token_ids[turn.start : turn.end]
        is_seen = chain.is_whole or turn.end <= len(chain.token_ids)
        is_next = not turn.start or turn.parent in found
        if is_next and is_seen and array("I", turn.token_ids)[: len(there)] == there:
            found[turn.id] = path
    return list(found.values())


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
    """A worker may put a file there meanwhile, before it hears of the deletion."""
    for folder in folders:
        for is_last in (False, False, True):
            with reported(folder):
                try:
                    if folder.is_dir():
                        shutil.rmtree(folder, onerror=_unless_gone)
                except OSError as error:
                    if is_last or error.errno != errno.ENOTEMPTY:
                        raise


def _unless_gone(_: object, path: str, failure: tuple[object, BaseException, object]) -> None:
    """A worker that hears of it removes the same. Raises OSError where it is still there."""
    if os.path.lexists(path):
        raise failure[1]
