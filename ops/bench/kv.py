"""The KV benchmark: what a turn costs when its beginning is known, against computing it again."""

from __future__ import annotations

import asyncio
import os
import signal
import statistics
import time
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from ops.bench.client import Stream, stream_completion
from ops.bench.engine import prompt
from ops.bench.files import forget_pages, read
from ops.bench.processes import Bare, Hearth, hearth
from runtime.kv.writer import REST_S

LENGTHS = (1024, 4096, 8192, 16384)
FOLLOW_UP, SHARED, WRITTEN = 50, 0.85, 4096
_PATIENCE_S, _SETTLED_S, _LOOK_S = 120.0, REST_S + 1.0, 0.1


class Reuse(msgspec.Struct):
    """Times to the first token for one length of prompt, in ms, medians over rounds.

    `resident` is mlx-lm continuing its own cache in memory with the same follow-up. `restart` is
    the follow-up as soon as a restarted server is ready, `killed` the same after `kill -9`, `disk`
    that of a server that brings nothing back unasked.
    """

    num_tokens: int
    cold_ms: float
    retry_ms: float
    follow_up_ms: float
    resident_ms: float
    sibling_ms: float
    edit_ms: float
    restart_ms: float
    disk_ms: float
    killed_ms: float

    def over_cold(self, figure_ms: float) -> float:
        """How many times faster than computing the whole prompt."""
        return self.cold_ms / figure_ms


class Restore(msgspec.Struct):
    """A restore after a restart, from file to layer caches, against plain reads of the files.

    These find the files in the page cache: `read` goes into one buffer that is used again and
    again, `keep` into new memory, as restoring does twice. `disk` and what it is compared with find
    none of them there, as after the machine was started.
    """

    num_tokens: int
    restore_mb_per_s: float
    read_mb_per_s: float
    ratio: float
    keep_mb_per_s: float = 0.0
    ratio_to_keep: float = 0.0
    disk_mb_per_s: float = 0.0
    disk_read_mb_per_s: float = 0.0
    ratio_from_disk: float = 0.0


class Run(NamedTuple):
    """What a run measures: `home` is an empty directory, `lengths` are those of prompts."""

    model: Path
    home: Path
    opponent: Bare
    rounds: int
    kv_bytes_per_token: int
    lengths: Sequence[int] = LENGTHS


class KvFigures(msgspec.Struct):
    """The KV part of the report."""

    reuse: list[Reuse]
    restore: list[Restore]
    decode_with_writes: float
    """Decode rate while what was just computed is written, over the rate with the cache off."""
    write_amplification: float
    """Bytes written of slots and heads over the bytes of KV in them, over a conversation of 40
    turns.
    """


async def measure(run: Run) -> KvFigures:
    """All figures."""
    seeds = iter(range(10**8, 10**9))
    reuse: list[Reuse] = []
    restores: list[Restore] = []
    for num_tokens in run.lengths:
        parts = [await _one_length(run, num_tokens, seeds) for _ in range(run.rounds)]
        reuse.append(_medians([row for row, _ in parts]))
        restores.append(_median_restore([restore for _, restore in parts]))
    async with hearth(run.model, run.home) as server:
        ratios = [await _with_writes(server, seeds) for _ in range(run.rounds)]
    amplification = await _amplification(run, seeds)
    return KvFigures(
        reuse=reuse,
        restore=restores,
        decode_with_writes=round(statistics.median(ratios), 3),
        write_amplification=round(amplification, 3),
    )


async def _one_length(run: Run, num_tokens: int, seeds: Iterator[int]) -> tuple[Reuse, Restore]:
    model, home = run.model, run.home

    def new(count: int) -> list[int]:
        return prompt(count, next(seeds))

    first = new(num_tokens)
    shared, half = int(num_tokens * SHARED), num_tokens // 2
    before = set(_slots(home))
    async with hearth(model, home) as server:
        await _ask(server, new(64))
        cold = await _ask(server, first)
        retry = await _ask(server, first)
        follow_up = await _ask(server, first + new(FOLLOW_UP))
        sibling = await _ask(server, first[:shared] + new(num_tokens - shared))
        edit = await _ask(server, first[:half] + new(num_tokens - half))
    written = sorted(set(_slots(home)) - before, key=lambda path: path.stat().st_mtime_ns)
    resident_s = await run.opponent.resume(first, new(FOLLOW_UP))
    async with hearth(model, home) as server:
        restart = await _ask(server, first + new(FOLLOW_UP))
        second = new(num_tokens)
        await _ask(server, second)
        await settled(home)
        os.kill(server.pid, signal.SIGKILL)
    async with hearth(model, home) as server:
        killed = await _ask(server, second + new(FOLLOW_UP))
    restore, disk_ms = await _restore(run, written, first)
    row = Reuse(
        num_tokens=num_tokens,
        cold_ms=_ms(cold),
        retry_ms=_ms(retry),
        follow_up_ms=_ms(follow_up),
        resident_ms=round(resident_s * 1000, 1),
        sibling_ms=_ms(sibling),
        edit_ms=_ms(edit),
        restart_ms=_ms(restart),
        disk_ms=disk_ms,
        killed_ms=_ms(killed),
    )
    return row, restore


