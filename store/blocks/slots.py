"""The folder of slots: whoever knows a block's name finds its file, or computes the block.

Nobody is told of a slot that comes or goes, and none is locked: a slot is made beside its place and
named in one step, who has the same writes the same, and who has opened one reads on when it goes.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import msgspec

from store.block_names import pack_ids
from store.blocks.kv_file import Tensor, open_file, write
from store.disk import make_directory, reported, sync_directories
from store.errors import SlotDamaged, SlotForeign, SlotMissing
from store.temp_names import SUFFIX, TEMPORARY, is_abandoned, temp_name

SLOT = "hearth-slot/3"
TOKENS = "tokens"


class BlockKey(NamedTuple):
    """A block of a model: its model hash, and its name."""

    model: bytes
    name: bytes


class SlotAbout(msgspec.Struct, frozen=True):
    """What a slot says of itself. `layout` is JSON text that only the packer of KV reads, and
    `recompute_ms` what computing the block took.
    """

    model: bytes
    name: bytes
    layout: str = ""
    recompute_ms: float = 0.0


class Slot(NamedTuple):
    """A block as it was read."""

    about: SlotAbout
    tensors: list[Tensor]


def nothing() -> None:
    """Called before each change of the disk; a test's raises, as a kill would come there."""


class Slots:
    """Slots below `root`, in a folder for each model."""

    def __init__(self, root: Path, before_change: Callable[[], None] = nothing) -> None:
        self._root = root
        self._before_change = before_change

    def path(self, key: BlockKey) -> Path:
        return self._root / key.model.hex() / f"{key.name.hex()}{SUFFIX}"

    def has(self, key: BlockKey) -> bool:
        return self.path(key).is_file()

    def put(
        self, about: SlotAbout, token_ids: Sequence[int], tensors: Sequence[Tensor]
    ) -> int | None:
        """Have a slot of this block; its bytes, or None where it was there.

        Its name is durable once `sync` returns.

        Raises:
            StoreFull, StoreFailed: the system has no room, or refuses.
        """
        path = self.path(BlockKey(about.model, about.name))
        if path.is_file():
            return None
        if not path.parent.is_dir():
            make_directory(path.parent)
        self._before_change()
        ids = Tensor(TOKENS, "U32", (len(token_ids),), pack_ids(token_ids))
        staged = path.with_name(temp_name(about.name.hex()))
        num_bytes = write(staged, SLOT, msgspec.json.encode(about), [ids, *tensors])
        self._before_change()
        with reported(path):
            staged.replace(path)
        return num_bytes

    def sync(self, models: Sequence[bytes]) -> None:
        """Make the names of slots durable that were put before. Raises StoreFailed."""
        sync_directories(self._root / one.hex() for one in models)

    def read(self, key: BlockKey, token_ids: Sequence[int]) -> Slot | None:
        """A block whose tokens are these, or None. What is not as it was written is removed.

        Raises:
            StoreFailed: the system refuses.
        """
        try:
            with open_file(self.path(key), SLOT) as file:
                about = msgspec.json.decode(file.front.about, type=SlotAbout)
                ids, *tensors = file.read()
        except (SlotMissing, SlotForeign):
            return None
        except (SlotDamaged, msgspec.MsgspecError, ValueError):
            self.remove(key)
            return None
        is_meant = BlockKey(about.model, about.name) == key and ids.name == TOKENS
        return Slot(about, tensors) if is_meant and ids.data == pack_ids(token_ids) else None

    def remove(self, key: BlockKey) -> None:
        """Have no slot of this block."""
        path = self.path(key)
        if os.path.lexists(path):
            self._before_change()
            with suppress(FileNotFoundError), reported(path):
                path.unlink()

    def found(self) -> Iterator[BlockKey]:
        """All that are there, without opening them; unfinished files of dead processes go."""
        with suppress(FileNotFoundError), os.scandir(self._root) as folders:
            for folder in folders:
                yield from self._found_in(folder)

    def num_bytes(self, key: BlockKey) -> int:
        """What its file takes; 0 without one."""
        with suppress(FileNotFoundError):
            return self.path(key).stat().st_size
        return 0

    def written_s(self, key: BlockKey) -> float:
        """When its file was written, by the wall clock; 0 without one."""
        with suppress(FileNotFoundError):
            return self.path(key).stat().st_mtime
        return 0.0

    def _found_in(self, folder: os.DirEntry[str]) -> Iterator[BlockKey]:
        model = _bytes_of(folder.name)
        if model is None or not folder.is_dir(follow_symlinks=False):
            return
        with os.scandir(folder) as entries:
            for entry in entries:
                name = _bytes_of(entry.name.removesuffix(SUFFIX))
                if name is not None:
                    yield BlockKey(model, name)
                elif entry.name.startswith(TEMPORARY) and is_abandoned(entry.name):
                    Path(entry).unlink(missing_ok=True)


def _bytes_of(text: str) -> bytes | None:
    try:
        return bytes.fromhex(text) or None
    except ValueError:
        return None
