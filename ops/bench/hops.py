"""How many calls a streamed chat request takes, in how many files: `python -m ops.bench.hops`.

`--chain` lists the functions of each part as well, in the order of their first call.

A server is started whose processes note every call of a function of ours, with its time. One chat
request of 40 tokens is asked a few times; of all but the first, the one with the fewest calls
counts, as a busy machine adds heartbeats, and new sandboxes for those that were too slow.

Counted are the calls in the server from the request's bytes to the frame for the worker, in the
worker and its sandbox from there to the engine, and per token, in the later half of the answer, in
the thread that computes and on the server's event loop. A generator counts once, however often it
goes on; what a thread repeats while it waits for a sandbox does not count. The worker rests before
each step, so that the server takes in each token by itself, and what is called for fewer than half
of the tokens (timers, heartbeats) is none of theirs. Prints one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from ops.bench.processes import give, hearth
from runtime.embedded import HEARTH_TINY

ROOT = Path(__file__).parents[2]
NUM_TOKENS = 40
NUM_REQUESTS = 5
_POLLS = ("Lane._look", "IntakeTask.call.<locals>.look")
_TRACER = """
import fcntl, os, sys, threading, time

FOLDER, ROOT = os.environ["HOPS_FOLDER"], os.environ["HOPS_ROOT"]
known, files = {}, {}

def note(frame, event, _):
    if event != "call":
        return
    code = frame.f_code
    name = known.get(code)
    if name is None:
        path = os.path.relpath(code.co_filename, ROOT)
        is_ours = path.startswith(("api/", "runtime/", "store/"))
        name = known[code] = f"{path} {code.co_qualname}" if is_ours else ""
    if not name or (code.co_flags & 0x2A0 and frame.f_lasti > 8):
        return
    if name.endswith(" Engine.step"):
        time.sleep(0.02)
    line = f"{time.monotonic_ns()} {threading.get_ident()} {name}\\n"
    pid = os.getpid()
    try:
        os.write(files[pid], line.encode())
    except (KeyError, OSError):  # a process that closes what it has no use for
        path = os.path.join(FOLDER, str(pid))
        file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        files[pid] = fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, 512)  # nobody else gets that number
        os.close(file)
        os.write(files[pid], line.encode())

