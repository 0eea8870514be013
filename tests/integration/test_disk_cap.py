"""The disk is within its cap at every moment, as somebody outside sees it."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from runtime.cache.service import KvStore
from runtime.supervisor.supervisor import Supervisor
from runtime.types import CacheParams, ChatPrompt, Message, TokenPrompt
from store.keyed_names import Whom
from tests.asking import ask
from tests.disk_observer import Observer, bytes_at_once
from tests.integration.test_kv_blocks_kept import serving
from tests.tiny_models import write_model
from tests.waiting import until

CAP_BYTES = 1_500_000
NUM_STEPS = 30


@pytest.fixture
def home(tmp_path: Path) -> Path:
    write_model(tmp_path / "models" / "m")
    return tmp_path


async def live(supervisor: Supervisor, kv: KvStore, seed: int) -> None:
    """Long and short prompts, turns with texts, deletions, and a rest now and then."""
    dice, said = random.Random(seed), list[tuple[int, ...]]()
    for number in range(NUM_STEPS):
        cache = CacheParams(session_id=str(number % 5))
        match dice.randrange(6):
            case 0:
                await kv.delete(Whom(session_id=str(dice.randrange(5))))
            case 1:
                text = " ".join(f"{dice.getrandbits(32):08x}" for _ in range(30))
                chat = ChatPrompt(messages=(Message(role="user", text=text),))
                await ask(supervisor, chat, max_tokens=4, cache=cache)
            case _:
                begun = dice.choice(said) if said and dice.random() < 0.5 else ()
                fresh = (dice.randrange(9, 400) for _ in range(dice.randrange(20, 500)))
                said.append((*begun, *fresh)[:1500])
                await ask(supervisor, TokenPrompt(token_ids=said[-1]), max_tokens=2, cache=cache)


async def seen(home: Path, cap_bytes: int, seed: int) -> Observer:
    """What somebody outside saw while a server with that cap was used."""
    with Observer(home / "kv") as observer:
        async with serving(home, cache_max_bytes=cap_bytes, block_size=64) as (supervisor, kv):
            await live(supervisor, kv, seed)
    assert observer.num_looks > 0
    return observer


@pytest.mark.parametrize("seed", [1, 2])
async def test_nobody_ever_sees_more_on_the_disk_than_the_cap(home: Path, seed: int):
    observer = await seen(home, CAP_BYTES, seed)
    assert CAP_BYTES // 2 < observer.most_bytes <= CAP_BYTES
    assert bytes_at_once(home / "kv") <= CAP_BYTES


async def test_under_a_lowered_cap_the_disk_holds_less_and_less_until_it_is_kept(home: Path):
    """Without a cap that is in the way they take more, which the observer sees."""
    before = (await seen(home, 1 << 30, 1)).most_bytes
    assert before > CAP_BYTES
    log_bytes = 512 << 10
    with Observer(home / "kv") as observer:
        async with serving(home, cache_max_bytes=CAP_BYTES, block_size=64) as (supervisor, kv):
            await ask(supervisor, TokenPrompt(token_ids=tuple(range(9, 300))), max_tokens=2)
            await until(lambda: bytes_at_once(home / "kv") <= CAP_BYTES, "the cap")
            assert kv.status.state == "ok"
    assert observer.most_bytes <= before + log_bytes
