"""Conversations that are kept by blocks travel to stock mlx-lm and back: real workers and files."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import load_prompt_cache, make_prompt_cache
from mlx_lm.utils import load

from runtime.cache.contents import KvContents
from runtime.cache.conversations import ImportRequest
from runtime.cache.mlx_lm_exchange import done
from runtime.cache.service import KvStore
from runtime.cache.views import ChainView
from runtime.config.settings import Settings
from runtime.errors import InterchangeFailed, UnknownConversation
from runtime.kv.mlx_lm_file import read
from runtime.mlx_lm_exchange import Export
from runtime.models.catalog import Catalog
from runtime.progress import Progress, unwatched
from runtime.types import CacheParams, TokenPrompt
from store.types import TTL_S
from tests.asking import ask
from tests.integration.test_kv_blocks_kept import NUM_TOKENS, kept, prompt, reused, serving
from tests.tiny_models import write_model
from tests.waiting import until

BLOCK = 256
FAMILIES = ("qwen3", "gemma3_text", "lfm2")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for family in FAMILIES:
        write_model(folder / family, family)
    return folder


@pytest.fixture
def home(tmp_path: Path, models: Path) -> Path:
    (tmp_path / "models").symlink_to(models)
    return tmp_path


def exported(chain: ChainView, models: Path, file: Path) -> int:
    """Write it to a file; its tokens."""
    path = str(models / chain.model)
    job = Export(str(file), chain.paths, chain.leaves, chain.model, path)
    with done(job, "off") as outcome:
        return outcome.num_tokens


def contents_of(kv: KvStore) -> KvContents:
    return KvContents(kv, kv.settings)


def logits(model: Any, token_ids: list[int], kv: list[Any]) -> mx.array:
    out = model(mx.array(token_ids)[None], cache=kv)[:, -1]
    mx.eval(out)
    return out


@pytest.mark.parametrize("family", FAMILIES)
async def test_mlx_lm_continues_what_we_exported(home: Path, models: Path, family: str):
    file = home / "cache.safetensors"
    async with serving(home) as (supervisor, kv):
        await reused(supervisor, prompt(1), model=family, session_id="one")
        await kept(kv)
    async with serving(home) as (_, kv):
        chain = await contents_of(kv).chain("one")
    assert chain.model == family
    num_tokens = exported(chain, models, file)
    assert chain.leaves[-1] == num_tokens >= NUM_TOKENS
    stock = read(file)
    assert stock.token_ids is not None
    assert len(stock.token_ids) == num_tokens
    assert tuple(stock.token_ids[:NUM_TOKENS]) == prompt(1).token_ids
    ours, metadata = load_prompt_cache(str(file), return_metadata=True)
    assert metadata["model"] == str(models / family)
    model, *_ = load(str(models / family))
    fresh = make_prompt_cache(model)
    for start in range(0, num_tokens, 64):
        logits(model, stock.token_ids[start : start + 64], fresh)
    for token_ids in ([7, 8, 9], [10]):
        one, other = logits(model, token_ids, ours), logits(model, token_ids, fresh)
        assert mx.allclose(one, other, rtol=1e-3, atol=1e-3).item()
        assert one.argmax().item() == other.argmax().item()


async def test_a_block_names_what_leads_to_it(home: Path, models: Path):
    file = home / "cache.safetensors"
    async with serving(home) as (supervisor, kv):
        await reused(supervisor, prompt(1), model="qwen3", session_id="one")
        branch = TokenPrompt(token_ids=(*prompt(1).token_ids[: 3 * BLOCK], *range(9, 309)))
        await reused(supervisor, branch, model="qwen3", session_id="two")
        await kept(kv, 2)
        contents = contents_of(kv)
        slots = (await contents.shown("one")).slots
        chain = await contents.chain(slots[3].id)
        assert chain.leaves == (256, 512, 768, 1024)
        assert chain.num_conversations == (2, 2, 2, 1)
        assert exported(chain, models, file) == 4 * BLOCK
        with pytest.raises(UnknownConversation):
            await contents.chain("0" * 32)
        store = kv.store
        assert store is not None
        store.slots.path(next(iter(store.heads.kept.blocks))).unlink()
        with pytest.raises(UnknownConversation):
            await contents.chain("one")


async def test_what_is_in_the_cold_store_is_brought_back(home: Path, models: Path):
    file = home / "cache.safetensors"
    async with serving(home, cold_store=str(home / "cold")) as (supervisor, kv):
        await reused(supervisor, prompt(1), model="qwen3", session_id="one", ttl_s=0.5)
        await kept(kv)
        heads = kv.store.heads if kv.store is not None else None
        assert heads is not None
        await until(lambda: bool(heads.idle()), "it rests")
        await kv.chore(lambda store: store.room.keep())
        contents = contents_of(kv)
        assert (await contents.find("one")).view.tier == "cold"
        assert exported(await contents.chain("one"), models, file) > 0
        assert (await contents.find("one")).view.tier == "warm"


@pytest.mark.parametrize(
    ("family", "num_tokens"),
    [
        ("qwen3", NUM_TOKENS),
        ("lfm2", NUM_TOKENS),
        ("lfm2", 4 * BLOCK - 2),
        ("gemma3_text", 4 * BLOCK - 2),
    ],
)
async def test_we_continue_our_own_file_in_another_home(
    home: Path, models: Path, family: str, num_tokens: int
):
    """Whether it ends within a block, or with one."""
    asked, file, other = prompt(1, num_tokens), home / "cache.safetensors", home / "other"
    async with serving(home) as (supervisor, kv):
        await reused(supervisor, asked, model=family, session_id="one")
        await kept(kv)
    async with serving(home) as (_, kv):
        num_exported = exported(await contents_of(kv).chain("one"), models, file)
    token_ids = read(file).token_ids
    assert token_ids is not None
    longer = TokenPrompt(token_ids=(*token_ids, 7, 8, 9))
    other.mkdir()
    (other / "models").symlink_to(models)
    async with serving(other) as (supervisor, kv):
        spec = Catalog(Settings(home=other), hub_cache=other / "hub").resolve(family)
        contents, wanted = contents_of(kv), ImportRequest(str(file), family)
        said = await contents.take_in(spec, wanted, unwatched)
        assert (said.num_tokens, said.num_new_slots) == (num_exported, num_exported // BLOCK)
        again = await contents.take_in(spec, wanted, unwatched)
        assert again.num_new_slots == 0
        (one,) = await contents.kept()
        assert (one.view.num_durable, one.view.is_named) == (num_exported, False)
        assert one.ttl_s == TTL_S["extended"]
        assert kv.store is not None
        assert kv.store.room.allowed.total() == 0
        restored = await ask(supervisor, longer, model=family, max_tokens=8)
        use = restored.finished.usage.cache
        assert use.num_tokens == num_exported
        assert use.tier in {"warm", "hot"}, "it may have been brought back unasked"
        off = CacheParams(mode="off")
        computed = await ask(supervisor, longer, model=family, max_tokens=8, cache=off)
        assert restored.text == computed.text


async def test_an_import_is_refused_where_there_is_no_room_and_nothing_leaves(
    home: Path, models: Path
):
    file, other = home / "cache.safetensors", home / "other"
    async with serving(home) as (supervisor, kv):
        await reused(supervisor, prompt(1), model="qwen3", session_id="one")
        await kept(kv)
        exported(await contents_of(kv).chain("one"), models, file)
    other.mkdir()
    (other / "models").symlink_to(models)
    async with serving(other, cache_max_bytes=700_000) as (supervisor, kv):
        await reused(supervisor, prompt(2, 300), model="qwen3", session_id="two")
        await kept(kv)
        spec = Catalog(Settings(home=other), hub_cache=other / "hub").resolve("qwen3")
        contents, store = contents_of(kv), kv.store
        assert store is not None
        with pytest.raises(InterchangeFailed, match="exceed the cap"):
            await contents.take_in(spec, ImportRequest(str(file), "qwen3"), unwatched)
        with pytest.raises(InterchangeFailed, match="absolute path"):
            await contents.take_in(spec, ImportRequest(file.name, "qwen3"), unwatched)
        await kept(kv)
        assert (await contents.find("two")).view.num_slots == 1
        assert [*(store.root / "heads").glob(".tmp-*")] == []


async def test_what_is_deleted_while_it_is_taken_in_does_not_stay(home: Path, models: Path):
    file, other = home / "cache.safetensors", home / "other"
    async with serving(home) as (supervisor, kv):
        await reused(supervisor, prompt(1), model="qwen3", session_id="one")
        await kept(kv)
        exported(await contents_of(kv).chain("one"), models, file)
    other.mkdir()
    (other / "models").symlink_to(models)
    async with serving(other) as (_, kv):
        spec = Catalog(Settings(home=other), hub_cache=other / "hub").resolve("qwen3")
        contents, is_read = contents_of(kv), asyncio.Event()
        loop = asyncio.get_running_loop()

        def watch(_: Progress) -> None:
            loop.call_soon_threadsafe(is_read.set)

        wanted = ImportRequest(str(file), "qwen3")
        taking = asyncio.create_task(contents.take_in(spec, wanted, watch))
        await is_read.wait()
        await contents.remove_all()
        with pytest.raises(InterchangeFailed, match="deleted"):
            await taking
        assert await contents.kept() == []
        assert [*(other / "kv" / "slots").rglob("*.safetensors")] == []


async def test_what_others_remove_while_it_is_taken_in_is_written_again(home: Path, models: Path):
    file, other = home / "cache.safetensors", home / "other"
    async with serving(home) as (supervisor, kv):
        await reused(supervisor, prompt(1), model="qwen3", session_id="one")
        await kept(kv)
    async with serving(home) as (_, kv):
        num_tokens = exported(await contents_of(kv).chain("one"), models, file)
    other.mkdir()
    (other / "models").symlink_to(models)
    async with serving(other) as (supervisor, kv):
        spec = Catalog(Settings(home=other), hub_cache=other / "hub").resolve("qwen3")
        contents, removed = contents_of(kv), list[Path]()

        def watch(told: Progress) -> None:
            there = [*(other / "kv" / "slots").rglob("*.safetensors")]
            if there and not removed and told.num_done == told.num_total - 1:
                removed.append(there[0])
                there[0].unlink(missing_ok=True)

        said = await contents.take_in(spec, ImportRequest(str(file), "qwen3"), watch)
        assert len(removed) == 1
        assert removed[0].exists()
        assert said.num_new_slots == NUM_TOKENS // BLOCK
        (one,) = await contents.kept()
        assert one.view.is_durable
        use = await reused(supervisor, prompt(1), model="qwen3")
        assert use.num_tokens == min(num_tokens, NUM_TOKENS - 1) > NUM_TOKENS - BLOCK


async def test_of_a_branch_its_whole_blocks_are_exported(home: Path, models: Path):
    file = home / "cache.safetensors"
    async with serving(home) as (supervisor, kv):
        await reused(supervisor, prompt(1), model="qwen3", session_id="one")
        await kept(kv)
    async with serving(home) as (_, kv):
        await kv.settled()
        contents = contents_of(kv)
        await contents.branch("one", "copy", {"qwen3": 2 * BLOCK + 7})
        copy = (await contents.find("copy")).view
        assert (copy.num_durable, copy.is_durable) == (2 * BLOCK, False)
        assert exported(await contents.chain("copy"), models, file) == 2 * BLOCK
