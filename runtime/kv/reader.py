"""Reader threads: slot files are verified, and brought into the page cache, beside the engine.

They make no mlx call; the mlx thread then loads a verified file in one go.
"""

from __future__ import annotations

import queue
import threading
import time
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from runtime.kv.prefix import Run
from store.errors import StoreError
from store.slots import read_token_ids, slot_path, verify
from store.types import SlotHeader

_NUM_THREADS = 2


class SlotRead(NamedTuple):
    """A slot that was asked for. `header` is None when only its tokens were wanted."""

    run: Run
    path: Path
    token_ids: array[int] | None = None
    header: SlotHeader | None = None
    num_bytes: int = 0
    seconds: float = 0.0
    error: StoreError | None = None


class SlotReader:
    """Takes runs and gives back what their files hold."""

    def __init__(self, root: Path, on_read: Callable[[SlotRead], None]) -> None:
        self._root = root
        self._on_read = on_read
        self._queue: queue.SimpleQueue[tuple[Run, str, bool]] = queue.SimpleQueue()
        for number in range(_NUM_THREADS):
            threading.Thread(target=self._run, name=f"reader-{number}", daemon=True).start()

    def read(self, run: Run, slot_id: str, *, tokens_only: bool = False) -> None:
        """Verify a slot's file, or read its tokens; the answer comes through `on_read`."""
        self._queue.put((run, slot_id, tokens_only))

    def _run(self) -> None:
        while True:
            run, slot_id, tokens_only = self._queue.get()
            path = slot_path(self._root, slot_id)
            start = time.perf_counter()
            try:
                if tokens_only:
                    result = SlotRead(run, path, read_token_ids(path))
                else:
                    slot = verify(path)
                    seconds = time.perf_counter() - start
                    result = SlotRead(
                        run, path, slot.token_ids, slot.header, slot.num_bytes, seconds
                    )
            except StoreError as error:
                result = SlotRead(run, path, error=error)
            self._on_read(result)
