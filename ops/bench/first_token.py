"""What the next turn of a known conversation waits for, by its length.

`python -m ops.bench.first_token` has conversations grow turn by turn, over chat completions and
over Messages, with many turns and with few, and asks some short questions at each length. Writes
`first_token.json`, after each length.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import statistics
import tempfile
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import msgspec
import psutil

from api.bench.machine import Environment, environment
from ops.bench.processes import Hearth, hearth, workers_of
from ops.bench.random_models import write_eight, write_slender

Shape = Literal["many turns", "few turns"]
Protocol = Literal["chat", "messages"]
LENGTHS = (1024, 16_384, 65_536, 131_072)
TURN_TOKENS = 1024
ROOM_TOKENS = 4096
_REPORT = Path(__file__).parent / "first_token.json"
_PATHS = {"chat": "/v1/chat/completions", "messages": "/v1/messages"}
_ANSWER_TOKENS = 8
_WORDS = (
    "about after again because before between call change code could does each error even file find"
    " first from function give have into just know last line list long make many model more most"
    " name never number only open other over path place read right same should some such take text"
    " than that their them then there these thing this time turn under until value what when where"
    " which while will with word work would write year you your"
).split()
_SCHEDSTAT = "schedstat"


class FirstToken(msgspec.Struct):
    """Milliseconds until the first piece of text of a known conversation's next turn.

    `num_tokens` are those of its prompt, all but some dozens of which are known. The processor
    times are of the whole turn: of the server, of the worker and of its sandbox.
    """

    name: str
    shape: Shape
    protocol: Protocol
    num_tokens: int
    num_turns: int
    num_bytes: int
    ttft_ms: float
    ttft_max_ms: float
    restore_ms: float
    prefill_ms: float
    server_cpu_ms: float
    worker_cpu_ms: float
    sandbox_cpu_ms: float
    num_computed: float


class Report(msgspec.Struct):
    """One run. `before` are the figures of another checkout's server, in turn with these."""

    environment: Environment
    model: str
    rounds: int
    rows: list[FirstToken]
    ms_per_1k: dict[str, float]
    """By how much the first token is later for each 1,024 tokens, of each conversation."""


class _Cache(msgspec.Struct):
    cached_tokens: int = 0
    restore_ms: float = 0.0
    prefill_ms: float = 0.0


class _Info(msgspec.Struct):
    cache: _Cache = msgspec.field(default_factory=_Cache)


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    input_tokens: int = 0
    cache_read_input_tokens: int = 0
    cache_creation_input_tokens: int = 0

    @property
    def num_prompt_tokens(self) -> int:
        return self.prompt_tokens or (
            self.input_tokens + self.cache_read_input_tokens + self.cache_creation_input_tokens
        )


class _Text(msgspec.Struct):
    content: str | None = None
    text: str | None = None
    reasoning_content: str | None = None
    thinking: str | None = None


class _Choice(msgspec.Struct):
    delta: _Text = msgspec.field(default_factory=_Text)
    finish_reason: str | None = None


class _Start(msgspec.Struct):
    usage: _Usage | None = None


class _Event(msgspec.Struct):
    type: str = ""
    choices: list[_Choice] = []
    delta: _Text | None = None
    message: _Start | None = None
    usage: _Usage | None = None
    hearth: _Info | None = None

    @property
    def text(self) -> str:
        """What is said with this event."""
        deltas = [choice.delta for choice in self.choices] + ([self.delta] if self.delta else [])
        return "".join(one.content or one.text or "" for one in deltas)

    @property
    def shows(self) -> bool:
        """A client sees something of the answer, or its end."""
        deltas = [choice.delta for choice in self.choices] + ([self.delta] if self.delta else [])
        thoughts = any(one.reasoning_content or one.thinking for one in deltas)
        is_end = any(choice.finish_reason for choice in self.choices)
        return bool(self.text or thoughts or is_end or self.type == "message_delta")


_decoder = msgspec.json.Decoder(_Event)


@dataclass(slots=True)
class Told:
    """An answer: what was said, when its first piece came, and what it cost."""

    ttft_s: float = 0.0
    text: str = ""
    num_prompt_tokens: int = 0
    cache: _Cache = field(default_factory=_Cache)

    def add(self, event: _Event, seconds: float) -> None:
        self.ttft_s = self.ttft_s or seconds * event.shows
        self.text += event.text
        usage = event.usage or (event.message.usage if event.message is not None else None)
        if usage is not None:
            self.num_prompt_tokens = max(self.num_prompt_tokens, usage.num_prompt_tokens)
        if event.hearth is not None:
            self.cache = event.hearth.cache


