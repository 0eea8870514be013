"""What the turns of all servers say: sums and percentiles over turns that all were asked for."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import msgspec

from api.bench.agents.replay import ServerRun, TurnRecord
from api.bench.figures import times_better

Turns = Sequence[TurnRecord]
Figure = Callable[[ServerRun, Turns], float | None]
MIB = 1 << 20


class AgentsMetric(NamedTuple):
    """One figure. `of` takes a run and those of its turns that count; None: there is none."""

    title: str
    meaning: str
    of: Figure
    unit: str
    is_less_better: bool | None = True


class AgentsRow(msgspec.Struct):
    """One figure of one server: the median of its rounds."""

    title: str
    meaning: str
    unit: str
    peer: str
    value: float | None
    values: list[float]
    times_better: float | None = None


def percentile(values: Iterable[float], share: float) -> float | None:
    """The smallest value that so large a share of them does not exceed; None of none."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)] if ordered else None


def num_computed(turns: Turns) -> int | None:
    """Tokens of prompts that were not taken from a cache; None if any answer does not tell."""
    answered = [one for one in turns if one.failure is None]
    cached = [one.cached_tokens for one in answered if one.cached_tokens is not None]
    if not answered or len(cached) < len(answered):
        return None
    return sum(one.prompt_tokens for one in answered) - sum(cached)


def _ttft(share: float, counts: Callable[[TurnRecord], bool]) -> Figure:
    def of(_: ServerRun, turns: Turns) -> float | None:
        return percentile((t.ttft_ms for t in turns if counts(t) and t.ttft_ms is not None), share)

    return of


def _sent(_: ServerRun, turns: Turns) -> float:
    return sum(one.prompt_tokens for one in turns)


def _computed(_: ServerRun, turns: Turns) -> float | None:
    return num_computed(turns)


def _computed_share(_: ServerRun, turns: Turns) -> float | None:
    computed, sent = num_computed(turns), sum(one.prompt_tokens for one in turns)
    return 100 * computed / sent if computed is not None and sent else None


def _asked(_: ServerRun, turns: Turns) -> float:
    return len(turns)


def _failed(_: ServerRun, turns: Turns) -> float:
    return sum(one.failure is not None for one in turns)


def _right(_: ServerRun, turns: Turns) -> float | None:
    judged = [one.is_right for one in turns if one.is_right is not None]
    return 100 * sum(judged) / len(judged) if judged else None


def _out(_: ServerRun, turns: Turns) -> float:
    return sum(one.output_tokens for one in turns)


def _whole(what: Callable[[ServerRun], float | None]) -> Figure:
    """A figure of a whole run, which says nothing of one that runs yet or ended early."""
    return lambda run, _: None if run.ended_early or run.wall_s is None else what(run)


def _mib(value: float | None) -> float | None:
    return None if value is None else value / MIB


def _peak(run: ServerRun, _: Turns) -> float | None:
    return _mib(run.peak_resident_bytes)


def _everybody(_: TurnRecord) -> bool:
    return True


METRICS = (
    AgentsMetric("turns", "requests that every server was asked", _asked, "", None),
    AgentsMetric("prompt tokens sent", "as the server counts them", _sent, "tokens", None),
    AgentsMetric(
        "prefill computed",
        "of these, not taken from a cache, as the server says",
        _computed,
        "tokens",
    ),
    AgentsMetric("share computed", "the same as a share", _computed_share, "%", None),
    AgentsMetric("first token, p50", "of all turns", _ttft(0.5, _everybody), "ms"),
    AgentsMetric("first token, p99", "of all turns", _ttft(0.99, _everybody), "ms"),
    AgentsMetric(
        "sub-agents, p50",
        "first token, turns of sub-agents",
        _ttft(0.5, lambda one: one.is_sub_agent),
        "ms",
    ),
    AgentsMetric(
        "sub-agents, p99",
        "first token, turns of sub-agents",
        _ttft(0.99, lambda one: one.is_sub_agent),
        "ms",
    ),
    AgentsMetric(
        "sub-agents begin, p50",
        "first token of a sub-agent's first turn",
        _ttft(0.5, lambda one: one.is_sub_agent and one.turn == 0),
        "ms",
    ),
    AgentsMetric(
        "after a restart, p50",
        "first token of each agent's first turn after it",
        _ttft(0.5, lambda one: one.after == "restart"),
        "ms",
    ),
    AgentsMetric(
        "after a restart, longest",
        "of these",
        _ttft(1.0, lambda one: one.after == "restart"),
        "ms",
    ),
    AgentsMetric(
        "after a swap, p50",
        "first token of each agent's first turn after another model's",
        _ttft(0.5, lambda one: one.after == "swap"),
        "ms",
    ),
    AgentsMetric(
        "after a swap, longest", "of these", _ttft(1.0, lambda one: one.after == "swap"), "ms"
    ),
    AgentsMetric("tokens out", "as the server counts them", _out, "tokens", None),
    AgentsMetric("wall time", "of the whole traffic", _whole(lambda run: run.wall_s), "s"),
    AgentsMetric("CPU time", "of all processes", _whole(lambda run: run.cpu_s), "s"),
    AgentsMetric(
        "bytes written",
        "to disks, by all processes",
        _whole(lambda run: _mib(run.written_bytes)),
        "MiB",
    ),
    AgentsMetric(
        "peak memory",
        "resident, all processes",
        _peak,
        "MiB",
    ),
    AgentsMetric("recalled", "last answers that hold a number told at first", _right, "%", None),
    AgentsMetric("failed", "turns without an answer", _failed, "", None),
)


def agents_rows(runs: Sequence[ServerRun], baseline: str) -> list[AgentsRow]:
    """Every figure of every server that was asked anything."""
    names = list(dict.fromkeys(run.peer for run in runs))
    shared = shared_turns(runs)
    rows: list[AgentsRow] = []
    for metric in METRICS:
        group = [_row(metric, name, runs, shared) for name in names]
        base = next((one.value for one in group if one.peer == baseline), None)
        for one in group:
            if metric.is_less_better is not None:
                one.times_better = times_better(one.value, base, metric.is_less_better)
        if any(one.values for one in group):
            rows += group
    return rows


def shared_turns(runs: Sequence[ServerRun]) -> set[tuple[str, int]]:
    """The turns that every run has: others would compare early turns with late ones."""
    each = [{(one.agent, one.turn) for one in run.turns} for run in runs]
    return each[0].intersection(*each[1:]) if each else set()


def _row(
    metric: AgentsMetric, peer: str, runs: Sequence[ServerRun], shared: set[tuple[str, int]]
) -> AgentsRow:
    values: list[float] = []
    for run in runs:
        if run.peer == peer:
            turns = [one for one in run.turns if (one.agent, one.turn) in shared]
            value = metric.of(run, turns)
            values += [] if value is None else [round(value, 2)]
    middle = round(statistics.median(values), 2) if values else None
    return AgentsRow(metric.title, metric.meaning, metric.unit, peer, middle, values)


def spelled(row: AgentsRow) -> str:
    """A figure as people read it."""
    if row.value is None:
        return "not told"
    digits = 1 if row.unit in ("%", "s") else 0
    return f"{row.value:,.{digits}f} {row.unit}".rstrip()
