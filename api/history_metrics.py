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
            ("up", "1 while agents and responses can be stored", int(self._figures.is_working)),
            (
                "degraded",
                "1 while they cannot, or damage was found and nobody acknowledged it",
                int(self._figures.is_degraded),
            ),
            ("bytes", "Bytes that agents and responses take on disk", counts.num_bytes),
            ("max_bytes", "Bytes that they may take (history_max_bytes)", self._max_bytes),
            ("agents", "Agents that are stored", counts.num_agents),
            ("turns", "Turns of these agents", counts.num_turns),
            ("responses", "Responses that are stored", counts.num_responses),
            (
                "pending_deletions",
                "Deleted agents and responses whose KV is still to be deleted",
                counts.num_leaving,
            ),
        ):
            yield GaugeMetricFamily(f"hearth_history_{name}", what, value=value)
