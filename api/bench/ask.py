"""Streams one chat completion of any OpenAI-compatible server, with the time of every arrival."""

from __future__ import annotations

import http.client
import time
from collections.abc import Callable, Mapping
from urllib.parse import urlsplit

import msgspec

from api.bench.texts import Messages
from runtime.errors import HearthError

_TIMEOUT_S = 600.0
_SHOWN = 300


class AskFailed(HearthError):
    """A server did not answer as it should; the message says how."""

    code = "bench_failed"


class Target(msgspec.Struct, frozen=True):
    """Where to ask, and what goes into every request to this server."""

    url: str
    model: str
    extra: Mapping[str, object] = {}
    key: str | None = None


class TimedAnswer(msgspec.Struct):
    """What came, and when: seconds of one clock."""

    sent_s: float = 0.0
    arrivals_s: list[float] = []
    end_s: float = 0.0
    text: str = ""
    prompt_tokens: int = 0
    cached_tokens: int | None = None
    """None where the server does not tell."""
    output_tokens: int = 0

    @property
    def ttft_ms(self) -> float:
        return (self.arrivals_s[0] - self.sent_s) * 1000


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _Details | None = None


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class _Choice(msgspec.Struct):
    delta: _Delta = msgspec.field(default_factory=_Delta)


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: msgspec.Raw | None = None


_decoder = msgspec.json.Decoder(_Event)


def ask(
    target: Target,
    messages: Messages,
    max_tokens: int,
    on_arrival: Callable[[int], None] | None = None,
    *,
    may_be_empty: bool = False,
) -> TimedAnswer:
    """Ask and read to the end; `on_arrival` is told how many pieces of text have come.

    Raises:
        AskFailed: no connection, an error instead of a stream or in it, or no text where there
            has to be some.
    """
    answer = TimedAnswer()
    try:
        _stream(target, _body(target, messages, max_tokens), answer, on_arrival)
    except (OSError, http.client.HTTPException, msgspec.MsgspecError) as error:
        raise AskFailed(f"{type(error).__name__}: {error}") from error
    if not answer.arrivals_s and not may_be_empty:
        raise AskFailed("the answer held no text")
    return answer


def _body(target: Target, messages: Messages, max_tokens: int) -> bytes:
    body = {
        "model": target.model,
        "messages": messages,
        "max_tokens": max_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    return msgspec.json.encode(body | dict(target.extra))


def _stream(
    target: Target, body: bytes, answer: TimedAnswer, on_arrival: Callable[[int], None] | None
) -> None:
    url = urlsplit(target.url)
    is_secure = url.scheme == "https"
    kind = http.client.HTTPSConnection if is_secure else http.client.HTTPConnection
    connection = kind(url.hostname or "", url.port, timeout=_TIMEOUT_S)
    headers = {"content-type": "application/json"}
    if target.key:
        headers["authorization"] = f"Bearer {target.key}"
    try:
        connection.connect()
        answer.sent_s = time.perf_counter()
        connection.request("POST", f"{url.path.rstrip('/')}/chat/completions", body, headers)
        with connection.getresponse() as response:
            if response.status != 200:
                said = response.read().decode(errors="replace")[:_SHOWN]
                raise AskFailed(f"status {response.status}: {said}")
            while line := response.readline():
                if line.startswith(b"data:") and (data := line[5:].strip()) != b"[DONE]":
                    _take(answer, _decoder.decode(data), on_arrival)
        answer.end_s = time.perf_counter()
    finally:
        connection.close()


def _take(answer: TimedAnswer, event: _Event, on_arrival: Callable[[int], None] | None) -> None:
    if event.error is not None:
        raise AskFailed(f"error in the stream: {bytes(event.error)[:_SHOWN].decode()}")
    for choice in event.choices:
        delta = choice.delta
        answer.text += delta.content or ""
        if delta.content or delta.reasoning_content or delta.reasoning:
            answer.arrivals_s.append(time.perf_counter())
            if on_arrival is not None:
                on_arrival(len(answer.arrivals_s))
    if event.usage is not None:
        answer.prompt_tokens = event.usage.prompt_tokens
        answer.output_tokens = event.usage.completion_tokens
        details = event.usage.prompt_tokens_details
        answer.cached_tokens = None if details is None else details.cached_tokens
