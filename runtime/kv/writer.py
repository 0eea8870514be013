"""The writer: runs become slot files behind the requests, the newest turns first, within bounds.

Its threads make no mlx call: they get evaluated host bytes. Publishing a staged file is the
server's part.
"""

from __future__ import annotations

import threading
import time
from array import array
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import NamedTuple

from msgspec import structs

from runtime.kv.room import UNBOUNDED, WriteRoom
from runtime.slot_events import SlotStaged
from store.errors import OverCap, StoreError
from store.keyed_names import NOBODY, Asker
from store.slots import StagedSlot, remove, stage
from store.types import SlotHeader, TensorData, TtlClass

PAUSE_AFTER_ERROR_S = 60.0
NUM_THREADS = 2
"""That write at once while nothing else runs."""

_REST_SHARE = 3.0
"""While requests run a writer rests so much longer than it works, with an empty queue."""

_CALM_SHARE = 1 / 16
"""With so much of the queue full it does not rest: what waits there is in memory until then."""


class Packed(NamedTuple):
    """A run on its way to disk, as host bytes.

    Where these are one of `num_parts` parts, `whole` asks for the others and gives all of them: it
    waits, and may be called in any thread.
    """

    layout: str
    tensors: list[TensorData]
    num_parts: int = 1
    whole: Callable[[], Packed] | None = None

    @property
    def nbytes(self) -> int:
        """Those of all parts, which are about alike."""
        return sum(tensor.data.nbytes for tensor in self.tensors) * self.num_parts


@dataclass(frozen=True, slots=True)
class WriteJob:
    """One slot to be written, who asked for it, and whether a turn ends.

    `parent` is the slot that has the tokens before it.
    """

    header: SlotHeader
    token_ids: array[int]
    packed: Packed
    asker: Asker = NOBODY
    ends_turn: bool = False
    parent: str | None = None

    def staged(self, file: StagedSlot) -> SlotStaged:
        """What the server is told once it is written."""
        return SlotStaged(
            header=self.header,
            path=str(file.path),
            num_bytes=file.num_bytes,
            asker=self.asker,
            ends_turn=self.ends_turn,
            write_ms=file.took_s * 1000,
            parent=self.parent,
        )


class WriteFailed(NamedTuple):
    """A slot was not written: the queue was full, or the store failed."""

    slot_id: str
    reason: str


class _Forgetting(NamedTuple):
    """Slots that are being written and are to be forgotten, and what is to be called then."""

    slot_ids: set[str]
    then: Callable[[], None]


