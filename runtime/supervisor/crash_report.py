"""What is learnt of a worker while it lives, so that its end can be told: cause, record, memory."""

from __future__ import annotations

import asyncio
import signal
import time
from pathlib import Path

import msgspec
import structlog

from runtime import nvidia
from runtime.errors import WorkerDied, WorkerError
from runtime.memory import (
    KEPT_BESIDE_GPU_BYTES,
    KEPT_BYTES,
    RETURN_S,
    Departure,
    available_bytes,
    footprint_bytes,
    has_returned,
    is_given_back,
    num_oom_kills,
)
from runtime.scarcity import says_so
from runtime.supervisor.blame import WorkerEnd, sentence_of
from runtime.supervisor.crashes import (
    Crashes,
    CrashRecord,
    MemoryFigures,
    name_of_signal,
    new_id,
    split_stacks,
)
from runtime.supervisor.health import Watchdog
from runtime.supervisor.last_words import last_words
from runtime.supervisor.spawn import Child
from runtime.wire import Heartbeat, Released

_log = structlog.get_logger("hearth.worker")
_OUT_OF_MEMORY = ("bad_alloc", "Unable to allocate", "MemoryError", "out of memory", "OutOfMemory")
_POLL_S = 0.25


class CrashReporter:
    """Belongs to the event loop: `sample()` now and then, `lost()` at a crash, the rest after."""

    def __init__(self, home: Path, model: str, num_processes: int = 1) -> None:
        self._num_processes = num_processes
        self._has_own_memory = nvidia.is_used()
        self._crashes = Crashes(home / "crashes")
        self._model = model
        self._memory = MemoryFigures()
        self.peak_bytes = 0
        """The most that its allocator held at once, the hot tier included."""
        self.working_bytes = 0
        """The same without the hot tier, which gives way: weights, running KV and the rest."""
        self._num_oom_kills = num_oom_kills()
        self._was_killed_for_memory = False
        self._lost: CrashRecord | None = None
        self.returncode: int | None = None
        self.departure: Departure | None = None

    @property
    def footprint_bytes(self) -> int:
        """What it took when it was looked at last."""
        return self._memory.footprint

    def heard(self, beat: Heartbeat) -> None:
        """A heartbeat arrived."""
        peak_bytes = max(beat.peak_bytes, beat.active_bytes)
        hot_bytes = beat.kv.hot_bytes if beat.kv is not None else 0
        self.peak_bytes = max(self.peak_bytes, peak_bytes)
        self.working_bytes = max(self.working_bytes, peak_bytes - hot_bytes)

    def sample(self, pid: int | None, beat: Heartbeat | None) -> None:
        """Look at its memory while it lives; what was seen last stands when it has just ended."""
        if pid is None:
            return
        beat = beat or Heartbeat(step=0, is_busy=False, phase="starting")
        available = available_bytes()
        footprint = footprint_bytes(
            pid,
            beat.active_bytes + beat.cache_bytes,
            num_processes=self._num_processes,
            has_own_memory=self._has_own_memory,
        )
        if footprint:
            self._memory = MemoryFigures(
                active=beat.active_bytes,
                cache=beat.cache_bytes,
                peak=self.peak_bytes,
                footprint=footprint,
                available=available,
            )

    def end_of(self, child: Child) -> WorkerEnd:
        """How the process ended, or its connection did, as far as that is known now."""
        code, output = child.returncode, child.output
        self._was_killed_for_memory = (
            code == -signal.SIGKILL and num_oom_kills() > self._num_oom_kills
        )
        return WorkerEnd(
            returncode=code,
            was_up=child.hello is not None,
            was_out_of_memory=self._was_killed_for_memory,
            is_lacking=code not in (None, 0) and says_so(output),
        )

    def lost(self, error: WorkerError, watchdog: Watchdog, num_running: int) -> None:
        """It was lost, for this reason, with so many generations at work."""
        beat, memory = watchdog.last, self._memory
        if beat is not None:
            memory = msgspec.structs.replace(
                memory, active=beat.active_bytes, cache=beat.cache_bytes, peak=self.peak_bytes
            )
        self._lost = CrashRecord(
            id=new_id(),
            at_s=time.time(),
            model=self._model,
            pid=0,
            code=error.code,
            message=error.message,
            phase=watchdog.phase,
            step=beat.step if beat is not None else 0,
            num_running=num_running,
            memory=memory,
        )

    async def keep(self, child: Child, watchdog: Watchdog) -> None:
        """The process has ended and was heard out: write the record, if it was lost.

        So it was when it was asked to leave and came to another end.
        """
        self.returncode = child.returncode
        if self._lost is None and child.has_failed:
            cause = f"{sentence_of(self.end_of(child))} while it was leaving"
            _log.error("worker did not leave", model=self._model, pid=child.pid, cause=cause)
            self.lost(WorkerDied(f"The process of the model {self._model} {cause}."), watchdog, 0)
        if self._lost is None:
            return
        await asyncio.to_thread(self._crashes.keep, self._record(self._lost, child))

    def is_given_back(self, released: Released) -> bool:
        """Whether its process kept nothing of its models."""
        before, after = released.before, released.after
        beside = KEPT_BESIDE_GPU_BYTES if self._has_own_memory else KEPT_BYTES
        is_freed = is_given_back(before.allocated_bytes, after.allocated_bytes)
        return is_freed and is_given_back(before.resident_bytes, after.resident_bytes, beside)

    def gave_back(self, released: Released) -> None:
        """Its process lives on, and has given all of its memory back."""
        freed = self._memory.footprint - released.after.resident_bytes
        self.departure = Departure(
            is_clean=True,
            footprint_bytes=self._memory.footprint,
            freed_bytes=freed,
            is_memory_suspect=False,
        )

    async def check_memory(self, *, was_asked: bool) -> bool:
        """Wait until the memory of the process is available again, or is not going to be.

        False when it never took any that is worth a look.
        """
        is_clean = was_asked and self.returncode == 0
        footprint = self._memory.footprint
        deadline_s = time.monotonic() + RETURN_S
        while True:
            freed = available_bytes() - self._memory.available
            is_back = has_returned(footprint, freed)
            if is_back or time.monotonic() >= deadline_s:
                break
            await asyncio.sleep(_POLL_S)
        self.departure = Departure(
            is_clean=is_clean,
            footprint_bytes=footprint,
            freed_bytes=freed,
            is_memory_suspect=not is_back,
        )
        if not is_back:
            _log.error("memory not given back", model=self._model, took=footprint, freed=freed)
        elif not is_clean:
            _log.info("worker did not exit cleanly", model=self._model, freed=freed)
        return footprint > 0

    def _record(self, lost: CrashRecord, child: Child) -> CrashRecord:
        stacks, stderr = split_stacks(child.output)
        code = child.returncode
        ran_out = any(mark in line for line in stderr for mark in _OUT_OF_MEMORY)
        return CrashRecord(
            id=lost.id,
            at_s=lost.at_s,
            model=lost.model,
            pid=child.pid or 0,
            code=lost.code,
            message=lost.message,
            signal=name_of_signal(code),
            exit_status=code if code is not None and code >= 0 else None,
            phase=lost.phase,
            step=lost.step,
            num_running=lost.num_running,
            uptime_s=round(time.monotonic() - child.spawned_s, 3),
            memory=lost.memory,
            was_out_of_memory=self._was_killed_for_memory or ran_out,
            stderr=last_words(stderr),
            stacks=last_words(stacks),
        )
