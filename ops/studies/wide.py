"""Requests for many choices beside others: `python -m ops.studies.wide`.

How long a small request waits while one with `n = 16` does, beside 17 of 32 busy rows; and what a
worker holds of memory while it answers 16 choices of a long prompt.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
from contextlib import suppress
from pathlib import Path

import msgspec

from api.bench.machine import Environment, environment
from ops.bench.client import stream_completion
from ops.bench.engine import prompt
from ops.bench.processes import Hearth, hearth, workers_of
from runtime.embedded import HEARTH_TINY

BUSY, ROWS, CHOICES = 17, 32, 16
LONG_TOKENS = 5900
BUDGET = "700MB"
_REPORT = Path(__file__).parent / "wide.json"
_SAMPLE_S = 0.01
_BEGIN_S = 0.5


class Held(msgspec.Struct):
    """MB of memory resident in the worker before a request and at most during it."""

    idle_mb: float
    peak_mb: float
    was_answered: bool


class Figures(msgspec.Struct):
    """Seconds to the first token of a small request, beside the busy rows alone and with the wide
    request waiting: medians over rounds; the longest. Memory with and without a budget.
    """

    environment: Environment
    rounds: int
    alone_s: float
    beside_wide_s: float
    beside_wide_max_s: float
    budget: str
    within_budget: Held
    without_budget: Held


async def ask(server: Hearth, seed: int, num_tokens: int = 64, **fields: object) -> float:
    """Seconds to the first token."""
    body = {"model": "bench", "prompt": prompt(num_tokens, seed), "ignore_eos": True, **fields}
    return (await stream_completion(server.port, body)).ttft_s


async def waits(server: Hearth, number: int, *, is_wide: bool) -> float:
    """How long a small request waits beside the busy rows."""
    seeds = iter(range(number * 100, number * 100 + 100))
    running = [asyncio.create_task(ask(server, next(seeds), max_tokens=400)) for _ in range(BUSY)]
    await asyncio.sleep(_BEGIN_S)
    if is_wide:
        wide = ask(server, next(seeds), 1024, max_tokens=64, n=CHOICES)
        running.append(asyncio.create_task(wide))
        await asyncio.sleep(0.05)
    waited_s = await ask(server, next(seeds), max_tokens=1)
    await asyncio.gather(*running)
    return waited_s


async def held(budget: str | None) -> Held:
    """What a worker holds while it answers many choices of a long prompt."""
    settings = {"memory_budget": budget} if budget is not None else dict[str, str]()
    async with hearth(
        HEARTH_TINY, None, None, None, spare_worker=False, max_batch=ROWS, **settings
    ) as server:
        await ask(server, 1, max_tokens=1)
        worker = max(workers_of(server.pid), key=lambda one: one.memory_info().rss)
        idle = worker.memory_info().rss
        peak = idle
        request = asyncio.create_task(ask(server, 2, LONG_TOKENS, max_tokens=32, n=CHOICES))
        while not request.done():
            peak = max(peak, worker.memory_info().rss)
            await asyncio.sleep(_SAMPLE_S)
        with suppress(RuntimeError):
            return Held(idle / 1e6, peak / 1e6, (await request) > 0)
    return Held(idle / 1e6, peak / 1e6, was_answered=False)


async def measure(rounds: int) -> Figures:
    """The rounds in turn against one server, then each memory in a server of its own."""
    async with hearth(HEARTH_TINY, spare_worker=False, max_batch=ROWS) as server:
        alone: list[float] = []
        beside: list[float] = []
        for number in range(rounds):
            alone.append(await waits(server, 2 * number, is_wide=False))
            beside.append(await waits(server, 2 * number + 1, is_wide=True))
    return Figures(
        environment=environment(),
        rounds=rounds,
        alone_s=round(statistics.median(alone), 3),
        beside_wide_s=round(statistics.median(beside), 3),
        beside_wide_max_s=round(max(beside), 3),
        budget=BUDGET,
        within_budget=await held(BUDGET),
        without_budget=await held(None),
    )


def main() -> None:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(prog="python -m ops.studies.wide", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, default=_REPORT)
    arguments = parser.parse_args()
    figures = asyncio.run(measure(arguments.rounds))
    print(msgspec.json.format(msgspec.json.encode(figures)).decode())
    arguments.json.write_bytes(msgspec.json.format(msgspec.json.encode(figures)) + b"\n")


if __name__ == "__main__":
    main()