class SlotWriter:
    """A bounded queue of slots to write: first those that `prefer` named, else in order.

    While requests run one thread writes and rests in between, the less the more is queued. All
    `num_threads` do while nothing runs, one that computes checksums keeps no disk busy, and when
    too much is queued.
    """

    def __init__(
        self,
        root: Path,
        max_bytes: int,
        on_staged: Callable[[WriteJob, StagedSlot], None],
        on_failed: Callable[[WriteFailed], None],
        room: WriteRoom = UNBOUNDED,
        *,
        num_threads: int = NUM_THREADS,
    ) -> None:
        self._root = root
        self._max_bytes = max_bytes
        self._on_staged = on_staged
        self._on_failed = on_failed
        self._room = room
        self._num_threads = num_threads
        self._jobs: OrderedDict[str, WriteJob] = OrderedDict()
        self._ages: dict[str, int] = {}
        self._counter = count()
        self._wake = threading.Condition()
        self._writing: dict[str, WriteJob] = {}
        self._given_up: dict[str, list[_Forgetting]] = {}
        self._idle = threading.Event()
        self._is_closing = False
        self._paused_until_s = 0.0
        self._resting_until_s = 0.0
        self.pause_s = PAUSE_AFTER_ERROR_S
        self.clock: Callable[[], float] = time.monotonic
        self.num_queued_bytes = 0
        self.num_dropped = 0

    def put(self, job: WriteJob) -> None:
        """Queue a slot; in a full queue the oldest make room for it."""
        dropped: list[WriteFailed] = []
        with self._wake:
            if not self.takes(job.header.ttl_class):
                is_paused = time.monotonic() < self._paused_until_s
                dropped.append(WriteFailed(job.header.id, "paused" if is_paused else "budget"))
            else:
                self._jobs[job.header.id] = job
                self._ages[job.header.id] = next(self._counter)
                self.num_queued_bytes += job.packed.nbytes
                if self.num_queued_bytes > self._max_bytes:
                    dropped = self._make_room()
                self._wake.notify_all()
            self.num_dropped += len(dropped)
        for failure in dropped:
            self._on_failed(failure)

    def prefer(self, slot_ids: Sequence[str]) -> None:
        """Write these before everything else that is queued, in this order, as the newest."""
        with self._wake:
            for slot_id in reversed(slot_ids):
                if slot_id in self._jobs:
                    self._jobs.move_to_end(slot_id, last=False)
                    self._ages[slot_id] = next(self._counter)

    def set_idle(self, *, is_idle: bool) -> None:
        """Whether no request is running."""
        with self._wake:
            (self._idle.set if is_idle else self._idle.clear)()
            self._wake.notify_all()

    def takes(self, ttl_class: TtlClass) -> bool:
        """Whether slots of this class are written now: not while the store fails, nor, unless
        pinned, when enough was written today.
        """
        now_s = time.monotonic()
        is_resting = now_s < self._resting_until_s and ttl_class != "pinned"
        return now_s >= self._paused_until_s and not is_resting

    def rest(self, seconds: float) -> None:
        """Take nothing but what is pinned for so long: enough was written today."""
        self._resting_until_s = time.monotonic() + seconds

    @property
    def has_room(self) -> bool:
        """So much can be queued that nothing has to make room for it soon."""
        return self.num_queued_bytes < self._max_bytes // 2

    def resume(self) -> None:
        """The store works again, as far as anybody knows: try it."""
        self._paused_until_s = 0.0

    def drop_all(self) -> None:
        """Write nothing of what is queued: it bears the names of another store."""
        with self._wake:
            self._clear()
            for slot_id in self._writing:
                self._given_up.setdefault(slot_id, [])

    def forget(
        self,
        slot_ids: Collection[str],
        is_meant: Callable[[Asker], bool],
        then: Callable[[], None],
    ) -> None:
        """Do not write these slots; do not say any more that others are of these conversations.

        `then` is called, from any thread, when nothing of these slots is on disk nor staged later.
        """
        with self._wake:
            for slot_id in self._jobs.keys() & set(slot_ids):
                self._take(slot_id)
            self._jobs = OrderedDict((i, _anonymous(j, is_meant)) for i, j in self._jobs.items())
            self._writing = {i: _anonymous(j, is_meant) for i, j in self._writing.items()}
            written = self._writing.keys() & set(slot_ids)
            forgetting = _Forgetting(written, then)
            for slot_id in written:
                self._given_up.setdefault(slot_id, []).append(forgetting)
        if not written:
            then()

    def run(self) -> None:
        """Write until closed and empty."""
        helpers = [
            threading.Thread(target=self._help, name="writer helper", daemon=True)
            for _ in range(self._num_threads - 1)
        ]
        for helper in helpers:
            helper.start()
        while (job := self._next(lambda: True)) is not None:
            self._write(job)
        for helper in helpers:
            helper.join()

    def _help(self) -> None:
        while (job := self._next(self._may_help)) is not None:
            self._write(job)

    def _may_help(self) -> bool:
        return self._idle.is_set() or not self._rest_share()

    def _rest_share(self) -> float:
        return rest_share(self.num_queued_bytes, self._max_bytes)

    def close(self) -> None:
        """Write what is queued without consideration for anybody, then end."""
        with self._wake:
            self._is_closing = True
            self._idle.set()
            self._wake.notify_all()

    def _make_room(self) -> list[WriteFailed]:
        """Drop the oldest jobs until the rest fits."""
        dropped: list[WriteFailed] = []
        while self.num_queued_bytes > self._max_bytes and len(self._jobs) > 1:
            oldest = min(self._jobs, key=self._ages.__getitem__)
            self._take(oldest)
            dropped.append(WriteFailed(oldest, "queue_full"))
        return dropped

    def _take(self, slot_id: str) -> WriteJob:
        """Take a job out of the queue."""
        job = self._jobs.pop(slot_id)
        del self._ages[slot_id]
        self.num_queued_bytes -= job.packed.nbytes
        return job

    def _clear(self) -> list[WriteJob]:
        return [self._take(slot_id) for slot_id in list(self._jobs)]

    def _next(self, may_write: Callable[[], bool]) -> WriteJob | None:
        with self._wake:
            self._wake.wait_for(lambda: (self._jobs and may_write()) or self._is_closing)
            if not self._jobs:
                return None
            job = self._take(next(iter(self._jobs)))
            self._writing[job.header.id] = job
            return job

    def _write(self, job: WriteJob) -> None:
        slot_id = job.header.id
        pace = _Pace(self._idle, lambda: slot_id in self._given_up, self._rest_share, self.clock)

        def reserve(num_bytes: int) -> None:
            self._room.take(slot_id, num_bytes, parent=job.parent)
            pace.begin()

        try:
            header, tensors = _whole(job)
            staged = stage(self._root, header, job.token_ids, tensors, pace.yield_, reserve)
        except _GivenUp:
            self._room.leave(slot_id)
            self._end(slot_id)
            return
        except OverCap as error:
            if not self._end(slot_id):
                self._on_failed(WriteFailed(slot_id, error.reason))
            return
        except (StoreError, ValueError) as error:
            self._room.leave(slot_id)
            self._fail(job, error)
            return
        with self._wake:
            if slot_id not in self._given_up:
                self._on_staged(replace(self._writing.pop(slot_id), header=header), staged)
                return
        with suppress(StoreError):
            remove(staged.path)
        self._room.leave(slot_id)
        self._end(slot_id)

    def _fail(self, job: WriteJob, error: StoreError | ValueError) -> None:
        """The store does not work: nothing else is written for a while either."""
        if self._end(job.header.id):
            return
        reason = error.reason if isinstance(error, StoreError) else "refused"
        with self._wake:
            self._paused_until_s = time.monotonic() + self.pause_s
            waiting = self._clear()
        for one in (job, *waiting):
            self._on_failed(WriteFailed(one.header.id, reason))

    def _end(self, slot_id: str) -> bool:
        """It is not written any more; whether it was given up, so that nothing of it is left."""
        with self._wake:
            del self._writing[slot_id]
            if slot_id not in self._given_up:
                return False
            waiting = self._given_up.pop(slot_id)
            for one in waiting:
                one.slot_ids.discard(slot_id)
        for one in waiting:
            if not one.slot_ids:
                one.then()
        return True


