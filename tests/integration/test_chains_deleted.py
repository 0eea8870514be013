"""Conversations without a session id that share their beginning, or all: each is deleted alone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from runtime.cache.views import ConversationView
from runtime.config.settings import ModelSettings
from runtime.supervisor.generation import Generation
from runtime.types import Usage
from tests.asking import answer, supervising_with_store, worker_of
from tests.integration.test_turns_deleted import SLOW, Home, Talk, at_home, check_reused
from tests.tiny_models import CHAT_TEMPLATE, write_model
from tests.waiting import until

LONG = "stone " + "a kettle hums on the hearth and rain falls over the lazy dog " * 30


@pytest.fixture
def home(tmp_path: Path) -> Path:
    model = tmp_path / "models" / "m"
    write_model(model)
    (model / "chat_template.jinja").write_text(SLOW + CHAT_TEMPLATE)
    return tmp_path


@asynccontextmanager
async def two_names(home: Path) -> AsyncGenerator[Home]:
    """One model that is asked by two names."""
    models = {
        "m": ModelSettings(context=16_384),
        "n": ModelSettings(context=16_384, path=home / "models" / "m"),
    }
    async with supervising_with_store(home, models=models, kv_disk=True, block_size=32) as found:
        yield Home(home, *found)


async def listed(here: Home, number: int) -> list[ConversationView]:
    """All of them, once they are there and so many."""
    await until(lambda: len(here.kept()) == number, f"{number} are listed")
    return here.kept()


async def deleted_while_read(here: Home, mine: str, asked: Talk) -> Usage:
    """What becomes of a request that is being read when that conversation is deleted."""
    generation: Generation | None = None
    with here.worker_held():
        generation = here.submit(asked, asked.asked("go on"))
        await until(lambda: worker_of(here.supervisor).num_running, "its worker has it")
        deletion = asyncio.create_task(here.delete(mine))
        await until(lambda: here.kv.receive().number, "it has a number")
    await deletion
    return (await answer(generation)).finished.usage


async def test_one_that_a_session_goes_on_from_is_deleted_and_the_session_keeps_all(home: Path):
    async with at_home(home) as here:
        one = Talk("stone", None)
        await here.say(one)
        (mine,) = here.kept()
        fork = one.forked("fork")
        last = await here.say(fork)
        await here.delete(mine.id)
        assert [view.is_named for view in here.kept()] == [True]
        check_reused(last, await here.say(fork))


async def test_what_goes_on_from_one_that_a_session_shares_is_not_kept(home: Path):
    async with at_home(home) as here:
        one = Talk("qvslow", None)
        await here.say(one)
        (mine,) = here.kept()
        fork = one.forked("fork")
        last = await here.say(fork, "elsewhere")
        await listed(here, 2)
        usage = await deleted_while_read(here, mine.id, one)
        assert (usage.cache.reason, usage.cache.num_durable) == ("deleted", 0)
        assert [view.is_named for view in here.kept()] == [True]
        check_reused(last, await here.say(fork))


@pytest.mark.parametrize("name", ["m", "n"])
async def test_what_another_name_goes_on_with_stays_its(home: Path, name: str):
    async with two_names(home) as here:
        one = Talk("stone", None, model="m")
        await here.say(one)
        await listed(here, 1)
        other = one.forked(None, model="n")
        last = await here.say(other)
        await until(lambda: len(here.kept()) == 2 and here.turns == 2, "both are listed")
        (mine,) = [view for view in here.kept() if view.model == name]
        await here.delete(mine.id)
        assert [view.model for view in here.kept()] == [{"m": "n", "n": "m"}[name]]
        if name == "m":
            check_reused(last, await here.say(other))
        else:
            assert (await here.say(one)).num_cached_tokens >= 300


@pytest.mark.parametrize("name", ["a", None])
@pytest.mark.parametrize("other_name", ["c", None])
async def test_who_is_in_memory_only_keeps_what_it_began_with(
    home: Path, name: str | None, other_name: str | None
):
    async with at_home(home) as here:
        one, other = Talk(f"{LONG} one", name), Talk(f"{LONG} other", other_name, ttl_s=0.0)
        await here.say(one)
        first = await here.say(other)
        assert first.num_cached_tokens > 300
        (mine,) = here.kept()
        await here.delete(name or mine.id)
        check_reused(first, await here.say(other))


async def test_what_another_tenant_was_told_alike_stays_its(home: Path):
    async with at_home(home) as here:
        one, other = (Talk("stone", None, tenant=name) for name in ("a", "b"))
        for talk in (one, other):
            await here.say(talk)
            last = await here.say(talk)
        await until(lambda: here.turns == 4 and len(here.kept()) == 2, "turns of both")
        mine = min(here.kept(), key=lambda view: view.last_used_s)
        await here.delete(mine.id)
        assert here.turns == 2
        check_reused(last, await here.say(other))


async def test_what_another_tenant_says_meanwhile_is_kept(home: Path):
    async with at_home(home) as here:
        one, other = (Talk("qvslow", None, tenant=name) for name in ("a", "b"))
        for talk in (one, other):
            await here.say(talk)
        await until(lambda: here.turns == 2 and len(here.kept()) == 2, "turns of both")
        mine = min(here.kept(), key=lambda view: view.last_used_s)
        usage = await deleted_while_read(here, mine.id, other)
        assert usage.cache.reason != "deleted"
        await until(lambda: here.turns == 2, "two of the one that stays")
