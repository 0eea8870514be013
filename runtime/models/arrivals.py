"""Models of the settings that are not on this machine yet: downloaded when somebody wants them.

Each download is a process, as nothing can interrupt the hub's client and it would keep the server
from ending. They run one after the other. What was fetched before an end is not fetched again.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections.abc import Callable

import msgspec
import structlog

from runtime.environment import own_environment
from runtime.errors import ModelDownloading, ModelNotDownloaded, UnknownModel
from runtime.progress import Progress
from runtime.types import Struct

_AGAIN_S = 60.0
"""After a download that failed, until a request begins the next one."""
_LINE_EVERY = 10
"""Percent between two lines of the log."""
_MIN_RETRY_AFTER_S, _MAX_RETRY_AFTER_S, _UNKNOWN_RETRY_AFTER_S = 5, 60, 10
_MAX_LINE_BYTES = 1 << 20

_log = structlog.stdlib.get_logger("hearth.downloads")


class Arrived(Struct, frozen=True, tag="arrived"):
    """The last line of a download that succeeded."""


class Missed(Struct, frozen=True, tag="missed"):
    """The last line of one that failed; `why` is for people."""

    why: str


Word = Progress | Arrived | Missed
"""What a download prints, a line of JSON each."""

_decoder: msgspec.json.Decoder[Word] = msgspec.json.Decoder(Word)


class _Download:
    """One repository that somebody wanted."""

    def __init__(self) -> None:
        self.begun_s = time.monotonic()
        self.progress = Progress("download")
        self.failed: str | None = None
        self.ended_s: float | None = None

    @property
    def how_far(self) -> str:
        """In words."""
        done, total = self.progress.num_done, self.progress.num_total
        if not total:
            return "it has just begun"
        return f"{100 * done // total} % of {total / 1e9:.1f} GB"

    @property
    def retry_after_s(self) -> int:
        """The time that the rest takes at the rate so far, within bounds."""
        done, total = self.progress.num_done, self.progress.num_total
        if not done:
            return _UNKNOWN_RETRY_AFTER_S
        rest_s = (time.monotonic() - self.begun_s) * (total - done) / done
        return round(min(max(rest_s, _MIN_RETRY_AFTER_S), _MAX_RETRY_AFTER_S))

    @property
    def is_over(self) -> bool:
        return self.ended_s is not None

    @property
    def again_after_s(self) -> int:
        """Seconds until it is tried again; 0 and less: now."""
        return 0 if self.ended_s is None else round(self.ended_s + _AGAIN_S - time.monotonic())


class Arrivals:
    """Repositories on their way into the Hugging Face cache. It belongs to the event loop."""

    def __init__(self) -> None:
        self._downloads: dict[str, _Download] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._one_at_a_time = asyncio.Lock()
        self._on_arrival: Callable[[str], None] | None = None

    def start(self, on_arrival: Callable[[str], None]) -> None:
        """Begin what was wanted before; from now on tell of every repository that is there."""
        self._on_arrival = on_arrival
        for repo, one in self._downloads.items():
            if not one.is_over:
                self._begin(repo, one)

    async def stop(self) -> None:
        """End every download where it is."""
        self._on_arrival = None
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def on_their_way(self) -> set[str]:
        """What is being downloaded now, so that what is there of it is not all."""
        return {repo for repo, one in self._downloads.items() if not one.is_over}

    def why_not_here(self, name: str, repo: str) -> UnknownModel | None:
        """What is told about a model whose repository somebody wanted; None if nobody did."""
        one = self._downloads.get(repo)
        if one is None or (one.is_over and one.failed is None):
            return None
        if one.failed is not None:
            return ModelNotDownloaded(name, one.failed, max(one.again_after_s, 1))
        return ModelDownloading(name, f"{repo}, {one.how_far}", one.retry_after_s)

    def want(self, name: str, repo: str) -> UnknownModel:
        """Have it downloaded if it neither comes nor has just failed; what to tell meanwhile."""
        one = self._downloads.get(repo)
        if one is None or (one.is_over and (one.failed is None or one.again_after_s <= 0)):
            one = self._downloads[repo] = _Download()
            if self._on_arrival is not None:
                self._begin(repo, one)
        told = self.why_not_here(name, repo)
        assert told is not None
        return told

    def _begin(self, repo: str, one: _Download) -> None:
        task = asyncio.get_running_loop().create_task(self._run(repo, one))
        self._tasks[repo] = task
        task.add_done_callback(lambda _: self._tasks.pop(repo, None))

    async def _run(self, repo: str, one: _Download) -> None:
        async with self._one_at_a_time:
            _log.info("downloading a model", repo=repo)
            one.begun_s = time.monotonic()
            one.failed = await _fetch(repo, one)
            one.ended_s = time.monotonic()
        seconds = round(one.ended_s - one.begun_s, 1)
        if one.failed is not None:
            _log.error("model not downloaded", repo=repo, why=one.failed)
        else:
            _log.info("model downloaded", repo=repo, seconds=seconds)
            if self._on_arrival is not None:
                self._on_arrival(repo)


async def _fetch(repo: str, one: _Download) -> str | None:
    """Download in a process, which ends with its standard input; why it failed, if it did."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-m", "runtime.models.download", repo),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
        start_new_session=True,
        limit=_MAX_LINE_BYTES,
        env=own_environment(),
    )
    try:
        return await _follow(repo, one, process)
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


async def _follow(repo: str, one: _Download, process: asyncio.subprocess.Process) -> str | None:
    assert process.stdout is not None
    told = 0
    async for line in process.stdout:
        word = _decoder.decode(line)
        if isinstance(word, Arrived):
            return None
        if isinstance(word, Missed):
            return word.why
        one.progress = word
        percent = 100 * word.num_done // (word.num_total or 1)
        if percent >= told + _LINE_EVERY:
            told = percent
            _log.info("downloading a model", repo=repo, how_far=one.how_far)
    return f"the download ended with exit code {await process.wait()}"
