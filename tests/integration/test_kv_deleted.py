"""Delete means delete: also what is still computed, written or published when it is deleted."""

from __future__ import annotations

import random
from array import array
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from runtime.cache.service import KvStore
from runtime.supervisor.supervisor import Supervisor
from runtime.types import CacheParams, CacheUse, TokenPrompt
from store.keyed_names import Whom
from tests.asking import (
    answer,
    ask,
    first_chunks,
    request,
    supervising_with_store,
)
from tests.tiny_models import write_model
from tests.waiting import until

NUM_TOKENS = 900


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    write_model(folder / "m", head_dim=64, num_hidden_layers=8)
    return folder


@pytest.fixture
def home(tmp_path: Path, models: Path) -> Path:
    (tmp_path / "models").symlink_to(models)
    return tmp_path


def prompt(seed: int, num_tokens: int = NUM_TOKENS) -> TokenPrompt:
    return TokenPrompt(token_ids=tuple(random.Random(seed).choices(range(9, 400), k=num_tokens)))


class Home:
    """Conversations with one model, what is on disk of them, and how one is deleted."""

    def __init__(self, home: Path, supervisor: Supervisor, kv: KvStore) -> None:
        self.root, self.supervisor, self.kv = home / "kv", supervisor, kv

    async def say(self, session: str, tokens: TokenPrompt, **fields: Any) -> CacheUse:
        wish = CacheParams(session_id=session)
        done = await ask(self.supervisor, tokens, cache=wish, **({"max_tokens": 2} | fields))
        return done.finished.usage.cache

    async def delete(self, session: str) -> None:
        await self.kv.delete(Whom(session_id=session))

    def num_saved(self, session: str) -> int:
        """How many tokens the head of a conversation has that is on disk."""
        if self.kv.store is None:
            return 0
        found = self.kv.inventory(on_disk=True).of_sessions([session])[session]
        return sum(one.last.head.num_tokens for one in found)

    async def saved(self, session: str, num_tokens: int = NUM_TOKENS) -> None:
        await until(
            lambda: self.num_saved(session) >= num_tokens,
            f"{num_tokens} tokens of {session} are saved: {self.kv.status}",
        )

    def holders(self, tokens: TokenPrompt) -> list[str]:
        """The files below the store, finished or not, that hold a piece of this prompt."""
        needle = array("I", tokens.token_ids[400:432]).tobytes()
        while True:
            # What got another name, or went, between the listing and the look is looked for again.
            with suppress(FileNotFoundError):
                paths = [path for path in self.root.rglob("*") if path.is_file()]
                return [path.name for path in paths if needle in path.read_bytes()]


@asynccontextmanager
async def at_home(home: Path) -> AsyncGenerator[Home]:
    async with supervising_with_store(home, kv_disk=True) as (supervisor, kv):
        yield Home(home, supervisor, kv)


async def test_what_is_still_written_when_it_is_deleted_never_appears(home: Path):
    async with at_home(home) as here:
        shared = prompt(3, 500)
        await here.say("warm", shared)
        await here.saved("warm", 500)
        mine = TokenPrompt(token_ids=(*shared.token_ids, *prompt(1).token_ids))
        await here.say("mine", mine)
        await here.delete("mine")
        assert not here.holders(prompt(1))
        await here.say("other", prompt(2))
        await here.saved("other")
        assert not here.num_saved("mine")
        assert not here.holders(prompt(1))
        assert here.num_saved("warm") >= 500
        assert (await here.say("mine", mine)).num_tokens <= 500
        await here.saved("mine")

        await here.say("last", prompt(4))
        await here.kv.delete(Whom())
        await here.say("other", prompt(2))
        await here.saved("other")
        assert not here.num_saved("last")
        assert not here.holders(prompt(4))
        assert (await here.say("last", prompt(4))).num_tokens == 0


async def test_what_a_running_request_says_of_it_is_not_kept(home: Path):
    async with at_home(home) as here:
        wish = CacheParams(session_id="mine")
        running = here.supervisor.submit(request(prompt(1), cache=wish, max_tokens=200))
        await first_chunks(running)
        await here.delete("mine")
        await answer(running)
        await here.say("other", prompt(2))
        await here.saved("other")
        assert not here.num_saved("mine")
        assert not here.holders(prompt(1))
        assert (await here.say("mine", prompt(1))).num_tokens == 0


async def test_what_others_say_as_well_is_theirs(home: Path):
    async with at_home(home) as here:
        longer = TokenPrompt(token_ids=(*prompt(1).token_ids, *prompt(5, 300).token_ids))
        await here.say("mine", prompt(1))
        assert (await here.say("other", longer)).num_tokens >= NUM_TOKENS - 1
        await here.delete("mine")
        assert not here.num_saved("mine")
        assert (await here.say("other", longer)).num_tokens >= NUM_TOKENS
        await here.saved("other", NUM_TOKENS + 300)
        assert not here.num_saved("mine")
    async with at_home(home) as here:
        assert (await here.say("other", longer)).num_tokens == NUM_TOKENS + 299
