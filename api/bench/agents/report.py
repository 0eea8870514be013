"""The report of one replay: as JSON, as a table for a terminal or a document, as a page."""

from __future__ import annotations

from pathlib import Path

import msgspec

from api.bench.agents.figures import AgentsRow, spelled
from api.bench.agents.replay import ServerRun
from api.bench.agents.traffic import TrafficFacts
from api.bench.figures import times
from api.bench.machine import Environment
from api.bench.report import PeerNote, assembled
from api.cli.views import aligned


class NotRun(msgspec.Struct):
    """A server that nothing could be asked of."""

    name: str
    why: str


class AgentsReport(msgspec.Struct):
    """Everything that a replay found; `command` makes it again."""

    command: str
    made_at: str
    environment: Environment
    model: str
    second: str
    seed: int
    scale: float
    pause_scale: float
    num_at_once: int
    num_rounds: int
    restart_at: float | None
    swap_at: float | None
    characters_per_token: float
    traffic: TrafficFacts
    seconds: float
    is_whole: bool
    baseline: str
    peers: list[PeerNote]
    not_run: list[NotRun]
    rows: list[AgentsRow]
    runs: list[ServerRun]


def agents_table(report: AgentsReport) -> str:
    """The figures as columns, one per server."""
    names = [one.name for one in report.peers]
    head = ["OF ALL TURNS", *names]
    lines = [[title, *(_cell(report, title, name) for name in names)] for title in _titles(report)]
    return "\n".join([aligned([head, *lines]), *_remarks(report)])


def agents_markdown(report: AgentsReport) -> str:
    """The same for a document, with what the traffic was."""
    names = [one.name for one in report.peers]
    meanings = {row.title: row.meaning for row in report.rows}
    lines = [f"| | {' | '.join(names)} |", "|---" * (len(names) + 1) + "|"]
    for title in _titles(report):
        cells = " | ".join(_cell(report, title, name) for name in names)
        lines.append(f"| **{title}**: {meanings[title]} | {cells} |")
    machine, made = report.environment, report.traffic
    told = (
        f"{made.num_sessions} sessions and {made.num_sub_agents} sub-agents, {made.num_turns} "
        f"turns, {report.num_at_once} sessions at once; tokens at {report.scale:g} and pauses at "
        f"{report.pause_scale:g} of what was published. {machine.gpu or machine.cpu}, "
        f"{machine.cores} cores, {report.made_at[:10]}. `{report.command}`"
    )
    if machine.load_before[0] > machine.cores / 2:
        told += f" Busy with other work (load {machine.load_before[0]}): read the ratios only."
    return "\n".join([*lines, "", told, *(f"\n{one}" for one in _remarks(report))])


def agents_page(report: AgentsReport) -> str:
    """One HTML file that needs nothing else."""
    return assembled("agents", report)


def write_agents(report: AgentsReport, folder: Path) -> None:
    """`agents.json`, `agents.md` and `agents.html` in that folder, each whole at any time."""
    folder.mkdir(parents=True, exist_ok=True)
    texts = {
        "agents.json": msgspec.json.encode(report).decode(),
        "agents.md": agents_markdown(report),
        "agents.html": agents_page(report),
    }
    for name, text in texts.items():
        new = folder / f".{name}.new"
        new.write_text(f"{text}\n", "utf-8")
        new.replace(folder / name)


def _titles(report: AgentsReport) -> list[str]:
    return list(dict.fromkeys(row.title for row in report.rows))


def _cell(report: AgentsReport, title: str, peer: str) -> str:
    found = [row for row in report.rows if (row.title, row.peer) == (title, peer)]
    if not found:
        return "not run"
    (row,) = found
    if peer == report.baseline or row.times_better is None:
        return spelled(row)
    return f"{spelled(row)} ({times(row.times_better)}x)"


def _remarks(report: AgentsReport) -> list[str]:
    """What a reader of the figures must not miss."""
    said = [f"{one.name} was not run: {one.why}" for one in report.not_run]
    said += [
        f"{run.peer} ended early, after {len(run.turns)} of {report.traffic.num_turns} turns: "
        f"{run.ended_early}. Figures are over turns that every server was asked."
        for run in report.runs
        if run.ended_early
    ]
    return said
