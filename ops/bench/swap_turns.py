"""Three models take turns in one slot: `python -m ops.bench.swap_turns --before CHECKOUT`.

Two agents on each model ask for short answers with quick tools in between, all beginning at once;
then the same with the server of another checkout, in turn. Writes `swap_turns.json`.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import tempfile
import time
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from api.bench.machine import Environment, environment
from ops.bench.client import stream_completion
from ops.bench.engine import prompt
from ops.bench.processes import Hearth, hearth
from ops.bench.swap import write_wide

NAMES = ("bench", "second", "third")
AGENTS_PER_MODEL = 2
_REPORT = Path(__file__).parent / "swap_turns.json"
_PROMPT_TOKENS, _ANSWER_TOKENS = 64, 48
_TOOL_S = (0.1, 0.5)
_LOADS = 'hearth_model_transitions_total{model="%s",state="loading"}'


class Outcome(msgspec.Struct):
    """One policy. Waits are until the first token of each turn, `first_s` of the agents' first;
    `span_s` is until the last agent had its last answer. Medians over the rounds.
    """

    wait_p50_s: float
    wait_p95_s: float
    wait_max_s: float
    waits_sum_s: float
    first_s: float
    span_s: float
    num_loads: float


class Report(msgspec.Struct):
    """One run; `before` is the server of the other checkout."""

    environment: Environment
    rounds: int
    turns_per_agent: int
    alone_s: float
    after: Outcome
    before: Outcome | None = None


class _Round(NamedTuple):
    waits_s: list[float]
    firsts_s: list[float]
    span_s: float
    num_loads: int


async def one_round(models: Mapping[str, Path], num_turns: int, checkout: Path | None) -> _Round:
    """Let the agents take their turns with a new server; each model was loaded once before."""
    others = {name: models[name] for name in NAMES[1:]}
    async with hearth(
        models["bench"], others=others, checkout=checkout, max_loaded_models=1
    ) as server:
        for name in (*NAMES, *NAMES):
            await _ask(server, name, 0)
        loads = await asyncio.to_thread(_num_loads, server.port)
        start_s = time.perf_counter()
        agents = [(name, number) for name in NAMES for number in range(AGENTS_PER_MODEL)]
        waits = await asyncio.gather(
            *(_agent(server, name, number, num_turns) for name, number in agents)
        )
        span_s = time.perf_counter() - start_s
        loads = await asyncio.to_thread(_num_loads, server.port) - loads
    return _Round([one for each in waits for one in each], [one[0] for one in waits], span_s, loads)


async def _agent(server: Hearth, model: str, number: int, num_turns: int) -> list[float]:
    dice = random.Random(f"{model}{number}")
    waits_s: list[float] = []
    for turn in range(num_turns):
        waits_s.append(await _ask(server, model, dice.randrange(10**9)))
        if turn < num_turns - 1:
            await asyncio.sleep(dice.uniform(*_TOOL_S))
    return waits_s


async def _ask(server: Hearth, model: str, seed: int) -> float:
    """Seconds to the first token."""
    body = {
        "model": model,
        "prompt": prompt(_PROMPT_TOKENS, seed),
        "max_tokens": _ANSWER_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
    }
    return (await stream_completion(server.port, body)).ttft_s


def _num_loads(port: int) -> int:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
        lines = answer.read().decode().splitlines()
    heads = tuple(_LOADS % name for name in NAMES)
    return sum(int(float(line.rpartition(" ")[2])) for line in lines if line.startswith(heads))


async def alone(models: Mapping[str, Path]) -> float:
    """Seconds to the first token where nobody else asks and the model is loaded."""
    async with hearth(models["bench"]) as server:
        return statistics.median([await _ask(server, "bench", seed) for seed in range(5)])


def outcome(rounds: Sequence[_Round]) -> Outcome:
    """Medians of what the rounds gave."""

    def middle(figures: Sequence[float]) -> float:
        return round(statistics.median(figures), 2)

    ordered = [sorted(one.waits_s) for one in rounds]
    return Outcome(
        wait_p50_s=middle([statistics.median(waits) for waits in ordered]),
        wait_p95_s=middle([waits[int(len(waits) * 0.95)] for waits in ordered]),
        wait_max_s=middle([waits[-1] for waits in ordered]),
        waits_sum_s=middle([sum(waits) for waits in ordered]),
        first_s=middle([max(one.firsts_s) for one in rounds]),
        span_s=middle([one.span_s for one in rounds]),
        num_loads=middle([one.num_loads for one in rounds]),
    )


async def measure(models: Mapping[str, Path], arguments: argparse.Namespace) -> Report:
    """Rounds in turn: the other checkout, this one."""
    before: list[_Round] = []
    after: list[_Round] = []
    for _ in range(arguments.rounds):
        if arguments.before is not None:
            before.append(await one_round(models, arguments.turns, arguments.before.resolve()))
        after.append(await one_round(models, arguments.turns, None))
    return Report(
        environment=environment(),
        rounds=arguments.rounds,
        turns_per_agent=arguments.turns,
        alone_s=round(await alone(models), 3),
        after=outcome(after),
        before=outcome(before) if before else None,
    )


def main() -> None:
    """Parse the command line, run, print and write."""
    parser = argparse.ArgumentParser(prog="python -m ops.bench.swap_turns", description=__doc__)
    parser.add_argument("--before", type=Path, help="a checkout whose server is compared")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--turns", type=int, default=20, help="of each agent")
    parser.add_argument("--json", type=Path, default=_REPORT)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        models = {name: write_wide(Path(folder) / name, n) for n, name in enumerate(NAMES)}
        report = asyncio.run(measure(models, arguments))
    for name, one in (("before", report.before), ("after", report.after)):
        if one is not None:
            waits = f"{one.wait_p50_s} / {one.wait_p95_s} / {one.wait_max_s}"
            print(f"{name:6s} waits p50/p95/max {waits} s, together {one.waits_sum_s} s", end="; ")
            print(f"first {one.first_s} s, all {one.span_s} s, {one.num_loads} loads")
    arguments.json.write_bytes(msgspec.json.format(msgspec.json.encode(report)) + b"\n")


if __name__ == "__main__":
    main()
