"""Prompts that meet on one model: what each waits beside the others, over what it takes alone.

`python -m ops.bench.fair_prefill` asks a fresh server for prompts of mixed sizes, each alone and
then all of them, the longest first. Writes `fair_prefill.json`.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from api.bench.machine import Environment, environment
from ops.bench.client import Stream, stream_completion
from ops.bench.engine import prompt
from ops.bench.processes import Hearth, hearth
from runtime.embedded import HEARTH_TINY

_REPORT = Path(__file__).parent / "fair_prefill.json"
_HEAD_START_S = 0.3
_CASES = {"2k beside 20k": (20_000, 2000), "4 agents": (20_000, 8000, 3000, 1000)}


class Wait(msgspec.Struct):
    """Seconds to the first token of a prompt of `num_tokens`; medians over the rounds.

    `ratio` is beside the others over alone, and `in_order` what it would be if all of them were
    computed one after the other as they came, from their times alone.
    """

    num_tokens: int
    alone_s: float
    beside_s: float
    ratio: float
    ratio_max: float
    in_order: float


class Case(msgspec.Struct):
    """One mixture; `together_over_alone` is the time until all have a first token, over the sum
    of what they take alone.
    """

    name: str
    together_over_alone: float
    waits: list[Wait]


class Report(msgspec.Struct):
    """One run."""

    environment: Environment
    model: str
    rounds: int
    cases: list[Case]


async def measure(server: Hearth, rounds: int) -> list[Case]:
    """All mixtures, each round alone and beside in turn."""
    seeds = iter(range(10**9))
    await _ask(server, 1000, seeds)
    return [await _case(server, name, sizes, rounds, seeds) for name, sizes in _CASES.items()]


async def _case(
    server: Hearth, name: str, sizes: Sequence[int], rounds: int, seeds: Iterator[int]
) -> Case:
    alone: list[list[float]] = []
    beside: list[list[float]] = []
    whole: list[float] = []
    for _ in range(rounds):
        alone.append([(await _ask(server, size, seeds)).ttft_s for size in sizes])
        streams = await _all(server, sizes, seeds)
        beside.append([stream.ttft_s for stream in streams])
        last_s = max(stream.arrivals_s[0] for stream in streams)
        whole.append((last_s - streams[0].sent_s) / sum(alone[-1]))
    waits = [_wait(size, number, alone, beside) for number, size in enumerate(sizes)]
    return Case(name, round(statistics.median(whole), 3), waits)


def _wait(
    size: int, number: int, alone: Sequence[Sequence[float]], beside: Sequence[Sequence[float]]
) -> Wait:
    ratios = [b[number] / a[number] for a, b in zip(alone, beside, strict=True)]
    in_order = [(sum(a[: number + 1]) - number * _HEAD_START_S) / a[number] for a in alone]
    return Wait(
        num_tokens=size,
        alone_s=round(statistics.median(a[number] for a in alone), 3),
        beside_s=round(statistics.median(b[number] for b in beside), 3),
        ratio=round(statistics.median(ratios), 2),
        ratio_max=round(max(ratios), 2),
        in_order=round(statistics.median(in_order), 2),
    )


async def _all(server: Hearth, sizes: Sequence[int], seeds: Iterator[int]) -> list[Stream]:
    """Each is sent a moment after the one before it."""
    asked: list[asyncio.Task[Stream]] = []
    for number, size in enumerate(sizes):
        if number:
            await asyncio.sleep(_HEAD_START_S)
        asked.append(asyncio.create_task(_ask(server, size, seeds)))
    return await asyncio.gather(*asked)


async def _ask(server: Hearth, size: int, seeds: Iterator[int]) -> Stream:
    body = {
        "model": "bench",
        "prompt": prompt(size, next(seeds)),
        "max_tokens": 8,
        "temperature": 0,
        "ignore_eos": True,
        "cache_mode": "off",
    }
    return await stream_completion(server.port, body)


async def run(model: Path, rounds: int) -> list[Case]:
    """Measure in a server of its own."""
    async with hearth(model) as server:
        return await measure(server, rounds)


def main() -> None:
    """Parse the command line, run, print and write."""
    parser = argparse.ArgumentParser(prog="python -m ops.bench.fair_prefill", description=__doc__)
    parser.add_argument("--model", type=Path, default=HEARTH_TINY)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, default=_REPORT)
    arguments = parser.parse_args()
    cases = asyncio.run(run(arguments.model.resolve(), arguments.rounds))
    for case in cases:
        print(f"{case.name}: all after {case.together_over_alone:.2f} of the sum alone")
        for one in case.waits:
            times = f"alone {one.alone_s:.2f} s, beside {one.beside_s:.2f} s"
            ratios = (
                f"x{one.ratio:.2f} (at most x{one.ratio_max:.2f}; in order x{one.in_order:.2f})"
            )
            print(f"  {one.num_tokens:6d} tokens: {times}, {ratios}")
    report = Report(environment(), arguments.model.name, arguments.rounds, cases)
    arguments.json.write_bytes(msgspec.json.format(msgspec.json.encode(report)) + b"\n")


if __name__ == "__main__":
    main()
