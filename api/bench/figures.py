"""What the samples of all rounds say: medians, and ratios to one of the servers."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import msgspec

from api.bench.scenarios import Measurement, Round


def _first(sample: Measurement) -> float | None:
    return sample.ttft_ms


def _rate(sample: Measurement) -> float | None:
    return sample.tokens_per_s


def _gap(sample: Measurement) -> float | None:
    return sample.longest_gap_ms


def _kept(sample: Measurement) -> float | None:
    return sample.kept


class Metric(NamedTuple):
    """One figure of a scenario; `{streams}` in its title is their number."""

    scenario: str
    title: str
    meaning: str
    of: Callable[[Measurement], float | None] = _first
    unit: str = "ms"
    is_less_better: bool = True


METRICS = (
    Metric("start", "start", "from the command to the answer to a greeting, nothing kept"),
    Metric("cold", "cold", "a prompt that nobody has seen"),
    Metric("retry", "retry", "the same prompt again"),
    Metric("follow-up", "follow-up", "the next turn of the conversation"),
    Metric("sibling", "sibling", "another prompt with the same system prompt"),
    Metric("mid-edit", "mid-edit", "the turn again, with a fact changed in mid-history"),
    Metric("swap", "swap", "a short prompt to another model"),
    Metric("back", "back", "the conversation's next turn after that other model"),
    Metric("restart", "restart", "the next turn, first thing after a restart"),
    Metric("kill", "kill -9", "the next turn, first thing after kill -9 and a start"),
    Metric("1 stream", "1 stream", "a long answer", _rate, "tokens/s", False),
    Metric("streams", "{streams} streams", "long answers at once", _rate, "tokens/s", False),
    Metric("beside", "beside: first token", "a cold long prompt beside running streams"),
    Metric("beside", "beside: gap", "the longest silence of a stream meanwhile", _gap),
    Metric("beside", "beside: kept", "share of their rate that the streams keep", _kept, "", False),
)


class FigureRow(msgspec.Struct):
    """One figure of one server, of right answers only.

    `times_better` compares its median with the baseline's.
    """

    title: str
    meaning: str
    unit: str
    peer: str
    median: float | None
    low: float | None
    high: float | None
    values: list[float]
    num_wrong: int
    num_failed: int
    times_better: float | None = None
    cached_tokens: float | None = None
    cpu_s: float | None = None


def rows(
    rounds: Sequence[Round], peers: Sequence[str], baseline: str, streams: int
) -> list[FigureRow]:
    """Every figure of every server, in the order of the scenarios."""
    found: list[FigureRow] = []
    for metric in METRICS:
        group = [_row(metric, peer, rounds, streams) for peer in peers]
        base = next(one.median for one in group if one.peer == baseline)
        for one in group:
            one.times_better = times_better(one.median, base, metric.is_less_better)
        found += [one for one in group if one.values or one.num_failed or one.num_wrong]
    return found


def _row(metric: Metric, peer: str, rounds: Sequence[Round], streams: int) -> FigureRow:
    samples = [
        sample
        for one in rounds
        if one.peer == peer
        for sample in one.samples
        if sample.scenario == metric.scenario
    ]
    right = [one for one in samples if one.is_right]
    values = [value for one in right if (value := metric.of(one)) is not None]
    return FigureRow(
        title=metric.title.replace("{streams}", str(streams)),
        meaning=metric.meaning,
        unit=metric.unit,
        peer=peer,
        median=_median(values),
        low=min(values, default=None),
        high=max(values, default=None),
        values=values,
        num_wrong=sum(not one.is_right and one.failure is None for one in samples),
        num_failed=sum(one.failure is not None for one in samples),
        cached_tokens=_median([one.cached_tokens for one in samples if one.prompt_tokens]),
        cpu_s=_median([one.cpu_s for one in samples if one.cpu_s is not None]),
    )


def _median(values: Iterable[float]) -> float | None:
    values = list(values)
    return round(statistics.median(values), 3) if values else None


def times_better(value: float | None, base: float | None, is_less_better: bool) -> float | None:
    """How many times better than the baseline."""
    if not value or not base:
        return None
    return round(base / value if is_less_better else value / base, 3)


def said(row: FigureRow) -> str:
    """A figure as people read it, with what is wrong with it."""
    parts: list[str] = []
    if row.median is not None:
        parts.append(f"{row.median:.2f}" if row.unit == "" else f"{row.median:,.0f} {row.unit}")
    if row.num_wrong:
        parts.append(f"{row.num_wrong} WRONG")
    if row.num_failed:
        parts.append(f"{row.num_failed} failed")
    return ", ".join(parts)


def times(value: float) -> str:
    """How many times, with the digits that say something."""
    return f"{value:.2g}" if value < 10 else f"{value:.0f}"
