"""Figures of the history for Prometheus, as of its last refresh."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from typing_extensions import override

from runtime.history_figures import HistoryFigures
from runtime.settings import Settings


class HistoryCollector(Collector):
    """Agents, their turns and stored responses, and what they take."""

    def __init__(self, figures: HistoryFigures, settings: Settings) -> None:
        self._figures = figures
        self._max_bytes = settings.history_max_bytes

    @override
    def collect(self) -> Iterator[Metric]:
        counts = self._figures.counts
        for name, what, value in (
            ("up", "Whether the history can be used", int(self._figures.is_working)),
            ("bytes", "Bytes that the history takes", counts.num_bytes),
            ("max_bytes", "Bytes that the history may take", self._max_bytes),
            ("agents", "Agents", counts.num_agents),
            ("turns", "Turns of agents", counts.num_turns),
            ("responses", "Stored responses", counts.num_responses),
            ("leaving", "Deleted sessions whose KV is to follow", counts.num_leaving),
        ):
            yield GaugeMetricFamily(f"hearth_history_{name}", what, value=value)
