"""Chores on schedule: APScheduler jobs of this process, never two of a kind at a time."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import NamedTuple

from apscheduler.executors.asyncio import AsyncIOExecutor
from apscheduler.jobstores.memory import MemoryJobStore
from apscheduler.schedulers.asyncio import AsyncIOScheduler

from runtime import housekeeping
from runtime.compaction import compact
from runtime.housekeeping import Limits, News
from runtime.kv_store import KvStore
from runtime.open_store import OpenStore
from runtime.settings import Settings

_AT_BOOT_S = 2.0
_SCRUB_S = 300.0


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
        self._scheduler = AsyncIOScheduler(
            jobstores={"default": MemoryJobStore()},
            executors={"default": AsyncIOExecutor()},
            job_defaults={"max_instances": 1, "coalesce": True, "misfire_grace_time": None},
            timezone=UTC,
        )
        self._jobs = _jobs(Limits.of(settings), lambda: kv.is_stopping or not is_idle(), kv)
        self._chores = chores

    def start(self) -> None:
        """Do everything once soon after boot, then each on its schedule."""
        logging.getLogger("apscheduler").setLevel(logging.WARNING)
        of_the_store = [Chore(one.name, one.every_s, partial(self._run, one)) for one in self._jobs]
        for number, chore in enumerate([*of_the_store, *self._chores]):
            first = datetime.now(UTC) + timedelta(seconds=_AT_BOOT_S + number)
            self._scheduler.add_job(  # pyright: ignore[reportUnknownMemberType]
                chore.run,
                "interval",
                seconds=chore.every_s,
                id=chore.name,
                next_run_time=first,
            )
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


def _jobs(limits: Limits, is_busy: Callable[[], bool], kv: KvStore) -> tuple[Job, ...]:
    def merge(store: OpenStore) -> Iterable[News]:
        return compact(store, kv.loaded_models, is_busy)

    expire = partial(housekeeping.expire, limits=limits)
    caps = partial(housekeeping.keep_within_caps, limits=limits)
    tidy = partial(housekeeping.tidy, limits=limits)
    scrub = partial(housekeeping.scrub, period_s=_SCRUB_S, should_stop=is_busy)
    orphans = partial(housekeeping.sweep_orphans, should_stop=is_busy)
    return (
        Job("expire", 60.0, expire),
        Job("caps", 60.0, caps),
        Job("tidy", 600.0, tidy),
        Job("compact", 600.0, merge, is_for_idle=True),
        Job("scrub", _SCRUB_S, scrub, is_for_idle=True),
        Job("orphans", 86_400.0, orphans),
    )
