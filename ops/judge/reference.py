"""mlx_lm's own generator in a process of its own, and what it is asked."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncGenerator, Mapping, Sequence
from pathlib import Path

import msgspec

from ops.bench.processes import worker_environment
from ops.judge.compare import Scored

Messages = Sequence[Mapping[str, object]]
_LINE_BYTES = 1 << 26


class Continue(msgspec.Struct, tag="continue"):
    """Continue a text, or answer messages; greedily."""

    max_tokens: int
    text: str = ""
    messages: Messages = ()


class Score(msgspec.Struct, tag="score"):
    """The log probability of each token of a text but the first."""

    text: str


class Continued(msgspec.Struct):
    """`cuts[n]` is the whole text of an answer that ends after n tokens."""

    text: str
    cuts: list[str]
    tokens: list[Scored]
    finish: str
    num_prompt: int


class Reference:
    """The process; it does one thing after the other."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self._turn = asyncio.Lock()

    async def answer(self, messages: Messages, max_tokens: int) -> Continued:
        """The answer to messages; one that goes on with the last takes its tokens as they are."""
        asked = Continue(max_tokens, messages=messages)
        return msgspec.json.decode(await self._ask(asked), type=Continued)

    async def complete(self, text: str, max_tokens: int) -> Continued:
        """What follows a text."""
        asked = Continue(max_tokens, text=text)
        return msgspec.json.decode(await self._ask(asked), type=Continued)

    async def score(self, text: str) -> list[float]:
        """Log probabilities of a text's tokens."""
        return msgspec.json.decode(await self._ask(Score(text)), type=list[float])

    async def _ask(self, job: Continue | Score) -> bytes:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        async with self._turn:
            self._process.stdin.write(msgspec.json.encode(job) + b"\n")
            line = await self._process.stdout.readline()
        if not line:
            raise RuntimeError("the process of mlx_lm ended; its errors are above")
        return line


@contextlib.asynccontextmanager
async def reference(model: Path) -> AsyncGenerator[Reference]:
    """Start it; it loads its model when it is first asked."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "ops.judge.mlx_lm_side", str(model)),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env=worker_environment(),
        limit=_LINE_BYTES,
    )
    try:
        yield Reference(process)
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
