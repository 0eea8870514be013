"""What a worker has in memory that is too busy to forget it: whoever deletes it is told so."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from api.agents.kv import AgentKv
from api.http.chains import Chains
from api.http.kv_access import KvAccess
from runtime.cache.contents import KvContents
from runtime.cache.views import RemovalView
from runtime.config.settings import ModelSettings, Settings
from runtime.errors import UnknownConversation
from runtime.models.catalog import Catalog
from runtime.prewarm.prewarm import Prewarm
from runtime.types import CacheParams, Usage
from tests.asking import answer, request, script, supervising_with_store
from tests.integration.test_turns_deleted import Home, Talk, at_home
from tests.living_history import living
from tests.tiny_models import write_model
from tests.waiting import until


@pytest.fixture
def home(tmp_path: Path) -> Path:
    write_model(tmp_path / "models" / "m")
    return tmp_path


@asynccontextmanager
async def access_to(here: Home, home: Path) -> AsyncGenerator[KvAccess]:
    settings = Settings(home=home)
    catalog = Catalog(settings, hub_cache=home / "hub")
    prewarm = Prewarm(settings, here.supervisor, here.kv, lambda _: ())
    async with living(home) as history:
        stored = Chains(history, settings, here.kv.is_deleted)
        yield KvAccess(catalog, here.kv, KvContents(here.kv, settings), prewarm, stored)


async def ask(here: Home, session: str, *, model: str = "m", ttl_s: float | None = None) -> Usage:
    words = here.tokenizer.encode("so</think>while rain falls<|im_end|>", add_special_tokens=False)
    asked = request(
        Talk("stone", session).asked("go on"),
        model=model,
        sampling=script(words.ids),
        cache=CacheParams(session_id=session, ttl_s=ttl_s),
    )
    return (await answer(here.supervisor.submit(asked))).finished.usage


async def held(here: Home, session: str) -> int:
    told = await here.contents.held([session])
    return sum(told[session].values())


async def test_what_is_only_in_the_memory_of_a_busy_worker_is_said_to_be_pending(home: Path):
    async with at_home(home) as here:
        await ask(here, "mine", ttl_s=0.0)
        await until(lambda: any(one.known for one in here.kv.all_heads()), "it is known")
        assert await held(here, "mine")
        async with access_to(here, home) as access:
            agents = AgentKv(access)
            with here.worker_held():
                removed = await access.remove_conversation("mine")
                assert removed == RemovalView(1, num_slots=0, is_cut=True, is_pending=True)
            with here.worker_held():  # not for so long at once that it is taken for hung
                assert not await agents.remove("mine"), "it must wait"
            assert not await held(here, "mine")
            assert await agents.remove("mine")
            with pytest.raises(UnknownConversation):
                await access.remove_conversation("mine")


async def test_what_is_on_disk_is_gone_and_what_a_busy_worker_has_is_pending(home: Path):
    async with at_home(home) as here:
        await ask(here, "mine")
        await until(lambda: any(one.is_durable for one in here.kept()), "it is on disk")
        async with access_to(here, home) as access:
            with here.worker_held():
                removed = await access.remove_conversation("mine")
                assert (removed.num_conversations, removed.is_pending) == (1, True)
            await ask(here, "yours")
            await until(lambda: any(one.is_durable for one in here.kept()), "it is on disk")
            with here.worker_held():  # not for so long at once that it is taken for hung
                everything = await access.remove_all()
            assert (everything.num_conversations, everything.is_pending) == (1, True)
        assert not here.kept()
        assert not await held(here, "mine")
        assert (await ask(here, "mine")).num_cached_tokens == 0


async def test_weights_are_deleted_by_their_hash_and_who_waits_for_others_loses_nothing(home: Path):
    write_model(home / "models" / "n", seed=3)
    models = {name: ModelSettings(context=16_384) for name in "mn"}
    async with supervising_with_store(home, models=models, kv_disk=True, block_size=32) as found:
        here = Home(home, *found)
        await ask(here, "one")
        await until(lambda: len(here.kept()) == 1, "it is listed")
        model = here.kept()[0].model_hash
        other = request(
            Talk("kettle", "other").asked("go on"),
            model="n",
            cache=CacheParams(session_id="other"),
        )
        asked = here.supervisor.submit(other)
        async with access_to(here, home) as access:
            removed = await access.remove_model(model)
        assert removed.num_conversations == 1
        cache = (await answer(asked)).finished.usage.cache
        assert cache.reason != "deleted"
        assert cache.num_kept != 0
