"""The KV of a model on two ranks, on disk: one slot has the parts of both, or it has nothing."""

from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
import pytest_asyncio

from runtime.cache.compaction import compact
from runtime.config.settings import ModelSettings
from runtime.kv.parts import Span
from runtime.kv.writer import Packed
from runtime.ranks import BACKENDS, LOOPBACK, Ranks, Split
from runtime.types import CacheParams, TokenPrompt
from runtime.worker.distributed.launch import Followers, RanksFailed
from runtime.worker.distributed.leader import Leader
from runtime.worker.distributed.records import Free, HasRead, Loaded, Read, Record
from runtime.worker.distributed.shards import LeaderParts, Rank
from runtime.worker.model import split
from store.errors import SlotDamaged, SlotMissing, StoreError, StoreFailed
from store.slots import slot_path
from store.types import SlotHeader
from tests.asking import ask, supervising_with_store
from tests.kv_sessions import load
from tests.rank_talk import LONG, Talk
from tests.tiny_models import write_model
from tests.waiting import until

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(
        not mx.distributed.is_available("ring"), reason="this build of mlx has no ring"
    ),
]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("home")
    write_model(home / "models" / "m")
    write_model(home / "models" / "layered", "qwen3_next")
    return home


def talking(home: Path, *, ranks: int = 2, **settings: Any) -> Any:
    models = {name: ModelSettings(ranks=ranks) for name in ("m", "layered")}
    fields = {"kv_disk": True, "prewarm_share": 0.0} | settings
    return supervising_with_store(home, models=models, **fields)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def alone(home: Path) -> tuple[str, str, int]:
    """What one rank says, and how much of the first turn the second one took up."""
    async with supervising_with_store(home / "alone", models_dir=home / "models") as (one, kv):
        talk = Talk(one, kv, await ask(one, LONG))
        second = await talk.go_on()
        return talk.first.text, second.text, second.finished.usage.cache.num_tokens


@pytest.mark.soak
async def test_a_slot_that_is_gone_is_computed_again(home: Path, alone: tuple[str, str, int]):
    async with talking(home, kv_dir=home / "gone") as (supervisor, kv):
        talk = Talk(supervisor, kv, await ask(supervisor, LONG))
        for row in await talk.published():
            assert kv.store is not None
            slot_path(kv.store.root, row.header.id).unlink()
        await talk.kill()
        second = await talk.go_on()
        assert (second.text, second.finished.usage.cache.num_tokens) == (alone[1], 0)


@pytest.mark.soak
@pytest.mark.parametrize("model", ["m", "layered"])
async def test_a_restart_and_prewarming_are_for_all_ranks(home: Path, model: str):
    """Split by heads, and by layers of which some keep a state."""
    said: list[tuple[str, int]] = []
    for ranks in (1, 2):
        folder = home / f"{model} on {ranks}"
        async with talking(home, ranks=ranks, kv_dir=folder) as (supervisor, kv):
            first = await ask(supervisor, LONG, model=model)
            await Talk(supervisor, kv, first, model).published()
        async with talking(home, ranks=ranks, kv_dir=folder, prewarm_share=0.5) as (one, kv):
            second = await Talk(one, kv, first, model).go_on()
            said.append((second.text, second.finished.usage.cache.num_tokens))
    assert said[0] == said[1]
    assert said[0][1] > 256


@pytest.mark.soak
async def test_numbers_of_ranks_never_share_a_slot(home: Path, alone: tuple[str, str, int]):
    """A model that is split otherwise begins anew; as it was before it finds what it left."""
    folder = home / "crossing"
    found: list[tuple[int, str | None]] = []
    for ranks in (2, 1, 2):
        async with talking(home, ranks=ranks, kv_dir=folder) as (supervisor, kv):
            first = await ask(supervisor, LONG)
            assert first.text == alone[0]
            use = first.finished.usage.cache
            found.append((use.num_tokens, use.reason))
            await Talk(supervisor, kv, first).published()
    num_prompt_tokens = first.finished.usage.num_prompt_tokens
    assert found == [(0, "first_seen"), (0, "first_seen"), (num_prompt_tokens - 1, None)]


