"""What a swap costs, part by part: `python -m ops.bench.swap`, described in METHODOLOGY.

Two models of random weights take turns in one server, with and without a spare worker; beside it
mlx-lm loads the same weights in a fresh process, and the file is read from beginning to end.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from __future__ import annotations

import argparse
import asyncio
import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import TypeVar

import msgspec

from api.bench.machine import Environment, environment
from ops.bench.client import stream_completion
from ops.bench.engine import prompt
from ops.bench.processes import Hearth, hearth, worker_environment, workers_of
from ops.bench.random_models import write_wide

_HISTORY, _FOLLOW_UP = 8192, 50
_REPORT = Path(__file__).parent / "swap.json"
_SPARE_S = 60.0
_PLAIN = """
import json, sys, time
from mlx_lm import load
import mlx.core as mx
imported = time.time()
model, tokenizer = load(sys.argv[1])
mx.eval(model.parameters())
print(json.dumps([imported, time.time()]))
"""


class Parts(msgspec.Struct):
    """One swap, in ms. `wait_ms` is what a client with a one-token request waited for all of it."""

    drain_ms: float
    flush_ms: float
    exit_ms: float
    spawn_ms: float
    load_ms: float
    warm_ms: float
    wait_ms: float

    @property
    def start_ms(self) -> float:
        return self.spawn_ms + self.load_ms + self.warm_ms


class Plain(msgspec.Struct):
    """`mlx_lm.load` in a fresh process, in ms from its start; `read_ms` is reading the weights."""

    import_ms: float
    load_ms: float
    read_ms: float


class Turn(msgspec.Struct):
    """First token in ms: of an unknown history, and of its follow-up after a swap and back."""

    cold_ms: float
    after_swap_ms: float
    tier: str
    cached_tokens: int


class Figures(msgspec.Struct):
    """Medians over the rounds. `overhead_ms` is the start with a spare minus reading the weights;
    the aim is 500.
    """

    environment: Environment
    rounds: int
    weights_bytes: int
    plain: Plain
    with_spare: Parts
    without_spare: Parts
    overhead_ms: float
    start_over_plain: float
    conversation: Turn


def plain_load(model: Path) -> Plain:
    """Measure the opponent once."""
    weights = model / "model.safetensors"
    start_s = time.perf_counter()
    with weights.open("rb", buffering=0) as file:
        while file.read(1 << 24):
            pass
    read_s = time.perf_counter() - start_s
    started_s = time.time()
    command = [sys.executable, "-c", _PLAIN, str(model)]
    ended = subprocess.run(
        command, env=worker_environment(), stdout=subprocess.PIPE, check=True, timeout=300
    )
    imported_s, loaded_s = json.loads(ended.stdout.splitlines()[-1])
    return Plain(
        import_ms=(imported_s - started_s) * 1000,
        load_ms=(loaded_s - imported_s) * 1000,
        read_ms=read_s * 1000,
    )


async def swap_to(server: Hearth, name: str, other: str, number: int) -> Parts:
    """Ask for a model that is not loaded while `other` is."""
    body = {"model": name, "prompt": prompt(9, seed=number), "max_tokens": 1, "ignore_eos": True}
    stream = await stream_completion(server.port, body)
    seconds = await asyncio.to_thread(_parts, server.port)
    return Parts(
        **{f"{part}_ms": seconds[other, part] * 1000 for part in ("drain", "flush", "exit")},
        **{f"{part}_ms": seconds[name, part] * 1000 for part in ("spawn", "load", "warm")},
        wait_ms=stream.ttft_s * 1000,
    )


def _parts(port: int) -> dict[tuple[str, str], float]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    line = r'^hearth_swap_seconds\{model="(\w+)",part="(\w+)"\} (\S+)$'
    found = re.findall(line, text, re.MULTILINE)
    return {(model, part): float(value) for model, part, value in found}


async def spare_is_there(server: Hearth) -> None:
    """Wait until a second worker process has done its imports: it takes no CPU time any more."""
    deadline = time.monotonic() + _SPARE_S
    before: dict[int, float] = {}
    while time.monotonic() < deadline:
        await asyncio.sleep(0.5)
        now = {one.pid: sum(one.cpu_times()[:2]) for one in workers_of(server.pid)}
        if len(now) == 2 and all(now[pid] - before.get(pid, 0.0) < 0.05 for pid in now):
            return
        before = now
    raise TimeoutError("no spare worker")


async def swaps(home: Path, models: Sequence[Path], rounds: int, *, spare: bool) -> list[Parts]:
    """Swaps there and back; the first one of a server is left out."""
    found: list[Parts] = []
    async with serving(home, models, spare=spare) as server:
        for number in range(2 * rounds + 1):
            if spare:
                await spare_is_there(server)
            names = ("other", "bench") if number % 2 == 0 else ("bench", "other")
            found.append(await swap_to(server, *names, number))
    return found[1:]


async def conversation(home: Path, models: Sequence[Path], number: int) -> Turn:
    """A long history, another model, and the next turn."""
    history = prompt(_HISTORY, seed=1000 + number)
    body = {"model": "bench", "prompt": history, "max_tokens": 8, "ignore_eos": True}
    async with serving(home, models, spare=True) as server:
        warm_up = {"model": "bench", "prompt": prompt(300, seed=1), "max_tokens": 2}
        await stream_completion(server.port, warm_up)
        cold = await stream_completion(server.port, body)
        await spare_is_there(server)
        await swap_to(server, "other", "bench", number)
        await spare_is_there(server)
        body["prompt"] = history + prompt(_FOLLOW_UP, seed=2000 + number)
        again = await stream_completion(server.port, body)
    return Turn(
        cold_ms=cold.ttft_s * 1000,
        after_swap_ms=again.ttft_s * 1000,
        tier=again.cache.tier,
        cached_tokens=again.cache.cached_tokens,
    )


def serving(
    home: Path, models: Sequence[Path], *, spare: bool
) -> AbstractAsyncContextManager[Hearth]:
    """A server with both models, one of which fits."""
    others = {"other": models[1]}
    return hearth(models[0], home, others, max_loaded_models=1, spare_worker=spare)


async def measure(models: Sequence[Path], home: Path, rounds: int) -> Figures:
    """Everything, in turn, so that all of it meets the same machine."""
    plain: list[Plain] = []
    with_spare: list[Parts] = []
    without: list[Parts] = []
    turns: list[Turn] = []
    for number in range(rounds):
        plain.append(plain_load(models[number % 2]))
        with_spare += await swaps(home, models, 1, spare=True)
        without += await swaps(home, models, 1, spare=False)
        turns.append(await conversation(home, models, number))
    one = _middle(with_spare, Parts)
    opponent = _middle(plain, Plain)
    return Figures(
        environment=environment(),
        rounds=rounds,
        weights_bytes=(models[0] / "model.safetensors").stat().st_size,
        plain=opponent,
        with_spare=one,
        without_spare=_middle(without, Parts),
        overhead_ms=round(one.start_ms - opponent.read_ms, 1),
        start_over_plain=round(one.start_ms / (opponent.import_ms + opponent.load_ms), 3),
        conversation=Turn(
            cold_ms=round(statistics.median(turn.cold_ms for turn in turns), 1),
            after_swap_ms=round(statistics.median(turn.after_swap_ms for turn in turns), 1),
            tier=turns[-1].tier,
            cached_tokens=turns[-1].cached_tokens,
        ),
    )


_Times = TypeVar("_Times", Parts, Plain)


def _middle(found: Sequence[_Times], kind: type[_Times]) -> _Times:
    """The median of every field."""
    rows = [msgspec.structs.asdict(one) for one in found]
    return kind(**{key: round(statistics.median(row[key] for row in rows), 1) for key in rows[0]})


def show(figures: Figures) -> None:
    """The figures for people."""
    print(f"weights {figures.weights_bytes / 1e6:.0f} MB, read in {figures.plain.read_ms:.0f} ms")
    print("ms           drain  flush   exit  spawn   load   warm   start   client waits")
    rows = (("spare", figures.with_spare), ("no spare", figures.without_spare))
    for name, row in rows:
        parts = (row.drain_ms, row.flush_ms, row.exit_ms, row.spawn_ms, row.load_ms, row.warm_ms)
        columns = " ".join(f"{value:6.0f}" for value in parts)
        print(f"{name:11s} {columns} {row.start_ms:7.0f} {row.wait_ms:10.0f}")
    plain = figures.plain
    total_ms = plain.import_ms + plain.load_ms
    print(f"mlx_lm.load in a fresh process: {plain.import_ms:.0f} + {plain.load_ms:.0f} ms")
    print(f"start with a spare: {figures.start_over_plain:.2f} of these {total_ms:.0f} ms")
    print(f"over reading the weights: {figures.overhead_ms:.0f} ms (aim: 500)")
    turn = figures.conversation
    cached = f"{turn.cached_tokens} tokens from {turn.tier}"
    print(
        f"8k history: cold {turn.cold_ms:.0f} ms, after a swap {turn.after_swap_ms:.0f} ({cached})"
    )


def main() -> None:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(prog="python -m ops.bench.swap", description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, default=_REPORT)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        models = [write_wide(Path(folder) / name, seed) for seed, name in enumerate(("a", "b"))]
        home = Path(folder) / "home"
        home.mkdir()
        figures = asyncio.run(measure(models, home, arguments.rounds))
    show(figures)
    arguments.json.write_bytes(msgspec.json.format(msgspec.json.encode(figures)) + b"\n")


if __name__ == "__main__":
    main()
