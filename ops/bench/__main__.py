"""`python -m ops.bench`: run the benchmarks, print a table, write a JSON report."""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path

import msgspec

from ops.bench import engine
from ops.bench.processes import Environment, bare, environment, hearth
from runtime.embedded import HEARTH_TINY

_REPORT = Path(__file__).parent / "report.json"


class Report(msgspec.Struct):
    """One run."""

    environment: Environment
    model: str
    rounds: int
    engine: engine.Figures


async def run(model: Path, rounds: int) -> Report:
    """The whole report."""
    env = environment()
    async with bare(model) as opponent, hearth(model) as server:
        figures = await engine.measure(server, opponent, rounds)
    return Report(env, model.name, rounds, figures)


def print_table(figures: engine.Figures) -> None:
    """The report for people."""
    print("\nstreams   decode tok/s ours / bare    ratio (min..max)   server CPU per token")
    for row in figures.decode:
        rates = f"{row.ours_tokens_per_s:9.1f} / {row.bare_tokens_per_s:9.1f}"
        spread = f"{row.ratio:.3f} ({row.ratio_min:.3f}..{row.ratio_max:.3f})"
        print(f"{row.streams:7d}   {rates}   {spread}   {row.server_cpu_us_per_token:.0f} us")
    print("\nstreams   TTFT ms ours / bare   over")
    for row in figures.ttft:
        times = f"{row.ours_ms:8.1f} / {row.bare_ms:8.1f}"
        print(f"{row.streams:7d}   {times}   {row.over_ms:+.1f} ms")
    print("\nrunning streams while a 4k prompt prefills: gaps p50/p99 ms quiet, busy; decode kept")
    for row in figures.stall:
        quiet, busy = row.quiet_gap_ms, row.busy_gap_ms
        kept = f"kept {row.decode_kept:.2f}   long prefill x{row.prefill_stretched:.2f}"
        print(f"  {quiet.p50}/{quiet.p99}   {busy.p50}/{busy.p99}   {kept}")


def main() -> None:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(prog="python -m ops.bench", description=__doc__)
    parser.add_argument("--model", type=Path, default=HEARTH_TINY, help="a model directory")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, default=_REPORT)
    arguments = parser.parse_args()
    report = asyncio.run(run(arguments.model.resolve(), arguments.rounds))
    print_table(report.engine)
    arguments.json.write_bytes(msgspec.json.format(msgspec.json.encode(report)) + b"\n")


if __name__ == "__main__":
    main()
