"""`hearth bench`: the course of a run, and what becomes of its figures."""

from __future__ import annotations

import argparse
import shlex
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType

import msgspec
from rich.console import Console
from rich.progress import Progress

from api.bench.agents.command import run_agents
from api.bench.figures import rows
from api.bench.machine import environment
from api.bench.report import PeerNote, Report, page, table
from api.bench.scenarios import Asking, Round, Sizes, num_samples
from api.bench.servers import Servers
from api.cli.arguments import AGENTS, BASELINE
from api.cli.errors import Misused
from runtime.config.settings import Settings

_OF_CONVERSATIONS = {"tokens": 4096, "streams": 4, "random_weights": False}
_OF_AGENTS: dict[str, float | None] = {
    "sessions": 8,
    "at_once": 4,
    "scale": 0.02,
    "turns": 43,
    "pause_scale": 0.1,
    "seed": 1,
    "restart_at": None,
    "swap_at": None,
}


def _settle(arguments: argparse.Namespace) -> None:
    """Put in what was left out. May be done again.

    Raises:
        Misused: a flag of the other kind of `hearth bench` was given.
    """
    is_agents = arguments.peers[:1] == [AGENTS]
    own, other = (_OF_AGENTS, _OF_CONVERSATIONS)[:: 1 if is_agents else -1]
    for name in other:
        if vars(arguments)[name] is not None:
            flag = f"--{name.replace('_', '-')}"
            without = "without" if is_agents else "with"
            raise Misused(f"{flag} is a flag of `hearth bench` {without} `{AGENTS}`.")
    for name, default in own.items():
        if vars(arguments)[name] is None:
            vars(arguments)[name] = default
    if arguments.rounds is None:
        arguments.rounds = 1 if is_agents else 3
    if len(arguments.peers) == is_agents:
        arguments.peers = [*arguments.peers, "hearth", BASELINE]


class BenchRun:
    """The rounds of one run."""

    def __init__(self, arguments: argparse.Namespace, folder: Path) -> None:
        self._arguments = arguments
        self.servers = Servers(arguments, arguments.peers, folder)
        self.rounds: list[Round] = []
        self.ended_early = False

    @property
    def num_samples(self) -> int:
        """How many there will be, unless something fails."""
        each = (num_samples(self.servers.peer(one, 0)) for one in self.servers.recipes)
        return self._arguments.rounds * sum(each)

    def run(
        self, say: Callable[[str], None], deadline_s: float | None, on_round: Callable[[], None]
    ) -> None:
        """Every round asks every server; none begins when the time is up."""
        if self._arguments.install:
            for recipe in self.servers.recipes:
                self.servers.peer(recipe, 0).install()
        wanted = int(self._arguments.tokens)
        per_token = self.servers.characters_per_token(max(1, wanted // 8))
        judges = not self._arguments.random_weights
        sizes = Sizes(int(wanted * per_token), self._arguments.streams, judges)
        for number in range(self._arguments.rounds):
            for recipe in self.servers.in_turn(number):
                if deadline_s is not None and time.monotonic() >= deadline_s:
                    self.ended_early = True
                    return
                into = Round(recipe.name, number)
                self.rounds.append(into)
                peer = self.servers.peer(recipe, number)
                try:
                    Asking(peer, into, sizes, say).everything()
                finally:
                    peer.stop()
                on_round()


def run(_: Settings, arguments: argparse.Namespace) -> int:
    """Measure, print and write; the exit code is 1 if an answer was wrong or missing.

    Raises:
        RecipeError: a server is not known, or cannot be installed.
        Misused: flags that do not belong together.
    """
    _settle(arguments)
    before = signal.signal(signal.SIGTERM, _leave)
    try:
        return _measure_and_print(arguments)
    finally:
        signal.signal(signal.SIGTERM, before)


def _measure_and_print(arguments: argparse.Namespace) -> int:
    command = f"hearth {shlex.join(sys.argv[1:])}"
    if arguments.peers[:1] == [AGENTS]:
        return run_agents(arguments, command)
    report = measure(arguments, command)
    text = msgspec.json.encode(report).decode() if arguments.as_json else table(report)
    sys.stdout.write(text + "\n")
    return int(any(row.num_wrong or row.num_failed for row in report.rows))


def _leave(number: int, _: FrameType | None) -> None:
    """Asked to end: the servers that were started go first."""
    sys.exit(128 + number)


def write(report: Report, folder: Path) -> None:
    """`report.json` and `report.html` in that folder."""
    folder.mkdir(parents=True, exist_ok=True)
    formatted = msgspec.json.format(msgspec.json.encode(report), indent=1)
    (folder / "report.json").write_bytes(formatted + b"\n")
    (folder / "report.html").write_text(page(report), "utf-8")


def measure(arguments: argparse.Namespace, command: str) -> Report:
    """All rounds, with a bar on a terminal and a line for each figure elsewhere.

    `command` is what makes the report again; what is known of it is written after every server.
    """
    _settle(arguments)
    console = Console(stderr=True)
    begun = time.perf_counter()
    before = environment()
    deadline_s = time.monotonic() + 60 * arguments.minutes if arguments.minutes else None
    with (
        tempfile.TemporaryDirectory(prefix="hearth-bench-") as folder,
        Progress(console=console, disable=not console.is_terminal) as progress,
    ):
        course = BenchRun(arguments, Path(folder))
        bar = progress.add_task("asking", total=course.num_samples)
        servers = course.servers
        baseline = servers.baseline(arguments.baseline)

        def say(line: str) -> None:
            progress.update(bar, description=line[:60], advance=1)
            if not console.is_terminal:
                console.print(line, highlight=False, markup=False, soft_wrap=True)

        def report() -> Report:
            return Report(
                command=command,
                made_at=datetime.now(UTC).isoformat(timespec="seconds"),
                environment=before,
                model=Path(arguments.model).name,
                second=Path(arguments.second).name if arguments.second else "a copy of it",
                num_tokens=arguments.tokens,
                num_rounds=max((one.number + 1 for one in course.rounds), default=0),
                num_streams=arguments.streams,
                texts_judged=not arguments.random_weights,
                seconds=round(time.perf_counter() - begun, 1),
                baseline=baseline,
                peers=[PeerNote.of(one) for one in servers.recipes],
                rows=rows(course.rounds, servers.names, baseline, arguments.streams),
                rounds=course.rounds,
            )

        def keep() -> None:
            if arguments.out is not None:
                write(report(), arguments.out)

        course.run(say, deadline_s, keep)
    if course.ended_early:
        console.print(f"The time was up after {len(course.rounds)} rounds of servers.")
    return report()
