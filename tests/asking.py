"""Requests to a real supervisor with real workers, and their whole answers."""

import asyncio
import itertools
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from api.http.draft import Draft
from runtime.cache.service import KvStore
from runtime.config.settings import Settings
from runtime.models.catalog import Catalog
from runtime.supervisor.generation import Generation
from runtime.supervisor.process import WorkerProcess
from runtime.supervisor.status import ModelStatus
from runtime.supervisor.supervisor import Supervisor
from runtime.types import (
    Chunk,
    Failed,
    Finished,
    GenerateRequest,
    Prompt,
    PromptLogprobs,
    ReasoningDelta,
    SamplingParams,
    TextDelta,
    TextPrompt,
    TokenLogprobs,
    ToolCall,
    ToolCallDelta,
)
from tests.waiting import PATIENCE_S

GREEDY = SamplingParams(temperature=0.0)
PROBED_S = 90.0
"""A store that failed is tried again a minute later at most."""

_numbers = itertools.count()


@dataclass(frozen=True)
class Answer:
    """All chunks of one request; the properties are of one choice unless they say otherwise."""

    chunks: tuple[Chunk, ...]
    index: int = 0

    def choice(self, index: int) -> "Answer":
        return Answer(self.chunks, index)

    @property
    def pieces(self) -> list[str]:
        return [c.text for c in self.chunks if isinstance(c, TextDelta) and c.index == self.index]

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    @property
    def reasoning(self) -> str:
        deltas = [c for c in self.chunks if isinstance(c, ReasoningDelta)]
        return "".join(c.text for c in deltas if c.index == self.index)

    @property
    def calls(self) -> list[ToolCall]:
        draft = Draft()
        for chunk in self.chunks:
            if isinstance(chunk, ToolCallDelta):
                draft.add(chunk)
        return draft.calls

    @property
    def logprobs(self) -> list[TokenLogprobs]:
        deltas = [c for c in self.chunks if isinstance(c, TextDelta | ReasoningDelta)]
        return [one for c in deltas if c.index == self.index for one in c.logprobs]

    @property
    def scores(self) -> list[TokenLogprobs | None]:
        """Of the prompt, whatever the choice."""
        slices = [c for c in self.chunks if isinstance(c, PromptLogprobs)]
        return [one for c in slices for one in c.logprobs]

    @property
    def finished(self) -> Finished:
        (last,) = [c for c in self.chunks if isinstance(c, Finished) and c.index == self.index]
        return last

    @property
    def failed(self) -> Failed:
        last = self.chunks[-1]
        assert isinstance(last, Failed), last
        return last


@asynccontextmanager
async def supervising(home: Path, **settings: Any) -> AsyncGenerator[Supervisor]:
    """A supervisor over the models in `home / "models"`; it loads nothing before it is asked.

    KV is kept in memory only unless the settings say `kv_disk=True`.
    """
    async with supervising_with_store(home, **settings) as (supervisor, _):
        yield supervisor


@asynccontextmanager
async def supervising_with_store(
    home: Path, **settings: Any
) -> AsyncGenerator[tuple[Supervisor, KvStore]]:
    """The same, with the store that belongs to it."""
    async with supervising_by(KvStore, home, **settings) as served:
        yield served


@asynccontextmanager
async def supervising_by(
    make: Callable[[Settings], KvStore], home: Path, **settings: Any
) -> AsyncGenerator[tuple[Supervisor, KvStore]]:
    """The same with a store of one's own making."""
    fields: dict[str, Any] = {
        "preload": (),
        "stop_timeout_s": 5.0,
        "kv_disk": False,
        "spare_worker": False,
        "max_loaded_models": 1,
    } | settings
    chosen = Settings(home=home, **fields)
    kv = make(chosen)
    supervisor = Supervisor(chosen, Catalog(chosen, hub_cache=home / "hub"), kv)
    kv.start()
    await supervisor.start()
    try:
        yield supervisor, kv
    finally:
        await supervisor.stop()
        await kv.stop()


def request(prompt: str | Prompt, *, model: str = "m", **fields: Any) -> GenerateRequest:
    """A greedy request for at most 40 tokens unless told otherwise."""
    if isinstance(prompt, str):
        prompt = TextPrompt(text=prompt)
    fields = {"sampling": GREEDY, "max_tokens": 40} | fields
    return GenerateRequest(request_id=f"r{next(_numbers)}", model=model, prompt=prompt, **fields)


async def answer(generation: Generation, heard: Sequence[Chunk] = ()) -> Answer:
    """Everything that it says, to the end, beginning with what was `heard` already.

    Raises:
        HearthError: it was refused or failed before the worker took it.
    """
    chunks = list(heard)
    async with asyncio.timeout(PATIENCE_S):
        await generation.accepted()
        while arrived := await generation.next_chunks():
            chunks += arrived
    return Answer(tuple(chunks))


async def ask(supervisor: Supervisor, prompt: str | Prompt, **fields: Any) -> Answer:
    return await answer(supervisor.submit(request(prompt, **fields)))


async def ask_for_a_while(supervisor: Supervisor, prompt: Prompt | str, **fields: Any) -> Answer:
    """An answer that its deadline cuts off once it has begun, however late that is."""
    for deadline_s in (1.0, 5.0, 25.0):
        said = await ask(supervisor, prompt, deadline_s=deadline_s, **fields)
        if said.finished.usage.num_output_tokens:
            return said
    raise AssertionError("nothing was said within any deadline")


async def first_chunks(generation: Generation) -> list[Chunk]:
    """What arrives first."""
    async with asyncio.timeout(PATIENCE_S):
        await generation.accepted()
        return await generation.next_chunks() or []


def worker_of(supervisor: Supervisor, model: str = "m") -> WorkerProcess:
    worker = supervisor.worker(model)
    assert isinstance(worker, WorkerProcess), worker
    return worker


def status_of(supervisor: Supervisor, model: str = "m") -> ModelStatus:
    (status,) = [one for one in supervisor.status() if one.spec.id == model]
    return status


def script(token_ids: Sequence[int], **sampling: Any) -> SamplingParams:
    """Sampling that has any model say exactly these tokens, none of which may occur twice."""
    assert len(set(token_ids)) == len(token_ids)
    bias = tuple((token_id, 10_000.0 - 10 * i) for i, token_id in enumerate(token_ids))
    return SamplingParams(temperature=0.0, logit_bias=bias, presence_penalty=1e6, **sampling)
