"""Clients that ask any model and leave when they like, while somebody kills workers."""

from __future__ import annotations

import asyncio
import random
import signal
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest

from api.http.errors import STATUSES
from runtime.errors import HearthError
from runtime.supervisor.generation import Generation
from runtime.supervisor.lifecycle import HAS_PROCESS
from runtime.supervisor.supervisor import Supervisor
from runtime.types import (
    ChatPrompt,
    Failed,
    Message,
    PrefillProgress,
    SamplingParams,
    TextDelta,
    TextPrompt,
    Usage,
)
from tests.asking import ask, request, status_of, supervising_with_store
from tests.conversation import CODE, QUESTION, Conversation
from tests.forked_worker import own_workers
from tests.tiny_models import write_model
from tests.waiting import until

RECALLING = "hearth-tiny"
MODELS = ("a", "b", RECALLING)
PATIENCE_S = 180.0
DOCUMENTED = {error.code for error in STATUSES}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("home")
    for seed, name in enumerate(MODELS[:2]):
        write_model(home / "models" / name, seed=seed)
    return home


def loaded(supervisor: Supervisor) -> set[str]:
    return {one.spec.id for one in supervisor.status() if one.state in HAS_PROCESS}


class Needle:
    """A conversation that is asked for its code word, whatever happened since the last time."""

    def __init__(self) -> None:
        said = Conversation(num_sentences=12).messages
        self._messages = [Message(role=one["role"], text=one["content"]) for one in said]
        self.usage = Usage(num_prompt_tokens=0)
        self._num_asked = 0

    async def recall(self, supervisor: Supervisor) -> str:
        """Ask once more; how it ended. An answer that forgot the word fails the test."""
        question = Message(role="user", text=QUESTION)
        prompt = ChatPrompt(messages=(*self._messages, question))
        text = ""
        try:
            self._num_asked += 1  # or two kills would have it taken for what workers die of
            sampling = SamplingParams(temperature=0.0, seed=self._num_asked)
            wanted = request(prompt, model=RECALLING, sampling=sampling)
            generation = supervisor.submit(wanted)
            async with asyncio.timeout(PATIENCE_S):
                await generation.accepted()
                while chunks := await generation.next_chunks():
                    text += "".join(one.text for one in chunks if isinstance(one, TextDelta))
                    if isinstance(last := chunks[-1], Failed):
                        return last.code
        except HearthError as error:
            return error.code
        assert CODE in text
        assert generation.usage is not None
        self._messages += [question, Message(role="assistant", text=text)]
        self.usage = generation.usage
        return "finished"

    async def comes_back(self, supervisor: Supervisor) -> None:
        """Its model leaves and returns, and it goes on from its KV."""
        if status_of(supervisor, RECALLING).state != "ready":
            await supervisor.restart(RECALLING).granted()
        assert await self.recall(supervisor) == "finished"
        num_tokens = self.usage.num_prompt_tokens
        await everybody_leaves(supervisor)
        assert await self.recall(supervisor) == "finished"
        assert self.usage.num_cached_tokens >= num_tokens - 1
        assert self.usage.cache.tier in ("warm", "hot")  # hot when it was brought at the load


