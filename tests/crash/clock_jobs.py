"""Run jobs in a process whose wall clock is set while they run, and say how often they ran."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections import Counter
from pathlib import Path

import msgspec

from api.jobs import SteadyScheduler
from tests.waiting import PATIENCE_S

EVERY_S = 0.05
DAY_S = 86_400.0


async def run(steps: list[str]) -> dict[str, int]:
    """Set the clock to each of `steps` in turn, each once the short job ran ten times more.

    How often each job ran; `allowed` is how often the short one may have by now.
    """
    told = Path(os.environ["FAKETIME_TIMESTAMP_FILE"])
    counts: Counter[str] = Counter()
    runs = asyncio.Condition()

    def counted(name: str):
        async def job() -> None:
            async with runs:
                counts[name] += 1
                runs.notify_all()

        return job

    scheduler = SteadyScheduler()
    begun_s = time.monotonic()
    scheduler.every(DAY_S, counted("daily"), "daily")
    scheduler.every(EVERY_S, counted("short"), "short")
    scheduler.start()
    async with asyncio.timeout(PATIENCE_S), runs:
        await runs.wait_for(lambda: counts["daily"] == 1 and counts["short"] >= 1)
        for step in steps:
            before, seen_s = counts["short"], time.time()
            await asyncio.to_thread(told.write_text, step)
            await runs.wait_for(lambda before=before: counts["short"] >= before + 10)
            counts["steps_seen"] += abs(time.time() - seen_s) > DAY_S
    counts["allowed"] = int((time.monotonic() - begun_s) / EVERY_S) + 2
    scheduler.shutdown(wait=False)
    return dict(counts)


if __name__ == "__main__":
    print(msgspec.json.encode(asyncio.run(run(sys.argv[1:]))).decode())  # noqa: T201
