"""Hot tiers are as large as memory allows, from one moment to the next."""

import asyncio
from pathlib import Path
from typing import Any

import psutil
import pytest

from runtime.errors import Aborted, MemoryShort
from runtime.kv_messages import HotBudget
from runtime.types import CacheParams, ChatPrompt, Message
from store.keyed_names import Whom
from tests.asking import (
    answer,
    ask,
    request,
    status_of,
    supervising,
    supervising_with_store,
    worker_of,
)
from tests.tiny_models import write_model
from tests.waiting import until

TEXT = "The boats stay in the harbour. " * 40


@pytest.fixture
def home(tmp_path: Path) -> Path:
    write_model(tmp_path / "models" / "m")
    return tmp_path


async def test_a_running_worker_shrinks_at_once_and_grows_again(home: Path):
    async with supervising(home, models_dir=home / "models") as supervisor:
        first = await ask(supervisor, TEXT, max_tokens=4)
        again = await ask(supervisor, TEXT, max_tokens=4)
        assert again.finished.usage.cache.tier == "hot"
        await ask(supervisor, "Something else. " + TEXT, max_tokens=4)
        channel = worker_of(supervisor).kv
        await until(lambda: channel.counts.num_pieces >= 2, "both are in memory")
        channel.set_budget(HotBudget(num_bytes=1))
        await until(lambda: channel.counts.hot_bytes == 0, "nothing of it fits")
        missed = await ask(supervisor, TEXT, max_tokens=4)
        assert missed.finished.usage.cache.num_tokens == 0
        assert missed.text == first.text
        channel.set_budget(HotBudget(num_bytes=1 << 30))
        await ask(supervisor, TEXT, max_tokens=4)
        kept = await ask(supervisor, TEXT, max_tokens=4)
        assert kept.finished.usage.cache.tier == "hot"


async def test_what_a_running_request_uses_is_not_touched(home: Path):
    async with supervising(home, models_dir=home / "models") as supervisor:
        whole = await ask(supervisor, TEXT, max_tokens=200, ignore_eos=True)
        running = supervisor.submit(request(TEXT, max_tokens=200, ignore_eos=True))
        await running.accepted()
        worker_of(supervisor).kv.set_budget(HotBudget(num_bytes=1))
        chunks: list[Any] = []
        while arrived := await running.next_chunks():
            chunks += arrived
        assert "".join(getattr(one, "text", "") for one in chunks) == whole.text


async def test_a_machine_short_of_memory_loses_idle_models_and_then_refuses(home: Path):
    async with supervising(home, models_dir=home / "models", memory_floor=2**47) as supervisor:
        await ask(supervisor, TEXT, max_tokens=4)
        await until(lambda: status_of(supervisor).state == "ready", "it is idle")
        await supervisor.relieve()
        await until(lambda: status_of(supervisor).state == "cold", "the idle model has left")
        await supervisor.relieve()
        with pytest.raises(MemoryShort) as refusal:
            supervisor.submit(request(TEXT))
        assert refusal.value.retry_after_s <= 60


async def test_warming_wakes_no_model_and_keeps_none(home: Path):
    async with supervising(home, models_dir=home / "models") as supervisor:
        warming = request(TEXT, work="prefill", priority="background")
        assert supervisor.warm(warming) is None
        assert status_of(supervisor).state == "cold"
        await ask(supervisor, "Wake up.", max_tokens=4)
        before = status_of(supervisor).expires_in_s
        generation = supervisor.warm(warming)
        assert generation is not None
        while await generation.next_chunks():
            pass
        after = status_of(supervisor).expires_in_s
        assert before is not None
        assert after is not None
        assert after <= before
        warm = await ask(supervisor, TEXT, max_tokens=4)
        assert warm.finished.usage.cache.tier == "hot"


async def test_a_request_overtakes_what_only_warms_and_that_goes_on_afterwards(home: Path):
    async with supervising(home, models_dir=home / "models", prefill_slice=32) as supervisor:
        await ask(supervisor, "Wake up.", max_tokens=4)
        long = request(TEXT * 3, work="prefill", priority="background")
        worker = psutil.Process(worker_of(supervisor).pid)
        worker.suspend()  # so that it hears of both at once
        warming, hello = supervisor.warm(long), supervisor.submit(request("Hello.", max_tokens=4))
        worker.resume()
        assert warming is not None
        said, warmed = await asyncio.gather(answer(hello), answer(warming))
        assert said.finished.usage.num_output_tokens > 0
        assert hello.finished_ns is not None
        assert warming.finished_ns is not None
        assert hello.finished_ns < warming.finished_ns
        assert warmed.finished.usage.num_output_tokens == 0
        again = await ask(supervisor, TEXT * 3, max_tokens=1)
        assert again.finished.usage.num_cached_tokens == warmed.finished.usage.num_prompt_tokens - 1


async def test_another_model_that_is_waited_for_ends_what_only_warms(home: Path):
    write_model(home / "models" / "n")
    async with supervising(home, models_dir=home / "models") as supervisor:
        await ask(supervisor, "Wake up.", max_tokens=4)
        warming = supervisor.warm(request(TEXT, work="prefill", priority="background"))
        assert warming is not None
        other = supervisor.submit(request("Hello.", model="n", max_tokens=4))
        assert warming.is_finished
        with pytest.raises(Aborted):
            await warming.accepted()
        assert (await answer(other)).finished.usage.num_output_tokens > 0


async def test_a_conversation_in_memory_only_is_forgotten_by_its_name(home: Path):
    async with supervising_with_store(home, models_dir=home / "models") as (supervisor, kv):
        chat = ChatPrompt(messages=(Message(role="user", text=TEXT),))
        mine = CacheParams(session_id="mine", ttl_s=0)
        await ask(supervisor, chat, cache=mine, max_tokens=4)
        assert not (await kv.delete(Whom(session_id="somebody else's"))).num_pieces
        assert (await kv.delete(Whom(session_id="mine"))).num_pieces
        again = await ask(supervisor, chat, cache=mine, max_tokens=4)
        assert again.finished.usage.cache.num_tokens == 0
