"""Traces: what a request's time went to, as a real OTLP receiver gets it."""

from __future__ import annotations

import gzip
import subprocess
import sys
import threading
from collections.abc import Generator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from structlog.testing import capture_logs
from typing_extensions import override

from api.observe.traces import ToldOnce
from tests.running_server import CHAT, ROOT, RunningServer, running

CANARY = "zebra harbour 7351x9"
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


class Receiver(ThreadingHTTPServer):
    """Keeps every span that it is sent."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.spans: list[Span] = []
        self.bodies: list[bytes] = []
        self.status = 200


class _Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        receiver = self.server
        assert isinstance(receiver, Receiver)
        body = self.rfile.read(int(self.headers["content-length"]))
        if self.headers.get("content-encoding") == "gzip":
            body = gzip.decompress(body)
        request = ExportTraceServiceRequest.FromString(body)
        receiver.bodies.append(body)
        for resource in request.resource_spans:
            receiver.spans += [one for scope in resource.scope_spans for one in scope.spans]
        self.send_response(receiver.status if self.path == "/v1/traces" else 404)
        self.end_headers()

    @override
    def log_message(self, format: str, *args: object) -> None:
        return


@contextmanager
def receiving() -> Generator[Receiver]:
    with Receiver() as receiver:
        thread = threading.Thread(target=receiver.serve_forever)
        thread.start()
        try:
            yield receiver
        finally:
            receiver.shutdown()
            thread.join()


def test_a_collector_that_takes_nothing_is_told_of_once_and_when_it_takes_again(
    caplog: pytest.LogCaptureFixture,
):
    span = TracerProvider().get_tracer("a").start_span("b")
    assert isinstance(span, ReadableSpan)
    with receiving() as receiver, capture_logs() as said:
        exporter = ToldOnce(f"http://127.0.0.1:{receiver.server_port}/v1/traces")
        for status in (400, 400, 200, 200, 400):
            receiver.status = status
            exporter.export([span])
        exporter.shutdown()
    assert [one["event"] for one in said] == [
        "traces_refused",
        "traces_sent_again",
        "traces_refused",
    ]
    assert said[1]["num_lost"] == 2
    assert caplog.records == [], "upstream says it with every batch"


def attributes_of(span: Span) -> dict[str, Any]:
    return {
        one.key: getattr(one.value, one.value.WhichOneof("value") or "string_value")
        for one in span.attributes
    }


def ask(server: RunningServer, **headers: str) -> None:
    said = [{"role": "user", "content": f"{CANARY} " * 60}]
    body = {"model": "hearth-tiny", "messages": said, "max_tokens": 8, "session_id": CANARY}
    assert server.request("POST", CHAT, json=body, headers=headers).status_code == 200


def test_a_request_is_one_trace_below_its_callers_with_a_span_for_every_part(tmp_path: Path):
    with receiving() as receiver:
        config = f'preload = []\notlp_endpoint = "http://127.0.0.1:{receiver.server_port}"'
        with running(tmp_path, config=config) as server:
            ask(server, traceparent=f"00-{TRACE}-{PARENT}-01")
            ask(server)
            server.post(CHAT, {"model": "nobody", "messages": []})
            assert server.stop() == 0
    roots = [one for one in receiver.spans if one.kind == Span.SPAN_KIND_SERVER]
    called, free, refused = roots
    assert (called.trace_id.hex(), called.parent_span_id.hex()) == (TRACE, PARENT)
    assert (free.parent_span_id, free.trace_id == called.trace_id) == (b"", False)
    assert refused.status.code == refused.status.STATUS_CODE_ERROR
    inside = {
        root.span_id: [one for one in receiver.spans if one.parent_span_id == root.span_id]
        for root in roots
    }
    first = [one.name for one in inside[called.span_id]]
    assert first == ["queue", "swap", "intake", "prefill", "decode"]
    second = [one.name for one in inside[free.span_id]]
    assert second == ["queue", "intake", "restore", "prefill", "decode"]
    for root in (called, free):
        for one in inside[root.span_id]:
            assert one.trace_id == root.trace_id
            assert root.start_time_unix_nano <= one.start_time_unix_nano
            assert one.start_time_unix_nano <= one.end_time_unix_nano <= root.end_time_unix_nano
    known = attributes_of(called)
    assert (known["http.route"], known["http.response.status_code"]) == (CHAT, 200)
    assert known["hearth.model"] == "hearth-tiny"
    decoded = attributes_of(inside[called.span_id][-1])
    assert decoded["hearth.num_tokens"] == known["hearth.output_tokens"] > 0
    restored = attributes_of(inside[free.span_id][2])
    assert restored["hearth.tier"] == "hot"
    written = [attributes_of(one) for one in receiver.spans if one.name == "write"]
    assert sum(one["hearth.num_slots"] for one in written) > 0
    assert sum(one["hearth.num_bytes"] for one in written) > 0
    assert not [word for word in CANARY.split() if word.encode() in b"".join(receiver.bodies)]


def test_nothing_fails_when_nobody_takes_the_traces(tmp_path: Path):
    with running(tmp_path, config='otlp_endpoint = "http://127.0.0.1:9/"') as server:
        ask(server)
        assert server.stop() == 0


def test_without_an_endpoint_none_of_it_is_imported():
    code = "import sys, api.app; sys.exit('opentelemetry' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0
