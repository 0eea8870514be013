"""`hearth bench agents`: the course of a replay, and what becomes of its figures."""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path

import msgspec
from rich.console import Console
from rich.progress import Progress

from api.bench.agents.figures import agents_rows
from api.bench.agents.replay import Replay, ReplayPlan, ServerRun, TurnRecord
from api.bench.agents.report import AgentsReport, NotRun, agents_table, write_agents
from api.bench.agents.traffic import AgentScript, Shape, Texts, TrafficFacts, facts, traffic
from api.bench.ask import AskFailed
from api.bench.machine import Environment, environment
from api.bench.recipes import Recipe, RecipeError
from api.bench.report import PeerNote
from api.bench.servers import Servers

_TRIAL_TOKENS = 512
_KEEP_EVERY_S = 30.0
_SAY_EVERY = 25


class _Config(msgspec.Struct):
    max_position_embeddings: int | None = None
    text_config: _Config | None = None


def run_agents(arguments: argparse.Namespace, command: str) -> int:
    """Replay, print and write; the exit code is 1 if a turn was not answered.

    Raises:
        RecipeError: a server is not known, none could be run, or the model's window is too small.
    """
    report = replay_agents(arguments, command)
    text = msgspec.json.encode(report).decode() if arguments.as_json else agents_table(report)
    sys.stdout.write(text + "\n")
    return int(any(turn.failure is not None for run in report.runs for turn in run.turns))


def replay_agents(arguments: argparse.Namespace, command: str) -> AgentsReport:
    """Every server in turn. What is known is written twice a minute. Raises RecipeError."""
    console = Console(stderr=True)
    with (
        tempfile.TemporaryDirectory(prefix="hearth-bench-") as folder,
        Progress(console=console, disable=not console.is_terminal) as progress,
    ):
        course = AgentsCourse(arguments, command, Path(folder))
        bar = progress.add_task("replaying", total=course.num_turns)

        def say(line: str, advance: int = 0) -> None:
            progress.update(bar, description=line[:60], advance=advance)
            if not console.is_terminal and not advance:
                console.print(line, highlight=False, markup=False, soft_wrap=True)

        course.run(say)
    if not course.runs:
        raise RecipeError("; ".join(f"{one.name}: {one.why}" for one in course.not_run))
    return course.report(is_whole=True)