class _GivenUp(Exception):
    """What is being written is not wanted any more."""


def rest_share(num_queued_bytes: int, max_bytes: int) -> float:
    """How much longer than it works a writer rests while requests run."""
    calm_bytes = max_bytes * _CALM_SHARE
    return _REST_SHARE * max(0.0, 1 - num_queued_bytes / calm_bytes) if calm_bytes else 0.0


class _Pace:
    """While requests run, writing takes a part of the time only. Waiting for room is no work."""

    def __init__(
        self,
        idle: threading.Event,
        is_given_up: Callable[[], bool],
        share: Callable[[], float],
        clock: Callable[[], float],
    ) -> None:
        self._idle = idle
        self._is_given_up = is_given_up
        self._share = share
        self._clock = clock
        self._since_s = clock()

    def begin(self) -> None:
        """Work begins now."""
        self._since_s = self._clock()

    def yield_(self, num_bytes: int) -> None:  # noqa: ARG002
        """Raises _GivenUp."""
        if self._is_given_up():
            raise _GivenUp
        if not self._idle.is_set():
            self._idle.wait((self._clock() - self._since_s) * self._share())
        self.begin()


def _whole(job: WriteJob) -> tuple[SlotHeader, list[TensorData]]:
    if job.packed.whole is None:
        return job.header, job.packed.tensors
    whole = job.packed.whole()
    return structs.replace(job.header, layout=whole.layout), whole.tensors


def _anonymous(job: WriteJob, is_meant: Callable[[Asker], bool]) -> WriteJob:
    return replace(job, asker=NOBODY) if is_meant(job.asker) else job
