"""Three models take turns in one slot: `python -m ops.bench.swap_turns --before CHECKOUT`.

Two agents on each model ask for short answers with quick tools in between, all beginning at once
and for a given time; then the same with the server of another checkout, in turn. Writes
`swap_turns.json`.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import tempfile
import time
import urllib.request
from collections.abc import AsyncGenerator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from api.bench.machine import Environment, environment
from ops.bench.client import stream_completion
from ops.bench.engine import prompt
from ops.bench.processes import Hearth, hearth
from ops.bench.random_models import write_wide

NAMES = ("bench", "second", "third")
AGENTS_PER_MODEL = 2
_REPORT = Path(__file__).parent / "swap_turns.json"
_PROMPT_TOKENS, _ANSWER_TOKENS = 64, 48
_TOOL_S = (0.1, 0.5)
_LOADS = 'hearth_model_transitions_total{model="%s",state="loading"}'
_SWAPS = 'hearth_swap_seconds{model="%s"'


class Outcome(msgspec.Struct):
    """One policy: medians over the rounds. Waits are until the first token of each turn, `first_s`
    the longest of the agents' first ones; `swap_s` is what a swap took lately, by model.
    """

    num_turns: float
    wait_p50_s: float
    wait_p95_s: float
    wait_max_s: float
    first_s: float
    answer_p50_s: float
    num_loads: float
    swap_s: float


class Report(msgspec.Struct):
    """One run; `before` is the server of the other checkout. `alone_s` is until the first token
    where nobody else asks and the model is loaded.
    """

    environment: Environment
    rounds: int
    seconds: float
    alone_s: float
    after: Outcome
    before: Outcome | None = None


class _Turn(NamedTuple):
    wait_s: float
    answer_s: float


class _Round(NamedTuple):
    turns: list[_Turn]
    firsts_s: list[float]
    num_loads: float
    swap_s: float


async def one_round(models: Mapping[str, Path], seconds: float, checkout: Path | None) -> _Round:
    """Let the agents take turns for so long with a new server; each model was loaded before."""
    others = {name: models[name] for name in NAMES[1:]}
    async with hearth(
        models["bench"], others=others, checkout=checkout, max_loaded_models=1
    ) as server:
        for name in NAMES:
            await _ask(server, name, 0)
        loads = await asyncio.to_thread(_sum_of, server.port, _LOADS)
        until_s = time.perf_counter() + seconds
        agents = [(name, number) for name in NAMES for number in range(AGENTS_PER_MODEL)]
        told = await asyncio.gather(
            *(_agent(server, name, number, until_s) for name, number in agents)
        )
        loads = await asyncio.to_thread(_sum_of, server.port, _LOADS) - loads
        swaps_s = await asyncio.to_thread(_sum_of, server.port, _SWAPS)
    turns = [one for each in told for one in each]
    return _Round(turns, [one[0].wait_s for one in told], loads, swaps_s / len(NAMES))


async def _agent(server: Hearth, model: str, number: int, until_s: float) -> list[_Turn]:
    dice = random.Random(f"{model}{number}")
    turns = [await _ask(server, model, dice.randrange(10**9))]
    while time.perf_counter() < until_s:
        await asyncio.sleep(dice.uniform(*_TOOL_S))
        turns.append(await _ask(server, model, dice.randrange(10**9)))
    return turns


async def _ask(server: Hearth, model: str, seed: int) -> _Turn:
    body = {
        "model": model,
        "prompt": prompt(_PROMPT_TOKENS, seed),
        "max_tokens": _ANSWER_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
    }
    told = await stream_completion(server.port, body)
    return _Turn(told.ttft_s, told.arrivals_s[-1] - told.arrivals_s[0])


def _sum_of(port: int, head: str) -> float:
    """The sum of a figure over the models."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as answer:
        lines = answer.read().decode().splitlines()
    heads = tuple(head % name for name in NAMES)
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(heads))


async def alone(models: Mapping[str, Path]) -> float:
    """Seconds to the first token where nobody else asks and the model is loaded."""
    async with hearth(models["bench"]) as server:
        return statistics.median([(await _ask(server, "bench", seed)).wait_s for seed in range(5)])


def outcome(rounds: Sequence[_Round]) -> Outcome:
    """Medians of what the rounds gave."""

    def middle(figures: Sequence[float]) -> float:
        return round(statistics.median(figures), 2)

    ordered = [sorted(one.wait_s for one in each.turns) for each in rounds]
    return Outcome(
        num_turns=middle([len(one.turns) for one in rounds]),
        wait_p50_s=middle([statistics.median(waits) for waits in ordered]),
        wait_p95_s=middle([waits[int(len(waits) * 0.95)] for waits in ordered]),
        wait_max_s=middle([waits[-1] for waits in ordered]),
        first_s=middle([max(one.firsts_s) for one in rounds]),
        answer_p50_s=middle(
            [statistics.median(one.answer_s for one in each.turns) for each in rounds]
        ),
        num_loads=middle([one.num_loads for one in rounds]),
        swap_s=middle([one.swap_s for one in rounds]),
    )


async def measure(
    models: Mapping[str, Path], arguments: argparse.Namespace
) -> AsyncGenerator[Report]:
    """Rounds in turn, the other checkout and this one; a report of all so far after each pair."""
    known: dict[str, list[_Round]] = {"before": [], "after": []}
    alone_s = round(await alone(models), 3)
    for number in range(arguments.rounds):
        for name, checkout in (("before", arguments.before), ("after", None)):
            if name == "after" or checkout is not None:
                place = checkout.resolve() if checkout is not None else None
                known[name].append(await one_round(models, arguments.seconds, place))
                print(f"{name:6s} {outcome(known[name][-1:])}", flush=True)
        yield Report(
            environment=environment(),
            rounds=number + 1,
            seconds=arguments.seconds,
            alone_s=alone_s,
            after=outcome(known["after"]),
            before=outcome(known["before"]) if known["before"] else None,
        )


async def _write(models: Mapping[str, Path], arguments: argparse.Namespace) -> None:
    async for report in measure(models, arguments):
        arguments.json.write_bytes(msgspec.json.format(msgspec.json.encode(report)) + b"\n")


def main() -> None:
    """Parse the command line, run, print and write."""
    parser = argparse.ArgumentParser(prog="python -m ops.bench.swap_turns", description=__doc__)
    parser.add_argument("--before", type=Path, help="a checkout whose server is compared")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=60.0, help="of each round")
    parser.add_argument("--json", type=Path, default=_REPORT)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        models = {name: write_wide(Path(folder) / name, n, {}) for n, name in enumerate(NAMES)}
        asyncio.run(_write(models, arguments))


if __name__ == "__main__":
    main()
