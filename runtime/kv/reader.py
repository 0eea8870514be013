"""What there is on disk of a prompt, and reading it: on threads of their own, beside the engine.

They compute nothing, and hand over only what is evaluated: lazy arrays belong to their thread.
"""

# pyright: reportUnknownMemberType=false

from __future__ import annotations

import time
import traceback
from array import array
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple, cast

import mlx.core as mx
import msgspec

from runtime.kv.others import ALONE, OtherRanks, Span
from runtime.kv.pages import BlockArrays, Pages
from runtime.kv.parts import SLAB_BLOCKS
from runtime.kv.rates import NUM_READERS
from store.block_names import HashChain, num_common
from store.errors import SlotDamaged, SlotForeign, SlotMissing, StoreError
from store.head_file import HEAD, Head, heads_behind, read_head
from store.kv_file import Front, KvFile, TensorEntry, open_file
from store.slots import SLOT, STATE, TOKENS, BlockKey, SlotAbout, Slots

_MAX_HEADS = 8
"""So many heads behind one block are looked at, those used last."""


@dataclass(frozen=True, slots=True)
class Asked:
    """Of a prompt the blocks `names` are to be looked for, of which the first `num_found` are in
    memory. `token_ids` are all that may be taken up.
    """

    key: bytes
    model: bytes
    chain: HashChain
    root: bytes
    names: Sequence[bytes]
    token_ids: array[int]
    num_found: int
    needs_state: bool


class Tidy(NamedTuple):
    """What other ranks have is to go where nothing here is of that name."""

    model: bytes
    chain: HashChain


_THREADS = ThreadPoolExecutor(NUM_READERS, thread_name_prefix="reader")
"""One set for all models of the process: mlx has a stream for each thread that ever computed."""


class EndOnDisk(NamedTuple):
    """The KV behind the last whole block of a head, of which a prompt has `num_tokens` tokens, out
    of `num_all`. `name` is that of the end.
    """

    path: Path
    num_blocks: int
    num_tokens: int
    name: bytes
    num_all: int


class OnDisk(NamedTuple):
    """What of a prompt is on disk: slots up to block `num_blocks`, and then those of `later`.

    A state is at the end of `end`, or at that of the block before `state_at`; 0 is none. Heads
    have the first `num_known` tokens of the prompt, of which not all may have KV on disk; the first
    `num_said` are all that one of them has. The slots up to `num_blocks` that were not in memory
    take `num_bytes`.
    """

    asked: Asked
    num_blocks: int
    later: tuple[int, ...] = ()
    end: EndOnDisk | None = None
    state_at: int = 0
    num_known: int = 0
    num_said: int = 0
    num_bytes: int = 0


class Wanted(NamedTuple):
    """A file to be read. `name` is that of the piece; its `token_ids` begin at `start`. Other ranks
    have their parts of the tokens or the state `span` under the name `part`.
    """

    name: bytes
    path: Path
    kind: str
    above: bytes
    start: int
    token_ids: array[int]
    part: BlockKey
    span: Span


class PieceRead(NamedTuple):
    """A file that was asked for: its arrays, evaluated, or why there are none. `share` is what
    other ranks read of the same run.
    """

    wanted: Wanted
    layout: str = ""
    recompute_ms: float = 0.0
    token_ids: array[int] | None = None
    arrays: BlockArrays | None = None
    num_bytes: int = 0
    seconds: float = 0.0
    error: StoreError | None = None
    share: object = None


class FilesRead(NamedTuple):
    """What was read at once: the arrays of several blocks are views of a slab."""

    reads: Sequence[PieceRead]


