"""The folder of slots: whoever knows a block's name finds its file, or computes the block.

Beside a slot there may be the *states* of layers that cannot be sliced, as they were at the end of
its block: a file of its own, which may go while the slot stays.

Nobody is told of a slot that comes or goes, and none is locked: a slot is made beside its place and
named in one step, who has the same writes the same, and who has opened one reads on when it goes.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import msgspec

from store.block_names import pack_ids
from store.blocks.kv_file import Tensor, open_file, size_of, write
from store.disk import make_directory, reported, sync_directories
from store.errors import SlotDamaged, SlotForeign, SlotMissing
from store.temp_names import SUFFIX, TEMPORARY, is_abandoned, temp_name

SLOT = "hearth-slot/3"
STATE = "hearth-state/1"
TOKENS = "tokens"
STATE_SUFFIX = f".state{SUFFIX}"


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


def slot_bytes(about: SlotAbout, token_ids: Sequence[int] | None, tensors: Sequence[Tensor]) -> int:
    """How large the file of a slot is; without tokens, that of states at a block's end."""
    if token_ids is None:
        return size_of(STATE, msgspec.json.encode(about), tensors)
    return size_of(SLOT, msgspec.json.encode(about), [_ids(token_ids), *tensors])


def _ids(token_ids: Sequence[int]) -> Tensor:
    return Tensor(TOKENS, "U32", (len(token_ids),), pack_ids(token_ids))


def nothing() -> None:
    """Called before each change of the disk; a test's raises, as a kill would come there."""


