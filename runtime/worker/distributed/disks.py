"""The disks of all ranks: what rank 0 has of a block the others have as well, under its name.

Rank 0 asks, from the threads that read and write, and the others answer from threads of their own.
Files of ranks on the machine of the server are counted and removed by it, together with rank 0's.
On other machines nobody else sees them: what is deleted goes when rank 0 hears of it, and what was
evicted, or is of a turn that was not finished, once the model is loaded again.
"""

from __future__ import annotations

import queue
import threading
from array import array
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from functools import partial

from runtime.kv.others import Has, Span
from runtime.kv.pack import PackedKv, RunKv
from runtime.kv.rates import NUM_READERS
from runtime.kv.reader import Wanted, read_file
from runtime.worker.distributed.records import (
    Answer,
    DiskRecord,
    Have,
    HaveAny,
    Read,
    Remove,
    Sync,
    Write,
)
from runtime.worker.distributed.shards import Part, Peers, RankParts
from store.block_names import HASH_BYTES
from store.errors import SlotDamaged, SlotForeign, SlotMissing, StoreError, StoreFailed, StoreFull
from store.slots import SLOT, STATE, BlockKey, SlotAbout, Slots

_FAILURES: dict[str, type[StoreError]] = {
    one.reason: one for one in (SlotDamaged, SlotForeign, SlotMissing, StoreFull)
}
_HAS_SLOT, _HAS_STATE = 1, 2


class OtherDisks:
    """Those of all ranks but 0, as rank 0 uses them. Some may be `are_away`, on other machines."""

    def __init__(self, peers: Peers, *, are_away: bool) -> None:
        self._peers = peers
        self.are_away = are_away

    def have(self, model: bytes, names: Sequence[bytes]) -> list[Has]:
        if not names:
            return []
        answers = self._peers.ask(Have(ask=0, model=model, names=list(names)))()
        by_name = zip(*(one.found for one in answers), strict=True)
        return [
            Has(all(one & _HAS_SLOT for one in each), all(one & _HAS_STATE for one in each))
            for each in by_name
        ]

    def read(self, key: BlockKey, span: Span) -> Callable[[], object]:
        share = self._peers.new_share()
        answers = self._peers.ask(Read(ask=0, run=share.number, key=key, span=span))

        def finish() -> object:
            _check(answers())
            return share

        return finish

    def write(self, about: SlotAbout, token_ids: array[int] | None, share: object) -> None:
        assert isinstance(share, Part)
        wanted = Write(
            ask=0,
            run=share.share.number,
            which=share.which,
            start=share.start,
            key=BlockKey(about.model, about.name),
            token_ids=None if token_ids is None else list(token_ids),
            recompute_ms=about.recompute_ms,
        )
        _check(self._peers.ask(wanted)())

    def sync(self, model: bytes) -> None:
        _check(self._peers.ask(Sync(ask=0, model=model))())

    def remove(self, model: bytes, names: Collection[bytes]) -> None:
        if names:
            self._peers.tell_now(Remove(model=model, names=list(names)))

    def names_of(self, model: bytes) -> set[bytes]:
        found = b"".join(one.found for one in self._peers.ask(HaveAny(ask=0, model=model))())
        return {found[at : at + HASH_BYTES] for at in range(0, len(found), HASH_BYTES)}


def _check(answers: Sequence[Answer]) -> None:
    """Raises StoreError: the first of them that one rank met."""
    for rank, one in enumerate(answers, 1):
        if one.failure is not None:
            raise _FAILURES.get(one.failure, StoreFailed)(f"rank {rank}: {one.message}")


class RankDisk:
    """That of one rank but 0, which does what is `asked`. What it reads it puts among `runs`."""

    def __init__(
        self,
        slots: Slots,
        parts: RankParts,
        runs: dict[int, RunKv],
        asked: queue.SimpleQueue[DiskRecord],
        send: Callable[[Answer], None],
    ) -> None:
        self._slots = slots
        self._parts = parts
        self._runs = runs
        self._asked = asked
        self._send = send
        self._writes: queue.SimpleQueue[tuple[Write, PackedKv]] = queue.SimpleQueue()
        for _ in range(NUM_READERS):
            threading.Thread(target=self._run, daemon=True).start()
        threading.Thread(target=self._run_writes, daemon=True).start()

    def write(self, record: Write) -> None:
        """Write a run as it is now; belongs to the mlx thread."""
        packed = self._parts.packed(self._runs[record.run], record.start, record.which)
        self._writes.put((record, packed))

    def _run(self) -> None:
        while True:
            record = self._asked.get()
            if isinstance(record, Remove):
                with suppress(StoreError):
                    for name in record.names:
                        self._slots.remove(BlockKey(record.model, name))
            else:
                self._answer(record.ask, partial(self._do, record))

    def _run_writes(self) -> None:
        while True:
            record, packed = self._writes.get()
            self._answer(record.ask, partial(self._write, record, packed))

    def _answer(self, ask: int, do: Callable[[], bytes]) -> None:
        try:
            answer = Answer(ask=ask, found=do())
        except StoreError as error:
            answer = Answer(ask=ask, failure=error.reason, message=str(error))
        with suppress(OSError):  # rank 0 has gone
            self._send(answer)

    def _do(self, record: Have | HaveAny | Read | Sync) -> bytes:
        """What was found. Raises StoreError."""
        match record:
            case Have(model=model, names=names):
                return bytes(self._has(BlockKey(model, name)) for name in names)
            case HaveAny(model=model):
                return b"".join(n for n in self._slots.names_of(model) if len(n) == HASH_BYTES)
            case Read():
                self._read(record)
            case Sync(model=model):
                if self._slots.has_folder(model):
                    self._slots.sync([model])
        return b""

    def _has(self, key: BlockKey) -> int:
        has_state = self._slots.has_state(key)
        return _HAS_SLOT * self._slots.has(key) + _HAS_STATE * has_state

    def _read(self, record: Read) -> None:
        key, span = record.key, record.span
        kind, path = SLOT, self._slots.path(key)
        if span.is_state:
            kind, path = STATE, self._slots.state_path(key)
        read = read_file(Wanted(key.name, path, kind, b"", span.start, array("I"), key, span))
        if read.error is not None:
            raise read.error
        assert read.arrays is not None
        try:
            kv = self._parts.load(read.layout, read.arrays.tensors, span.start, span.num_tokens)
        except SlotDamaged:  # it is whole, and of something else
            path.unlink(missing_ok=True)
            raise
        self._runs[record.run] = kv

    def _write(self, record: Write, packed: PackedKv) -> bytes:
        about = SlotAbout(*record.key, packed.layout, record.recompute_ms)
        if record.token_ids is None:
            self._slots.put_state(about, packed.tensors)
        else:
            self._slots.put(about, record.token_ids, packed.tensors)
        return b""