async def _restore(run: Run, written: list[Path], first: list[int]) -> tuple[Restore, float]:
    """What a restore costs of what is in `written`, and the first token after it in ms."""
    async with hearth(run.model, run.home, prewarm_share=0) as server:
        read_s, keep_s = read(written), read(written, keeps=True)
        restarted = await _ask(server, first + prompt(FOLLOW_UP, 1))
    async with hearth(run.model, run.home, prewarm_share=0) as server:
        forget_pages(written)
        disk_read_s = read(written)
        forget_pages(written)
        from_disk = await _ask(server, first + prompt(FOLLOW_UP, 2))
    file_bytes = sum(path.stat().st_size for path in written)
    restore_rate, disk_rate = (
        stream.cache.cached_tokens * run.kv_bytes_per_token / 1e3 / max(stream.cache.restore_ms, 1)
        for stream in (restarted, from_disk)
    )
    read_rate, keep_rate, disk_read_rate = (
        file_bytes / 1e6 / seconds for seconds in (read_s, keep_s, disk_read_s)
    )
    restore = Restore(
        num_tokens=len(first),
        restore_mb_per_s=round(restore_rate, 1),
        read_mb_per_s=round(read_rate, 1),
        ratio=round(restore_rate / read_rate, 3),
        keep_mb_per_s=round(keep_rate, 1),
        ratio_to_keep=round(restore_rate / keep_rate, 3),
        disk_mb_per_s=round(disk_rate, 1),
        disk_read_mb_per_s=round(disk_read_rate, 1),
        ratio_from_disk=round(disk_rate / disk_read_rate, 3),
    )
    return restore, _ms(restarted)


async def _ask(server: Hearth, token_ids: list[int], **changes: object) -> Stream:
    body = {"prompt": token_ids, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    return await stream_completion(server.port, body | changes)


def _ms(stream: Stream) -> float:
    return round(stream.ttft_s * 1000, 1)


def _medians(rows: list[Reuse]) -> Reuse:
    columns: Iterator[tuple[float, ...]] = zip(*map(msgspec.structs.astuple, rows), strict=True)
    num_tokens, *times = (round(statistics.median(column), 1) for column in columns)
    return Reuse(int(num_tokens), *times)


def _median_restore(rows: list[Restore]) -> Restore:
    columns: Iterator[tuple[float, ...]] = zip(*map(msgspec.structs.astuple, rows), strict=True)
    num_tokens, *figures = (round(statistics.median(column), 3) for column in columns)
    return Restore(int(num_tokens), *figures)


def _slots(home: Path) -> list[Path]:
    return list((home / "kv" / "slots").rglob("*.safetensors"))


async def settled(home: Path) -> float:
    """Wait until nothing is being written any more, ends that wait for a model to rest included;
    when something was written last, by the monotonic clock.
    """
    deadline_s = time.monotonic() + _PATIENCE_S
    last, changed_s = -1, time.monotonic()
    while (now_s := time.monotonic()) < deadline_s:
        names = [one for folder in ("slots", "heads") for one in _names(home / "kv" / folder)]
        if len(names) != last or any(name.startswith(".tmp") for name in names):
            last, changed_s = len(names), now_s
        elif now_s - changed_s > _SETTLED_S:
            break
        await asyncio.sleep(_LOOK_S)
    return changed_s


def _names(folder: Path) -> list[str]:
    return [path.name for path in folder.rglob("*")]


async def _with_writes(server: Hearth, seeds: Iterator[int]) -> float:
    rates: dict[str, list[float]] = {"off": [], "full": []}
    for mode in ("off", "full", "full", "off"):
        token_ids = prompt(WRITTEN, next(seeds))
        stream = await _ask(server, token_ids, max_tokens=384, cache_mode=mode)
        rates[mode].append(stream.rate)
    return statistics.mean(rates["full"]) / statistics.mean(rates["off"])


async def _amplification(run: Run, seeds: Iterator[int]) -> float:
    """Turns of 200 tokens each: what was written of slots and heads over the KV of them."""
    token_ids: list[int] = []
    async with hearth(run.model, run.home) as server:
        before = await asyncio.to_thread(_written_bytes, server)
        for _ in range(40):
            token_ids += prompt(200, next(seeds))
            await _ask(server, token_ids, cache_mode="full", max_tokens=1)
        await settled(run.home)
        num_bytes = await asyncio.to_thread(_written_bytes, server) - before
    return num_bytes / (len(token_ids) * run.kv_bytes_per_token)


class _Stats(msgspec.Struct):
    counters: dict[str, float]


def _written_bytes(server: Hearth) -> float:
    url = f"http://127.0.0.1:{server.port}/admin/cache/stats"
    with urllib.request.urlopen(url, timeout=_PATIENCE_S) as answer:
        stats = msgspec.json.decode(answer.read(), type=_Stats)
    return stats.counters.get("written_bytes", 0.0)
