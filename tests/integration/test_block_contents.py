"""What is kept by blocks, as people see, pin, delete and verify it: real workers, real files."""

from __future__ import annotations

from pathlib import Path

import pytest

from runtime.cache.contents import KvContents
from runtime.cache.service import KvStore
from runtime.errors import StoreUnavailable, UnknownConversation
from runtime.progress import unwatched
from runtime.types import TokenPrompt
from store.keyed_names import conversation_key
from tests.integration.test_kv_blocks_kept import (
    home,
    kept,
    models,
    num_heads,
    prompt,
    reused,
    serving,
)
from tests.waiting import until

__all__ = ["home", "models"]

BLOCK = 256
NUM_BLOCKS = 5
"""Whole ones of each prompt."""

END = 1
"""What is behind them counts as one slot where it is deleted."""


def contents_of(kv: KvStore) -> KvContents:
    return KvContents(kv, kv.settings)


def never() -> bool:
    return False


async def test_what_is_on_disk_is_listed_and_what_is_in_memory_is_hot(home: Path):
    async with serving(home) as (supervisor, kv):
        await reused(supervisor, prompt(1), session_id="one")
        await reused(supervisor, prompt(2))
        await reused(supervisor, prompt(3), session_id="private", ttl_s=0.0)
        await until(lambda: num_heads(kv) >= 3, "all are known")
        contents = contents_of(kv)
        found = await contents.kept()
        assert {one.view.is_named for one in found} == {False, True}
        assert {one.tier for one in await contents.seen(found)} == {"hot"}
        held = await contents.held(["one", "private", "nobody"])
        assert held["one"]["m"] >= 1500
        assert held["private"]["m"] >= 1500
        assert held["nobody"] == {}
    async with serving(home) as (supervisor, kv):
        await kv.settled()
        contents = contents_of(kv)
        found = await contents.kept()
        assert [one.view.num_slots for one in found] == [NUM_BLOCKS, NUM_BLOCKS]
        assert {one.tier for one in await contents.seen(found)} == {"warm"}
        assert (await contents.held(["one"]))["one"] == {}


async def test_a_conversation_without_a_session_id_keeps_its_id_when_its_end_is_written(
    home: Path,
):
    """Who was shown the id deletes it by that."""
    async with serving(home) as (supervisor, kv):
        await reused(supervisor, prompt(1))
        await kept(kv)
        contents = contents_of(kv)
        [first] = await contents.kept()
        assert kv.store is not None
        assert [one.end_bytes for one in kv.store.heads.known.values()] == [0]
        known = kv.store.heads.known
        await until(lambda: any(one.end_bytes for one in known.values()), "its end is written")
        removed = await contents.remove(await contents.named(first.view.id))
        assert removed.num_conversations == 1
        assert await contents.kept() == []


async def test_a_conversation_is_found_shown_and_counted(home: Path):
    async with serving(home) as (supervisor, kv):
        await reused(supervisor, prompt(1), session_id="one")
        branch = TokenPrompt(token_ids=(*prompt(1).token_ids[: 3 * BLOCK], *range(9, 309)))
        await reused(supervisor, branch, session_id="two")
        await kept(kv, 2)
        contents = contents_of(kv)
        shown = await contents.shown("one")
        assert [one.start for one in shown.slots] == [n * BLOCK for n in range(NUM_BLOCKS)]
        assert shown.conversation.id == conversation_key(kv.secret, "one").hex()
        by_id = await contents.find(shown.conversation.id[:8])
        assert by_id.view.num_tokens == shown.conversation.num_tokens
        nodes = await contents.tree("m")
        assert [one.num_conversations for one in nodes].count(2) == 3
        assert {one.parent for one in nodes if one.start} <= {one.id for one in nodes}
        stats = await contents.stats()
        assert stats.num_conversations == 2
        assert sum(one.num_slots for one in stats.tiers) == len(nodes)
        known = await contents.known_models()
        assert {*known.asked} == {*known.labels.values()} == {"m"}
        await contents.count({"told": 2.0})
        assert (await contents.counters())[1]["told"] == 2.0
        with pytest.raises(UnknownConversation):
            await contents.find("nobody")


async def test_a_branch_stays_when_its_source_is_deleted(home: Path):
    async with serving(home) as (supervisor, kv):
        await reused(supervisor, prompt(1), session_id="one")
        await kept(kv)
        contents = contents_of(kv)
        await contents.branch("one", "copy", {"m": 2 * BLOCK + 7})
        removed = await contents.remove(await contents.named("one"))
        assert (removed.num_conversations, removed.num_slots) == (1, NUM_BLOCKS - 2 + END)
        (copy,) = (await contents.of_sessions(["copy"]))["copy"]
        assert copy.view.num_tokens == 2 * BLOCK + 7
        assert (await reused(supervisor, prompt(1), session_id="new")).num_tokens == 2 * BLOCK


