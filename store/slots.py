"""The folder of slots: whoever knows a block's name finds its file, or computes the block.

Beside a slot there may be the *states* of layers that cannot be sliced, as they were at the end of
its block: a file of its own, which may go while the slot stays.

Nobody is told of a slot that comes or goes, and none is locked: a slot is made beside its place and
named in one step, who has the same writes the same, and who has opened one reads on when it goes.

Where several processes compute a model (*ranks*), each has a part of every block. The slots of rank
0 lie here, those of rank N of the same machine below `ranks/N` under the same names, and on another
machine at the same place of its disk. A head's file has rank 0's part of its end, the others have
theirs as states under the end's name. What is removed or counted is so for all ranks of a machine.
"""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import msgspec

from store.block_names import pack_ids
from store.disk import make_directory, reported, sync_directories
from store.errors import SlotDamaged, SlotForeign, SlotMissing
from store.kv_file import Tensor, open_file, size_of, write
from store.temp_names import SUFFIX, TEMPORARY, is_abandoned, temp_name

SLOT = "hearth-slot/3"
STATE = "hearth-state/1"
TOKENS = "tokens"
STATE_SUFFIX = f".state{SUFFIX}"
RANKS = "ranks"


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
    """Slots below `root`, in a folder for each model, and those of the other ranks."""

    def __init__(self, root: Path, before_change: Callable[[], None] = nothing) -> None:
        self._root = root
        self._before_change = before_change

    def of_rank(self, number: int) -> Slots:
        """Those of another rank."""
        return Slots(self._root / RANKS / str(number), self._before_change)

    def _others(self) -> list[str]:
        """Where other ranks of this machine have theirs."""
        with suppress(FileNotFoundError), os.scandir(self._root / RANKS) as folders:
            return [one.path for one in folders]
        return []

    def path(self, key: BlockKey) -> Path:
        return Path(_path(self._root, key, SUFFIX))

    def state_path(self, key: BlockKey) -> Path:
        return Path(_path(self._root, key, STATE_SUFFIX))

    def has(self, key: BlockKey) -> bool:
        return self.size(key) > 0

    def size(self, key: BlockKey) -> int:
        """The bytes of a slot as its file says; 0 where there is none."""
        return _size(self.path(key))

    def has_state(self, key: BlockKey) -> bool:
        return _size(self.state_path(key)) > 0

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
        if _size(path):  # one that is empty counts as missing
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
        folders = [self._root / one.hex() for one in models]
        for folder in folders:
            make_directory(folder)  # one that was removed meanwhile lacks what it had, and no more
        sync_directories(folders)

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
        """Have no slot of this block, nor its states, of any rank."""
        self.remove_state(key)
        for root in (self._root, *self._others()):
            self._unlink(_path(root, key, SUFFIX))

    def remove_state(self, key: BlockKey) -> None:
        """Have no states at the end of this block."""
        self._unlink(self.state_path(key))
        self.remove_end(key)

    def remove_end(self, key: BlockKey) -> None:
        """Have nothing that other ranks have of an end of this name."""
        for root in self._others():
            self._unlink(_path(root, key, STATE_SUFFIX))

    def is_shared(self, key: BlockKey) -> bool:
        """Other ranks of this machine have a part of this block."""
        return any(
            os.path.lexists(_path(root, key, suffix))
            for root in self._others()
            for suffix in (SUFFIX, STATE_SUFFIX)
        )

    def _unlink(self, path: str | Path) -> None:
        if os.path.lexists(path):
            self._before_change()
            with suppress(FileNotFoundError), reported(Path(path)):
                if Path(path).is_dir() and not Path(path).is_symlink():
                    shutil.rmtree(path)
                else:
                    Path(path).unlink()

    def found(self) -> dict[BlockKey, tuple[int, int]]:
        """All that are there, without opening them, and what their slots and states take of the
        disk, with those of the other ranks; unfinished files of dead processes go.
        """
        found: dict[BlockKey, tuple[int, int]] = {}
        for root in (self._root, *self._others()):
            with suppress(FileNotFoundError), os.scandir(root) as folders:
                for folder in folders:
                    _find_in(folder, found)
        return found

    def has_folder(self, model: bytes) -> bool:
        """Something was put of a model."""
        return (self._root / model.hex()).is_dir()

    def names_of(self, model: bytes) -> set[bytes]:
        """The names of all that is there of a model, without those of other ranks."""
        with suppress(FileNotFoundError), os.scandir(self._root / model.hex()) as files:
            return {name for one in files if (name := _bytes_of(one.name.partition(".")[0]))}
        return set()

    def disk_bytes(self, key: BlockKey) -> tuple[int, int]:
        """What its slots and its states take of the disk, of all ranks; 0 without any."""
        slot = state = 0
        for root in (self._root, *self._others()):
            slot += _disk_bytes(_path(root, key, SUFFIX))
            state += _disk_bytes(_path(root, key, STATE_SUFFIX))
        return slot, state

    def end_bytes(self, key: BlockKey) -> int:
        """What other ranks have of an end of this name takes so much of the disk."""
        return sum(_disk_bytes(_path(root, key, STATE_SUFFIX)) for root in self._others())

    def written_s(self, key: BlockKey) -> float:
        """When the last of its files was written, by the wall clock; 0 without one."""
        written_s = 0.0
        for root in (self._root, *self._others()):
            for suffix in (SUFFIX, STATE_SUFFIX):
                with suppress(FileNotFoundError):
                    written_s = max(written_s, os.lstat(_path(root, key, suffix)).st_mtime)
        return written_s


def _find_in(folder: os.DirEntry[str], found: dict[BlockKey, tuple[int, int]]) -> None:
    model = _bytes_of(folder.name)
    if model is None or not folder.is_dir(follow_symlinks=False):
        return
    with os.scandir(folder) as entries:
        for entry in entries:
            name = _bytes_of(entry.name.partition(".")[0])
            if name is not None:
                key = BlockKey(model, name)
                before = found.get(key, (0, 0))
                is_state = entry.name.endswith(STATE_SUFFIX)
                num_bytes = _disk_bytes(entry.path)
                slot, state = (0, num_bytes) if is_state else (num_bytes, 0)
                found[key] = before[0] + slot, before[1] + state
            elif entry.name.startswith(TEMPORARY) and is_abandoned(entry.name):
                Path(entry).unlink(missing_ok=True)


def _path(root: str | Path, key: BlockKey, suffix: str) -> str:
    return f"{root}/{key.model.hex()}/{key.name.hex()}{suffix}"


def _size(path: Path) -> int:
    with suppress(OSError):
        found = path.lstat()
        return found.st_size if stat.S_ISREG(found.st_mode) else 0
    return 0


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
