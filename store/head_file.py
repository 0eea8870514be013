"""A head on disk: a conversation as it stood when a turn ended, in one small file."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import msgspec

from store.block_names import pack_ids
from store.disk import reported
from store.errors import SlotDamaged
from store.keyed_names import Asker, conversation_key, keyed_hash
from store.kv_file import Tensor, open_file, size_of, write
from store.slots import TOKENS, BlockKey

HEAD = "hearth-head/1"

KEPT = "kept"
"""Pins a conversation whatever it becomes, and not only what it is: its next head has it then."""


class Owner(NamedTuple):
    """Whose a head is: the name under which the model was asked, the session, and what names of its
    tenant's blocks begin with. All three are keyed hashes; without a session it is empty.
    """

    asked: bytes
    session: bytes
    root: bytes


def owner_of(secret: bytes, asker: Asker, root: bytes) -> Owner:
    """Whose a head is that this asker says, by names that are keyed with the store's secret."""
    session = b"" if asker.session_id is None else conversation_key(secret, asker.session_id)
    return Owner(keyed_hash(secret, "model", asker.model.encode()), session, root)


class Head(msgspec.Struct, frozen=True):
    """What a head says of itself, without its tokens and KV.

    `name` is the model's, as it was asked. `continues` names the tokens it goes on from
    (`HashChain.end_hash`): the head of its owner that ends there is replaced by it. `ttl_s` is None
    for ever, else seconds after the last use; with `pins` it stays until all who pinned it have
    taken that back. One without tokens keeps the pin of a conversation that is yet to come.
    `layout` is JSON text that only the packer of KV reads, and `block_ms` what computing one of its
    blocks took, on average.
    """

    id: str
    model: bytes
    owner: Owner
    num_tokens: int
    name: str = ""
    continues: bytes = b""
    ttl_s: float | None = None
    pins: tuple[str, ...] = ()
    layout: str = ""
    block_ms: float = 1.0

    @property
    def is_pinned(self) -> bool:
        """Whether somebody pinned it."""
        return bool(self.pins)


class _About(Head, frozen=True):
    """A head as its file has it, with its turns."""

    said: bytes = b""


class HeadFile(NamedTuple):
    """A head and its tokens, without what comes behind its last whole block. What it has `said` is
    as `turns.packed` makes it.
    """

    head: Head
    token_ids: Sequence[int]
    said: bytes = b""


class KnownHead(NamedTuple):
    """A head that was published: its last whole block if it has one, the name of its end, and its
    file of `num_bytes` on disk, of which the KV behind the last whole block takes `end_bytes`. One
    that is in memory only has its tokens instead of a file. Its `num_turns` turns are found by
    `digests`, of 16 bytes each, which are keyed. Times are trusted time, and `hits` as they were at
    `last_used_s`.
    """

    head: Head
    last: BlockKey | None
    end: bytes
    path: Path | None = None
    token_ids: Sequence[int] = ()
    num_bytes: int = 0
    end_bytes: int = 0
    created_s: float = 0.0
    last_used_s: float = 0.0
    hits: float = 0.0
    digests: bytes = b""
    num_turns: int = 0


def head_folder(folder: Path, last: BlockKey) -> Path:
    """Where the heads are that end behind this block, or behind a root of that name."""
    return folder / last.model.hex() / last.name.hex()


def heads_behind(folder: Path, last: BlockKey) -> list[Path]:
    """These heads; the one used last comes first. Raises StoreFailed."""
    found: list[tuple[int, Path]] = []
    with reported(folder), suppress(FileNotFoundError):
        for path in head_folder(folder, last).iterdir():
            with suppress(FileNotFoundError):  # it leaves just now
                found.append((path.stat().st_mtime_ns, path))
    return [path for _, path in sorted(found, reverse=True)]


def write_head(
    path: Path,
    head: Head,
    token_ids: Sequence[int],
    tensors: Sequence[Tensor] = (),
    said: bytes = b"",
) -> int:
    """Make the file of a head at `path`; its bytes.

    `tensors` are the KV behind its last whole block, and the states at its end; `said` is as in
    `HeadFile`.

    Raises:
        StoreFull, StoreFailed: the system has no room, or refuses.
    """
    return write(path, HEAD, _about(head, said), _with_ids(token_ids, tensors))


def head_bytes(
    head: Head, token_ids: Sequence[int], tensors: Sequence[Tensor] = (), said: bytes = b""
) -> int:
    """How large the file is that `write_head` makes of these."""
    return size_of(HEAD, _about(head, said), _with_ids(token_ids, tensors))


def bare_bytes(file: HeadFile) -> int:
    """How large the file of a head is that has nothing behind its last whole block."""
    head = msgspec.structs.replace(file.head, layout="")
    return head_bytes(head, file.token_ids, (), file.said)


def _about(head: Head, said: bytes) -> bytes:
    """The same whether it is read again as a head or with its turns."""
    return msgspec.json.encode(_About(**msgspec.structs.asdict(head), said=said))


def _with_ids(token_ids: Sequence[int], tensors: Sequence[Tensor]) -> list[Tensor]:
    return [Tensor(TOKENS, "U32", (len(token_ids),), pack_ids(token_ids)), *tensors]


def read_head(path: Path) -> HeadFile:
    """A head with its tokens and turns.

    Raises:
        SlotMissing, SlotForeign, SlotDamaged, StoreFailed: as `kv_file.open_file`.
    """
    with open_file(path, HEAD) as file:
        try:
            about = msgspec.json.decode(file.front.about, type=_About)
        except msgspec.MsgspecError as error:
            raise SlotDamaged("it does not say of what it is") from error
        data = b"".join(one.data for one in file.read({TOKENS}))
    token_ids = array("I", data)
    if len(token_ids) != about.num_tokens:
        raise SlotDamaged(f"{len(token_ids)} tokens instead of {about.num_tokens}")
    fields = msgspec.structs.asdict(about)
    said = fields.pop("said")
    return HeadFile(Head(**fields), token_ids, said)


def read_end(path: Path) -> list[Tensor]:
    """The KV behind the last whole block of a head, and the states at its end.

    Raises as `read_head`.
    """
    with open_file(path, HEAD) as file:
        return [one for one in file.read() if one.name != TOKENS]
