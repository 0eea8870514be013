"""The writer thread: runs become slot files behind the requests, in order, within bounds.

It makes no mlx call: it gets evaluated host bytes. Publishing a staged file is the server's part.
"""

from __future__ import annotations

import threading
import time
from array import array
from collections import deque
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

from msgspec import structs

from runtime.kv.room import UNBOUNDED, Room
from store.errors import OverCap, StoreError
from store.keyed_names import NOBODY, Asker
from store.slots import StagedSlot, remove, stage
from store.types import SlotHeader, TensorData, TtlClass

PAUSE_AFTER_ERROR_S = 60.0
_BUSY_SHARE = 3.0


class Whole(NamedTuple):
    """All that a slot file has of a run."""

    layout: str
    tensors: list[TensorData]


@dataclass(frozen=True, slots=True)
class WriteJob:
    """One slot to be written, who asked for it, and whether a turn ends.

    `parent` is the slot that has the tokens before it. Where `tensors` are one of `num_parts`
    parts, `whole` gives layout and tensors of all.
    """

    header: SlotHeader
    token_ids: array[int]
    tensors: list[TensorData]
    asker: Asker = NOBODY
    ends_turn: bool = False
    parent: str | None = None
    num_parts: int = 1
    whole: Callable[[], Whole] | None = None

    @property
    def nbytes(self) -> int:
        """Those of all parts, which are about alike."""
        return sum(tensor.data.nbytes for tensor in self.tensors) * self.num_parts


class WriteFailed(NamedTuple):
    """A slot was not written: the queue was full, or the store failed."""

    slot_id: str
    reason: str


class SlotWriter:
    """A bounded queue of slots to write. While `idle` is not set the writer takes turns off."""

    def __init__(
        self,
        root: Path,
        max_bytes: int,
        on_staged: Callable[[WriteJob, StagedSlot], None],
        on_failed: Callable[[WriteFailed], None],
        room: Room = UNBOUNDED,
    ) -> None:
        self._root = root
        self._max_bytes = max_bytes
        self._on_staged = on_staged
        self._on_failed = on_failed
        self._room = room
        self._jobs: deque[WriteJob] = deque()
        self._wake = threading.Condition()
        self._current: WriteJob | None = None
        self._on_given_up: list[Callable[[], None]] = []
        self._is_closing = False
        self._paused_until_s = 0.0
        self._resting_until_s = 0.0
        self.pause_s = PAUSE_AFTER_ERROR_S
        self.idle = threading.Event()
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
                self._jobs.append(job)
                self.num_queued_bytes += job.nbytes
                if self.num_queued_bytes > self._max_bytes:
                    dropped = self._make_room()
                self._wake.notify()
            self.num_dropped += len(dropped)
        for failure in dropped:
            self._on_failed(failure)

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
            self._jobs.clear()
            self.num_queued_bytes = 0
            if self._current is not None:
                self._on_given_up.append(lambda: None)

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
            jobs = [job for job in self._jobs if job.header.id not in slot_ids]
            self._jobs = deque(_anonymous(job, is_meant) for job in jobs)
            self.num_queued_bytes = sum(job.nbytes for job in jobs)
            current = self._current
            if current is not None and current.header.id in slot_ids:
                self._on_given_up.append(then)
                return
            if current is not None:
                self._current = _anonymous(current, is_meant)
        then()

    def run(self) -> None:
        """Write until closed and empty."""
        while (job := self._next()) is not None:
            self._write(job)

    def close(self) -> None:
        """Write what is queued without consideration for anybody, then end."""
        with self._wake:
            self._is_closing = True
            self._wake.notify()
        self.idle.set()

    def _make_room(self) -> list[WriteFailed]:
        """Drop the oldest jobs until the rest fits."""
        dropped: list[WriteFailed] = []
        while self.num_queued_bytes > self._max_bytes and len(self._jobs) > 1:
            job = self._jobs.popleft()
            self.num_queued_bytes -= job.nbytes
            dropped.append(WriteFailed(job.header.id, "queue_full"))
        return dropped

    def _next(self) -> WriteJob | None:
        with self._wake:
            self._wake.wait_for(lambda: self._jobs or self._is_closing)
            if not self._jobs:
                return None
            self._current = job = self._jobs.popleft()
            self.num_queued_bytes -= job.nbytes
            return job

    def _write(self, job: WriteJob) -> None:
        pace = _Pace(self.idle, lambda: bool(self._on_given_up))
        try:
            header, tensors = _whole(job)
            reserve = partial(self._room.take, header.id, parent=job.parent)
            staged = stage(self._root, header, job.token_ids, tensors, pace.yield_, reserve)
        except _GivenUp:
            self._room.leave(job.header.id)
            self._given_up()
            return
        except OverCap as error:
            self._refused(job, error.reason)
            return
        except (StoreError, ValueError) as error:
            self._room.leave(job.header.id)
            if self._given_up():
                return
            reason = error.reason if isinstance(error, StoreError) else "refused"
            with self._wake:
                self._paused_until_s = time.monotonic() + self.pause_s
                waiting = list(self._jobs)
                self._jobs.clear()
                self.num_queued_bytes = 0
            for one in (job, *waiting):
                self._on_failed(WriteFailed(one.header.id, reason))
            return
        with self._wake:
            if self._current is not None and not self._on_given_up:
                self._on_staged(replace(self._current, header=header), staged)
                self._current = None
                return
        with suppress(StoreError):
            remove(staged.path)
        self._room.leave(job.header.id)
        self._given_up()

    def _refused(self, job: WriteJob, reason: str) -> None:
        """The disk has no room for it."""
        if self._given_up():
            return
        with self._wake:
            self._current = None
        self._on_failed(WriteFailed(job.header.id, reason))

    def _given_up(self) -> bool:
        """Whether what was written is not wanted any more; nothing of it is left then."""
        with self._wake:
            waiting, self._on_given_up, self._current = self._on_given_up, [], None
        for then in waiting:
            then()
        return bool(waiting)


class _GivenUp(Exception):
    """What is being written is not wanted any more."""


class _Pace:
    """While requests run, writing takes a quarter of the time at most."""

    def __init__(self, idle: threading.Event, is_given_up: Callable[[], bool]) -> None:
        self._idle = idle
        self._is_given_up = is_given_up
        self._since_s = time.monotonic()

    def yield_(self, num_bytes: int) -> None:  # noqa: ARG002
        """Raises _GivenUp."""
        if self._is_given_up():
            raise _GivenUp
        if not self._idle.is_set():
            self._idle.wait((time.monotonic() - self._since_s) * _BUSY_SHARE)
        self._since_s = time.monotonic()


def _whole(job: WriteJob) -> tuple[SlotHeader, list[TensorData]]:
    if job.whole is None:
        return job.header, job.tensors
    layout, tensors = job.whole()
    return structs.replace(job.header, layout=layout), tensors


def _anonymous(job: WriteJob, is_meant: Callable[[Asker], bool]) -> WriteJob:
    return replace(job, asker=NOBODY) if is_meant(job.asker) else job
