"""Reader threads: slot files become checked arrays in memory, beside the engine.

They compute nothing, and hand over only what is evaluated: lazy arrays belong to their thread.
"""

# pyright: reportUnknownMemberType=false

from __future__ import annotations

import atexit
import queue
import threading
import time
from array import array
from collections.abc import Callable, Mapping
from functools import cache
from mmap import PAGESIZE, mmap
from pathlib import Path
from typing import Literal, NamedTuple, cast

import mlx.core as mx

from runtime.kv import pack
from runtime.kv.prefix_tree import Run
from runtime.kv.rates import NUM_READERS
from store.errors import SlotDamaged, SlotMissing, StoreError, StoreFailed
from store.slot_file import TOKENS, Checker, Damage, SlotContents, TensorEntry
from store.slots import CheckedSlot, check, read_front, read_token_ids, slot_path, verify

_AS_WIDE: dict[int, Literal["B", "H", "I", "Q"]] = {1: "B", 2: "H", 4: "I", 8: "Q"}
"""By bytes: the buffer protocol knows no bfloat16."""


class LoadedSlot(NamedTuple):
    """A slot whose tensors are in memory; all but what is in its `damage` was found as written."""

    checked: CheckedSlot
    tensors: dict[str, mx.array]


class SlotRead(NamedTuple):
    """A slot that was asked for, or its tokens only."""

    run: Run
    token_ids: array[int] | None = None
    slot: LoadedSlot | None = None
    seconds: float = 0.0
    error: StoreError | None = None


def load(path: Path) -> LoadedSlot:
    """Read a slot file and compare every checksum. The arrays are evaluated.

    What is compared is what was read into memory, where the CPU can see that.

    Raises:
        SlotMissing, SlotDamaged: as `store.slots.check`.
        StoreFailed: reading failed, or gave something else than the file has.
    """
    if mx.cuda.is_available():
        return LoadedSlot(check(path), read_tensors(path))
    if adopts_pages():
        return load_in_place(path)
    try:
        contents, token_ids = read_front(path, is_strict=False)
        tensors = read_tensors(path)
        damage = compare(contents, token_ids, tensors)
    except SlotDamaged as error:
        verify(path)
        raise StoreFailed(str(error)) from error
    if damage and not check(path).damage:
        # The file is put aside only if it is what is wrong, not memory that ran out.
        raise StoreFailed(f"what was read is not what is there: {damage}")
    checked = CheckedSlot(contents.header, token_ids, contents.file_bytes, damage)
    return LoadedSlot(checked, tensors)


@cache
def adopts_pages() -> bool:
    """Whether mlx takes memory of this process for an array as it is, without a copy.

    On Metal it does, which has the same memory; mlx refuses it on a CPU alone.
    """
    try:
        adopted(memoryview(mmap(-1, PAGESIZE)))
    except ValueError:
        return False
    return True


def adopted(pages: memoryview) -> mx.array:
    """An array in these very pages. Raises ValueError where the device cannot use them."""
    return mx.asarray(pages, copy=False)


def load_in_place(path: Path, adopt: Callable[[memoryview], mx.array] = adopted) -> LoadedSlot:
    """As `load`: the file is read into pages that `adopt` makes arrays of, each byte checked there.

    Each tensor has pages of its own, which leave memory with it.

    Raises:
        SlotMissing, SlotDamaged, StoreFailed: as `load`.
    """
    read: list[tuple[TensorEntry, memoryview]] = []

    def into(entry: TensorEntry) -> memoryview:
        pages = memoryview(mmap(-1, max(entry.num_bytes, 1)))[: entry.num_bytes]
        read.append((entry, pages))
        return pages

    checked = check(path, into=into)
    if checked.damage and not check(path).damage:
        raise StoreFailed(f"what was read is not what is there: {checked.damage}")
    with mx.stream(mx.cpu):
        tensors = {entry.name: _array_of(entry, pages, adopt) for entry, pages in read}
        mx.eval(list(tensors.values()))
    return LoadedSlot(checked, tensors)