class Conversation:
    """One that grows: its messages as a client has them."""

    def __init__(
        self,
        server: Hearth,
        shape: Shape,
        protocol: Protocol,
        seed: int,
        answer_tokens: int = _ANSWER_TOKENS,
    ) -> None:
        self.server = server
        self._answer_tokens = answer_tokens
        self.shape: Shape = shape
        self.protocol: Protocol = protocol
        self.num_tokens = 0
        self.num_bytes = 0
        self.num_turns = 0
        self._dice = random.Random(f"{shape}{protocol}{seed}")
        self._system = self._words(200)
        self._messages: list[dict[str, str]] = []
        self._tokens_per_word = 0.0

    async def ask(self, num_words: int) -> Told:
        """One more turn, with a question of so many words."""
        self._messages.append({"role": "user", "content": self._words(num_words)})
        told = await self._sent()
        if not self._tokens_per_word:
            self._tokens_per_word = told.num_prompt_tokens / (num_words + 200)
        self._messages.append({"role": "assistant", "content": told.text or "yes"})
        self.num_tokens, self.num_turns = told.num_prompt_tokens, self.num_turns + 1
        return told

    async def grow_to(self, num_tokens: int) -> None:
        """Say so much that the prompt has about so many tokens."""
        if not self._tokens_per_word:
            await self.ask(200)
        while (lacking := num_tokens - self.num_tokens) > TURN_TOKENS // 4:
            part = min(lacking, TURN_TOKENS) if self.shape == "many turns" else lacking
            await self.ask(self.num_words(part))

    def num_words(self, num_tokens: int) -> int:
        """So many words have about so many tokens; known when something was asked."""
        return max(int(num_tokens / self._tokens_per_word), 1)

    def _words(self, count: int) -> str:
        dice = self._dice
        said = dice.choices(_WORDS, k=count)
        return " ".join(word + "\n" * (dice.random() < 0.05) for word in said)

    def _body(self) -> Mapping[str, object]:
        common = {"model": "bench", "stream": True, "temperature": 0}
        common["max_tokens"] = self._answer_tokens
        if self.protocol == "messages":
            return {**common, "system": self._system, "messages": self._messages}
        system = {"role": "system", "content": self._system}
        options = {"stream_options": {"include_usage": True}}
        return {**common, **options, "messages": [system, *self._messages]}

    async def _sent(self) -> Told:
        payload = msgspec.json.encode(self._body())
        self.num_bytes = len(payload)
        head = (
            f"POST {_PATHS[self.protocol]} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(payload)}\r\n\r\n"
        )
        reader, writer = await asyncio.open_connection("127.0.0.1", self.server.port, limit=1 << 22)
        told, start = Told(), time.perf_counter()
        writer.write(head.encode() + payload)
        status = await reader.readline()
        if b" 200 " not in status:
            raise RuntimeError((status + await reader.read()).decode(errors="replace")[:2000])
        while line := await reader.readline():
            if line.startswith(b"data: {"):
                told.add(_decoder.decode(line[6:]), time.perf_counter() - start)
        writer.close()
        return told


class Spent:
    """Processor time of a server's processes, in seconds, by what they are."""

    def __init__(self, server: Hearth) -> None:
        self._server = psutil.Process(server.pid)
        self._parts = self._found()
        self._before = self._now()

    def since(self) -> dict[str, float]:
        """What they used since this was made."""
        now, before = self._now(), self._before
        return {
            part: sum(now[one] - before.get(one, 0.0) for one in them if one in now)
            for part, them in self._parts.items()
        }

    def _found(self) -> dict[str, list[psutil.Process]]:
        """A worker leads a group of processes, and the sandbox is the others of that group."""
        workers = workers_of(self._server.pid)
        groups = {one.pid for one in workers}
        others = [
            one
            for one in psutil.process_iter()
            if one.pid not in groups and _group(one.pid) in groups
        ]
        return {"server": [self._server], "worker": workers, "sandbox": others}

    def _now(self) -> dict[psutil.Process, float]:
        them = (one for part in self._parts.values() for one in part)
        return {one: seconds for one in them if (seconds := _cpu_s(one)) is not None}


def _group(pid: int) -> int | None:
    try:
        return os.getpgid(pid)
    except OSError:
        return None


def _cpu_s(process: psutil.Process) -> float | None:
    """To the nanosecond where the system says so, else in its ticks; None once it has ended."""
    try:
        tasks = list(Path(f"/proc/{process.pid}/task").iterdir())
        return sum(int((task / _SCHEDSTAT).read_text().split()[0]) for task in tasks) / 1e9
    except OSError:
        try:
            times = process.cpu_times()
        except psutil.Error:
            return None
        return times.user + times.system


