"""How long prompts of 128k tokens keep the server's event loop: `python -m ops.bench.loop_stall`.

A server is started whose loop is to be woken every millisecond, and which notes when it was later.
Its model has a template that shows the beginnings of a few messages, so that long prompts are
answered at once: what is measured is the server, not the model. Writes `loop_stall.json`. With
`--bodies` it is sent the nasty bodies of `nasty_bodies` instead, each the largest that is read.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import os
import random
import statistics
import tempfile
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple

import msgspec

from api.bench.machine import Environment, environment
from ops.bench.nasty_bodies import one_of_each, routes
from ops.bench.processes import Hearth, give, hearth
from runtime.config.settings import Settings
from runtime.embedded import HEARTH_TINY

NUM_TOKENS = 128_000
PERIOD_MS = 1.0
AIM_MS = 5.0
BODY_AIM_MS = 50.0
_TRIES = 5
_MOST_AGAIN = 40
"""So many bodies that missed the aim are sent again by each process that sends some."""
_REPORT = Path(__file__).parent / "loop_stall.json"
_AFTER_S = 0.25
"""What follows an answer is the request's as well."""
_TEMPLATE = """\
{% for message in messages %}{% if loop.index < 5 or loop.revindex < 5 %}\
{{ message.role }}: {{ message.content[:64] }}
{% endif %}{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"""
_WATCH = """
import asyncio, atexit, os, time

beats = []

def used():
    return time.thread_time_ns(), time.process_time_ns()

def watch(loop, due_ns, since):
    late_ns = time.monotonic_ns() - due_ns
    cpu_ns, all_ns = (now - then for now, then in zip(used(), since))
    if late_ns > 500_000 or cpu_ns > 500_000:
        beats.append((due_ns + late_ns, late_ns, cpu_ns, min(all_ns, late_ns + 1_000_000)))
    due_ns = time.monotonic_ns() + 1_000_000
    loop.call_later(0.001, watch, loop, due_ns, used())

def dump():
    if beats:
        with open(os.environ["LOOP_STALL_FILE"], "w") as file:
            file.writelines(" ".join(map(str, beat)) + "\\n" for beat in beats)

run = asyncio.Runner.run

def watched(self, work, **options):
    loop = self.get_loop()
    loop.call_soon(watch, loop, time.monotonic_ns(), used())
    atexit.register(dump)
    return run(self, work, **options)

asyncio.Runner.run = watched
"""


class Beat(NamedTuple):
    """The loop was woken then, so much later than it was to be; in between its thread used so much
    processor time, and all of the server's threads together so much.
    """

    at_ns: int
    late_ns: int
    cpu_ns: int
    server_ns: int


class Stall(msgspec.Struct):
    """Milliseconds, of the requests of one shape: the longest of all, and the median over the
    requests of the longest in each. `cpu` is what the loop's own thread computed for meanwhile,
    `server` what all threads of the server did: the part of a stall that is not the machine's.
    """

    shape: str
    num_bytes: int
    longest_ms: float
    median_ms: float
    longest_cpu_ms: float
    median_cpu_ms: float
    longest_server_ms: float = 0.0
    median_server_ms: float = 0.0
    where: str = ""
    """Where the server computed longest."""


class Sent(msgspec.Struct):
    """One body, and the longest stall until it was answered, in milliseconds. `cpu` is what the
    loop's own thread computed for during that stall, `server` what all threads of the server did.
    """

    shape: str
    where: str
    num_bytes: int
    status: int
    longest_ms: float = 0.0
    cpu_ms: float = 0.0
    server_ms: float = 0.0
    most_cpu_ms: float = 0.0
    """The same between any two turns of the loop, the longest of each."""
    most_server_ms: float = 0.0
    again: list[tuple[float, float, float]] = []
    """The longest stall of each further try: the whole of it, `cpu` and `server`."""


class Bodies(msgspec.Struct):
    """Of nasty bodies to all routes: the longest stalls by shape, and how they were answered."""

    environment: Environment
    rounds: int
    aim_ms: float
    greeting: Stall
    stalls: list[Stall]
    statuses: dict[str, int]
    share: float = 1.0
    """Of the bodies so many were sent, drawn by chance."""
    lanes: int = 1
    """So many servers were measured side by side, each on cores of its own."""
    over: list[Sent] = []
    """Those that missed the aim."""
    greetings_again: list[float] = []
    """The longest stall of each greeting while those were sent again."""


