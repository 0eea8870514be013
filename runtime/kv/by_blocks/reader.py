"""What there is on disk of a prompt, and reading it: on threads of their own, beside the engine.

They compute nothing, and hand over only what is evaluated: lazy arrays belong to their thread.
"""

# pyright: reportUnknownMemberType=false

from __future__ import annotations

import atexit
import queue
import threading
import time
from array import array
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from mmap import mmap
from pathlib import Path
from typing import NamedTuple, cast

import mlx.core as mx
import msgspec
from xxhash import xxh3_128_hexdigest

from runtime.kv import pack
from runtime.kv.rates import NUM_READERS
from runtime.kv.reader import adopted, adopts_pages
from store.block_names import num_common
from store.blocks.head_file import HEAD, Head, heads_behind, read_head
from store.blocks.kv_file import Front, KvFile, Tensor, open_file
from store.blocks.slots import SLOT, STATE, TOKENS, BlockKey, SlotAbout, Slots
from store.errors import SlotDamaged, SlotForeign, SlotMissing, StoreError, StoreFailed

_MAX_HEADS = 8
"""So many heads behind one block are looked at, those used last."""


@dataclass(frozen=True, slots=True)
class Asked:
    """Of a prompt the blocks `names` are to be looked for, of which the first `num_found` are in
    memory. `token_ids` are all that may be taken up.
    """

    key: bytes
    model: bytes
    root: bytes
    names: Sequence[bytes]
    token_ids: array[int]
    num_found: int
    needs_state: bool


class EndOnDisk(NamedTuple):
    """The KV behind the last whole block of a head, of which a prompt has `num_tokens` tokens."""

    path: Path
    num_blocks: int
    num_tokens: int


class OnDisk(NamedTuple):
    """What of a prompt is on disk: slots up to block `num_blocks`, and then those of `later`.

    A state is at the end of `end`, or at that of the block before `state_at`; 0 is none. Heads
    have the first `num_known` tokens of the prompt, of which not all may have KV on disk. The slots
    up to `num_blocks` that were not in memory take `num_bytes`.
    """

    asked: Asked
    num_blocks: int
    later: tuple[int, ...] = ()
    end: EndOnDisk | None = None
    state_at: int = 0
    num_known: int = 0
    num_bytes: int = 0


class Wanted(NamedTuple):
    """A file to be read. `name` is that of the piece; its `token_ids` begin at `start`."""

    name: bytes
    path: Path
    kind: str
    above: bytes
    start: int
    token_ids: array[int]


class PieceRead(NamedTuple):
    """A file that was asked for: its tensors, evaluated, or why there are none."""

    wanted: Wanted
    layout: str = ""
    recompute_ms: float = 0.0
    token_ids: array[int] | None = None
    tensors: Mapping[str, mx.array] | None = None
    num_bytes: int = 0
    seconds: float = 0.0
    error: StoreError | None = None


class Reader:
    """Looks for what is on disk and reads it. `on_done` is called in its threads."""

    def __init__(
        self, slots: Slots, heads: Path, on_done: Callable[[OnDisk | PieceRead], None], block: int
    ) -> None:
        self._slots = slots
        self._heads = heads
        self._on_done = on_done
        self._block_size = block
        self._queue: queue.SimpleQueue[Asked | Wanted | None] = queue.SimpleQueue()
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

    def ask(self, asked: Asked | Wanted) -> None:
        """Look for a prompt, or read a file; `OnDisk` or `PieceRead` comes through `on_done`."""
        self._queue.put(asked)

    def slot(self, model: bytes, name: bytes, above: bytes, start: int, ids: array[int]) -> Wanted:
        """The slot of a block, to be read."""
        return Wanted(name, self._slots.path(BlockKey(model, name)), SLOT, above, start, ids)

    def state(self, model: bytes, name: bytes, end: int) -> Wanted:
        """The states at the end of a block, to be read."""
        path = self._slots.state_path(BlockKey(model, name))
        return Wanted(name, path, STATE, b"", end, array("I"))

    def end(self, found: EndOnDisk, above: bytes) -> Wanted:
        """What is behind the last whole block of a head, to be read."""
        start = found.num_blocks * self._block_size
        return Wanted(str(found.path).encode(), found.path, HEAD, above, start, array("I"))

    def _run(self) -> None:
        while (asked := self._queue.get()) is not None:
            # What was read is named nowhere here: this thread may wait long, and keeps no arrays.
            self._on_done(self._looked(asked) if isinstance(asked, Asked) else _read(asked))
        mx.clear_streams()

    # Looking

    def _looked(self, asked: Asked) -> OnDisk:
        numbers = range(asked.num_found, len(asked.names))
        sizes = {n: self._bytes_of(asked, n) for n in numbers}
        num_blocks = asked.num_found
        while sizes.get(num_blocks):
            num_blocks += 1
        found = self._found(asked, num_blocks)
        num_bytes = sum(sizes[n] for n in range(asked.num_found, found.num_blocks))
        later = tuple(number for number in numbers if number > num_blocks and sizes[number])
        return found._replace(num_bytes=num_bytes, later=() if asked.needs_state else later)

    def _bytes_of(self, asked: Asked, number: int) -> int:
        return self._slots.disk_bytes(BlockKey(asked.model, asked.names[number]))[0]

    def _found(self, asked: Asked, num_blocks: int) -> OnDisk:
        end, num_known = self._end_behind(asked, num_blocks)
        if end is not None or not asked.needs_state:
            return OnDisk(asked, num_blocks, end=end, num_known=num_known)
        for number in range(num_blocks, 0, -1):
            key = BlockKey(asked.model, asked.names[number - 1])
            if self._slots.has_state(key):
                return OnDisk(asked, number, state_at=number, num_known=num_known)
            end, _ = self._end_behind(asked, number - 1)
            if end is not None:
                return OnDisk(asked, number - 1, end=end, num_known=num_known)
        return OnDisk(asked, 0, num_known=num_known)

    def _end_behind(self, asked: Asked, number: int) -> tuple[EndOnDisk | None, int]:
        """The end behind this many blocks that has most of the prompt, and how many first tokens of
        it a head has, with or without their KV. Where a state is needed the prompt must have all of
        the end.
        """
        start = number * self._block_size
        above = BlockKey(asked.model, asked.names[number - 1] if number else asked.root)
        rest = asked.token_ids[start:]
        best: EndOnDisk | None = None
        most_known = 0
        with suppress(StoreError):
            for path in heads_behind(self._heads, above)[:_MAX_HEADS]:
                with suppress(SlotMissing, SlotForeign, SlotDamaged):
                    tokens, has_kv = _end_of(path, start)
                    num = num_common(tokens, rest)
                    most_known = max(most_known, num)
                    fits = num == len(tokens) if asked.needs_state else num > 0
                    if has_kv and fits and (best is None or num > best.num_tokens):
                        best = EndOnDisk(path, number, num)
        return best, start + most_known