class AgentsCourse:
    """One replay: the traffic, and what came of it so far."""

    def __init__(self, arguments: argparse.Namespace, command: str, folder: Path) -> None:
        self._arguments = arguments
        self._command = command
        self._servers = Servers(arguments, arguments.peers[1:], folder)
        self._shape = Shape(
            arguments.seed,
            arguments.sessions,
            arguments.turns,
            arguments.scale,
            arguments.pause_scale,
        )
        self._sessions: Sequence[AgentScript] = traffic(self._shape)
        self._facts: TrafficFacts = facts(self._shape, self._sessions)
        self._environment: Environment = environment()
        self._per_token = 0.0
        self._begun_s = time.monotonic()
        self._kept_s = self._begun_s
        self.runs: list[ServerRun] = []
        self.not_run: list[NotRun] = []
        check_window(Path(arguments.model), self._facts.longest_tokens, arguments.scale)

    @property
    def num_turns(self) -> int:
        """How many there will be, unless something fails."""
        return self._arguments.rounds * len(self._servers.recipes) * self._facts.num_turns

    def run(self, say: Callable[..., None]) -> None:
        """Every server in turn, each with its part of the time that is left."""
        if self._arguments.install:
            self._install()
        self._per_token = self._servers.characters_per_token(_TRIAL_TOKENS)
        texts = Texts(self._shape, self._per_token)
        turns = [
            (n, one) for n in range(self._arguments.rounds) for one in self._servers.in_turn(n)
        ]
        for place, (number, recipe) in enumerate(turns):
            if recipe.name not in {one.name for one in self.not_run}:
                self._one(recipe, number, texts, self._deadline_s(len(turns) - place), say)
            self._keep(is_whole=False)
        self._keep(is_whole=True)

    def _install(self) -> None:
        for recipe in self._servers.recipes:
            try:
                self._servers.peer(recipe, 0).install()
            except RecipeError as error:
                self.not_run.append(NotRun(recipe.name, error.message))

    def _deadline_s(self, num_left: int) -> float | None:
        minutes = self._arguments.minutes
        if minutes is None:
            return None
        now = time.monotonic()
        return now + max(0.0, self._begun_s + 60 * minutes - now) / num_left

    def _one(
        self,
        recipe: Recipe,
        number: int,
        texts: Texts,
        deadline_s: float | None,
        say: Callable[..., None],
    ) -> None:
        into = ServerRun(recipe.name, number)
        plan = ReplayPlan(
            self._arguments.at_once, self._arguments.restart_at, self._arguments.swap_at
        )
        replay = Replay(self._servers.peer(recipe, number), self._sessions, texts, plan, into)

        def on_turn(record: TurnRecord) -> None:
            done = len(into.turns)
            say(f"{recipe.name}: agent {record.agent}, turn {record.turn + 1}", advance=1)
            if done == 1 or done % _SAY_EVERY == 0 or record.failure is not None:
                say(_told(recipe.name, record, done, self._facts.num_turns))

        self.runs.append(into)
        why: str | None = None
        try:
            replay.play(deadline_s, on_turn, lambda: self._keep(is_whole=False, is_late=True))
        except (AskFailed, RecipeError) as error:
            why = error.message
        if not into.turns:
            why = why or f"{into.ended_early} before its first turn"
            self.runs.remove(into)
            self.not_run.append(NotRun(recipe.name, why))
            say(f"{recipe.name} was not run: {why}")

    def _keep(self, *, is_whole: bool, is_late: bool = False) -> None:
        """Write what is known; where it `is_late`, only if that was not done lately."""
        now = time.monotonic()
        if self._arguments.out is None or (is_late and now - self._kept_s < _KEEP_EVERY_S):
            return
        self._kept_s = now
        write_agents(self.report(is_whole=is_whole), self._arguments.out)

    def report(self, *, is_whole: bool) -> AgentsReport:
        """What is known now."""
        arguments = self._arguments
        baseline = self._servers.baseline(arguments.baseline)
        runs = [run for run in self.runs if run.turns]
        return AgentsReport(
            command=self._command,
            made_at=datetime.now(UTC).isoformat(timespec="seconds"),
            environment=self._environment,
            model=Path(arguments.model).name,
            second=Path(arguments.second).name if arguments.second else "a copy of it",
            seed=arguments.seed,
            scale=arguments.scale,
            pause_scale=arguments.pause_scale,
            num_at_once=arguments.at_once,
            num_rounds=arguments.rounds,
            restart_at=arguments.restart_at,
            swap_at=arguments.swap_at,
            characters_per_token=round(self._per_token, 3),
            traffic=self._facts,
            seconds=round(time.monotonic() - self._begun_s, 1),
            is_whole=is_whole,
            baseline=baseline,
            peers=[PeerNote.of(one) for one in self._servers.recipes],
            not_run=list(self.not_run),
            rows=agents_rows(runs, baseline),
            runs=runs,
        )


def _told(name: str, record: TurnRecord, done: int, total: int) -> str:
    """A turn in one line."""
    if record.failure is not None:
        return f"{name}: agent {record.agent}, turn {record.turn + 1} failed: {record.failure}"
    cached = "" if record.cached_tokens is None else f", {record.cached_tokens} of them reused"
    return (
        f"{name}: {done} of {total} turns; the last had {record.prompt_tokens} tokens{cached}, "
        f"and {record.ttft_ms:.0f} ms to the first token"
    )


def check_window(model: Path, longest_tokens: int, scale: float) -> None:
    """See that the longest prompt fits into the model, where a directory says what does.

    Raises:
        RecipeError: it does not; the message says which scale would.
    """
    try:
        config = msgspec.json.decode((model / "config.json").read_bytes(), type=_Config)
    except (OSError, msgspec.MsgspecError):
        return
    inner = config.text_config or config
    window = inner.max_position_embeddings
    if window is not None and longest_tokens > window:
        fits = scale * window / longest_tokens * 0.9
        raise RecipeError(
            f"The longest prompt has some {longest_tokens:,} tokens, but {model.name} takes "
            f"{window:,}. --scale {fits:.2g} fits."
        )
