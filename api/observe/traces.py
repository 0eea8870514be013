"""Traces for OpenTelemetry: one per request, with a span for each thing its time went to.

Imported only where `otlp_endpoint` is set. Attributes are counts, names and reasons, never text.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple
from urllib.parse import urlsplit

import structlog
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from typing_extensions import override

from api.observe.record import RequestRecord
from runtime.cache.figures import WrittenGroup
from runtime.supervisor.generation import Generation
from runtime.version import VERSION

_log = structlog.get_logger("hearth.traces")
_EXPORT_S = 5.0
_PATH = "/v1/traces"


class TraceSpan(NamedTuple):
    """A part of a request's time, in ns of wall time."""

    name: str
    start_ns: int
    end_ns: int


class ToldOnce(SpanExporter):
    """Sends spans to an endpoint, and logs when that begins to fail and when it works again.

    Upstream says it up to three times for every batch, for as long as the collector is away.
    """

    def __init__(self, endpoint: str) -> None:
        logging.getLogger(OTLPSpanExporter.__module__).setLevel(logging.CRITICAL)
        self._endpoint = endpoint
        self._exporter = OTLPSpanExporter(endpoint=endpoint, timeout=_EXPORT_S)
        self._num_lost = 0

    @override
    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        result = self._exporter.export(spans)
        if result is SpanExportResult.SUCCESS:
            if self._num_lost:
                _log.info("traces_sent_again", endpoint=self._endpoint, num_lost=self._num_lost)
            self._num_lost = 0
            return result
        if not self._num_lost:
            remedy = "start what listens there, or correct otlp_endpoint"
            _log.warning("traces_refused", endpoint=self._endpoint, remedy=remedy)
        self._num_lost += len(spans)
        return result

    @override
    def shutdown(self) -> None:
        self._exporter.shutdown()

    @override
    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        return self._exporter.force_flush(timeout_millis)


class OtlpTraces:
    """Sends spans over OTLP/HTTP, from a thread of its own; what cannot be sent is dropped."""

    def __init__(self, endpoint: str) -> None:
        if urlsplit(endpoint).path in ("", "/"):
            endpoint = endpoint.rstrip("/") + _PATH
        resource = Resource.create({"service.name": "hearth", "service.version": VERSION})
        self._provider = TracerProvider(resource=resource)
        self._provider.add_span_processor(BatchSpanProcessor(ToldOnce(endpoint)))
        self._tracer = self._provider.get_tracer("hearth", VERSION)
        self._propagator = TraceContextTextMapPropagator()

    def close(self) -> None:
        """Send what is left; blocks for some seconds at most."""
        self._provider.shutdown()

    def wrote(self, written: WrittenGroup) -> None:
        """Slots were written, behind whatever requests they are of: a trace of its own."""
        sizes = {"hearth.num_slots": written.num_slots, "hearth.num_bytes": written.num_bytes}
        span = self._tracer.start_span("write", attributes=sizes, start_time=written.start_ns)
        span.end(written.end_ns)

    def finished(
        self, method: str, route: str, headers: Mapping[str, str], record: RequestRecord
    ) -> None:
        """A request is over."""
        given = {name: headers.get(name, "") for name in ("traceparent", "tracestate")}
        attributes: dict[str, str | int | float] = {
            "http.request.method": method,
            "http.route": route,
            "http.response.status_code": record.status,
            "hearth.request_id": record.request_id,
        }
        for name, value in record.facts().items():
            if isinstance(value, str | int | float):
                attributes[f"hearth.{name}"] = value
        root = self._tracer.start_span(
            f"{method} {route}",
            context=self._propagator.extract(given),
            kind=SpanKind.SERVER,
            attributes=attributes,
            start_time=record.started_ns,
        )
        inside = set_span_in_context(root)
        for generation in record.generations:
            for piece in pieces_of(generation):
                span = self._tracer.start_span(piece.name, inside, start_time=piece.start_ns)
                if piece.name in ("restore", "prefill", "decode"):
                    span.set_attributes(_counts(piece.name, generation))
                span.end(piece.end_ns)
        if record.status >= 500 or record.error_code is not None:
            root.set_status(Status(StatusCode.ERROR, record.error_code))
        root.end(time.time_ns())


def pieces_of(generation: Generation) -> Iterator[TraceSpan]:
    """What is known of where its time went, in order: waiting, loading, intake, and its usage."""
    one = generation
    now_ns = time.time_ns()
    waited_ns = one.sent_ns or one.finished_ns or now_ns
    loading_ns = one.loading_ns
    yield TraceSpan("queue", one.submitted_ns, loading_ns or waited_ns)
    if loading_ns is not None:
        yield TraceSpan("swap", loading_ns, waited_ns)
    if one.sent_ns is None or one.accepted_ns is None:
        return
    yield TraceSpan("intake", one.sent_ns, one.accepted_ns)
    if one.usage is None or one.finished_ns is None:
        return
    at_ns = one.accepted_ns
    for name, took_ms in (
        ("restore", one.usage.cache.restore_ms),
        ("prefill", one.usage.prefill_ms),
    ):
        if took_ms:
            # Reading may have begun before the worker said that it took the request.
            start_ns, at_ns = at_ns, min(at_ns + int(took_ms * 1e6), one.finished_ns)
            yield TraceSpan(name, start_ns, at_ns)
    if one.usage.decode_ms:
        start_ns = one.finished_ns - int(one.usage.decode_ms * 1e6)
        yield TraceSpan("decode", max(start_ns, one.accepted_ns), one.finished_ns)


def _counts(name: str, generation: Generation) -> dict[str, str | int]:
    usage = generation.usage
    if usage is None:
        return {}
    if name == "restore":
        return {"hearth.tier": usage.cache.tier, "hearth.num_tokens": usage.cache.num_tokens}
    if name == "prefill":
        num_computed = usage.num_prompt_tokens - usage.num_cached_tokens
        return {"hearth.num_tokens": num_computed, "hearth.reason": usage.cache.reason or ""}
    return {"hearth.num_tokens": usage.num_output_tokens}
