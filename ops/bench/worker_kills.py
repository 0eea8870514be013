"""`kill -9` of a worker under eight streams: `python -m ops.bench.worker_kills`.

Reports the pause that each client sees, and whether every stream went on to its end with the text
of a run in which nothing was killed.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import signal
import statistics
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

import msgspec
import psutil

from api.bench.machine import Environment, environment
from ops.bench.engine import prompt
from ops.bench.processes import Hearth, hearth, workers_of
from runtime.embedded import HEARTH_TINY

NUM_STREAMS = 8
NUM_TOKENS = 200
_REPORT = Path(__file__).parent / "worker_kills.json"
_PATIENCE_S = 300.0


class Figures(msgspec.Struct):
    """Milliseconds without an event in each stream after the signal, over all rounds.

    `num_changed` streams said something else than without a kill, `num_errors` ended with an error.
    """

    environment: Environment
    rounds: int
    streams: int
    num_errors: int
    num_changed: int
    server_restarts: int
    p50_ms: float
    p99_ms: float
    max_ms: float


class Client:
    """One stream: `begun` is set with its first text, `heard_s` is when each event came."""

    def __init__(self, port: int, seed: int) -> None:
        self.begun = asyncio.Event()
        self.heard_s: list[float] = []
        self.text = ""
        self.has_failed = False
        self._port = port
        self._body = {
            "model": "bench",
            "prompt": prompt(32, seed=seed),
            "max_tokens": NUM_TOKENS,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
        }

    async def run(self) -> None:
        """Read until the end of the stream."""
        payload = msgspec.json.encode(self._body)
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        head = (
            "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(payload)}\r\n\r\n"
        )
        writer.write(head.encode() + payload)
        while line := await reader.readline():
            if line.startswith(b'data: {"error"'):
                self.has_failed = True
            elif line.startswith(b"data: {"):
                self.heard_s.append(time.perf_counter())
                self.text += json.loads(line[6:])["choices"][0]["text"]
                self.begun.set()
        writer.close()

    def pause_s(self, since_s: float) -> float:
        """The longest time without an event from then on."""
        times = [since_s, *(at_s for at_s in self.heard_s if at_s >= since_s)]
        return max(after - before for before, after in itertools.pairwise(times))


async def one_round(server: Hearth, number: int) -> tuple[list[float], list[Client], list[Client]]:
    """The pauses in seconds, and who read without a kill and with one."""
    seeds = range(number * NUM_STREAMS, (number + 1) * NUM_STREAMS)
    calm, clients = ([Client(server.port, seed) for seed in seeds] for _ in range(2))
    async with asyncio.timeout(_PATIENCE_S):
        await asyncio.gather(*(client.run() for client in calm))
        for _ in range(100):  # a spare waits, as it does for users
            if await loaded(server) and len(workers_of(server.pid)) > 1:
                break
            await asyncio.sleep(0.1)
        running = [asyncio.create_task(client.run()) for client in clients]
        for client in clients:
            await client.begun.wait()
        (pid,) = await loaded(server)
        killed_s = time.perf_counter()
        os.kill(pid, signal.SIGKILL)
        await asyncio.gather(*running)
    return [client.pause_s(killed_s) for client in clients], calm, clients


async def loaded(server: Hearth) -> list[int]:
    """The processes that have a model."""
    url = f"http://127.0.0.1:{server.port}/running"

    def ask() -> Any:
        with urllib.request.urlopen(url, timeout=_PATIENCE_S) as answer:
            return json.load(answer)

    return [int(one["pid"]) for one in (await asyncio.to_thread(ask))["models"] if one["pid"]]


async def restart(server: Hearth) -> None:
    """What an operator does: forget the crashes, so that no pause and no breaker holds us up."""
    url = f"http://127.0.0.1:{server.port}/admin/models/bench/restart"
    request = urllib.request.Request(url, data=b"{}", method="POST")
    request.add_header("content-type", "application/json")

    def ask() -> None:
        with urllib.request.urlopen(request, timeout=_PATIENCE_S) as answer:  # noqa: S310
            answer.read()

    await asyncio.to_thread(ask)


async def measure(rounds: int) -> Figures:
    """All rounds against one server."""
    pauses: list[float] = []
    num_errors = num_changed = 0
    with tempfile.TemporaryDirectory() as home:
        async with hearth(HEARTH_TINY, Path(home), spare_worker=True) as server:
            pid, started_s = server.pid, psutil.Process(server.pid).create_time()
            for number in range(rounds):
                paused, calm, clients = await one_round(server, number)
                pauses += paused
                num_errors += sum(client.has_failed for client in clients)
                pairs = zip(calm, clients, strict=True)
                num_changed += sum(one.text != other.text for one, other in pairs)
                await restart(server)
            is_same = psutil.Process(pid).create_time() == started_s
    told = sorted(pause * 1000 for pause in pauses)
    return Figures(
        environment=environment(),
        rounds=rounds,
        streams=NUM_STREAMS,
        num_errors=num_errors,
        num_changed=num_changed,
        server_restarts=0 if is_same else 1,
        p50_ms=round(statistics.median(told), 2),
        p99_ms=round(statistics.quantiles(told, n=100)[98], 2),
        max_ms=round(told[-1], 2),
    )


def main() -> None:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(prog="python -m ops.bench.worker_kills", description=__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--json", type=Path, default=_REPORT)
    arguments = parser.parse_args()
    figures = asyncio.run(measure(arguments.rounds))
    print(
        f"{figures.rounds} kills under {figures.streams} streams: {figures.num_errors} errors, "
        f"{figures.num_changed} changed, {figures.server_restarts} restarts of the server; pause "
        f"p50 {figures.p50_ms} ms, p99 {figures.p99_ms} ms, longest {figures.max_ms} ms"
    )
    arguments.json.write_bytes(msgspec.json.format(msgspec.json.encode(figures)) + b"\n")


if __name__ == "__main__":
    main()