async def test_what_is_pinned_stays_and_so_does_what_it_becomes(home: Path):
    async with serving(home) as (supervisor, kv):
        await reused(supervisor, prompt(1), session_id="one")
        await kept(kv)
        contents = contents_of(kv)
        assert (await contents.pin("one")).is_pinned
        longer = TokenPrompt(token_ids=(*prompt(1).token_ids, *range(9, 309)))
        await reused(supervisor, longer, session_id="one")
        inventory = kv.inventory()
        size = len(longer.token_ids)
        await until(lambda: inventory.find("one").last.head.num_tokens > size, "it went on")
        assert (await contents.find("one")).is_pinned
        await contents.branch("one", "copy", {"m": BLOCK})
        assert not (await contents.find("copy")).is_pinned
        await contents.unpin("one")
        assert not (await contents.find("one")).is_pinned


async def test_each_way_to_delete_says_what_is_gone(home: Path):
    async with serving(home, max_loaded_models=2) as (supervisor, kv):
        contents = contents_of(kv)
        for seed, session in enumerate(["one", "two", "three", None]):
            await reused(supervisor, prompt(seed), session_id=session)
        await reused(supervisor, prompt(1), model="other", session_id="one")
        await kept(kv, 5)
        with pytest.raises(UnknownConversation):
            await contents.remove(await contents.named("nobody"))
        one = await contents.remove(await contents.named("one"))
        assert (one.num_conversations, one.num_slots, one.is_pending) == (
            2,
            2 * (NUM_BLOCKS + END),
            False,
        )
        beginning = conversation_key(kv.secret, "two").hex()[:10]
        two = await contents.remove(await contents.named(beginning))
        assert (two.num_conversations, two.num_slots) == (1, NUM_BLOCKS + END)
        (nameless,) = [one for one in await contents.kept() if not one.view.is_named]
        gone = await contents.remove(await contents.named(nameless.view.id))
        assert (gone.num_conversations, gone.num_slots) == (1, NUM_BLOCKS + END)
        assert (await contents.remove_name("other")).num_conversations == 0
        (left,) = await contents.kept()
        assert (await contents.remove_weights({left.model})).num_slots == NUM_BLOCKS + END
        assert await contents.kept() == []
        assert (await contents.remove_all()).num_slots == 0
        assert [*(home / "kv" / "slots").rglob("*.safetensors")] == []


async def test_what_is_not_as_it_was_written_goes(home: Path):
    async with serving(home) as (supervisor, kv):
        await reused(supervisor, prompt(1), session_id="one")
        await reused(supervisor, prompt(2), session_id="two")
        await kept(kv, 2)
    async with serving(home) as (_, kv):
        await kv.settled()
        contents, store = contents_of(kv), kv.store
        assert store is not None
        whole = await contents.verify(unwatched, never)
        assert (whole.num_verified, whole.num_damaged) == (2 * NUM_BLOCKS + num_heads(kv), 0)
        slot = store.slots.path(next(iter(store.heads.kept.blocks)))
        head = kv.inventory().find("two").last.path
        assert head is not None
        for path in (slot, head):
            data = bytearray(path.read_bytes())
            data[-1] ^= 1
            path.write_bytes(data)
        damaged = await contents.verify(unwatched, never)
        assert (damaged.num_damaged, damaged.num_unread) == (2, 0)
        assert not slot.exists()
        assert not head.exists()
        stopped = await contents.verify(unwatched, lambda: True)
        assert stopped.num_verified == 0


async def test_what_rests_goes_to_the_cold_store_and_is_verified_there(home: Path):
    async with serving(home, cold_store=str(home / "cold")) as (supervisor, kv):
        await reused(supervisor, prompt(1), session_id="one", ttl_s=0.5)
        await kept(kv)
        contents = contents_of(kv)
        heads = kv.store.heads if kv.store is not None else None
        assert heads is not None
        await until(lambda: bool(heads.idle()), "it rests")
        assert (await contents.collect(unwatched, never)).num_demoted == NUM_BLOCKS
        assert (await contents.find("one")).view.tier == "cold"
        verified = await contents.verify(unwatched, never)
        assert verified.num_damaged == 0
        assert verified.num_verified >= NUM_BLOCKS
        packed = max((home / "cold").rglob("*"), key=lambda path: path.stat().st_size)
        packed.write_bytes(packed.read_bytes()[:-9])
        assert (await contents.verify(unwatched, never)).num_damaged == 1
        await contents.remove(await contents.named("one"))
        assert [*(home / "cold").rglob("*.zst")] == []


async def test_without_a_disk_there_is_nothing_to_look_at(home: Path):
    async with serving(home, kv_disk=False) as (supervisor, kv):
        await reused(supervisor, prompt(1), session_id="one")
        contents: KvContents = contents_of(kv)
        with pytest.raises(StoreUnavailable):
            await contents.kept()
        removed = await contents.remove(await contents.named("one"))
        assert removed.num_conversations == 1
        assert (await reused(supervisor, prompt(1))).num_tokens == 0
