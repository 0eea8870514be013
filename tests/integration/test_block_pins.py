"""Prompts that are pinned in a store by blocks: who pinned them, how much, and until when."""

from __future__ import annotations

from pathlib import Path

import pytest

from runtime.cache.contents import KvContents
from runtime.cache.service import KvStore
from runtime.errors import PinsFull
from runtime.supervisor.supervisor import Supervisor
from runtime.types import CacheParams
from tests.asking import ask
from tests.integration.test_kv_blocks_kept import NUM_TOKENS, home, models, prompt, reused, serving
from tests.waiting import until

__all__ = ["home", "models"]

ASKED, CONFIGURED = "prewarm-1", "config:one"


def pins(kv: KvStore) -> dict[str, int]:
    """How many tokens each source has pinned."""
    heads = kv.store.heads.known.values() if kv.store is not None else ()
    return {source: one.head.num_tokens for one in heads for source in one.head.pins}


async def pinned(supervisor: Supervisor, number: int, source: str, session: str) -> None:
    wish = CacheParams(session_id=session, pin=source)
    await ask(supervisor, prompt(number), work="prefill", cache=wish)


async def test_a_pinned_prompt_stays_when_its_conversation_goes_on(home: Path):
    async with serving(home) as (supervisor, kv):
        await pinned(supervisor, 1, CONFIGURED, "s")
        await until(lambda: pins(kv), "it is pinned")
        longer = prompt(1, NUM_TOKENS + 600)
        await reused(supervisor, longer, session_id="s")
        assert kv.store is not None
        known = kv.store.heads.known
        await until(
            lambda: any(one.head.num_tokens > NUM_TOKENS + 600 for one in known.values()), ""
        )
        assert pins(kv) == {CONFIGURED: NUM_TOKENS - 1}


async def test_what_is_stale_is_taken_back_and_the_rest_stays(home: Path):
    async with serving(home) as (supervisor, kv):
        await pinned(supervisor, 1, CONFIGURED, "a")
        await pinned(supervisor, 2, "config:two", "b")
        await until(lambda: len(pins(kv)) == 2, "both are pinned")
        await kv.pins.unpin_all("m", lambda source, name: (source, name) == (CONFIGURED, "m"))
        assert pins(kv) == {"config:two": NUM_TOKENS - 1}


async def test_a_pin_that_is_taken_back_before_it_comes_is_none(home: Path):
    async with serving(home) as (supervisor, kv):
        assert await kv.pins.take_back(ASKED) == 0
        await pinned(supervisor, 1, ASKED, "a")
        await pinned(supervisor, 2, CONFIGURED, "b")
        await until(lambda: CONFIGURED in pins(kv), "the other one is pinned")
        assert kv.store is not None
        known = kv.store.heads.known
        await until(lambda: len({one.head.owner.session for one in known.values()}) == 2, "both")
        await until(lambda: [*pins(kv)] == [CONFIGURED], "the first one is taken back")
        assert await kv.pins.take_back(CONFIGURED) == 1
        assert pins(kv) == {}


async def test_more_than_its_share_no_tenant_pins(home: Path):
    async with serving(home, pinned_max_bytes=100_000) as (supervisor, kv):
        await kv.settled()
        with pytest.raises(PinsFull, match="pinned_max_bytes"):
            await kv.pins.check_pins("", 100_001)
        await kv.pins.check_pins("", 100_000)
        await pinned(supervisor, 1, ASKED, "a")
        await until(lambda: ASKED in kv.pins.refused_pins, "it is refused")
        await until(lambda: pins(kv) == {}, "nothing is pinned")
        assert kv.pins.refused_pins[ASKED].most_bytes == 100_000


async def test_pins_are_there_after_a_restart_and_go_with_what_is_deleted(home: Path):
    async with serving(home) as (supervisor, kv):
        await ask(supervisor, prompt(1), work="prefill", cache=CacheParams(pin=ASKED))
        await until(lambda: pins(kv), "it is pinned")
    async with serving(home) as (supervisor, kv):
        await kv.settled()
        assert pins(kv) == {ASKED: NUM_TOKENS - 1}
        assert kv.store is not None
        kv.pins.keep_to_share(kv.store)
        assert pins(kv) == {ASKED: NUM_TOKENS - 1}
        head = next(one for one in kv.store.heads.known.values() if one.head.pins)
        await kv.delete_head(head.head.id)
        assert pins(kv) == {}
    async with serving(home, pinned_max_bytes=1) as (_, kv):
        await kv.settled()
        assert pins(kv) == {}


async def test_a_smaller_share_takes_the_latest_pins_back(home: Path):
    async with serving(home) as (supervisor, kv):
        await pinned(supervisor, 1, "prewarm-1", "a")
        await pinned(supervisor, 2, "prewarm-2", "b")
        await until(lambda: len(pins(kv)) == 2, "both are pinned")
        assert kv.store is not None
        known = kv.store.heads.known.values()
        ids = [one.head.id for one in known if "prewarm-1" in one.head.pins]
        one_bytes = kv.store.room.bytes_of(ids)
    async with serving(home, pinned_max_bytes=one_bytes * 3 // 2) as (_, kv):
        await kv.settled()
        assert kv.store is not None
        kv.pins.keep_to_share(kv.store)
        assert [*pins(kv)] == ["prewarm-1"]


async def test_what_is_pinned_and_what_was_used_last_comes_back_with_its_model(home: Path):
    async with serving(home) as (supervisor, kv):
        await pinned(supervisor, 1, CONFIGURED, "a")
        await reused(supervisor, prompt(2), session_id="b")
        await reused(supervisor, prompt(3), session_id="c")
        await until(lambda: kv.store is not None and len(kv.store.heads.known) == 3, "all are kept")
    async with serving(home) as (supervisor, kv):
        await reused(supervisor, prompt(9), session_id="first")
        contents = KvContents(kv, kv.settings)

        there: set[str] = set()
        while there != {"a", "b", "c"}:
            held = await contents.held(["a", "b", "c"])
            there = {name for name, models in held.items() if models}


async def test_what_is_pinned_or_announced_comes_back_whatever_the_share_of_the_rest(home: Path):
    async with serving(home) as (supervisor, kv):
        await pinned(supervisor, 1, CONFIGURED, "a")
        await reused(supervisor, prompt(2), session_id="b")
        await reused(supervisor, prompt(3), session_id="c")
        await until(lambda: kv.store is not None and len(kv.store.heads.known) == 3, "all are kept")
    async with serving(home, prewarm_share=0.0) as (supervisor, kv):
        await reused(supervisor, prompt(9), session_id="first")
        contents = KvContents(kv, kv.settings)
        there: set[str] = set()
        for wanted in ({"a"}, {"a", "b"}):
            while not wanted <= there:
                held = await contents.held(["a", "b", "c"])
                there = {name for name, models in held.items() if models}
            assert there == wanted
            assert await contents.bring(await contents.find("b")) == NUM_TOKENS + 2


async def test_what_is_pinned_is_written_also_when_enough_was_written_today(home: Path):
    async with serving(home, kv_daily_write_bytes=100_000) as (supervisor, kv):
        await ask(supervisor, prompt(1))
        await until(lambda: kv.figures().models["m"].num_unwritten, "no more is written")
        await ask(supervisor, prompt(2))
        await pinned(supervisor, 3, CONFIGURED, "a")
        await until(lambda: pins(kv), "it is pinned")
    async with serving(home) as (supervisor, kv):
        assert (await reused(supervisor, prompt(2))).num_tokens < NUM_TOKENS // 2
        assert (await reused(supervisor, prompt(3))).num_tokens >= NUM_TOKENS - 256