class Reader:
    """Looks for what is on disk and reads it. `on_done` is called in the threads that do.

    What the `others` do not have as well is not there.
    """

    def __init__(
        self,
        slots: Slots,
        heads: Path,
        on_done: Callable[[OnDisk | FilesRead], None],
        block: int,
        *,
        others: OtherRanks = ALONE,
    ) -> None:
        self._slots = slots
        self._others = others
        self._heads = heads
        self._on_done = on_done
        self._block_size = block
        self._under_way: set[Future[None]] = set()

    def cancel(self) -> None:
        """Read nothing more than what is being read."""
        for future in [*self._under_way]:
            future.cancel()

    def close(self, patience_s: float | None = None) -> bool:
        """Whether nothing is read any more, which is waited for; after `cancel` of what is being
        read only.
        """
        return not wait([*self._under_way], patience_s).not_done

    def ask(self, asked: Asked | Tidy) -> None:
        """Look for a prompt; `OnDisk` comes through `on_done`."""
        self._submit(asked)

    def read(self, wanted: Sequence[Wanted]) -> None:
        """Read files; what is read of each comes through `on_done`."""
        for group in _groups(wanted) if self._others is ALONE else [[one] for one in wanted]:
            self._submit(group)

    def _submit(self, asked: Asked | list[Wanted] | Tidy) -> None:
        future = _THREADS.submit(self._do, asked)
        self._under_way.add(future)
        future.add_done_callback(self._is_done)

    def _is_done(self, future: Future[None]) -> None:
        self._under_way.discard(future)
        if future.cancelled():
            return
        if (error := future.exception()) is not None:
            traceback.print_exception(error)

    def slot(self, model: bytes, name: bytes, above: bytes, start: int, ids: array[int]) -> Wanted:
        """The slot of a block, to be read."""
        key = BlockKey(model, name)
        span = Span(start, len(ids), is_state=False)
        return Wanted(name, self._slots.path(key), SLOT, above, start, ids, key, span)

    def state(self, model: bytes, name: bytes, end: int) -> Wanted:
        """The states at the end of a block, to be read."""
        key = BlockKey(model, name)
        span = Span(end - self._block_size, 0, is_state=True)
        return Wanted(name, self._slots.state_path(key), STATE, b"", end, array("I"), key, span)

    def end(self, model: bytes, found: EndOnDisk, above: bytes) -> Wanted:
        """What is behind the last whole block of a head, to be read."""
        start, name = found.num_blocks * self._block_size, str(found.path).encode()
        key, span = BlockKey(model, found.name), Span(start, found.num_all, is_state=True)
        return Wanted(name, found.path, HEAD, above, start, array("I"), key, span)

    def _do(self, asked: Asked | list[Wanted] | Tidy) -> None:
        match asked:
            case Asked():
                self._on_done(self._looked(asked))
            case list():
                self._read(asked)
            case Tidy():
                self._tidy(asked)

    def _read(self, group: list[Wanted]) -> None:
        by_others = [self._others.read(one.part, one.span) for one in group]
        reads: list[PieceRead] = []
        for read, theirs in zip(read_files(group), by_others, strict=True):
            try:
                reads.append(read._replace(share=theirs()))
            except StoreError as error:
                reads.append(read if read.error else PieceRead(read.wanted, error=error))
        self._on_done(FilesRead(reads))

    def _tidy(self, tidy: Tidy) -> None:
        there = self._others.names_of(tidy.model) - self._slots.names_of(tidy.model)
        for path in self._heads.glob(f"{tidy.model.hex()}/*/*") if there else ():
            with suppress(StoreError):
                token_ids = read_head(path).token_ids
                rest = token_ids[len(token_ids) - len(token_ids) % self._block_size :]
                there.discard(tidy.chain.end_hash(bytes.fromhex(path.parent.name), rest))
        self._others.remove(tidy.model, there)

    # Looking

    def _looked(self, asked: Asked) -> OnDisk:
        numbers = range(asked.num_found, len(asked.names))
        names = asked.names[asked.num_found :]
        others = dict(zip(numbers, self._others.have(asked.model, names), strict=True))
        sizes = {n: self._bytes_of(asked, n) if others[n].slot else 0 for n in numbers}
        num_blocks = asked.num_found
        while sizes.get(num_blocks):
            num_blocks += 1
        found = self._found(asked, num_blocks)
        num_bytes = sum(sizes[n] for n in range(asked.num_found, found.num_blocks))
        later = tuple(number for number in numbers if number > num_blocks and sizes[number])
        return found._replace(num_bytes=num_bytes, later=() if asked.needs_state else later)

    def _bytes_of(self, asked: Asked, number: int) -> int:
        return self._slots.size(BlockKey(asked.model, asked.names[number]))

    def _found(self, asked: Asked, num_blocks: int) -> OnDisk:
        end, num_known, num_said = self._end_behind(asked, num_blocks)
        found = OnDisk(asked, num_blocks, end=end, num_known=num_known, num_said=num_said)
        if end is not None or not asked.needs_state:
            return found
        for number in range(num_blocks, 0, -1):
            key = BlockKey(asked.model, asked.names[number - 1])
            if self._slots.has_state(key) and self._all_have_state(key):
                return found._replace(num_blocks=number, state_at=number)
            end, *_ = self._end_behind(asked, number - 1)
            if end is not None:
                return found._replace(num_blocks=number - 1, end=end)
        return found._replace(num_blocks=0)

    def _all_have_state(self, key: BlockKey) -> bool:
        return self._others.have(key.model, [key.name])[0].state

    def _end_behind(self, asked: Asked, number: int) -> tuple[EndOnDisk | None, int, int]:
        """The end behind this many blocks that has most of the prompt, how many first tokens of it
        a head has, with or without their KV, and how many one of which it has all. Where a state is
        needed the prompt must have all of the end.
        """
        start = number * self._block_size
        above = BlockKey(asked.model, asked.names[number - 1] if number else asked.root)
        rest = asked.token_ids[start:]
        best: EndOnDisk | None = None
        most_known = most_said = 0
        with suppress(StoreError):
            for path in heads_behind(self._heads, above)[:_MAX_HEADS]:
                with suppress(SlotMissing, SlotForeign, SlotDamaged):
                    tokens, has_kv = _end_of(path, start)
                    num = num_common(tokens, rest)
                    most_known = max(most_known, num)
                    most_said = max(most_said, start + num if num == len(tokens) else 0)
                    fits = num == len(tokens) if asked.needs_state else num > 0
                    if has_kv and fits and (best is None or num > best.num_tokens):
                        name = asked.chain.end_hash(above.name, tokens)
                        if self._all_have_state(BlockKey(asked.model, name)):
                            best = EndOnDisk(path, number, num, name, len(tokens))
        return best, start + most_known, most_said


