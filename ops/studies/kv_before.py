"""What known prompts cost now, and in an earlier commit: `python -m ops.studies.kv_before`.

Two sources in turn, on one machine, each with homes of its own: this one and `--before CHECKOUT`.
It writes `kv_before.json` after each round. Beside times it counts, in all processes of a server,
what a busy machine does not change as much: CPU time and bytes read. Linux only.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncGenerator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import mlx.core as mx
import msgspec
from mlx_lm.models.cache import make_prompt_cache, save_prompt_cache
from mlx_lm.utils import load
from msgspec.structs import asdict

from api.bench.machine import Environment, environment
from ops.bench.__main__ import kv_bytes_per_token
from ops.bench.client import stream_completion
from ops.bench.engine import prompt
from ops.bench.files import forget_pages
from ops.bench.kv import settled
from ops.bench.processes import Hearth, hearth, uses_of, worker_environment
from ops.bench.random_models import write_eight, write_wide
from runtime.embedded import HEARTH_TINY

NUM_RETRIES, NEW, SIBLING = 3, 50, 256
LONGEST = 1 << 18
_COMPUTED = 256
_CAP_BYTES = 64 << 30
_REPORT = Path(__file__).parent / "kv_before.json"
_ONE_HEAD = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "max_position_embeddings": LONGEST,
}
SHAPES = {
    "small": _ONE_HEAD | {"num_hidden_layers": 5, "head_dim": 128},
    "flat": _ONE_HEAD | {"num_hidden_layers": 1, "head_dim": 640},
    "8b": _ONE_HEAD | {"num_hidden_layers": 36, "head_dim": 512},
}
"""As many bytes of KV for each token as hearth-tiny has in as many layers, as it has in one layer,
and as an 8B model in bfloat16 has in as many; and as little to compute as such KV takes.
"""


class Asked(msgspec.Struct):
    """One request. `cpu_ms` and `read_mb` are those of all processes of the server meanwhile."""

    first_token_ms: float
    cpu_ms: float
    read_mb: float
    cached_tokens: int


class Figures(msgspec.Struct):
    """One source with prompts of one length; medians over rounds.

    `cold` is None where the KV was imported. `retry` is the best of three. `sibling` leaves 256
    tokens before the end. `restart` and `killed` are asked as soon as a server is ready, and count
    CPU time and bytes from its start; `warm` and `disk` are restored while the client waits, with
    the files in the page cache or not.
    """

    cold: Asked | None
    retry: Asked
    follow_up: Asked
    sibling: Asked
    restart: Asked
    killed: Asked
    warm: Asked
    disk: Asked
    durable_ms: float
    """From the answer until all is written."""


class Compared(msgspec.Struct):
    """`ratios` are now over before: of times to the first token, and of CPU time."""

    num_tokens: int
    rounds: int
    before: Figures
    now: Figures
    time_ratios: dict[str, float]
    cpu_ratios: dict[str, float]


class Report(msgspec.Struct):
    environment: Environment
    before: str
    now: str
    shape: str
    kv_bytes_per_token: int
    blas_threads: str
    is_imported: bool
    lengths: list[Compared]


class Used(NamedTuple):
    cpu_ms: float
    read_mb: float

    def since(self, earlier: Used) -> Used:
        return Used(self.cpu_ms - earlier.cpu_ms, self.read_mb - earlier.read_mb)


def used(server: Hearth) -> Used:
    """By all threads of the server and of its workers that live, from their start."""
    uses = uses_of(server.pid)
    return Used(sum(one.cpu_ms for one in uses), sum(one.read_bytes for one in uses) / 1e6)


@dataclass
class Job:
    """What one round of one source needs."""

    checkout: Path
    model: Path
    num_tokens: int
    imported: Path | None
    hot_bytes: int

    @contextlib.asynccontextmanager
    async def served(self, home: Path, **more: float) -> AsyncGenerator[Hearth]:
        settings = {
            "hot_bytes": self.hot_bytes,
            "kv_write_queue_bytes": self.hot_bytes,
            "cache_max_bytes": _CAP_BYTES,
        }
        async with hearth(
            self.model, home, None, self.checkout, key="", **settings, **more
        ) as server:
            yield server


async def ask(server: Hearth, token_ids: list[int], since: Used | None = None) -> Asked:
    """Counted from `since`, or from now."""
    since = since or used(server)
    body = {"prompt": token_ids, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    stream = await stream_completion(server.port, body | {"session_id": "one"})
    meanwhile = used(server).since(since)
    return Asked(
        first_token_ms=round(stream.ttft_s * 1000, 1),
        cpu_ms=round(meanwhile.cpu_ms, 1),
        read_mb=round(meanwhile.read_mb, 1),
        cached_tokens=stream.cache.cached_tokens,
    )


async def measure(job: Job, seeds: Iterator[int]) -> Figures:
    """One round."""

    def new(count: int) -> list[int]:
        return prompt(count, next(seeds))

    with tempfile.TemporaryDirectory() as folder:
        home, first, cold = Path(folder), prompt(job.num_tokens, job.num_tokens), None
        async with job.served(home) as server:
            await ask(server, new(64))
            if job.imported is None:
                await ask(server, new(job.num_tokens))  # the first long one of a process costs more
                cold = await ask(server, first)
            else:
                await asyncio.to_thread(import_into, job, home, server)
                await ask(server, first + new(1))
            start = time.monotonic()
            durable_ms = (await settled(home) - start) * 1000
            retries = [await ask(server, first) for _ in range(NUM_RETRIES)]
            follow_up = await ask(server, first + new(NEW))
            sibling = await ask(server, first[:-SIBLING] + new(SIBLING))
            await settled(home)
        async with job.served(home) as server:
            restart = await ask(server, first + new(NEW), Used(0, 0))
            turn = first + new(SIBLING)
            await ask(server, turn)
            await settled(home)
            os.kill(server.pid, signal.SIGKILL)
        async with job.served(home) as server:
            killed = await ask(server, turn + new(NEW), Used(0, 0))
        async with job.served(home, prewarm_share=0) as server:
            await settled(home)
            warm = await ask(server, turn + new(NEW))
        async with job.served(home, prewarm_share=0) as server:
            await settled(home)
            forget_pages(list((home / "kv" / "slots").rglob("*.safetensors")))
            disk = await ask(server, turn + new(NEW))
    retry = min(retries, key=lambda one: one.first_token_ms)
    figures = (cold, retry, follow_up, sibling, restart, killed, warm, disk)
    return Figures(*figures, durable_ms=round(durable_ms, 1))


def import_into(job: Job, home: Path, server: Hearth) -> None:
    """What `hearth cache import` does."""
    assert job.imported is not None
    where = {"HEARTH_HOME": str(home), "HEARTH_PORT": str(server.port)}
    command = (sys.executable, "-m", "api", "cache", "import", str(job.imported))
    subprocess.run(
        (*command, "--model", "bench", "--tokens", str(job.imported.with_suffix(".json"))),
        check=True,
        cwd=job.checkout,
        env=worker_environment() | where,
        stdout=subprocess.DEVNULL,
    )


def write_stock(file: Path, model_path: Path, num_tokens: int) -> None:
    """A prompt cache as mlx-lm saves it: its beginning computed, which an import checks, the rest
    random numbers. Computing all of it would take hours of a CPU.
    """
    model, token_ids = load(str(model_path))[0], prompt(num_tokens, num_tokens)
    kv = make_prompt_cache(model)
    model(mx.array(token_ids[:_COMPUTED])[None], cache=kv)
    for cache in kv:
        keys, values, _ = cache.state
        rest = (*keys.shape[:2], num_tokens - _COMPUTED, keys.shape[3])
        both = [
            mx.concatenate([one[:, :, :_COMPUTED], mx.random.normal(rest)], axis=2)
            for one in (keys, values)
        ]
        mx.eval(both)
        cache.state = (*both, num_tokens)
    save_prompt_cache(str(file), kv)
    file.with_suffix(".json").write_bytes(msgspec.json.encode(token_ids))


def median(rounds: list[Figures]) -> Figures:
    """Each figure by itself."""

    def of(name: str) -> Asked | None:
        each = [one for one in (asdict(figures)[name] for figures in rounds) if one is not None]
        columns = zip(*map(msgspec.structs.astuple, each), strict=True)
        return Asked(*(statistics.median_low(column) for column in columns)) if each else None

    names = [name for name in Figures.__struct_fields__ if name != "durable_ms"]
    durable_ms = statistics.median_low([figures.durable_ms for figures in rounds])
    return Figures(*map(of, names), durable_ms=durable_ms)  # pyright: ignore[reportArgumentType]


def compared(num_tokens: int, before: list[Figures], now: list[Figures]) -> Compared:
    one, other = median(before), median(now)
    times: dict[str, float] = {}
    cpu: dict[str, float] = {}
    for name, asked in asdict(one).items():
        again = asdict(other)[name]
        if isinstance(asked, Asked):
            times[name] = round(again.first_token_ms / asked.first_token_ms, 3)
            cpu[name] = round(again.cpu_ms / asked.cpu_ms, 3)
    return Compared(num_tokens, len(now), one, other, times, cpu)


def commit(checkout: Path) -> str:
    """Which source it is. A copy without history says it in a file."""
    said = checkout / ".commit"
    if said.exists():
        return said.read_text().strip()
    command = ("git", "-C", str(checkout), "rev-parse", "--short", "HEAD")
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


async def run(arguments: argparse.Namespace, model: Path, folder: Path, report: Report) -> None:
    """Rounds of the two sources in turn, every other one the other way round."""
    started_s, seeds = time.monotonic(), iter(range(10**8, 10**9))
    sources = (arguments.before, Path.cwd())
    found: dict[int, tuple[list[Figures], list[Figures]]]
    found = {one: ([], []) for one in arguments.tokens}
    took_s = dict.fromkeys(arguments.tokens, 0.0)
    rows: dict[int, Compared] = {}
    for number in range(arguments.rounds):
        for num_tokens in arguments.tokens:
            begun_s = time.monotonic()
            if begun_s - started_s + took_s[num_tokens] > arguments.limit_s:
                continue
            imported = folder / f"{num_tokens}.safetensors" if arguments.imported else None
            if imported is not None and not imported.exists():
                await asyncio.to_thread(write_stock, imported, model, num_tokens)
                mx.clear_cache()
            # Twice the conversation and its siblings: nothing has to leave memory.
            hot_bytes = 2 * report.kv_bytes_per_token * (num_tokens + 4 * SIBLING)
            for which in (0, 1) if number % 2 == 0 else (1, 0):
                job = Job(sources[which], model, num_tokens, imported, hot_bytes)
                found[num_tokens][which].append(await measure(job, seeds))
            took_s[num_tokens] = time.monotonic() - begun_s
            rows[num_tokens] = row = compared(num_tokens, *found[num_tokens])
            report.lengths = list(rows.values())
            print(f"{num_tokens} tokens, round {number}: {row.time_ratios}, CPU {row.cpu_ratios}")
            arguments.json.write_bytes(msgspec.json.format(msgspec.json.encode(report)) + b"\n")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m ops.studies.kv_before", description=__doc__)
    parser.add_argument("--before", type=Path, required=True, help="a checkout of another commit")
    parser.add_argument("--shape", choices=["hearth-tiny", "eight", *SHAPES], default="small")
    parser.add_argument("--tokens", type=int, nargs="+", default=[4096, 16384])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--imported", action="store_true", help="import KV, compute none of it")
    parser.add_argument("--limit-s", type=float, default=float("inf"), help="begin no round after")
    parser.add_argument("--json", type=Path, default=_REPORT)
    arguments = parser.parse_args()
    arguments.before = arguments.before.resolve()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = HEARTH_TINY.resolve()
        if arguments.shape == "eight":  # for a GPU
            model = write_eight(folder / "model", 1)
        if arguments.shape in SHAPES:
            model = write_wide(folder / "model", 1, SHAPES[arguments.shape])
        report = Report(
            environment(),
            before=commit(arguments.before),
            now=commit(Path.cwd()),
            shape=arguments.shape,
            kv_bytes_per_token=kv_bytes_per_token(model),
            blas_threads=worker_environment().get("OPENBLAS_NUM_THREADS", ""),
            is_imported=arguments.imported,
            lengths=[],
        )
        asyncio.run(run(arguments, model, folder, report))


if __name__ == "__main__":
    main()