class Figures(msgspec.Struct):
    """One run. A part that was not asked for is what an earlier run left."""

    environment: Environment
    rounds: int
    aim_ms: float
    stalls: list[Stall]
    bodies: Bodies | None = None


class Ask(NamedTuple):
    """A request of some shape."""

    shape: str
    path: str
    body: bytes
    agent: str = "curl/8"
    method: str = "POST"


def asks(seed: str) -> list[Ask]:
    """One of each shape, like no earlier one."""
    words = f"{seed} a word and the next "
    long = words * (NUM_TOKENS * 4 // len(words))
    lines = [words * 20 for _ in range(NUM_TOKENS * 4 // (len(words) * 20))]
    roles = ("user", "assistant")
    said = [{"role": roles[i % 2], "content": line} for i, line in enumerate([*lines, "?"][-1001:])]
    said = said if said[-1]["role"] == "user" else said[:-1]
    parts = [{"role": one["role"], "content": [_text(one["content"])]} for one in said]
    blocks = [_text("x-anthropic-billing-header: cc_version=2.1; cch=1;"), _text(long)]
    chinese = seed + "請把這個房間裡的每一盞燈都點亮" * (NUM_TOKENS // 15)
    claude: dict[str, object] = {"system": blocks, "messages": parts}
    chat, messages = "/v1/chat/completions", "/v1/messages"
    return [
        Ask("a greeting", chat, _chat([{"role": "user", "content": f"Hello {seed}"}])),
        Ask("one system prompt", chat, _chat([_system(long), *said[:1]])),
        Ask("800,000 characters of system prompt", chat, _chat([_system(long + long[:288_000])])),
        Ask("Chinese", chat, _chat([_system(chinese), *said[:1]])),
        Ask("many messages", chat, _chat([_system(words), *said])),
        Ask("Claude Code", messages, _packed(claude), "claude-cli/2"),
    ]


def _text(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


def _system(text: str) -> dict[str, str]:
    return {"role": "system", "content": text}


def _chat(messages: Sequence[Mapping[str, str]]) -> bytes:
    if messages[-1]["role"] == "system":
        messages = [*messages, {"role": "user", "content": "Hello"}]
    return _packed({"messages": messages})


def _packed(body: Mapping[str, object]) -> bytes:
    return msgspec.json.encode({"model": "bench", "max_tokens": 4, **body})


def answered(port: int, ask: Ask) -> int:
    """The status with which it is answered, to the end; 0 where the connection was closed."""
    headers = {"content-type": "application/json", "user-agent": ask.agent}
    url = f"http://127.0.0.1:{port}{ask.path}"
    request = urllib.request.Request(url, ask.body, headers, method=ask.method)
    try:
        with urllib.request.urlopen(request, timeout=120) as answer:  # noqa: S310
            answer.read()
            return answer.status
    except urllib.error.HTTPError as error:
        with contextlib.suppress(OSError):
            error.read()
        return error.code
    except OSError:
        return 0


def model_in(folder: Path) -> Path:
    """hearth-tiny with a template that shows the beginnings of the first messages and the last."""
    model = folder / "model"
    model.mkdir()
    for file in HEARTH_TINY.iterdir():
        if file.name != "chat_template.jinja":
            (model / file.name).symlink_to(file)
    (model / "chat_template.jinja").write_text(_TEMPLATE)
    return model


@contextlib.asynccontextmanager
async def watched() -> AsyncGenerator[tuple[Hearth, list[Beat]]]:
    """A server and how late its loop was woken, which is known when the server has ended."""
    beats: list[Beat] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "sitecustomize.py").write_text(_WATCH)
        file = folder / "beats"
        give({"PYTHONPATH": f"{folder}:{Path.cwd()}", "LOOP_STALL_FILE": str(file)})
        async with hearth(model_in(folder), spare_worker=False) as server:
            yield server, beats
        beats += [Beat(*map(int, line.split())) for line in file.read_text().splitlines()]


async def measure(rounds: int) -> Figures:
    """All shapes in turn, so many times."""
    began = environment()
    spans: dict[str, list[tuple[int, int]]] = {}
    sizes: dict[str, int] = {}
    async with watched() as (server, beats):
        for number in range(rounds + 1):
            for ask in asks(f"round {number}"):
                span = await _span(server, ask)
                if number:  # everything was done once
                    spans.setdefault(ask.shape, []).append(span)
                    sizes[ask.shape] = len(ask.body)
    stalls = [stall(shape, sizes[shape], those, beats) for shape, those in spans.items()]
    return Figures(began, rounds, AIM_MS, stalls)


def measure_bodies(rounds: int, share: float, lanes: int) -> Bodies:
    """To each route each shape, in each of the fields that it is meant for; a share of all that."""
    began = environment()
    with ProcessPoolExecutor(lanes, get_context("spawn")) as pool:
        parts = [pool.submit(_lane, lane, lanes, rounds, share) for lane in range(lanes)]
        sent = [one for part in parts for one in part.result()[0]]
        again = [one for part in parts for one in part.result()[1]]
    by_shape: dict[str, list[Sent]] = {}
    for one in sent:
        by_shape.setdefault(one.shape, []).append(one)
    stalls = [_of_shape(those) for those in by_shape.values()]
    bodies = [one for one in sent if one.where]
    statuses = Counter(str(one.status) for one in bodies)
    over = sorted((one for one in bodies if one.longest_ms > BODY_AIM_MS), key=_longest)[::-1]
    return Bodies(
        began,
        rounds,
        BODY_AIM_MS,
        stalls[0],
        stalls[1:],
        dict(sorted(statuses.items())),
        share,
        lanes,
        over,
        [one.longest_ms for one in again],
    )


def _longest(one: Sent) -> float:
    return one.longest_ms


def _lane(lane: int, lanes: int, rounds: int, share: float) -> tuple[list[Sent], list[Sent]]:
    """What one process sends to a server on its part of the cores, and greetings that were sent
    between those that were sent again.
    """
    if lanes > 1:
        cores = sorted(os.sched_getaffinity(0))
        num = len(cores) // lanes
        os.sched_setaffinity(0, cores[lane * num : (lane + 1) * num])
    sent = asyncio.run(_sent(rounds, _drawn(share, lane, lanes)))
    bodies = [one for one in sent if one.where]
    over = sorted((one for one in bodies if one.longest_ms > BODY_AIM_MS), key=_longest)
    chosen = {id(one) for one in over[-_MOST_AGAIN:]}
    numbers = {number for number, one in enumerate(bodies) if id(one) in chosen}
    if not numbers:
        return sent, []
    again = asyncio.run(_sent(rounds, _only(_drawn(share, lane, lanes), numbers), _TRIES))
    tries = iter([one for one in again if one.where])
    for number in sorted(numbers):
        those = itertools.islice(tries, _TRIES)
        bodies[number].again = [(one.longest_ms, one.cpu_ms, one.server_ms) for one in those]
    return sent, [one for one in again if not one.where]


def _drawn(share: float, lane: int, lanes: int) -> Callable[[], bool]:
    """Of those that are drawn by chance one in so many."""
    dice, numbers = random.Random(1), itertools.count()
    return lambda: dice.random() < share and next(numbers) % lanes == lane


def _only(is_drawn: Callable[[], bool], chosen: set[int]) -> Callable[[], bool]:
    """Of those that are drawn the ones with these numbers."""
    numbers = itertools.count()
    return lambda: is_drawn() and next(numbers) in chosen


async def _sent(rounds: int, is_drawn: Callable[[], bool], tries: int = 1) -> list[Sent]:
    """All that are drawn, so many times each, and a greeting before those of each route."""
    sent: list[Sent] = []
    spans: list[tuple[int, int]] = []
    greeting, settings = asks("round 0")[0], Settings(home=Path("/nowhere"))
    async with watched() as (server, beats):
        answered(server.port, greeting)
        answered(server.port, Ask("", "/v1/agents", b'{"id": "nobody"}'))
        for _ in range(rounds):
            for route in routes(settings, "bench"):
                spans.append(await _span(server, greeting))
                sent.append(Sent(greeting.shape, "", len(greeting.body), 200))
                for one in one_of_each(route, is_drawn=is_drawn):
                    ask = Ask(one.shape, route.path, one.body, method=route.method)
                    where = f"{one.field} of {route.path} {one.way}".strip()
                    for _ in range(tries):
                        since_ns = time.monotonic_ns()
                        status = await asyncio.to_thread(answered, server.port, ask)
                        spans.append((since_ns, time.monotonic_ns()))
                        sent.append(Sent(one.shape, where, len(one.body), status))
    return [_stalled(one, _inside(span, beats)) for one, span in zip(sent, spans, strict=True)]


def _stalled(one: Sent, beats: Sequence[Beat]) -> Sent:
    if not beats:
        return one
    longest = max(beats, key=lambda beat: beat.late_ns)
    return msgspec.structs.replace(
        one,
        longest_ms=_ms(longest.late_ns),
        cpu_ms=_ms(longest.cpu_ns),
        server_ms=_ms(longest.server_ns),
        most_cpu_ms=_ms(max(beat.cpu_ns for beat in beats)),
        most_server_ms=_ms(max(beat.server_ns for beat in beats)),
    )


def _of_shape(sent: Sequence[Sent]) -> Stall:
    most = max(sent, key=lambda one: one.most_server_ms)
    late, cpu = [one.longest_ms for one in sent], [one.most_cpu_ms for one in sent]
    server = [one.most_server_ms for one in sent]
    figures = (value for those in (late, cpu, server) for value in _most_and_median(those))
    return Stall(most.shape, max(one.num_bytes for one in sent), *figures, where=most.where)


def _most_and_median(values: Sequence[float]) -> tuple[float, float]:
    return round(max(values), 2), round(statistics.median(values), 2)


def _ms(ns: int) -> float:
    return round(ns / 1e6, 2)


async def _span(server: Hearth, ask: Ask) -> tuple[int, int]:
    since_ns = time.monotonic_ns()
    assert await asyncio.to_thread(answered, server.port, ask) == 200
    await asyncio.sleep(_AFTER_S)
    return since_ns, time.monotonic_ns()


def stall(
    shape: str, num_bytes: int, spans: Iterable[tuple[int, int]], beats: Sequence[Beat]
) -> Stall:
    """What became of the requests in these spans of time."""
    return _of_shape(
        [_stalled(Sent(shape, "", num_bytes, 200), _inside(span, beats)) for span in spans]
    )


def _inside(span: tuple[int, int], beats: Sequence[Beat]) -> list[Beat]:
    return [one for one in beats if span[0] <= one.at_ns <= span[1]]


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--bodies", action="store_true", help="nasty bodies to all routes instead")
    parser.add_argument("--share", type=float, default=1.0, help="of the nasty bodies")
    parser.add_argument("--lanes", type=int, default=1, help="servers for them side by side")
    parser.add_argument("--json", type=Path, default=_REPORT)
    arguments = parser.parse_args()
    print("longest and median stall, ms; computed on the loop's thread; by all of the server")
    if arguments.bodies:
        figures = msgspec.json.decode(_REPORT.read_bytes(), type=Figures)
        figures.bodies = measure_bodies(arguments.rounds, arguments.share, arguments.lanes)
        _show([figures.bodies.greeting, *figures.bodies.stalls])
        for one in figures.bodies.over:
            print(one.longest_ms, one.cpu_ms, one.server_ms, one.shape, one.where, one.again)
        print(figures.bodies.statuses, figures.bodies.greetings_again)
    else:
        figures = asyncio.run(measure(arguments.rounds))
        _show(figures.stalls)
    arguments.json.write_bytes(msgspec.json.format(msgspec.json.encode(figures)) + b"\n")


def _show(stalls: Sequence[Stall]) -> None:
    for one in stalls:
        late = f"{one.longest_ms:8.2f} {one.median_ms:8.2f}"
        cpu = f"{one.longest_cpu_ms:8.2f} {one.median_cpu_ms:8.2f}"
        cpu += f"   {one.longest_server_ms:8.2f} {one.median_server_ms:8.2f}"
        print(f"{late}   {cpu}   {one.shape} ({one.num_bytes} bytes) {one.where}")


if __name__ == "__main__":
    main()
