"""What forty turns of a conversation cost now, and in an earlier commit.

`python -m ops.studies.kv_turns --before CHECKOUT` has two servers hold the same conversation in
turn, of 200 tokens a turn, and writes `kv_turns.json` after each round. It counts CPU time of the
server process and of its workers, and what all of them write. Linux only.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec
from msgspec.structs import asdict

from api.bench.machine import Environment, environment
from ops.bench.__main__ import kv_bytes_per_token
from ops.bench.client import stream_completion
from ops.bench.engine import prompt
from ops.bench.kv import settled
from ops.bench.processes import Hearth, hearth, uses_of
from ops.bench.random_models import write_wide
from ops.studies.kv_before import SHAPES, commit

NUM_TURNS, NEW, ANSWER = 40, 200, 8
_REPORT = Path(__file__).parent / "kv_turns.json"


class Turns(msgspec.Struct):
    """One conversation. CPU times are those of a turn, in ms. `written` are the bytes that the disk
    was given for each byte of KV, index, logs and heads with them, `kept` what files of KV take.
    """

    server_cpu_ms: float
    workers_cpu_ms: float
    written: float
    kept: float


class Report(msgspec.Struct):
    """Medians over rounds; `ratios` are now over before."""

    environment: Environment
    before: str
    now: str
    shape: str
    kv_bytes_per_token: int
    rounds: int = 0
    turns_before: Turns | None = None
    turns_now: Turns | None = None
    ratios: dict[str, float] = {}


class Used(NamedTuple):
    """CPU time of the server and of its workers, and bytes that all of them gave the disk."""

    server_ms: float
    workers_ms: float
    written: int

    @staticmethod
    def of(server: Hearth) -> Used:
        own, *workers = uses_of(server.pid)
        written = own.written_bytes + sum(one.written_bytes for one in workers)
        return Used(own.cpu_ms, sum(one.cpu_ms for one in workers), written)


async def hold(checkout: Path, model: Path, seeds: Iterator[int], bytes_per_token: int) -> Turns:
    """One conversation with a fresh server of a checkout."""

    async def say(server: Hearth, token_ids: list[int]) -> None:
        body = {"prompt": token_ids, "max_tokens": ANSWER, "temperature": 0, "ignore_eos": True}
        await stream_completion(server.port, body | {"session_id": "one"})

    with tempfile.TemporaryDirectory() as folder:
        home, token_ids = Path(folder), list[int]()
        async with hearth(model, home, None, checkout) as server:
            await say(server, prompt(NEW, next(seeds)))
            await settled(home)
            before, kept = Used.of(server), _kv_bytes(home)
            for _ in range(NUM_TURNS):
                token_ids += prompt(NEW, next(seeds))
                await say(server, token_ids)
            after_turns = Used.of(server)
            await settled(home)
            after = Used.of(server)
            kv_bytes = len(token_ids) * bytes_per_token
            return Turns(
                server_cpu_ms=round((after_turns.server_ms - before.server_ms) / NUM_TURNS, 2),
                workers_cpu_ms=round((after_turns.workers_ms - before.workers_ms) / NUM_TURNS, 2),
                written=round((after.written - before.written) / kv_bytes, 3),
                kept=round((_kv_bytes(home) - kept) / kv_bytes, 3),
            )


def _kv_bytes(home: Path) -> int:
    folders = (home / "kv" / one for one in ("slots", "heads"))
    return sum(path.stat().st_size for one in folders for path in one.rglob("*.safetensors"))


def median(rounds: list[Turns]) -> Turns:
    """Each figure by itself."""
    columns: Iterator[tuple[float, ...]] = zip(*map(msgspec.structs.astuple, rounds), strict=True)
    return Turns(*(statistics.median(one) for one in columns))


async def run(arguments: argparse.Namespace, model: Path, report: Report) -> None:
    """Rounds of the two sources in turn, every other one the other way round."""
    seeds, sources = iter(range(10**8, 10**9)), (arguments.before, Path.cwd())
    found: tuple[list[Turns], list[Turns]] = ([], [])
    for number in range(arguments.rounds):
        for which in (0, 1) if number % 2 == 0 else (1, 0):
            turns = await hold(sources[which], model, seeds, report.kv_bytes_per_token)
            found[which].append(turns)
        before, now = map(median, found)
        report.rounds, report.turns_before, report.turns_now = number + 1, before, now
        report.ratios = {
            name: round(value / asdict(before)[name], 3) for name, value in asdict(now).items()
        }
        print(f"round {number}: {before} {now} {report.ratios}")
        arguments.json.write_bytes(msgspec.json.format(msgspec.json.encode(report)) + b"\n")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m ops.studies.kv_turns", description=__doc__)
    parser.add_argument("--before", type=Path, required=True, help="a checkout of another commit")
    parser.add_argument("--shape", choices=SHAPES, default="8b")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, default=_REPORT)
    arguments = parser.parse_args()
    arguments.before = arguments.before.resolve()
    with tempfile.TemporaryDirectory() as name:
        model = write_wide(Path(name) / "model", 1, SHAPES[arguments.shape])
        report = Report(
            environment(),
            before=commit(arguments.before),
            now=commit(Path.cwd()),
            shape=arguments.shape,
            kv_bytes_per_token=kv_bytes_per_token(model),
        )
        asyncio.run(run(arguments, model, report))


if __name__ == "__main__":
    main()
