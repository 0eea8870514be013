"""The report of one run: as JSON, as a table for a terminal, as one page for a browser."""

from __future__ import annotations

from importlib.resources import files

import msgspec

from api.bench.figures import FigureRow, said, times
from api.bench.machine import Environment
from api.bench.recipes import Recipe
from api.bench.scenarios import Round
from api.cli.views import aligned

_PLOTS = files("api.dashboard") / "static" / "vendor"
_PAGE = files("api.bench") / "page"


class PeerNote(msgspec.Struct):
    """What a server is, and how it was started."""

    name: str
    title: str
    tried: str
    start: list[str]

    @classmethod
    def of(cls, recipe: Recipe) -> PeerNote:
        return cls(recipe.name, recipe.title, recipe.tried, list(recipe.start))


class Report(msgspec.Struct):
    """Everything that a run found; `command` makes it again."""

    command: str
    made_at: str
    environment: Environment
    model: str
    second: str
    num_tokens: int
    num_rounds: int
    num_streams: int
    seconds: float
    baseline: str
    peers: list[PeerNote]
    rows: list[FigureRow]
    rounds: list[Round]
    texts_judged: bool = True
    """Every answer was compared with what it should hold; not where the weights are random."""


def table(report: Report) -> str:
    """The figures as columns, one per server."""
    names = [one.name for one in report.peers]
    head = ["SCENARIO", *names]
    lines = [[title, *(_cell(report, title, name) for name in names)] for title in titles(report)]
    return aligned([head, *lines])


def markdown(report: Report) -> str:
    """The same for a document."""
    names = [one.name for one in report.peers]
    meanings = {row.title: row.meaning for row in report.rows}
    lines = [f"| | {' | '.join(names)} |", "|---" * (len(names) + 1) + "|"]
    for title in titles(report):
        cells = " | ".join(_cell(report, title, name) for name in names)
        lines.append(f"| **{title}**: {meanings[title]} | {cells} |")
    machine = report.environment
    device = machine.gpu or machine.cpu
    told = f"{device}, {machine.cores} cores, {report.num_rounds} rounds, {report.made_at[:10]}"
    if machine.load_before[0] > machine.cores / 2:
        told += f"; busy with other work (load {machine.load_before[0]}): read the ratios only"
    if not report.texts_judged:
        told += "; random weights: texts were not judged"
    return "\n".join([*lines, "", f"{told}."])


def titles(report: Report) -> list[str]:
    """The figures in their order."""
    return list(dict.fromkeys(row.title for row in report.rows))


def _cell(report: Report, title: str, peer: str) -> str:
    found = [row for row in report.rows if (row.title, row.peer) == (title, peer)]
    if not found:
        return "not asked"
    (row,) = found
    if peer == report.baseline or row.times_better is None:
        return said(row)
    return f"{said(row)} ({times(row.times_better)}x)"


def page(report: Report) -> str:
    """One HTML file that needs nothing else."""
    return assembled("page", report)


def assembled(name: str, report: msgspec.Struct) -> str:
    """The page and script of that name, with all that they need, around the report's data."""
    data = msgspec.json.encode(report).decode().replace("<", "\\u003c")
    parts = {
        "/*PLOT CSS*/": (_PLOTS / "uplot.min.css").read_text("utf-8"),
        "/*STYLE*/": (_PAGE / "style.css").read_text("utf-8"),
        "/*PLOT JS*/": (_PLOTS / "uplot.min.js").read_text("utf-8"),
        "/*COMMON*/": (_PAGE / "common.js").read_text("utf-8"),
        "/*SCRIPT*/": (_PAGE / f"{name}.js").read_text("utf-8"),
        "/*DATA*/": data,
    }
    text = (_PAGE / f"{name}.html").read_text("utf-8")
    for mark, part in parts.items():
        text = text.replace(mark, part, 1)
    return text
