"""Many small requests of one key at once, and one of another key beside them now and then.

`python -m ops.bench.many_small` asks a fresh server for answers of one token, over one connection
and then over many; with `--before CHECKOUT` the server of another checkout in turn. Writes
`many_small.json`.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import statistics
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from api.bench.machine import Environment, environment
from ops.bench.processes import Hearth, hearth
from runtime.embedded import HEARTH_TINY
from runtime.keys import digest_of

WIDTHS = (1, 16, 64, 200)
_REPORT = Path(__file__).parent / "many_small.json"
_MANY, _FEW = "hearth-many", "hearth-few"
_PAUSE_S = 0.2
"""Between an answer to the second key and its next request."""
_LONGER = " The keeper lights the lamp and writes the weather down." * 8
"""What the second key says more than the first: it lacks more than each of those beside it."""


class Crowd(msgspec.Struct):
    """So many connections of the first key, with the second key beside them; of one round.

    Waits are from sending a request to the end of its answer of one token.
    """

    connections: int
    answers_per_s: float
    median_s: float
    longest_s: float
    beside_median_s: float
    beside_longest_s: float


class Round(msgspec.Struct):
    """One server: one connection of each key with nothing beside it, then the crowds. The first
    key's gives `alone_per_s`, the second key's `alone_s`.
    """

    server: str
    alone_per_s: float
    alone_s: float
    crowds: list[Crowd]


class Report(msgspec.Struct):
    """One run."""

    environment: Environment
    model: str
    rounds: list[Round]


class _Connection:
    """One that is kept open; requests follow each other on it."""

    def __init__(self, port: int, key: str, numbers: Iterator[int]) -> None:
        self._port = port
        self._key = key
        self._more = _LONGER if key == _FEW else ""
        self._numbers = numbers
        self.sent_s: list[float] = []
        self.waits_s: list[float] = []

    async def ask_until(self, end_s: float, pause_s: float = 0.0) -> None:
        """One request after the other; the last one is sent before `end_s`, and answered."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        while (now := time.perf_counter()) < end_s:
            writer.write(self._request())
            status = await reader.readline()
            head = await reader.readuntil(b"\r\n\r\n")
            length = head.lower().partition(b"content-length:")[2].split(b"\r\n")[0]
            body = await reader.readexactly(int(length))
            if b" 200 " not in status:
                raise RuntimeError(body.decode(errors="replace")[:2000])
            self.sent_s.append(now)
            self.waits_s.append(time.perf_counter() - now)
            await asyncio.sleep(pause_s)
        writer.close()

    def _request(self) -> bytes:
        content = f"Message {next(self._numbers)}: hello.{self._more}"
        body = msgspec.json.encode(
            {
                "model": "bench",
                "messages": [{"role": "user", "content": content}],
                "max_tokens": 1,
                "temperature": 0,
            }
        )
        head = (
            "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"
            f"Authorization: Bearer {self._key}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        return head.encode() + body


async def measure(server: Hearth, name: str, widths: Sequence[int], seconds: float) -> Round:
    """One connection alone, and the crowds after it."""
    numbers = itertools.count()
    await _Connection(server.port, _MANY, numbers).ask_until(time.perf_counter() + 1)
    alone, few = (_Connection(server.port, key, numbers) for key in (_MANY, _FEW))
    start = time.perf_counter()
    await alone.ask_until(start + seconds)
    taken_s = time.perf_counter() - start
    await few.ask_until(time.perf_counter() + seconds / 2, _PAUSE_S)
    done = Round(
        server=name,
        alone_per_s=round(len(alone.waits_s) / taken_s, 1),
        alone_s=round(statistics.median(few.waits_s), 4),
        crowds=[],
    )
    for width in widths:
        done.crowds.append(await _crowd(server, width, seconds, numbers))
        print_crowd(done, done.crowds[-1])
    return done


async def _crowd(server: Hearth, width: int, seconds: float, numbers: Iterator[int]) -> Crowd:
    many = [_Connection(server.port, _MANY, numbers) for _ in range(width)]
    few = _Connection(server.port, _FEW, numbers)
    start = time.perf_counter()
    asking = [one.ask_until(start + seconds) for one in many]
    await asyncio.gather(*asking, few.ask_until(start + seconds, _PAUSE_S))
    waits = [wait for one in many for wait in one.waits_s]
    # All that was asked is answered; with the last answers fewer and fewer connections ask.
    taken_s = time.perf_counter() - start
    return Crowd(
        connections=width,
        answers_per_s=round((len(waits) + len(few.waits_s)) / taken_s, 1),
        median_s=round(statistics.median(waits), 4),
        longest_s=round(max(waits), 4),
        beside_median_s=round(statistics.median(few.waits_s), 4),
        beside_longest_s=round(max(few.waits_s), 4),
    )


def print_crowd(done: Round, one: Crowd) -> None:
    """A line for people."""
    rate = f"{one.answers_per_s:6.1f}/s, x{one.answers_per_s / done.alone_per_s:.2f} of one alone"
    waits = f"waits {one.median_s:.3f} s, at most {one.longest_s:.3f} s"
    times = one.beside_median_s / done.alone_s
    beside = f"second key {one.beside_median_s:.3f} s, at most {one.beside_longest_s:.3f} s"
    line = f"{done.server:7s} {one.connections:4d} connections {rate}; {waits}; {beside}"
    print(f"{line}, x{times:.1f} of alone", flush=True)


async def run(arguments: argparse.Namespace) -> list[Round]:
    """Servers in turn, every other round the other way round."""
    servers: list[tuple[str, Path | None]] = [("this", None)]
    if arguments.before is not None:
        servers.insert(0, ("before", arguments.before.resolve()))
    keys = {"api_keys.many": digest_of(_MANY), "api_keys.few": digest_of(_FEW)}
    rounds: list[Round] = []
    for number in range(arguments.rounds):
        for name, checkout in servers[:: -1 if number % 2 else 1]:
            model = arguments.model.resolve()
            async with hearth(model, None, None, checkout, key=_FEW, **keys) as server:
                widths, seconds = arguments.connections, arguments.seconds
                rounds.append(await measure(server, name, widths, seconds))
    return rounds


def main() -> None:
    """Parse the command line, run, print and write."""
    parser = argparse.ArgumentParser(prog="python -m ops.bench.many_small", description=__doc__)
    parser.add_argument("--model", type=Path, default=HEARTH_TINY)
    parser.add_argument("--connections", type=int, nargs="+", default=list(WIDTHS))
    parser.add_argument("--seconds", type=float, default=8.0, help="for each crowd")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--before", type=Path, help="another checkout, to compare with")
    parser.add_argument("--json", type=Path, default=_REPORT)
    arguments = parser.parse_args()
    rounds = asyncio.run(run(arguments))
    report = Report(environment(), arguments.model.name, rounds)
    arguments.json.write_bytes(msgspec.json.format(msgspec.json.encode(report)) + b"\n")


if __name__ == "__main__":
    main()
