"""`python -m ops.bench`: run the benchmarks, print tables, write a JSON report."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import msgspec

from api.bench.machine import Environment, environment
from ops.bench import engine, kv, peers, vision
from ops.bench.processes import bare, hearth
from ops.bench.random_models import write_eight, write_wide
from runtime.embedded import HEARTH_TINY
from runtime.worker.linear import gains_from_forms

WIDE_LENGTHS = [1024, 4096]
HOT_TOKENS = 2048
_REPORT = Path(__file__).parent / "report.json"
_ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


class Report(msgspec.Struct):
    """One run. A part that was not asked for is what an earlier run left."""

    environment: Environment
    model: str
    rounds: int
    engine: engine.Figures | None = None
    decode: list[engine.Decode] | None = None
    hot_streams: engine.HotStreams | None = None
    kv: kv.KvFigures | None = None


async def run(report: Report, model: Path, parts: list[str], lengths: Sequence[int]) -> None:
    """Measure the parts into the report; KV with prompts of these lengths."""
    async with bare(model) as opponent:
        if "engine" in parts:
            async with hearth(model) as server:
                report.engine = await engine.measure(server, opponent, report.rounds)
        if "kv" in parts:
            with tempfile.TemporaryDirectory() as home:
                per_token = kv_bytes_per_token(model)
                job = kv.Run(model, Path(home), opponent, report.rounds, per_token, lengths)
                report.kv = await kv.measure(job)


async def run_decode(report: Report, model: Path, job: engine.DecodeJob) -> None:
    """Decode at many widths; beside layers in their forms too, where the device gains from them."""
    async with bare(model) as opponent, hearth(model) as server:
        if gains_from_forms():
            async with bare(model, "--formed") as formed:
                report.decode = await engine.decode(server, opponent, job, formed)
        else:
            report.decode = await engine.decode(server, opponent, job)
        width = max(job.widths)
        report.hot_streams = await engine.hot_streams(server, width, HOT_TOKENS, job.num_tokens)
        print(report.hot_streams)


def kv_bytes_per_token(model: Path) -> int:
    """What one token takes in the KV of a model whose layers are all alike."""
    config = json.loads((model / "config.json").read_text())
    heads = config["num_key_value_heads"] * config["head_dim"]
    dtype = config.get("torch_dtype") or config.get("dtype", "float32")
    return 2 * config["num_hidden_layers"] * heads * _ITEM_BYTES[dtype]


def print_engine(figures: engine.Figures) -> None:
    """The engine's part for people."""
    print_decode(figures.decode)
    print("\nstreams   TTFT ms ours / bare   over")
    for row in figures.ttft:
        times = f"{row.ours_ms:8.1f} / {row.bare_ms:8.1f}"
        print(f"{row.streams:7d}   {times}   {row.over_ms:+.1f} ms")
    print("\nrunning streams while a 4k prompt prefills: gaps p50/p99 ms quiet, busy; decode kept")
    for row in figures.stall:
        quiet, busy = row.quiet_gap_ms, row.busy_gap_ms
        kept = f"kept {row.decode_kept:.2f}   long prefill x{row.prefill_stretched:.2f}"
        print(f"  {quiet.p50}/{quiet.p99}   {busy.p50}/{busy.p99}   {kept}")


def print_decode(rows: list[engine.Decode]) -> None:
    """Decode rates for people."""
    print("\nstreams   decode tok/s ours / bare    ratio (min..max)   server CPU per token")
    for row in rows:
        rates = f"{row.ours_tokens_per_s:9.1f} / {row.bare_tokens_per_s:9.1f}"
        spread = f"{row.ratio:.3f} ({row.ratio_min:.3f}..{row.ratio_max:.3f})"
        print(f"{row.streams:7d}   {rates}   {spread}   {row.server_cpu_us_per_token:.0f} us")
        if row.formed_tokens_per_s is not None:
            share = row.ours_tokens_per_s / row.formed_tokens_per_s
            print(
                f"          bare with Hearth's forms {row.formed_tokens_per_s}; share {share:.3f}"
            )


