"""The engine benchmark: Hearth over HTTP against mlx-lm's BatchGenerator in a bare loop."""

from __future__ import annotations

import asyncio
import random
import statistics
from collections.abc import Callable, Iterator, Sequence

import msgspec

from ops.bench.client import Stream, stream_completion
from ops.bench.processes import Bare, Hearth

WIDTHS = (1, 4, 16)
SHORT_PROMPT, DECODE_TOKENS = 32, 384
LONG_PROMPT = 1024
STALL_PROMPT, STALL_STREAMS, STALL_TOKENS = 4096, 4, 1500


def prompt(num_tokens: int, seed: int) -> list[int]:
    """Token ids that no earlier request shares a prefix with."""
    choose = random.Random(seed)
    return [choose.randrange(300, 3000) for _ in range(num_tokens)]


class Decode(msgspec.Struct):
    """Decode rates of `streams` streams together, medians over rounds."""

    streams: int
    ours_tokens_per_s: float
    bare_tokens_per_s: float
    ratio: float
    ratio_min: float
    ratio_max: float
    server_cpu_us_per_token: float
    formed_tokens_per_s: float | None = None
    """The bare loop with the forms of layers that Hearth chooses on this device."""


class HotStreams(msgspec.Struct):
    """First tokens of `streams` conversations of `num_tokens`, all of it kept, that go on at once:
    the median and the longest wait in ms, and all their tokens per second while all run.
    """

    streams: int
    num_tokens: int
    p50_ms: float
    max_ms: float
    tokens_per_s: float


class Ttft(msgspec.Struct):
    """Time to the first token of `streams` prompts sent at once, medians over rounds."""

    streams: int
    ours_ms: float
    bare_ms: float
    over_ms: float


class Gaps(msgspec.Struct):
    """Times between two tokens of one stream, in ms."""

    p50: float
    p99: float
    max: float


class Stall(msgspec.Struct):
    """What a long prompt's prefill costs the running streams, and they it."""

    quiet_gap_ms: Gaps
    busy_gap_ms: Gaps
    decode_kept: float
    prefill_stretched: float
    alone_ttft_ms: float


class Figures(msgspec.Struct):
    """The engine's part of the report."""

    decode: list[Decode]
    ttft: list[Ttft]
    stall: list[Stall]


async def measure(server: Hearth, opponent: Bare, rounds: int) -> Figures:
    """All figures, medians over alternating rounds."""
    seeds = iter(range(10**9))
    return Figures(
        decode=await decode(server, opponent, DecodeJob(rounds=rounds)),
        ttft=[await _ttft(server, opponent, width, rounds, seeds) for width in WIDTHS],
        stall=[await _stall(server, seeds) for _ in range(rounds)],
    )


class DecodeJob(msgspec.Struct):
    """What to decode: streams of `num_tokens`, this many at once, so often."""

    widths: Sequence[int] = WIDTHS
    rounds: int = 5
    num_tokens: int = DECODE_TOKENS
    row_done: Callable[[list[Decode]], None] = lambda _: None


async def decode(
    server: Hearth, opponent: Bare, job: DecodeJob, formed: Bare | None = None
) -> list[Decode]:
    """Decode rates in alternating rounds, beside a bare loop over upstream's layers, and over the
    forms that Hearth gives them on this device if `formed` has such a loop. `job.row_done` has
    each row as soon as it is there.
    """
    seeds = iter(range(10**9, 2 * 10**9))
    everybody = [opponent] if formed is None else [opponent, formed]
    rows: list[Decode] = []
    for width in job.widths:
        await _decode_ours(server, width, seeds, 8)  # what is compiled for it is compiled now
        for bare in everybody:
            await _decode_bare(bare, width, seeds, 8)
        row = await _decode(server, opponent, width, job, seeds)
        if formed is not None:
            rates = [
                await _decode_bare(formed, width, seeds, job.num_tokens) for _ in range(job.rounds)
            ]
            row.formed_tokens_per_s = round(statistics.median(rates), 1)
        rows.append(row)
        job.row_done(rows)
    return rows


async def hot_streams(server: Hearth, width: int, num_tokens: int, num_output: int) -> HotStreams:
    """Have this many conversations read one after the other, then all go on at once."""
    histories = [prompt(num_tokens, 3 * 10**9 + number) for number in range(width)]
    for history in histories:
        await stream_completion(server.port, _asked(history, 1))
    going_on = [
        _asked(history + prompt(16, 4 * 10**9 + number), num_output)
        for number, history in enumerate(histories)
    ]
    streams = await asyncio.gather(*(stream_completion(server.port, body) for body in going_on))
    waits = [stream.ttft_s * 1000 for stream in streams]
    return HotStreams(
        streams=width,
        num_tokens=num_tokens,
        p50_ms=round(statistics.median(waits), 1),
        max_ms=round(max(waits), 1),
        tokens_per_s=round(together(streams), 1),
    )