@pytest.mark.soak
async def test_merged_slots_have_the_parts_of_all_ranks(home: Path):
    """As they are taken over in memory, and as they are read again."""
    token_ids = tuple(9 + i % 300 for i in range(1400))
    async with talking(home, kv_dir=home / "merged") as (supervisor, kv):
        for end in range(60, 1300, 60):
            await ask(supervisor, TokenPrompt(token_ids=token_ids[:end]), max_tokens=1)
        whole = TokenPrompt(token_ids=token_ids)
        expected = await ask(supervisor, whole, max_tokens=30, cache=CacheParams(mode="off"))
        talk = Talk(supervisor, kv, expected)
        await until(lambda: max(row.header.end for row in talk.slots()) >= 1259, "all on disk")
        assert kv.store is not None
        while not kv.store.counts["compacted"]:
            await kv.chore(lambda store: compact(store, kv.loaded_models, lambda: False))
        for tier in ("hot", "warm"):
            said = await ask(supervisor, whole, max_tokens=30)
            use = said.finished.usage.cache
            assert (said.text, use.tier) == (expected.text, tier)
            assert use.num_tokens >= 1259
            await talk.kill()


class OtherRank:
    """Rank 1 with the same layers, which answers to `Read` as it was told."""

    def __init__(self) -> None:
        self.records: list[Record] = []
        self.answer = HasRead()

    def send(self, record: Record) -> None:
        self.records.append(record)

    def loaded(self) -> list[Loaded]:
        return [Loaded(needs_state=False, unsupported=None)]

    def has_read(self) -> list[HasRead]:
        return [self.answer]

    def given(self) -> list[Packed]:
        return [Packed("{}", [])]


@pytest.mark.parametrize("failure", [SlotDamaged, SlotMissing, StoreFailed])
async def test_what_one_rank_cannot_take_up_no_rank_has(home: Path, failure: type[StoreError]):
    model = load(home / "models" / "m")
    other = OtherRank()
    lead = Leader(other)
    parts = LeaderParts(model, Rank(0, 2, "tensor"), lead)
    kv = lead.share(model.new_kv())
    model.prefill([1, 2, 3], kv)
    (run,) = parts.cut(kv, [Span(0, 3, has_state=False)])
    packed = parts.pack(run)
    assert packed.whole is not None
    layout, tensors, *_ = packed.whole()
    header = SlotHeader(
        id="0" * 32,
        model=b"m" * 32,
        start_hash=b"",
        start=0,
        end=3,
        block_size=256,
        block_hashes=(),
        end_hash=b"e" * 16,
        layout=layout,
        has_state=False,
        recompute_ms=0.0,
        created_s=0.0,
    )
    arrays = {
        one.name: mx.array(list(one.data), mx.uint8).view(mx.float32).reshape(one.shape)
        for one in tensors
    }
    again = parts.take(header, arrays)
    assert all(mx.array_equal(a, b) for a, b in zip(again.slices, run.slices, strict=True))
    other.answer = HasRead(failure=failure.reason, message="it is not there")
    with pytest.raises(failure, match="rank 1: it is not there"):
        parts.take(header, arrays)
    del run, again, packed
    parts.give_back()
    read = [one.run for one in other.records if isinstance(one, Read)]
    freed = [number for one in other.records if isinstance(one, Free) for number in one.numbers]
    assert len(read) == 2
    assert set(read) <= set(freed)


async def test_a_backend_that_this_mlx_lacks_is_named():
    lacking = [one for one in BACKENDS if not mx.distributed.is_available(one.partition("-")[0])]
    for backend in lacking:
        name = backend.partition("-")[0]
        with pytest.raises(RanksFailed, match=f"this build of mlx has no {name}; choose another"):
            Followers(Ranks(hosts=(LOOPBACK,) * 2, backend=backend), print)


async def test_what_mlx_lm_cannot_split_so_says_how_it_can(home: Path):
    group = mx.distributed.init()
    cases: list[tuple[str, Split, Split]] = [
        ("m", "pipeline", "tensor"),
        ("layered", "tensor", "pipeline"),
    ]
    for model, wanted, remedy in cases:
        whole = load(home / "models" / model).model
        with pytest.raises(ValueError, match=f'no "{wanted}" split .* use split = "{remedy}"'):
            split(whole, group, wanted)
        assert split(whole, group, None) == remedy