def _groups(wanted: Sequence[Wanted]) -> list[list[Wanted]]:
    """What is read at once: slots that follow each other, a few for each thread."""
    groups: list[list[Wanted]] = []
    most = min(SLAB_BLOCKS, -(-len(wanted) // NUM_READERS))
    for one in wanted:
        last = groups[-1][-1] if groups else one
        goes_on = last.kind == one.kind == SLOT and last.start + len(last.token_ids) == one.start
        if goes_on and len(groups[-1]) < most:
            groups[-1].append(one)
        else:
            groups.append([one])
    return groups


def _end_of(path: Path, start: int) -> tuple[array[int], bool]:
    """The tokens of a head behind its last whole block, and whether it has their KV: it has not
    before the model rests. Raises as `read_head`.
    """
    with open_file(path, HEAD) as file:
        has_kv = len(file.front.entries) > 1
    return array("I", read_head(path).token_ids[start:]), has_kv


def read_file(wanted: Wanted) -> PieceRead:
    """Read a file; one that is damaged goes."""
    return read_files([wanted])[0]


def read_files(group: Sequence[Wanted]) -> list[PieceRead]:
    """Read these files; one that is damaged goes.

    The arrays of several are views of a slab: these have to be of blocks that follow each other.
    """
    shared: Pages | None = None
    reads: list[tuple[PieceRead, Callable[[], BlockArrays] | None]] = []
    for number, wanted in enumerate(group):
        begun_s = time.perf_counter()
        try:
            with open_file(wanted.path, wanted.kind) as file:
                about, layout, recompute_ms = _about(file.front, wanted)
                if about is not None and about != wanted.name:
                    raise SlotDamaged("it is of another block")
                if mx.cuda.is_available():
                    token_ids, loaded = _loaded(wanted.path, file)
                    arrays = partial(BlockArrays, loaded)
                else:
                    entries = [one for one in file.front.entries if one.name != TOKENS]
                    shared = shared or Pages(entries, len(group))
                    pages, at = (shared, number) if shared.fits(entries) else (Pages(entries, 1), 0)
                    token_ids, arrays = _read_into(file, pages, at), partial(pages.block, at)
        except StoreError as error:
            reads.append((_not_read(wanted, error), None))
            continue
        if token_ids is not None and wanted.kind == HEAD:
            token_ids = token_ids[wanted.start :]
        num_bytes, seconds = file.front.file_bytes, time.perf_counter() - begun_s
        read = PieceRead(wanted, layout, recompute_ms, token_ids, None, num_bytes, seconds)
        reads.append((read, arrays))
    return [one if arrays is None else one._replace(arrays=arrays()) for one, arrays in reads]


def _read_into(file: KvFile, pages: Pages, number: int) -> array[int] | None:
    """Read all tensors, those of KV into their pages; the token ids, if it has any.

    What is compared is what was read into memory.
    """
    ids: list[memoryview] = []

    def place(entry: TensorEntry) -> memoryview:
        if entry.name != TOKENS:
            return pages.place(entry, number)
        ids.append(memoryview(bytearray(entry.num_bytes)))
        return ids[0]

    file.read(into=place)
    return array("I", bytes(ids[0])) if ids else None


def _loaded(path: Path, file: KvFile) -> tuple[array[int] | None, dict[str, mx.array]]:
    """The token ids of a file, if it has any, and its arrays, where the CPU writes none: on CUDA.

    They are read once to be compared, through one small buffer, and once by mlx, which copies them
    to the device with threads of its own. That takes a third of the time of a copy of ours.
    """
    tokens = file.read({TOKENS})
    file.check()
    try:
        loaded = cast("dict[str, mx.array]", mx.load(str(path)))
        loaded.pop(TOKENS, None)
        mx.eval(list(loaded.values()))
    except (RuntimeError, ValueError, OSError) as error:
        if not path.exists():
            raise SlotMissing(f"{path} has just left") from error
        raise SlotDamaged(f"it cannot be loaded: {error}") from error
    return array("I", bytes(tokens[0].data)) if tokens else None, loaded


def _not_read(wanted: Wanted, error: StoreError) -> PieceRead:
    if isinstance(error, SlotDamaged) and not isinstance(error, SlotForeign):
        wanted.path.unlink(missing_ok=True)
    return PieceRead(wanted, error=error)


def _about(front: Front, wanted: Wanted) -> tuple[bytes | None, str, float]:
    try:
        if wanted.kind == HEAD:
            return None, msgspec.json.decode(front.about, type=Head).layout, 0.0
        about = msgspec.json.decode(front.about, type=SlotAbout)
    except msgspec.MsgspecError as error:
        raise SlotDamaged("it does not say of what it is") from error
    return about.name, about.layout, about.recompute_ms