def print_kv(figures: kv.KvFigures) -> None:
    """The KV part for people."""
    print(
        "\n tokens   cold ms   times faster than cold: retry, follow-up, restart, from disk, kill"
    )
    for row in figures.reuse:
        times = (row.retry_ms, row.follow_up_ms, row.restart_ms, row.disk_ms, row.killed_ms)
        ratios = "  ".join(f"{row.over_cold(figure):6.1f}" for figure in times)
        print(f"{row.num_tokens:7d}   {row.cold_ms:7.0f}   {ratios}")
    print("\n tokens   ms: follow-up, mlx-lm's resident cache, restart, from disk, sibling, edit")
    for row in figures.reuse:
        times = (row.follow_up_ms, row.resident_ms, row.restart_ms, row.disk_ms)
        rest = f"{row.sibling_ms:8.0f}  {row.edit_ms:8.0f}"
        print(f"{row.num_tokens:7d}   {'  '.join(f'{one:7.1f}' for one in times)}  {rest}")
    for row in figures.restore:
        speeds = f"{row.restore_mb_per_s:.0f} of {row.read_mb_per_s:.0f} MB/s"
        kept = f"{row.ratio_to_keep:.2f} of one that keeps what it reads"
        print(f"restore of {row.num_tokens} tokens: {speeds} plain read, {row.ratio:.2f}; {kept}")
        speeds = f"{row.disk_mb_per_s:.0f} of {row.disk_read_mb_per_s:.0f} MB/s"
        print(f"    with none of it in the page cache: {speeds}, {row.ratio_from_disk:.2f}")
    print(f"decode with writes behind it: {figures.decode_with_writes:.3f} of without")
    print(f"write amplification over 40 turns: {figures.write_amplification:.3f}")


def main() -> None:
    """Parse the command line and run."""
    apart = {"peers": peers.main, "vision": vision.main}
    if sys.argv[1:2] and sys.argv[1] in apart:
        apart[sys.argv[1]](sys.argv[2:])
        return
    parser = argparse.ArgumentParser(prog="python -m ops.bench", description=__doc__)
    parser.add_argument(
        "parts",
        nargs="*",
        default=["engine", "kv"],
        help="engine, kv, decode (at --streams); peers and vision have flags of their own",
    )
    parser.add_argument("--model", type=Path, default=HEARTH_TINY, help="a model directory")
    parser.add_argument(
        "--wide",
        action="store_true",
        help="a model of 47M random weights in float32, of prompts of 1k and 4k tokens",
    )
    parser.add_argument(
        "--eight",
        action="store_true",
        help="a model of the shape of an 8B in 4 bits, of random weights, for a GPU",
    )
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 4, 8, 16, 32])
    parser.add_argument("--output", type=int, default=128, help="tokens of a stream, for decode")
    parser.add_argument("--tokens", type=int, nargs="+", help="lengths of prompts, for kv")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, default=_REPORT)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if arguments.wide or arguments.eight:
            write_model = write_wide if arguments.wide else write_eight
            arguments.model = write_model(Path(folder) / "random", seed=1)
        measure(arguments, arguments.model.resolve())


def measure(arguments: argparse.Namespace, model: Path) -> None:
    """Run the parts, print them, and write them into the report."""
    report = Report(environment(), model.name, arguments.rounds)
    if arguments.json.exists():
        old = msgspec.json.decode(arguments.json.read_bytes(), type=Report)
        report = msgspec.structs.replace(
            old, environment=report.environment, model=model.name, rounds=arguments.rounds
        )
    lengths = arguments.tokens or (WIDE_LENGTHS if arguments.wide else list(kv.LENGTHS))
    asyncio.run(run(report, model, arguments.parts, lengths))
    if "decode" in arguments.parts:

        def row_done(rows: list[engine.Decode]) -> None:
            """Print and keep what is there: a run on a lent machine can be cut."""
            report.decode = rows
            print_decode(rows[-1:])
            write(report, arguments.json)

        job = engine.DecodeJob(arguments.streams, arguments.rounds, arguments.output, row_done)
        asyncio.run(run_decode(report, model, job))
    if report.engine is not None and "engine" in arguments.parts:
        print_engine(report.engine)
    if report.kv is not None and "kv" in arguments.parts:
        print_kv(report.kv)
    write(report, arguments.json)


def write(report: Report, file: Path) -> None:
    """Write the report as JSON."""
    file.write_bytes(msgspec.json.format(msgspec.json.encode(report)) + b"\n")


if __name__ == "__main__":
    main()