async def _decode(
    server: Hearth, opponent: Bare, width: int, job: DecodeJob, seeds: Iterator[int]
) -> Decode:
    ours: list[float] = []
    bare: list[float] = []
    cpu_s, num_tokens = 0.0, 0
    for _ in range(job.rounds):
        bare.append(await _decode_bare(opponent, width, seeds, job.num_tokens))
        before = server.cpu_s()
        rate, num_streamed = await _decode_ours(server, width, seeds, job.num_tokens)
        cpu_s += server.cpu_s() - before
        num_tokens += num_streamed
        ours.append(rate)
    ratios = [a / b for a, b in zip(ours, bare, strict=True)]
    return Decode(
        streams=width,
        ours_tokens_per_s=round(statistics.median(ours), 1),
        bare_tokens_per_s=round(statistics.median(bare), 1),
        ratio=round(statistics.median(ratios), 3),
        ratio_min=round(min(ratios), 3),
        ratio_max=round(max(ratios), 3),
        server_cpu_us_per_token=round(cpu_s / num_tokens * 1e6, 1),
    )


async def _decode_ours(
    server: Hearth, width: int, seeds: Iterator[int], num_tokens: int
) -> tuple[float, int]:
    streams = await _streams(server, width, SHORT_PROMPT, num_tokens, seeds)
    return together(streams), sum(s.num_tokens for s in streams)


def together(streams: list[Stream]) -> float:
    """Tokens per second of all streams while all of them run."""
    since = max(stream.arrivals_s[0] for stream in streams)
    until = min(stream.arrivals_s[-1] for stream in streams)
    return sum(stream.num_arrivals(since, until) - 1 for stream in streams) / (until - since)


async def _decode_bare(opponent: Bare, width: int, seeds: Iterator[int], num_tokens: int) -> float:
    prompts = [prompt(SHORT_PROMPT, next(seeds)) for _ in range(width)]
    times = await opponent.run(prompts, num_tokens)
    spans = [b - a for a, b in zip(times["first"], times["last"], strict=True)]
    return sum((num_tokens - 1) / span for span in spans)


async def _ttft(
    server: Hearth, opponent: Bare, width: int, rounds: int, seeds: Iterator[int]
) -> Ttft:
    ours: list[float] = []
    bare: list[float] = []
    for _ in range(rounds):
        prompts = [prompt(LONG_PROMPT, next(seeds)) for _ in range(width)]
        bare.append(statistics.median((await opponent.run(prompts, 8))["first"]) * 1000)
        streams = await _streams(server, width, LONG_PROMPT, 8, seeds)
        ours.append(statistics.median(s.ttft_s for s in streams) * 1000)
    return Ttft(
        streams=width,
        ours_ms=round(statistics.median(ours), 1),
        bare_ms=round(statistics.median(bare), 1),
        over_ms=round(statistics.median(a - b for a, b in zip(ours, bare, strict=True)), 1),
    )


async def _stall(server: Hearth, seeds: Iterator[int]) -> Stall:
    """A long prompt alone, four streams alone, and the same four while a long prompt prefills.

    A step takes longer the longer the streams are, so the same tokens of both runs are compared.
    """
    alone = await _one(server, STALL_PROMPT, 2, seeds)
    bodies = [_body(SHORT_PROMPT, STALL_TOKENS, seeds) for _ in range(STALL_STREAMS)]
    quiet = await asyncio.gather(*(stream_completion(server.port, body) for body in bodies))
    running = [asyncio.create_task(stream_completion(server.port, body)) for body in bodies]
    await asyncio.sleep(1.0)
    long = await _one(server, STALL_PROMPT, 2, seeds)
    busy = await asyncio.gather(*running)
    spans = [stream.span(long.sent_s, long.arrivals_s[0]) for stream in busy]
    quiet_gaps = _gaps_in(quiet, spans)
    busy_gaps = _gaps_in(busy, spans)
    return Stall(
        quiet_gap_ms=_gaps(quiet_gaps),
        busy_gap_ms=_gaps(busy_gaps),
        decode_kept=round(sum(quiet_gaps) / sum(busy_gaps), 3),
        prefill_stretched=round(long.ttft_s / alone.ttft_s, 2),
        alone_ttft_ms=round(alone.ttft_s * 1000, 1),
    )


def _gaps_in(streams: list[Stream], spans: list[range]) -> list[float]:
    pairs = zip(streams, spans, strict=True)
    return [gap for stream, span in pairs for gap in stream.gaps_s(span)]


def _gaps(gaps: list[float]) -> Gaps:
    ordered = sorted(gaps) or [0.0]
    return Gaps(
        p50=round(statistics.median(ordered) * 1000, 2),
        p99=round(ordered[min(len(ordered) - 1, int(len(ordered) * 0.99))] * 1000, 2),
        max=round(ordered[-1] * 1000, 2),
    )


async def _streams(
    server: Hearth, width: int, num_prompt: int, num_output: int, seeds: Iterator[int]
) -> list[Stream]:
    return await asyncio.gather(
        *(_one(server, num_prompt, num_output, seeds) for _ in range(width))
    )


async def _one(server: Hearth, num_prompt: int, num_output: int, seeds: Iterator[int]) -> Stream:
    return await stream_completion(server.port, _body(num_prompt, num_output, seeds))


def _body(num_prompt: int, num_output: int, seeds: Iterator[int]) -> dict[str, object]:
    return _asked(prompt(num_prompt, next(seeds)), num_output)


def _asked(token_ids: list[int], num_output: int) -> dict[str, object]:
    return {"prompt": token_ids, "max_tokens": num_output, "temperature": 0, "ignore_eos": True}
