"""Reader threads: slot files become checked arrays in memory, beside the engine.

They compute nothing, and hand over only what is evaluated: lazy arrays belong to their thread.
"""

# pyright: reportUnknownMemberType=false

from __future__ import annotations

import queue
import threading
import time
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO, NamedTuple, cast

import mlx.core as mx

from runtime.kv.prefix import Run
from store.checked_file import CheckedFile, checked
from store.errors import SlotDamaged, StoreError
from store.slot_format import TOKENS
from store.slots import read_token_ids, slot_path
from store.types import SlotHeader

_NUM_THREADS = 2


class LoadedSlot(NamedTuple):
    """A slot of which every byte was found as written, its tensors in memory."""

    header: SlotHeader
    token_ids: array[int]
    tensors: dict[str, mx.array]
    num_bytes: int


class SlotRead(NamedTuple):
    """A slot that was asked for, or its tokens only."""

    run: Run
    token_ids: array[int] | None = None
    slot: LoadedSlot | None = None
    seconds: float = 0.0
    error: StoreError | None = None


def load(path: Path) -> LoadedSlot:
    """Read a slot file and compare every checksum. The arrays are evaluated.

    Raises:
        SlotMissing, SlotDamaged, StoreFailed: as `store.slots.verify`.
    """
    with checked(path) as file:
        token_ids = file.token_ids()
        tensors = _tensors(file)
        file.check()
        contents = file.contents
    return LoadedSlot(contents.header, token_ids, tensors, contents.file_bytes)


def _tensors(file: CheckedFile) -> dict[str, mx.array]:
    try:
        loaded = cast("dict[str, mx.array]", mx.load(cast("BinaryIO", file), "safetensors"))
        del loaded[TOKENS]
        mx.eval(list(loaded.values()))
    except (RuntimeError, ValueError) as error:
        raise SlotDamaged(f"it cannot be loaded: {error}") from error
    return loaded


class SlotReader:
    """Takes runs and gives back what their files hold."""

    def __init__(self, root: Path, on_read: Callable[[SlotRead], None]) -> None:
        self._root = root
        self._on_read = on_read
        self._queue: queue.SimpleQueue[tuple[Run, str, bool]] = queue.SimpleQueue()
        for number in range(_NUM_THREADS):
            threading.Thread(target=self._run, name=f"reader-{number}", daemon=True).start()

    def read(self, run: Run, slot_id: str, *, tokens_only: bool = False) -> None:
        """Load a slot's file, or its tokens only; the answer comes through `on_read`."""
        self._queue.put((run, slot_id, tokens_only))

    def _run(self) -> None:
        while True:
            # What was read is named nowhere here: this thread may wait long, and keeps no arrays.
            self._on_read(self._answer(*self._queue.get()))

    def _answer(self, run: Run, slot_id: str, tokens_only: bool) -> SlotRead:
        path = slot_path(self._root, slot_id)
        start = time.perf_counter()
        try:
            if tokens_only:
                return SlotRead(run, read_token_ids(path))
            slot = load(path)
        except StoreError as error:
            return SlotRead(run, error=error)
        return SlotRead(run, slot.token_ids, slot, time.perf_counter() - start)
