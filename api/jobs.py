"""Chores on schedule: APScheduler jobs of this process, never two of a kind at a time.

APScheduler writes its times as wall time. `SteadyScheduler` moves them along whenever the wall
clock was set, so that every chore keeps its distance on a clock that nobody sets.
"""

from __future__ import annotations

import asyncio
import logging
from asyncio import TimerHandle
from collections.abc import Awaitable, Callable, Iterable, Sequence
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import NamedTuple, Protocol, cast

from apscheduler.executors.asyncio import AsyncIOExecutor
from apscheduler.jobstores.memory import MemoryJobStore
from apscheduler.schedulers.asyncio import AsyncIOScheduler
from apscheduler.triggers.base import BaseTrigger
from typing_extensions import override

from runtime.cache import maintenance
from runtime.cache.compaction import compact
from runtime.cache.maintenance import News, StoreLimits
from runtime.cache.owned import OpenStore
from runtime.cache.service import KvStore
from runtime.config.settings import Settings
from store.clock import Clock, now

_AT_BOOT_S = 2.0
_SCRUB_S = 300.0
_LOOK_S = 5.0
"""How often the clocks are compared at least: as late a step, or a wake-up, may be noticed.

However far off a job is by the wall clock, which may be set back while it is being looked at.
"""

_SLEW_S = 0.5
"""The wall clock may gain or lose so much between two looks without having been set."""


class Job(NamedTuple):
    """One chore and how often it is done, in seconds."""

    name: str
    every_s: float
    work: Callable[[OpenStore], Iterable[News]]
    is_for_idle: bool = False


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
    """`is_idle` says whether no request is open: some work waits for that."""

    def __init__(
        self,
        kv: KvStore,
        settings: Settings,
        is_idle: Callable[[], bool],
        chores: Sequence[Chore] = (),
    ) -> None:
        self._kv = kv
        self._is_idle = is_idle
        self._scheduler = SteadyScheduler()
        self._jobs = _jobs(StoreLimits.of(settings), lambda: kv.is_stopping or not is_idle(), kv)
        self._chores = chores

    def start(self) -> None:
        """Do everything once soon after boot, then each on its schedule."""
        logging.getLogger("apscheduler").setLevel(logging.WARNING)
        of_the_store = [Chore(one.name, one.every_s, partial(self._run, one)) for one in self._jobs]
        for chore in [*of_the_store, *self._chores]:
            self._scheduler.every(chore.every_s, chore.run, chore.name)
        self._scheduler.start()

    def stop(self) -> None:
        """Start no more of them."""
        if self._scheduler.running:
            # It reports the jobs that it cancels as if they had failed.
            logging.getLogger("apscheduler").setLevel(logging.CRITICAL)
            self._scheduler.shutdown(wait=False)

    async def _run(self, job: Job) -> None:
        if self._is_idle() or not job.is_for_idle:
            await self._kv.chore(job.work)


def _jobs(limits: StoreLimits, is_busy: Callable[[], bool], kv: KvStore) -> tuple[Job, ...]:
    def merge(store: OpenStore) -> Iterable[News]:
        return compact(store, kv.loaded_models, is_busy)

    expire = partial(maintenance.expire, limits=limits)
    caps = partial(maintenance.keep_within_caps, limits=limits)
    tidy = partial(maintenance.tidy, limits=limits)
    scrub = partial(maintenance.scrub, period_s=_SCRUB_S, should_stop=is_busy)
    orphans = partial(maintenance.sweep_orphans, should_stop=is_busy)
    return (
        Job("expire", 60.0, expire),
        Job("caps", 60.0, caps),
        Job("tidy", 600.0, tidy),
        Job("compact", 600.0, merge, is_for_idle=True),
        Job("scrub", _SCRUB_S, scrub, is_for_idle=True),
        Job("orphans", 86_400.0, orphans),
    )
