"""Figures of the KV hierarchy for Prometheus, taken when they are asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from typing_extensions import override

from runtime.kv_figures import KvFigures
from runtime.wire import KvCounts

_MODEL_COUNTERS: tuple[tuple[str, str, Callable[[KvCounts], float]], ...] = (
    ("reused_tokens", "Prompt tokens taken from a tier", lambda c: c.num_reused_tokens),
    ("computed_tokens", "Prompt tokens computed", lambda c: c.num_computed_tokens),
    ("restored_bytes", "Bytes read from slots", lambda c: c.num_restored_bytes),
    ("restore_seconds", "Time taken to restore", lambda c: c.restore_s),
    ("hot_evictions", "Runs that left memory", lambda c: c.num_evicted),
    ("damaged_slots", "Slots that could not be read", lambda c: c.num_damaged),
    ("unwritten_slots", "Slots that could not be written", lambda c: c.num_unwritten),
    ("encoded_images", "Images that a vision tower saw", lambda c: c.num_encoded_images),
    ("healed_turns", "Turns read as the tokens generated", lambda c: c.num_healed_turns),
    (
        "exact_key_rejected_by_model_lcp",
        "Hash matches that the tokens refuted",
        lambda c: c.exact_key_rejected_by_model_lcp,
    ),
    ("hybrid_trim_miss", "Caches that could not be cut where needed", lambda c: c.hybrid_trim_miss),
    ("vlm_retreat", "Matches given up because of media", lambda c: c.vlm_retreat),
)
_MODEL_GAUGES: tuple[tuple[str, str, Callable[[KvCounts], float]], ...] = (
    ("hot_bytes", "Bytes of KV in memory", lambda c: c.hot_bytes),
    ("hot_runs", "Runs that are known", lambda c: c.num_runs),
    ("write_queue_bytes", "Bytes that wait to be written", lambda c: c.num_queued_bytes),
)
_STORE_COUNTERS = {
    "published_slots": "Slots that became durable",
    "published_bytes": "Bytes of new slots that became durable",
    "written_bytes": "Bytes written to the fast disk for any reason",
    "refused_slots": "Staged slots that were not published",
    "quarantined": "Damaged files that were put aside",
    "promoted": "Slots that came back from the cold store",
    "demoted": "Slots that went to the cold store",
    "compacted": "Slots that were merged into others",
    "scrubbed_bytes": "Bytes that were read to find damage",
}
_EVICTIONS = "evicted_"


class KvCollector(Collector):
    """Asks the store when it is scraped."""

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
    text = "Slots that left the disk, by reason"
    evictions = CounterMetricFamily("hearth_kv_evictions", text, labels=["reason"])
    for name, value in figures.store.items():
        if name.startswith(_EVICTIONS):
            evictions.add_metric([name.removeprefix(_EVICTIONS)], value)
    yield evictions
    text = "1 while the cold store does not answer"
    yield GaugeMetricFamily("hearth_kv_cold_away", text, value=float(figures.is_cold_away))
    new = figures.store.get("published_bytes", 0)
    written = figures.store.get("written_bytes", 0)
    yield GaugeMetricFamily(
        "hearth_kv_write_amplification",
        "Bytes written for each byte of new slots",
        value=written / new if new else 1.0,
    )


def _of_tiers(figures: KvFigures) -> Iterator[Metric]:
    labels = ["model", "tier"]
    slots = GaugeMetricFamily("hearth_kv_slots", "Slots in the store", labels=labels)
    tokens = GaugeMetricFamily("hearth_kv_tokens", "Tokens in the store", labels=labels)
    num_bytes = GaugeMetricFamily("hearth_kv_disk_bytes", "Disk that they take", labels=labels)
    for tier in figures.tiers:
        slots.add_metric([tier.model, tier.tier], tier.num_slots)
        tokens.add_metric([tier.model, tier.tier], tier.num_tokens)
        num_bytes.add_metric([tier.model, tier.tier], tier.disk_bytes)
    yield from (slots, tokens, num_bytes)