def _end_of(path: Path, start: int) -> tuple[array[int], bool]:
    """The tokens of a head behind its last whole block, and whether it has their KV: it has not
    before the model rests. Raises as `read_head`.
    """
    with open_file(path, HEAD) as file:
        has_kv = len(file.front.entries) > 1
    return array("I", read_head(path).token_ids[start:]), has_kv


def _read(wanted: Wanted) -> PieceRead:
    begun_s = time.perf_counter()
    try:
        with open_file(wanted.path, wanted.kind) as file:
            about, layout, recompute_ms = _about(file.front, wanted)
            token_ids, tensors = _tensors(wanted.path, file)
    except StoreError as error:
        return PieceRead(wanted, error=error)
    if token_ids is not None and wanted.kind == HEAD:
        token_ids = token_ids[wanted.start :]
    if about is not None and about != wanted.name:
        return PieceRead(wanted, error=SlotDamaged("it is of another block"))
    return PieceRead(
        wanted,
        layout,
        recompute_ms,
        token_ids,
        tensors,
        file.front.file_bytes,
        time.perf_counter() - begun_s,
    )


def _about(front: Front, wanted: Wanted) -> tuple[bytes | None, str, float]:
    try:
        if wanted.kind == HEAD:
            return None, msgspec.json.decode(front.about, type=Head).layout, 0.0
        about = msgspec.json.decode(front.about, type=SlotAbout)
    except msgspec.MsgspecError as error:
        raise SlotDamaged("it does not say of what it is") from error
    return about.name, about.layout, about.recompute_ms


def _tensors(path: Path, file: KvFile) -> tuple[array[int] | None, dict[str, mx.array]]:
    """The token ids of a file, if it has any, and its arrays; each byte is compared.

    What is compared is what was read into memory, where the CPU can see that.

    Raises:
        SlotMissing, SlotDamaged: the file has left, or some byte is not as it was written.
        StoreFailed: reading failed, or gave something else than the file has.
    """
    if adopts_pages():
        return _in_place(file)
    if mx.cuda.is_available():
        tokens = _ids(file.read())
        return tokens, _loaded(path)
    tokens = _ids(file.read({TOKENS}))
    tensors = _loaded(path)
    entries = {entry.name: entry for entry in file.front.entries if entry.name != TOKENS}
    if entries.keys() != tensors.keys():
        raise SlotDamaged("it holds other tensors than its header says")
    sums = dict(zip((e.name for e in file.front.entries), file.front.checksums, strict=True))
    for name, one in tensors.items():
        if xxh3_128_hexdigest(pack.host_bytes(one)) != sums[name]:
            file.read({name})  # only a file is damaged, not memory that ran out
            raise StoreFailed(f"what was read of {name} is not what is there")
    return tokens, tensors


def _loaded(path: Path) -> dict[str, mx.array]:
    """All but the token ids, as the file has them now: mlx reads them with threads of its own."""
    try:
        loaded = cast("dict[str, mx.array]", mx.load(str(path)))
        loaded.pop(TOKENS, None)
        mx.eval(list(loaded.values()))
    except (RuntimeError, ValueError, OSError) as error:
        if not path.exists():
            raise SlotMissing(f"{path} has just left") from error
        raise SlotDamaged(f"it cannot be loaded: {error}") from error
    return loaded


def _in_place(file: KvFile) -> tuple[array[int] | None, dict[str, mx.array]]:
    """Read into pages that become arrays as they are; each tensor's leave memory with it."""
    read = file.read(into=lambda num_bytes: memoryview(mmap(-1, max(num_bytes, 1)))[:num_bytes])
    with mx.stream(mx.cpu):
        tensors = {one.name: pack.array_of(one, adopted) for one in read if one.name != TOKENS}
        mx.eval(list(tensors.values()))
    return _ids(read), tensors


def _ids(read: Sequence[Tensor]) -> array[int] | None:
    data = next((one.data for one in read if one.name == TOKENS), None)
    return None if data is None else array("I", bytes(data))