class Slots:
    """Slots below `root`, in a folder for each model."""

    def __init__(self, root: Path, before_change: Callable[[], None] = nothing) -> None:
        self._root = root
        self._before_change = before_change

    def path(self, key: BlockKey) -> Path:
        return self._root / key.model.hex() / f"{key.name.hex()}{SUFFIX}"

    def state_path(self, key: BlockKey) -> Path:
        return self._root / key.model.hex() / f"{key.name.hex()}{STATE_SUFFIX}"

    def has(self, key: BlockKey) -> bool:
        return self.path(key).is_file()

    def has_state(self, key: BlockKey) -> bool:
        return self.state_path(key).is_file()

    def put(
        self, about: SlotAbout, token_ids: Sequence[int], tensors: Sequence[Tensor]
    ) -> int | None:
        """Have a slot of this block; its bytes, or None where it was there.

        Its name is durable once `sync` returns.

        Raises:
            StoreFull, StoreFailed: the system has no room, or refuses.
        """
        path = self.path(BlockKey(about.model, about.name))
        return self._put(path, SLOT, about, [_ids(token_ids), *tensors])

    def put_state(self, about: SlotAbout, tensors: Sequence[Tensor]) -> int | None:
        """Have the states at the end of a block, as `put`."""
        path = self.state_path(BlockKey(about.model, about.name))
        return self._put(path, STATE, about, tensors)

    def _put(
        self, path: Path, kind: str, about: SlotAbout, tensors: Sequence[Tensor]
    ) -> int | None:
        if path.is_file():
            return None
        staged = self.staging_path(path)
        self._before_change()
        num_bytes = write(staged, kind, msgspec.json.encode(about), tensors)
        self._before_change()
        with reported(path):
            staged.replace(path)
        return num_bytes

    def staging_path(self, path: Path) -> Path:
        """Where a file is made before it is named `path`."""
        if not path.parent.is_dir():
            make_directory(path.parent)
        return path.with_name(temp_name(path.name.removesuffix(SUFFIX)))

    def take(self, key: BlockKey, staged: Path, *, is_state: bool) -> bool:
        """Have the slot of a block, or its states, from a staged file, durably; False where that is
        not as it was written. Raises StoreFailed.
        """
        slot = self._read(key, staged, STATE if is_state else SLOT)
        if slot is None:
            self._unlink(staged)
            return False
        self._before_change()
        path = self.state_path(key) if is_state else self.path(key)
        with reported(path):
            staged.replace(path)
        self.sync([key.model])
        return True

    def sync(self, models: Sequence[bytes]) -> None:
        """Make the names of slots durable that were put before. Raises StoreFailed."""
        sync_directories(self._root / one.hex() for one in models)

    def read(self, key: BlockKey, token_ids: Sequence[int]) -> Slot | None:
        """A block whose tokens are these, or None. What is not as it was written is removed.

        Raises:
            StoreFailed: the system refuses.
        """
        slot = self._read(key, self.path(key), SLOT)
        if slot is None or not slot.tensors:
            return None
        ids, *tensors = slot.tensors
        is_meant = ids.name == TOKENS and ids.data == pack_ids(token_ids)
        return Slot(slot.about, tensors) if is_meant else None

    def read_state(self, key: BlockKey) -> Slot | None:
        """The states at the end of a block, as `read`."""
        return self._read(key, self.state_path(key), STATE)

    def _read(self, key: BlockKey, path: Path, kind: str) -> Slot | None:
        try:
            with open_file(path, kind) as file:
                about = msgspec.json.decode(file.front.about, type=SlotAbout)
                tensors = file.read()
        except (SlotMissing, SlotForeign):
            return None
        except (SlotDamaged, msgspec.MsgspecError, ValueError):
            self._unlink(path)
            return None
        return Slot(about, tensors) if BlockKey(about.model, about.name) == key else None

    def remove(self, key: BlockKey) -> None:
        """Have no slot of this block, nor its states."""
        self.remove_state(key)
        self._unlink(self.path(key))

    def remove_state(self, key: BlockKey) -> None:
        """Have no states at the end of this block."""
        self._unlink(self.state_path(key))

    def _unlink(self, path: Path) -> None:
        if os.path.lexists(path):
            self._before_change()
            with suppress(FileNotFoundError), reported(path):
                path.unlink()

    def found(self) -> dict[BlockKey, tuple[int, int]]:
        """All that are there, without opening them, and what their slots and states take of the
        disk; unfinished files of dead processes go.
        """
        found: dict[BlockKey, tuple[int, int]] = {}
        with suppress(FileNotFoundError), os.scandir(self._root) as folders:
            for folder in folders:
                self._find_in(folder, found)
        return found

    def disk_bytes(self, key: BlockKey) -> tuple[int, int]:
        """What its slot and its states take of the disk; 0 without any."""
        path = f"{self._root}/{key.model.hex()}/{key.name.hex()}"
        return _disk_bytes(path + SUFFIX), _disk_bytes(path + STATE_SUFFIX)

    def written_s(self, key: BlockKey) -> float:
        """When its file was written, by the wall clock; 0 without one."""
        with suppress(FileNotFoundError):
            return self.path(key).stat().st_mtime
        return 0.0

    def _find_in(self, folder: os.DirEntry[str], found: dict[BlockKey, tuple[int, int]]) -> None:
        model = _bytes_of(folder.name)
        if model is None or not folder.is_dir(follow_symlinks=False):
            return
        with os.scandir(folder) as entries:
            for entry in entries:
                name = _bytes_of(entry.name.partition(".")[0])
                if name is not None:
                    key = BlockKey(model, name)
                    slot, state = found.get(key, (0, 0))
                    is_state = entry.name.endswith(STATE_SUFFIX)
                    num_bytes = _disk_bytes(entry.path)
                    found[key] = (slot, num_bytes) if is_state else (num_bytes, state)
                elif entry.name.startswith(TEMPORARY) and is_abandoned(entry.name):
                    Path(entry).unlink(missing_ok=True)


def _disk_bytes(path: str) -> int:
    try:
        return os.lstat(path).st_blocks * 512
    except FileNotFoundError:
        return 0


def _bytes_of(text: str) -> bytes | None:
    try:
        return bytes.fromhex(text) or None
    except ValueError:
        return None