def _array_of(
    entry: TensorEntry, pages: memoryview, adopt: Callable[[memoryview], mx.array]
) -> mx.array:
    dtype = pack.DTYPES.get(entry.dtype)
    if dtype is None:
        raise SlotDamaged(f"the tensor {entry.name} cannot be loaded: it is of {entry.dtype}")
    if not entry.num_bytes:
        return mx.zeros(entry.shape, dtype)
    whole = pages.cast(_AS_WIDE[dtype.size])
    return adopt(whole).view(dtype).reshape(entry.shape)


def read_tensors(path: Path) -> dict[str, mx.array]:
    """All but the token ids, as the file has them now: mlx reads them with threads of its own.

    Raises:
        SlotMissing: the file has left.
        SlotDamaged: it cannot be loaded.
    """
    try:
        loaded = cast("dict[str, mx.array]", mx.load(str(path)))
        loaded.pop(TOKENS, None)
        mx.eval(list(loaded.values()))
    except (RuntimeError, ValueError, OSError) as error:
        if not path.exists():
            raise SlotMissing(f"{path} has just left") from error
        raise SlotDamaged(f"it cannot be loaded: {error}") from error
    return loaded


def compare(
    contents: SlotContents, token_ids: array[int], tensors: Mapping[str, mx.array]
) -> Damage:
    """What of a slot in memory is not, byte for byte, what was written.

    Raises:
        SlotDamaged: these are other tensors than its header says.
    """
    entries = [entry for entry in contents.tensors if entry.name != TOKENS]
    if {entry.name for entry in entries} != set(tensors):
        raise SlotDamaged("it holds other tensors than its header says")
    checker = Checker(contents.header)
    checker.tensor(contents.tensors[0])(memoryview(token_ids).cast("B"))
    with mx.stream(mx.cpu):
        for entry in entries:
            array = tensors[entry.name]
            if array.dtype != pack.DTYPES.get(entry.dtype) or array.shape != entry.shape:
                raise SlotDamaged(f"the tensor {entry.name} is another one than its header says")
            checker.tensor(entry)(pack.host_bytes(array))
    return contents.damage(checker.checksums())


class SlotReader:
    """Takes runs and gives back what their files hold."""

    def __init__(self, root: Path, on_read: Callable[[SlotRead], None]) -> None:
        self._root = root
        self._on_read = on_read
        self._queue: queue.SimpleQueue[tuple[Run, str, bool] | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._run, name=f"reader-{number}", daemon=True)
            for number in range(NUM_READERS)
        ]
        for thread in self._threads:
            thread.start()
        # An interpreter that ends while a daemon thread is inside mlx aborts.
        atexit.register(self.close)

    def close(self) -> None:
        """End when what was asked for is read; may be called again."""
        for _ in self._threads:
            self._queue.put(None)
        for thread in self._threads:
            thread.join()

    def read(self, run: Run, slot_id: str, *, tokens_only: bool = False) -> None:
        """Load a slot's file, or its tokens only; the answer comes through `on_read`."""
        self._queue.put((run, slot_id, tokens_only))

    def _run(self) -> None:
        while (wanted := self._queue.get()) is not None:
            # What was read is named nowhere here: this thread may wait long, and keeps no arrays.
            self._on_read(self._answer(*wanted))
        mx.clear_streams()

    def _answer(self, run: Run, slot_id: str, tokens_only: bool) -> SlotRead:
        path = slot_path(self._root, slot_id)
        start = time.perf_counter()
        try:
            if tokens_only:
                return SlotRead(run, read_token_ids(path))
            slot = load(path)
        except StoreError as error:
            return SlotRead(run, error=error)
        return SlotRead(run, slot.checked.token_ids, slot, time.perf_counter() - start)
