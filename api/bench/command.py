"""`hearth bench`: the course of a run, and what becomes of its figures."""

from __future__ import annotations

import argparse
import shlex
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path

import msgspec
from rich.console import Console
from rich.progress import Progress

from api.bench.ask import AskFailed, ask
from api.bench.figures import rows
from api.bench.machine import environment
from api.bench.peers import Models, Peer, lay_out
from api.bench.recipes import Recipe, RecipeError, find
from api.bench.report import PeerNote, Report, page, table
from api.bench.scenarios import Asking, Round, Sizes, num_samples
from api.bench.texts import CHARACTERS_PER_TOKEN, conversation
from api.cli.arguments import BASELINE
from runtime.config.settings import Settings


class BenchRun:
    """The rounds of one run."""

    def __init__(self, arguments: argparse.Namespace, folder: Path) -> None:
        self._arguments = arguments
        self._folder = folder
        self._recipes = [find(word) for word in arguments.peers]
        self._models = lay_out(folder, arguments.model, arguments.second)
        self._venvs: Path = arguments.venvs or folder / "venvs"
        self.rounds: list[Round] = []

    @property
    def recipes(self) -> Sequence[Recipe]:
        return self._recipes

    @property
    def models(self) -> Models:
        return self._models

    @property
    def num_samples(self) -> int:
        """How many there will be, unless something fails."""
        each = (num_samples(self._peer(one, 0)) for one in self._recipes)
        return self._arguments.rounds * sum(each)

    def run(self, say: Callable[[str], None]) -> None:
        """Every round asks every server, the other way round each time."""
        if self._arguments.install:
            for recipe in self._recipes:
                self._peer(recipe, 0).install()
        sizes = Sizes(self._num_characters(), self._arguments.streams)
        for number in range(self._arguments.rounds):
            for recipe in self._recipes[:: -1 if number % 2 else 1]:
                into = Round(recipe.name, number)
                self.rounds.append(into)
                peer = self._peer(recipe, number)
                try:
                    Asking(peer, into, sizes, say).everything()
                finally:
                    peer.stop()

    def _peer(self, recipe: Recipe, number: int) -> Peer:
        home = self._folder / f"{recipe.name.replace('/', '-')}-{number}"
        return Peer(recipe, self._models, home, self._venvs)

    def _num_characters(self) -> int:
        """As much text as makes the wanted number of tokens, as the first server counts them."""
        wanted = int(self._arguments.tokens)
        trial = conversation(int(wanted * CHARACTERS_PER_TOKEN / 8), seed=0).first
        num_characters = sum(len(one.content) for one in trial.messages)
        peer = self._peer(self._recipes[0], -1)
        try:
            peer.start()
            counted = ask(peer.target, trial.messages, 1).prompt_tokens
        finally:
            peer.stop()
        return int(wanted * num_characters / counted) if counted else wanted * 4


def run(_: Settings, arguments: argparse.Namespace) -> int:
    """Measure, print and write; the exit code is 1 if an answer was wrong or missing.

    Raises:
        RecipeError: a server is not known, or cannot be installed.
    """
    report = measure(arguments, f"hearth {shlex.join(sys.argv[1:])}")
    text = msgspec.json.encode(report).decode() if arguments.as_json else table(report)
    sys.stdout.write(text + "\n")
    if arguments.out is not None:
        write(report, arguments.out)
    return int(any(row.num_wrong or row.num_failed for row in report.rows))


def write(report: Report, folder: Path) -> None:
    """`report.json` and `report.html` in that folder."""
    folder.mkdir(parents=True, exist_ok=True)
    formatted = msgspec.json.format(msgspec.json.encode(report), indent=1)
    (folder / "report.json").write_bytes(formatted + b"\n")
    (folder / "report.html").write_text(page(report), "utf-8")


def measure(arguments: argparse.Namespace, command: str) -> Report:
    """All rounds, with a bar on a terminal and a line for each figure elsewhere.

    `command` is what makes the report again.
    """
    console = Console(stderr=True)
    begun = time.perf_counter()
    before = environment()
    with (
        tempfile.TemporaryDirectory(prefix="hearth-bench-") as folder,
        Progress(console=console, disable=not console.is_terminal) as progress,
    ):
        course = BenchRun(arguments, Path(folder))
        bar = progress.add_task("asking", total=course.num_samples)

        def say(line: str) -> None:
            progress.update(bar, description=line[:60], advance=1)
            if not console.is_terminal:
                console.print(line, highlight=False, markup=False, soft_wrap=True)

        try:
            course.run(say)
        except AskFailed as error:
            raise RecipeError(f"The first server does not answer: {error.message}") from error
    names = [one.name for one in course.recipes]
    given = arguments.baseline or (BASELINE if BASELINE in names else names[-1])
    return Report(
        command=command,
        made_at=datetime.now(UTC).isoformat(timespec="seconds"),
        environment=before,
        model=Path(arguments.model).name,
        second=Path(arguments.second).name if arguments.second else "the same, renamed",
        num_tokens=arguments.tokens,
        num_rounds=arguments.rounds,
        num_streams=arguments.streams,
        seconds=round(time.perf_counter() - begun, 1),
        baseline=given,
        peers=[PeerNote.of(one) for one in course.recipes],
        rows=rows(course.rounds, names, given, arguments.streams),
        rounds=course.rounds,
    )