threading.setprofile(note)
sys.setprofile(note)
"""


class Called(NamedTuple):
    at_ns: int
    thread: int
    path: str
    function: str


class Count(msgspec.Struct):
    """Calls, different functions, and files that they are in."""

    calls: float
    functions: int
    files: int


class Parts(NamedTuple):
    """The calls that are counted: of one request, and of its tokens on their way out."""

    to_the_frame: list[Called]
    to_the_engine: list[Called]
    token_in_worker: list[Called]
    token_in_server: list[Called]
    num_tokens: int


class Hops(msgspec.Struct):
    """Of one request, and of one token on its way out."""

    to_the_frame: Count
    to_the_engine: Count
    request_files: int
    token_in_worker: Count
    token_in_server: Count
    token_files: int


def counted(calls: Sequence[Called], each: int = 1) -> Count:
    functions = {(one.path, one.function) for one in calls}
    return Count(round(len(calls) / each, 1), len(functions), len({one.path for one in calls}))


def read(folder: Path, server_pid: int) -> tuple[list[Called], list[Called]]:
    """What the server called, and what its workers did, in the order of time."""
    server: list[Called] = []
    workers: list[Called] = []
    for file in folder.iterdir():
        if file.name.isdigit():
            found = server if int(file.name) == server_pid else workers
            found += _calls(file.read_text().splitlines())
    return sorted(server), sorted(workers)


def _calls(lines: Sequence[str]) -> Iterator[Called]:
    for line in lines:
        at_ns, thread, path, function = line.split(" ", 3)
        if function not in _POLLS:
            yield Called(int(at_ns), int(thread), path, function)


def parts(server: list[Called], workers: list[Called], asked_ns: int, until_ns: int) -> Parts:
    """Of the request that was asked and answered then, when nothing else was going on."""
    server = [one for one in server if asked_ns <= one.at_ns < until_ns]
    workers = [one for one in workers if asked_ns <= one.at_ns < until_ns]
    link = "/worker_link.py"
    sent_ns = next(
        one.at_ns for one in server if one.path.endswith(link) and one.function.endswith(".send")
    )
    loop = next(one.thread for one in server if one.path.endswith(link))
    reached_ns = next(one.at_ns for one in workers if one.function == "Engine._receive")
    tokens = _later_half([one for one in workers if one.function == "Engine._on_token"])
    pushed = _later_half([one for one in server if one.function == "Generation.push"])
    return Parts(
        to_the_frame=[one for one in server if one.at_ns <= sent_ns and one.thread == loop],
        to_the_engine=[one for one in workers if sent_ns <= one.at_ns <= reached_ns],
        token_in_worker=_between(workers, tokens),
        token_in_server=_between(server, pushed),
        num_tokens=len(tokens) - 1,
    )


def _later_half(marks: list[Called]) -> list[Called]:
    """By then an answer has begun to be sent, and each token takes what the next one takes."""
    return marks[len(marks) // 2 :]


def _between(calls: Iterable[Called], marks: Sequence[Called]) -> list[Called]:
    """The calls of that thread in between, of functions that each mark, or nearly, comes with."""
    first, last = marks[0], marks[-1]
    found = [one for one in calls if first <= one < last and one.thread == first.thread]
    times = Counter((one.path, one.function) for one in found)
    return [one for one in found if 2 * times[one.path, one.function] >= len(marks)]


def hops(found: Parts) -> Hops:
    def num_files(*calls: Sequence[Called]) -> int:
        return len({one.path for one in itertools.chain.from_iterable(calls)})

    return Hops(
        to_the_frame=counted(found.to_the_frame),
        to_the_engine=counted(found.to_the_engine),
        request_files=num_files(found.to_the_frame, found.to_the_engine),
        token_in_worker=counted(found.token_in_worker, found.num_tokens),
        token_in_server=counted(found.token_in_server, found.num_tokens),
        token_files=num_files(found.token_in_worker, found.token_in_server),
    )


def print_chain(found: Parts) -> None:
    """Each function with how often it is called, in the order of first calls."""
    for name, calls in found._asdict().items():
        if name == "num_tokens":
            continue
        print(f"\n{name}")
        for (path, function), times in Counter((one.path, one.function) for one in calls).items():
            print(f"{times:6} {path} {function}")


def ask(port: int, body: Mapping[str, object]) -> None:
    """Have it answered to the end."""
    url = f"http://127.0.0.1:{port}/v1/chat/completions"
    headers = {"content-type": "application/json"}
    request = urllib.request.Request(url, msgspec.json.encode(body), headers)
    with urllib.request.urlopen(request, timeout=60) as answer:  # noqa: S310
        answer.read()


async def measure() -> Parts:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "sitecustomize.py").write_text(_TRACER)
        give({"HOPS_FOLDER": name, "HOPS_ROOT": str(ROOT), "PYTHONPATH": name})
        asked_ns: list[int] = []
        async with hearth(HEARTH_TINY, prewarm=False) as server:
            for number in range(NUM_REQUESTS):
                message = {"role": "user", "content": f"Tell me about the number {number}."}
                body = {"model": "bench", "messages": [message], "max_tokens": NUM_TOKENS}
                body |= {"ignore_eos": True, "stream": True}
                await asyncio.sleep(2)  # for what follows an answer
                asked_ns.append(time.monotonic_ns())
                await asyncio.to_thread(ask, server.port, body)
            asked_ns.append(time.monotonic_ns())
            server_calls, worker_calls = read(folder, server.pid)
        times = itertools.pairwise(asked_ns[1:])
        found = [parts(server_calls, worker_calls, *between_ns) for between_ns in times]
        return min(found, key=lambda one: len(one.to_the_frame) + len(one.to_the_engine))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--chain", action="store_true", help="list the functions of each part")
    is_listed = bool(parser.parse_args().chain)
    found = asyncio.run(measure())
    print(msgspec.json.format(msgspec.json.encode(hops(found)), indent=2).decode())
    if is_listed:
        print_chain(found)


if __name__ == "__main__":
    main()