async def measure(one: Conversation, name: str, num_tokens: int, rounds: int) -> FirstToken:
    """Have it grow to that length, then ask short questions."""
    await one.grow_to(num_tokens)
    for _ in range(2):
        await one.ask(20)
    spent = Spent(one.server)
    told = [await one.ask(20) for _ in range(rounds)]
    cpu_s = spent.since()

    def middle(figures: Sequence[float]) -> float:
        return round(statistics.median(figures), 2)

    return FirstToken(
        name=name,
        shape=one.shape,
        protocol=one.protocol,
        num_tokens=one.num_tokens,
        num_turns=one.num_turns,
        num_bytes=one.num_bytes,
        ttft_ms=middle([each.ttft_s * 1000 for each in told]),
        ttft_max_ms=round(max(each.ttft_s for each in told) * 1000, 2),
        restore_ms=middle([each.cache.restore_ms for each in told]),
        prefill_ms=middle([each.cache.prefill_ms for each in told]),
        server_cpu_ms=round(cpu_s["server"] / rounds * 1000, 2),
        worker_cpu_ms=round(cpu_s["worker"] / rounds * 1000, 2),
        sandbox_cpu_ms=round(cpu_s["sandbox"] / rounds * 1000, 2),
        num_computed=middle([each.num_prompt_tokens - each.cache.cached_tokens for each in told]),
    )


def slopes(rows: Sequence[FirstToken]) -> dict[str, float]:
    """By how many ms the first token is later for each 1,024 tokens, from the shortest on."""
    found: dict[str, float] = {}
    for row in rows:
        name = f"{row.name}: {row.shape}, {row.protocol}"
        first = next(one for one in rows if (one.name, one.shape, one.protocol) == _of(row))
        if row is not first:
            longer = (row.num_tokens - first.num_tokens) / 1024
            found[name] = round((row.ttft_ms - first.ttft_ms) / longer, 3)
    return found


def _of(row: FirstToken) -> tuple[str, Shape, Protocol]:
    return row.name, row.shape, row.protocol


async def run(model: Path, arguments: argparse.Namespace) -> AsyncGenerator[FirstToken]:
    """All lengths, each conversation in each server in turn."""
    checkouts: dict[str, Path | None] = {"now": None}
    if arguments.before is not None:
        checkouts["before"] = arguments.before.resolve()
    async with AsyncExitStack() as stack:
        servers = {
            name: await stack.enter_async_context(hearth(model, checkout=checkout))
            for name, checkout in checkouts.items()
        }
        known = {
            (name, shape, protocol): Conversation(server, shape, protocol, seed=1)
            for shape in arguments.shapes
            for protocol in arguments.protocols
            for name, server in servers.items()
        }
        for num_tokens in sorted(arguments.tokens):
            for (name, _, _), one in known.items():
                yield await measure(one, name, num_tokens, arguments.rounds)


async def _write(model: Path, arguments: argparse.Namespace) -> None:
    rows: list[FirstToken] = []
    async for row in run(model, arguments):
        rows.append(row)
        _print(row)
        report = Report(environment(), model.name, arguments.rounds, rows, slopes(rows))
        arguments.json.write_bytes(msgspec.json.format(msgspec.json.encode(report)) + b"\n")
    for name, slope in slopes(rows).items():
        print(f"{name}: {slope:+.3f} ms for each 1,024 tokens")


def _print(row: FirstToken) -> None:
    whose = f"{row.name:6s} {row.shape:10s} {row.protocol:8s}"
    size = f"{row.num_tokens:7d} tokens {row.num_turns:4d} turns {row.num_bytes / 1000:5.0f} KB"
    waits = f"first token {row.ttft_ms:7.1f} ms (at most {row.ttft_max_ms:.1f})"
    parts = f"restore {row.restore_ms:.1f}, prefill {row.prefill_ms:.1f}"
    spent = f"{row.server_cpu_ms:.1f} / {row.worker_cpu_ms:.1f} / {row.sandbox_cpu_ms:.1f}"
    print(f"{whose} {size}: {waits}; {parts}; CPU server/worker/sandbox {spent} ms", flush=True)


def main() -> None:
    """Parse the command line, run, print and write."""
    parser = argparse.ArgumentParser(prog="python -m ops.bench.first_token", description=__doc__)
    parser.add_argument("--model", type=Path, help="a model directory (default: a slender one)")
    parser.add_argument("--eight", action="store_true", help="an 8B in 4 bits, for a GPU")
    parser.add_argument("--before", type=Path, help="a checkout whose server is measured as well")
    parser.add_argument("--tokens", type=int, nargs="+", default=LENGTHS)
    parser.add_argument("--shapes", nargs="+", default=["many turns", "few turns"])
    parser.add_argument("--protocols", nargs="+", default=["chat", "messages"])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", type=Path, default=_REPORT)
    arguments = parser.parse_args()
    context = 2 ** (max(arguments.tokens) + ROOM_TOKENS).bit_length()
    with tempfile.TemporaryDirectory() as folder:
        model = arguments.model
        if model is None:
            write = write_eight if arguments.eight else write_slender
            model = write(Path(folder) / write.__name__.removeprefix("write_"), 1, context)
        asyncio.run(_write(model.resolve(), arguments))


if __name__ == "__main__":
    main()
