"""Chores on schedule: APScheduler jobs of this process, never two of a kind at a time.

APScheduler writes its times as wall time. `SteadyScheduler` moves them along whenever the wall
clock was set, so that every chore keeps its distance on a clock that nobody sets.
"""

from __future__ import annotations

import asyncio
import logging
from asyncio import TimerHandle
from collections.abc import Awaitable, Callable, Sequence
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import NamedTuple, Protocol, cast

from apscheduler.executors.asyncio import AsyncIOExecutor
from apscheduler.jobstores.memory import MemoryJobStore
from apscheduler.schedulers.asyncio import AsyncIOScheduler
from apscheduler.triggers.base import BaseTrigger
from typing_extensions import override

from runtime.cache.conversations import StoreJob
from store.clock import Clock, now

_AT_BOOT_S = 2.0
_LOOK_S = 5.0
"""How often the clocks are compared at least: as late a step, or a wake-up, may be noticed.

However far off a job is by the wall clock, which may be set back while it is being looked at.
"""

_SLEW_S = 0.5
"""The wall clock may gain or lose so much between two looks without having been set."""


class Chore(NamedTuple):
    """Something else that is done now and then, on the event loop; it raises nothing."""

    name: str
    every_s: float
    run: Callable[[], Awaitable[None]]


class Every(BaseTrigger):
    """Each `every_s` seconds, on a grid: what was missed is done once, never listed."""

    def __init__(self, every_s: float) -> None:
        self._every_s = every_s

    @override
    def get_next_fire_time(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, previous_fire_time: datetime | None, now: datetime
    ) -> datetime:
        """The first point of the grid after now; a previous one in the future is kept to."""
        previous = previous_fire_time or now
        num_missed = max((now - previous).total_seconds(), 0.0) // self._every_s
        return previous + timedelta(seconds=(num_missed + 1) * self._every_s)


class _Due(Protocol):
    """What is read and changed of an APScheduler job."""

    next_run_time: datetime

    def modify(self, *, next_run_time: datetime) -> object: ...


class SteadyScheduler(AsyncIOScheduler):
    """Runs its jobs by the clock that nobody sets, whose seconds go on while the machine sleeps."""

    def __init__(self, clock: Clock = now) -> None:
        super().__init__(  # pyright: ignore[reportUnknownMemberType]
            jobstores={"default": MemoryJobStore()},
            executors={"default": AsyncIOExecutor()},
            job_defaults={"max_instances": 1, "coalesce": True, "misfire_grace_time": None},
            timezone=UTC,
        )
        self._clock = clock
        self._ahead_s = self._wall_ahead_s()
        self._next_look: TimerHandle | None = None

    def every(self, every_s: float, run: Callable[[], Awaitable[None]], name: str) -> None:
        """Add a job that runs soon after the start, later than those added before, then again."""
        first_s = _AT_BOOT_S + len(self._due())
        self.add_job(  # pyright: ignore[reportUnknownMemberType]
            run,
            Every(every_s),
            id=name,
            next_run_time=datetime.now(UTC) + timedelta(seconds=first_s),
        )

    @override
    def wakeup(self) -> None:
        """Do what is due, once the times of all jobs stand in the wall clock's present terms."""
        moved_s = self._wall_ahead_s() - self._ahead_s
        if abs(moved_s) > _SLEW_S:
            self._ahead_s += moved_s
            for job in self._due():
                job.modify(next_run_time=job.next_run_time + timedelta(seconds=moved_s))
        super().wakeup()
        self._stop_looking()
        self._next_look = asyncio.get_running_loop().call_later(_LOOK_S, self.wakeup)

    @override
    def shutdown(self, wait: bool = True) -> None:
        """Run nothing more."""
        self._stop_looking()
        super().shutdown(wait)

    def _stop_looking(self) -> None:
        if self._next_look is not None:
            self._next_look.cancel()

    def _due(self) -> list[_Due]:
        return cast("list[_Due]", self.get_jobs())  # pyright: ignore[reportUnknownMemberType]

    def _wall_ahead_s(self) -> float:
        """How far the wall clock is from the one that nobody sets."""
        instant = self._clock()
        return instant.wall_s - instant.monotonic_s


class Jobs:
    """`of_the_store` says what is to be done to the store, given whether requests are open.

    `is_idle` says whether none is: some of that waits for it.
    """

    def __init__(
        self,
        of_the_store: Callable[[Callable[[], bool]], Sequence[StoreJob]],
        is_idle: Callable[[], bool],
        chores: Sequence[Chore] = (),
    ) -> None:
        self._is_idle = is_idle
        self._scheduler = SteadyScheduler()
        self._of_the_store = of_the_store(lambda: not is_idle())
        self._chores = chores

    def start(self) -> None:
        """Do everything once soon after boot, then each on its schedule."""
        logging.getLogger("apscheduler").setLevel(logging.WARNING)
        for job in self._of_the_store:
            self._scheduler.every(job.every_s, partial(self._run, job), job.name)
        for chore in self._chores:
            self._scheduler.every(chore.every_s, chore.run, chore.name)
        self._scheduler.start()

    def stop(self) -> None:
        """Start no more of them."""
        if self._scheduler.running:
            # It reports the jobs that it cancels as if they had failed.
            logging.getLogger("apscheduler").setLevel(logging.CRITICAL)
            self._scheduler.shutdown(wait=False)

    async def _run(self, job: StoreJob) -> None:
        if self._is_idle() or not job.is_for_idle:
            await job.run()
