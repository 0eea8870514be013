"""`kill -9` of a worker under eight streams, a hundred times: `python -m ops.bench.worker_kills`.

Reports how long after the signal the clients were told, and that the server never restarted.
Streams end with a typed error; what took longer than anything else would hide is printed too.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import statistics
import tempfile
import time
import urllib.request
from pathlib import Path

import msgspec
import psutil

from api.bench.machine import Environment, environment
from ops.bench.engine import prompt
from ops.bench.processes import Hearth, hearth
from runtime.embedded import HEARTH_TINY

NUM_STREAMS = 8
_REPORT = Path(__file__).parent / "worker_kills.json"
_PATIENCE_S = 60.0


class Figures(msgspec.Struct):
    """Milliseconds from the signal to the error event, over all streams of all rounds."""

    environment: Environment
    rounds: int
    streams: int
    num_errors: int
    num_other_ends: int
    server_restarts: int
    p50_ms: float
    p99_ms: float
    max_ms: float


class Client:
    """One stream: `begun` is set with its first text, `told_s` when its error arrives."""

    def __init__(self, port: int, seed: int) -> None:
        self.begun = asyncio.Event()
        self.told_s: float | None = None
        self._port = port
        self._body = {
            "model": "bench",
            "prompt": prompt(32, seed=seed),
            "max_tokens": 20_000,
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
            if line.startswith(b'data: {"error"') and b"model_crashed" in line:
                self.told_s = time.perf_counter()
            elif line.startswith(b"data: {"):
                self.begun.set()
        writer.close()


async def one_round(server: Hearth, number: int) -> list[float | None]:
    """Seconds from the signal to the error of each stream; None for a stream that got none."""
    clients = [Client(server.port, number * NUM_STREAMS + index) for index in range(NUM_STREAMS)]
    running = [asyncio.create_task(client.run()) for client in clients]
    async with asyncio.timeout(_PATIENCE_S):
        for client in clients:
            await client.begun.wait()
        (worker,) = psutil.Process(server.pid).children()
        killed_s = time.perf_counter()
        os.kill(worker.pid, signal.SIGKILL)
        await asyncio.gather(*running)
    return [client.told_s - killed_s if client.told_s else None for client in clients]


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
    ends: list[float | None] = []
    with tempfile.TemporaryDirectory() as home:
        async with hearth(HEARTH_TINY, Path(home), spare_worker=False) as server:
            pid, started_s = server.pid, psutil.Process(server.pid).create_time()
            for number in range(rounds):
                ends += await one_round(server, number)
                await restart(server)
            is_same = psutil.Process(pid).create_time() == started_s
    told = sorted(end * 1000 for end in ends if end is not None)
    return Figures(
        environment=environment(),
        rounds=rounds,
        streams=NUM_STREAMS,
        num_errors=len(told),
        num_other_ends=len(ends) - len(told),
        server_restarts=0 if is_same else 1,
        p50_ms=round(statistics.median(told), 2),
        p99_ms=round(statistics.quantiles(told, n=100)[98], 2),
        max_ms=round(told[-1], 2),
    )


def main() -> None:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(prog="python -m ops.bench.worker_kills", description=__doc__)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--json", type=Path, default=_REPORT)
    arguments = parser.parse_args()
    figures = asyncio.run(measure(arguments.rounds))
    print(
        f"{figures.rounds} kills under {figures.streams} streams: {figures.num_errors} errors, "
        f"{figures.num_other_ends} other ends, {figures.server_restarts} restarts of the server; "
        f"p50 {figures.p50_ms} ms, p99 {figures.p99_ms} ms, longest {figures.max_ms} ms"
    )
    arguments.json.write_bytes(msgspec.json.format(msgspec.json.encode(figures)) + b"\n")


if __name__ == "__main__":
    main()
