"""Figures for Prometheus of what is stored: the KV hierarchy, agents and responses."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from typing_extensions import override

from runtime.cache.figures import KvFigures
from runtime.cache.history_figures import HistoryFigures
from runtime.config.settings import Settings
from runtime.wire import KvCounts

_MODEL_COUNTERS: tuple[tuple[str, str, Callable[[KvCounts], float]], ...] = (
    ("reused_tokens", "Prompt tokens whose KV was reused", lambda c: c.num_reused_tokens),
    ("computed_tokens", "Prompt tokens that were computed", lambda c: c.num_computed_tokens),
    ("restored_bytes", "Bytes of KV read from disk", lambda c: c.num_restored_bytes),
    ("restore_seconds", "Time taken to read KV from disk", lambda c: c.restore_s),
    ("hot_evictions", "Runs of KV blocks evicted from memory", lambda c: c.num_evicted),
    ("damaged_slots", "Slot files found damaged when they were read", lambda c: c.num_damaged),
    ("unwritten_slots", "Slot files that could not be written", lambda c: c.num_unwritten),
    ("encoded_images", "Images that a vision tower encoded", lambda c: c.num_encoded_images),
    (
        "healed_turns",
        "Turns that a client sent back changed and that were taken as they were generated",
        lambda c: c.num_healed_turns,
    ),
    (
        "hash_mismatches",
        "Blocks found by their hash whose tokens were others; should stay 0",
        lambda c: c.exact_key_rejected_by_model_lcp,
    ),
    (
        "image_mismatches",
        "Matches cut short because they ended inside an image; should stay 0",
        lambda c: c.vlm_retreat,
    ),
)
_MODEL_GAUGES: tuple[tuple[str, str, Callable[[KvCounts], float]], ...] = (
    ("hot_bytes", "Bytes of KV in memory", lambda c: c.hot_bytes),
    ("hot_pieces", "Blocks and ends of KV in memory", lambda c: c.num_pieces),
    ("write_queue_bytes", "Bytes of KV that wait to be written", lambda c: c.num_queued_bytes),
)
_STORE_COUNTERS = {
    "published_slots": "Slot files that were saved and indexed",
    "written_bytes": "Bytes written to the fast disk for any reason",
    "refused_cap": "Files that were not written because the cap had no room for them",
    "promoted": "Slots copied back from the cold store",
    "demoted": "Slots moved to the cold store",
    "scrubbed_bytes": "Bytes read to check their checksums",
}
_EVICTIONS = "evicted_"


class KvCollector(Collector):
    """The KV hierarchy. Asks the store when it is scraped."""

    def __init__(self, figures: Callable[[], KvFigures]) -> None:
        self._figures = figures

    @override
    def collect(self) -> Iterator[Metric]:
        figures = self._figures()
        yield from _of_models(figures)
        yield from _of_store(figures)
        yield from _of_tiers(figures)


def _of_models(figures: KvFigures) -> Iterator[Metric]:
    for name, text, value in _MODEL_COUNTERS:
        counter = CounterMetricFamily(f"hearth_kv_{name}", text, labels=["model"])
        for model, counts in figures.models.items():
            counter.add_metric([model], value(counts))
        yield counter
    for name, text, value in _MODEL_GAUGES:
        gauge = GaugeMetricFamily(f"hearth_kv_{name}", text, labels=["model"])
        for model, counts in figures.models.items():
            gauge.add_metric([model], value(counts))
        yield gauge


def _of_store(figures: KvFigures) -> Iterator[Metric]:
    for name, text in _STORE_COUNTERS.items():
        yield CounterMetricFamily(f"hearth_kv_{name}", text, value=figures.store.get(name, 0))
    text = "Slots deleted from the store, by reason"
    evictions = CounterMetricFamily("hearth_kv_evictions", text, labels=["reason"])
    for name, value in figures.store.items():
        if name.startswith(_EVICTIONS):
            evictions.add_metric([name.removeprefix(_EVICTIONS)], value)
    yield evictions
    text = "1 while conversations are kept on disk, 0 while the store is degraded or being opened"
    up = GaugeMetricFamily("hearth_kv_store_up", text)
    if figures.is_up is not None:
        up.add_metric([], float(figures.is_up))
    yield up
    text = "1 while the cold store cannot be reached or belongs to another server"
    yield GaugeMetricFamily("hearth_kv_cold_away", text, value=float(figures.is_cold_away))


def _of_tiers(figures: KvFigures) -> Iterator[Metric]:
    labels = ["model", "tier"]
    slots = GaugeMetricFamily("hearth_kv_slots", "Slots in the store", labels=labels)
    tokens = GaugeMetricFamily("hearth_kv_tokens", "Tokens of these slots", labels=labels)
    text = "Bytes that these slots take on disk"
    num_bytes = GaugeMetricFamily("hearth_kv_disk_bytes", text, labels=labels)
    for tier in figures.disk.tiers:
        slots.add_metric([tier.model, tier.tier], tier.num_slots)
        tokens.add_metric([tier.model, tier.tier], tier.num_tokens)
        num_bytes.add_metric([tier.model, tier.tier], tier.disk_bytes)
    yield from (slots, tokens, num_bytes)
    free = GaugeMetricFamily("hearth_kv_disk_free_bytes", "Bytes free on the store's disk")
    text = "Bytes that are left free there for others; slots are deleted to keep it so"
    floor = GaugeMetricFamily("hearth_kv_disk_floor_bytes", text)
    if figures.disk.free_bytes is not None:
        free.add_metric([], figures.disk.free_bytes)
        floor.add_metric([], figures.disk.floor_bytes)
    yield from (free, floor)


class HistoryCollector(Collector):
    """Agents, their turns and stored responses, and what they take, as of the last refresh."""

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
