"""Conversations with real workers in a random order, with deletions, swaps, kills and restarts.

A plain record of what was said and deleted says how much of each prompt may and must be reused:
nothing that only deleted conversations said, all whole blocks of what another one had been told is
kept. Every answer is that of a request that reuses nothing.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from runtime.cache.service import KvStore
from runtime.supervisor.supervisor import Supervisor
from runtime.types import CacheParams, TokenPrompt
from store.block_names import num_common
from store.keyed_names import Whom
from store.slots import BlockKey
from tests.asking import Answer, answer, ask, request, worker_of
from tests.integration.test_kv_blocks_kept import serving
from tests.tiny_models import write_model
from tests.waiting import until

BLOCK = 16
NAMES = ("m", "other")
TENANTS = ("", "second")
NUM_STEPS = 40


@dataclass
class Said:
    """Tokens that a session said to a model; `is_kept` once it is on disk for certain."""

    model: str
    tenant: str
    session: str
    token_ids: tuple[int, ...]
    is_private: bool
    """It is not to be on disk."""
    is_kept: bool = False


@dataclass
class Record:
    said: list[Said] = field(default_factory=list[Said])
    deleted: list[Said] = field(default_factory=list[Said])

    def shared(self, asked: Said, *, is_kept: bool = False) -> int:
        """How many first tokens of a prompt somebody said whose conversation is not deleted."""
        prompt = asked.token_ids
        there = [
            num_common(prompt, one.token_ids)
            for one in self.said
            if (one.model, one.tenant) == (asked.model, asked.tenant)
            if one.is_kept or not is_kept
        ]
        return min(max(there, default=0), len(prompt) - 1)


def told(turn: Said) -> str:
    kind = "private " if turn.is_private else ""
    tokens = f"{len(turn.token_ids)} tokens from {turn.token_ids[:3]}"
    return f"{kind}{turn.session} of {turn.tenant!r} to {turn.model}, {tokens}"


def wish_of(turn: Said) -> CacheParams:
    ttl_s = 0.0 if turn.is_private else 3600.0
    return CacheParams(session_id=turn.session, tenant=turn.tenant, ttl_s=ttl_s)


class World:
    """A server with its workers, its clients, and the record of what they said."""

    def __init__(self, home: Path, seed: int) -> None:
        self.home = home
        self.dice = random.Random(seed)
        self.num_loaded = 1 + seed % 2
        """With one the models are swapped for nearly every request."""
        self.record = Record()
        self.num_sessions = 0
        self.has_killed = False
        self.journal: list[str] = []
        """What was done, for who reads of a failure."""
        self.stack = AsyncExitStack()
        self.supervisor: Supervisor
        self.kv: KvStore

    async def start(self) -> None:
        serves = serving(self.home, block_size=BLOCK, max_loaded_models=self.num_loaded)
        self.supervisor, self.kv = await self.stack.enter_async_context(serves)

    def turn(self) -> Said:
        """A new conversation, the next turn of one, or a branch of it, from any of its tokens."""
        fresh = tuple(self.dice.randrange(9, 400) for _ in range(self.dice.randrange(1, 60)))
        said, is_private = self.record.said, self.dice.random() < 0.2
        if not said or self.dice.random() < 0.2:
            model, tenant = self.dice.choice(NAMES), self.dice.choice(TENANTS)
            return Said(model, tenant, self.session(), fresh, is_private)
        if self.record.deleted and self.dice.random() < 0.3:
            one = self.dice.choice(self.record.deleted)
            tokens = (*one.token_ids, *fresh)
            return Said(one.model, one.tenant, self.session(), tokens, is_private)
        one = self.dice.choice(said)
        if self.dice.random() < 0.5:
            return replace(one, token_ids=(*one.token_ids, *fresh), is_kept=False)
        tokens = (*one.token_ids[: self.dice.randrange(len(one.token_ids))], *fresh)
        tenant = one.tenant if self.dice.random() < 0.8 else self.dice.choice(TENANTS)
        return Said(one.model, tenant, self.session(), tokens, is_private)

    def session(self) -> str:
        self.num_sessions += 1
        return f"session {self.num_sessions}"

    async def say(self) -> None:
        turn = self.turn()
        prompt = turn.token_ids
        least, most = self.record.shared(turn, is_kept=True), self.record.shared(turn)
        plain = await self.ask(turn, CacheParams(mode="off"))
        said = await self.ask(turn, wish_of(turn))
        assert said.text == plain.text
        use = said.finished.usage.cache
        num = use.num_tokens
        self.journal.append(f"{told(turn)}: {num} reused, {least} to {most} allowed, {use.reason}")
        assert num <= most, f"{num} of {prompt} are reused, and {most} may be"
        if use.reason != "slower_than_prefill":  # the model is tiny
            assert num >= least - least % BLOCK, f"{use}: {least} of {prompt} are kept"
        self.record.said.append(turn)

    async def ask(self, turn: Said, cache: CacheParams) -> Answer:
        tokens = TokenPrompt(token_ids=turn.token_ids)
        return await ask(self.supervisor, tokens, model=turn.model, max_tokens=1, cache=cache)

    async def settle(self) -> None:
        """Wait until all that was said is published."""

        def is_there() -> bool:
            store = self.kv.store
            if store is None:
                return False
            kept = {*store.heads.kept.blocks}
            models = {channel.spec.id: channel.model_hash for channel in self.kv.loaded()}
            for one in self.record.said:
                if one.model in models and not one.is_private:
                    chain = store.chain_of(models[one.model])
                    root = chain.root_of(one.tenant)
                    blocks = chain.block_hashes(one.token_ids, root=root)
                    if blocks and BlockKey(models[one.model], blocks[-1]) not in kept:
                        return False
            return True

        self.journal.append("settle")
        await until(is_there, "all of it is published")
        loaded = {one.spec.id for one in self.kv.loaded()}
        for one in self.record.said:
            one.is_kept |= one.model in loaded and not one.is_private

    async def delete(self) -> None:
        if not self.record.said:
            return
        session = self.dice.choice(self.record.said).session
        self.journal.append(f"delete {session}")
        await self.kv.delete(Whom(session_id=session))
        said = self.record.said
        self.record.deleted += [one for one in said if one.session == session]
        self.record.said = [one for one in said if one.session != session]

    async def delete_meanwhile(self) -> None:
        """A conversation that is deleted while a turn of it is computed."""
        session, is_private = self.session(), self.dice.random() < 0.3
        prompt = tuple(self.dice.randrange(9, 400) for _ in range(self.dice.randrange(30, 90)))
        turn = Said(self.dice.choice(NAMES), "", session, prompt, is_private)
        tokens = TokenPrompt(token_ids=prompt)
        asked = request(tokens, model=turn.model, max_tokens=1, cache=wish_of(turn))
        self.journal.append(f"deleted meanwhile: {told(turn)}")
        generation = self.supervisor.submit(asked)  # it came before the deletion
        for _ in range(self.dice.randrange(4)):
            await asyncio.sleep(0)
        await self.kv.delete(Whom(session_id=session))
        await answer(generation)
        self.record.deleted.append(turn)

    async def kill(self) -> None:
        """What was published is not lost by it. Of too many crashes a model rests, so it is one."""
        if self.has_killed:
            return
        await self.settle()
        self.has_killed = True
        for channel in self.kv.loaded():
            self.journal.append(f"kill {channel.spec.id}")
            pid = worker_of(self.supervisor, channel.spec.id).pid
            assert pid is not None
            os.kill(pid, signal.SIGKILL)

    async def restart(self) -> None:
        self.journal.append("restart")
        await self.stack.aclose()
        self.has_killed = False
        for one in self.record.said:
            one.is_kept = not one.is_private
        await self.start()


@pytest.mark.parametrize("seed", [1, 2, 3])
async def test_nothing_deleted_comes_back_and_nothing_kept_is_lost(tmp_path: Path, seed: int):
    for number, name in enumerate(NAMES):
        write_model(tmp_path / "models" / name, seed=number)
    world = World(tmp_path, seed)
    await world.start()
    others = [world.settle, world.delete, world.delete_meanwhile, world.kill, world.restart]
    steps = [world.say] * 7 + others
    try:
        for _ in range(NUM_STEPS):
            await world.dice.choice(steps)()
    except BaseException as error:
        error.add_note("\n".join(world.journal))
        raise
    finally:
        await world.stack.aclose()
