"""A lean streaming client: raw HTTP on loopback, one timestamp per arrival."""

from __future__ import annotations

import asyncio
import bisect
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec


class Cache(msgspec.Struct):
    """What the answer says of the cache."""

    tier: str = "none"
    cached_tokens: int = 0
    restore_ms: float = 0.0
    prefill_ms: float = 0.0
    reason: str | None = None


@dataclass(slots=True)
class Stream:
    """Arrival times of one stream's text, in seconds of one clock."""

    sent_s: float
    arrivals_s: list[float] = field(default_factory=list[float])
    num_tokens: int = 0
    cache: Cache = field(default_factory=Cache)

    @property
    def ttft_s(self) -> float:
        return self.arrivals_s[0] - self.sent_s

    @property
    def rate(self) -> float:
        """Tokens per second after the first one."""
        return (self.num_tokens - 1) / (self.arrivals_s[-1] - self.arrivals_s[0])

    def gaps_s(self, span: range) -> list[float]:
        """How long each arrival of the span came after the one before it."""
        arrivals = self.arrivals_s
        return [arrivals[i] - arrivals[i - 1] for i in span if 0 < i < len(arrivals)]

    def span(self, since: float, until: float) -> range:
        """The numbers of the arrivals inside the window."""
        arrivals = self.arrivals_s
        return range(bisect.bisect_left(arrivals, since), bisect.bisect_right(arrivals, until))

    def num_arrivals(self, since: float, until: float) -> int:
        return sum(since <= arrival <= until for arrival in self.arrivals_s)


class _Hearth(msgspec.Struct):
    cache: Cache


class _Usage(msgspec.Struct):
    completion_tokens: int = 0


class _Choice(msgspec.Struct):
    text: str = ""


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    hearth: _Hearth | None = None


_decoder = msgspec.json.Decoder(_Event)


async def stream_completion(port: int, body: Mapping[str, object]) -> Stream:
    """Stream `/v1/completions`; raises RuntimeError when the answer is no stream."""
    payload = msgspec.json.encode(
        {**body, "stream": True, "stream_options": {"include_usage": True}}
    )
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 22)
    stream = Stream(sent_s=time.perf_counter())
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(payload)}\r\n\r\n"
    )
    writer.write(head.encode() + payload)
    status = await reader.readline()
    if b" 200 " not in status:
        raise RuntimeError((status + await reader.read()).decode(errors="replace")[:2000])
    while line := await reader.readline():
        if line.startswith(b"data: {"):
            _on_event(stream, _decoder.decode(line[6:]), time.perf_counter())
    writer.close()
    return stream


def _on_event(stream: Stream, event: _Event, now: float) -> None:
    if any(choice.text for choice in event.choices):
        stream.arrivals_s.append(now)
    if event.hearth is not None:
        stream.cache = event.hearth.cache
    if event.usage is not None:
        stream.num_tokens = event.usage.completion_tokens