@dataclass
class Chaos:
    """So many requests, one of eight of the conversation, and so many kills between them."""

    supervisor: Supervisor
    seed: int
    num_requests: int
    num_kills: int
    needle: Needle = field(default_factory=Needle)
    ends: Counter[str] = field(default_factory=Counter[str])
    num_begun: int = 0

    async def run(self, num_clients: int) -> None:
        clients = [self._client(number) for number in range(num_clients - 1)]
        async with asyncio.TaskGroup() as group:
            killer = group.create_task(self._kill())
            await asyncio.gather(*clients, self._recall())
            killer.cancel()

    async def _recall(self) -> None:
        while self._begin():
            self.ends[await self.needle.recall(self.supervisor)] += 1
            self._repair()

    async def _client(self, number: int) -> None:
        chance = random.Random(self.seed * 1000 + number)
        history = dict.fromkeys(MODELS, f"client {number} ")
        while self._begin():
            model = chance.choice(MODELS)
            history[model] += f"{chance.randrange(10**6)} "
            self.ends[await self._one(model, history[model], chance)] += 1
            self._repair()

    def _begin(self) -> bool:
        is_due = self.num_begun < self.num_requests
        self.num_begun += is_due
        return is_due

    async def _one(self, model: str, text: str, chance: random.Random) -> str:
        """How one request ends."""
        wanted = request(
            TextPrompt(text=text), model=model, max_tokens=chance.choice([2, 30]), ignore_eos=True
        )
        try:
            generation = self.supervisor.submit(wanted)
        except HearthError as error:
            return error.code
        leaves_after = chance.choice([None] * 8 + ["submit", "accept", "chunk"])
        try:
            async with asyncio.timeout(PATIENCE_S):
                return await self._read(generation, leaves_after)
        finally:
            generation.abort()
            assert generation.is_finished

    async def _read(self, generation: Generation, leaves_after: str | None) -> str:
        if leaves_after == "submit":
            await asyncio.sleep(0)
            return "left"
        try:
            await generation.accepted()
        except HearthError as error:
            return error.code
        num_chunks = 0
        while leaves_after != "accept" and (chunks := await generation.next_chunks()):
            num_chunks += sum(not isinstance(one, PrefillProgress) for one in chunks)
            if isinstance(chunks[-1], Failed):
                return chunks[-1].code
            if leaves_after == "chunk" and num_chunks:
                break
            if generation.is_finished:
                return "finished"
        return "left"

    def _busy(self) -> list[psutil.Process]:
        busy = {one.pid for one in self.supervisor.status() if one.num_running}
        return [one for one in own_workers() if one.pid in busy]

    async def _kill(self) -> None:
        """At random, but spread over the requests, and every other time while it works."""
        chance = random.Random(self.seed)
        for number in range(1, self.num_kills + 1):
            due = number * self.num_requests // (self.num_kills + 1)
            await until(lambda due=due: self.num_begun >= due, "more requests", 600)
            find = self._busy if number % 2 else own_workers
            await until(find, "a worker", 60)
            victim = chance.choice(find())
            victim.send_signal(chance.choice([signal.SIGKILL, signal.SIGABRT, signal.SIGSTOP]))

    def _repair(self) -> None:
        """What an operator does about a model that is given up after three crashes."""
        for one in self.supervisor.status():
            if one.state == "failed":
                self.supervisor.restart(one.spec.id)


async def ends_of_chaos(
    home: Path, tmp_path: Path, chaos: dict[str, Any], **fields: Any
) -> Counter[str]:
    """How all requests ended; the conversation goes on, and nothing is left behind."""
    disk: dict[str, Any] = {"kv_disk": True, "kv_dir": tmp_path, "block_size": 16}
    settings = disk | {"heartbeat_timeout_s": 5.0} | fields
    async with supervising_with_store(home, **settings) as (supervisor, kv):
        await until(lambda: kv.status.state == "ok", "the store is open")
        await ask(supervisor, "a", model="a", max_tokens=1)
        num_descriptors = psutil.Process().num_fds()
        run = Chaos(supervisor, **chaos)
        await run.run(num_clients=8)
        await until(lambda: supervisor.is_idle, "what was wished for is loaded", 60)
        await until(lambda: len(loaded(supervisor)) <= fields["max_loaded_models"], "leaving", 60)
        await run.needle.comes_back(supervisor)
        await everybody_leaves(supervisor)
        await until(lambda: psutil.Process().num_fds() <= num_descriptors, "all is closed")
    assert own_workers() == []
    assert set(run.ends) <= DOCUMENTED | {"finished", "left"}, run.ends
    assert run.ends.total() == run.num_begun == chaos["num_requests"]
    return run.ends


async def everybody_leaves(supervisor: Supervisor) -> None:
    for model in MODELS:
        supervisor.unload(model)
    await until(lambda: not loaded(supervisor), "everybody has left", 60)
    assert all(one.reserved_bytes == 0 for one in supervisor.status())
    await until(lambda: own_workers() == [], "no process is left", 30)


async def test_every_request_ends_in_one_documented_way(home: Path, tmp_path: Path) -> None:
    chaos = {"seed": 7, "num_requests": 12, "num_kills": 1}
    ends = await ends_of_chaos(home, tmp_path, chaos, max_loaded_models=2)
    assert ends["finished"] >= 5, ends


@pytest.mark.soak
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("max_loaded_models", [1, 2])
async def test_every_request_ends_in_one_documented_way_for_long(
    home: Path, tmp_path: Path, max_loaded_models: int
) -> None:
    chaos = {"seed": max_loaded_models, "num_requests": 200, "num_kills": 10}
    ends = await ends_of_chaos(home, tmp_path, chaos, max_loaded_models=max_loaded_models)
    assert ends["finished"] >= 100, ends
