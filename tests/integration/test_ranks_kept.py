"""The KV of a model on two ranks, on disk: each has its part of everything, or it has nothing."""

from __future__ import annotations

import asyncio
import queue
from array import array
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
import pytest_asyncio

from runtime.cache.service import KvStore
from runtime.config.settings import ModelSettings
from runtime.kv.others import Has
from runtime.kv.others import Span as Kept
from runtime.kv.pack import RunKv
from runtime.kv.parts import Span
from runtime.kv.reader import Reader, Tidy
from runtime.ranks import BACKENDS, LOOPBACK, Ranks, Split
from runtime.supervisor.supervisor import Supervisor
from runtime.types import CacheParams, TokenPrompt
from runtime.worker.distributed.disks import OtherDisks, RankDisk
from runtime.worker.distributed.launch import Followers, RanksFailed
from runtime.worker.distributed.leader import Leader
from runtime.worker.distributed.questions import Questions
from runtime.worker.distributed.records import (
    Answer,
    Cut,
    DiskRecord,
    Free,
    Have,
    HaveAny,
    Loaded,
    Read,
    Record,
    Remove,
    Sync,
    Write,
)
from runtime.worker.distributed.shards import LeaderParts, Rank, RankParts, number_of
from runtime.worker.model import LoadedModel, split
from store.block_names import HashChain
from store.errors import SlotDamaged, SlotMissing
from store.head_file import Head, Owner, head_folder, write_head
from store.keyed_names import Whom
from store.slots import BlockKey, SlotAbout, Slots
from tests.asking import ask
from tests.integration.test_kv_blocks_kept import kept, num_heads, prompt, reused, serving
from tests.kv_sessions import load
from tests.rank_talk import LONG, Talk, spoil
from tests.tiny_models import write_model
from tests.waiting import until

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(
        not mx.distributed.is_available("ring"), reason="this build of mlx has no ring"
    ),
]

BLOCK = 16
MODEL = b"m" * 32


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("home")
    write_model(home / "models" / "m")
    write_model(home / "models" / "layered", "qwen3_next")
    return home


def talking(
    home: Path, *, ranks: int = 2, **settings: Any
) -> AbstractAsyncContextManager[tuple[Supervisor, KvStore]]:
    models = {name: ModelSettings(ranks=ranks) for name in ("m", "layered")}
    return serving(home, **({"models": models, "prewarm_share": 0.0} | settings))


def files(kv: KvStore) -> list[Path]:
    """All slots, states and ends of all ranks."""
    return [*(kv.settings.kv_root / "slots").rglob("*.safetensors")]


def of_rank_1(kv: KvStore) -> list[Path]:
    return [one for one in files(kv) if "ranks" in one.parts]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def alone(home: Path) -> tuple[str, str]:
    """What one rank says."""
    async with serving(home / "alone", models_dir=home / "models", kv_disk=False) as (one, kv):
        talk = Talk(one, kv, await ask(one, LONG))
        return talk.first.text, (await talk.go_on()).text


@pytest.mark.parametrize("rank", [0, 1])
async def test_what_is_gone_of_one_rank_is_computed_again(
    home: Path, alone: tuple[str, str], rank: int
):
    async with talking(home, kv_dir=home / f"gone {rank}", block_size=64) as (supervisor, kv):
        talk = Talk(supervisor, kv, await ask(supervisor, LONG))
        await talk.published()
        for one in files(kv):
            if ("ranks" in one.parts) == bool(rank):
                one.unlink()
        await talk.kill()
        second = await talk.go_on()
        use = second.finished.usage.cache
        assert (second.text, use.num_tokens) == (alone[1], 0)


@pytest.mark.parametrize("model", ["m", "layered"])
async def test_a_restart_and_prewarming_are_for_all_ranks(home: Path, model: str):
    """Split by heads, and by layers of which some keep a state."""
    said: list[tuple[str, int]] = []
    for ranks in (1, 2):
        folder = home / f"{model} on {ranks}"
        async with talking(home, ranks=ranks, kv_dir=folder) as (supervisor, kv):
            first = await ask(supervisor, LONG, model=model)
            talk = Talk(supervisor, kv, first, model)
            known = await talk.published()
            token_ids = talk.store.heads.read(known.head.id).token_ids
        async with talking(home, ranks=ranks, kv_dir=folder, prewarm_share=0.5) as (one, _):
            longer = TokenPrompt(token_ids=(*token_ids, 11, 12, 13))
            second = await ask(one, longer, model=model)
            use = second.finished.usage.cache
            assert use.num_tokens == len(token_ids) > 256
            said.append((second.text, use.num_tokens))
    assert said[0] == said[1]


async def test_numbers_of_ranks_never_share_a_slot(home: Path, alone: tuple[str, str]):
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


async def test_all_that_ranks_have_is_counted_and_leaves_with_its_conversation(home: Path):
    async with talking(home, kv_dir=home / "deleted", block_size=64) as (supervisor, kv):
        await reused(supervisor, prompt(2), session_id="stays")
        await kept(kv)
        first = await ask(supervisor, LONG, cache=CacheParams(session_id="goes"))
        known = await Talk(supervisor, kv, first).published()
        store = kv.store
        assert store is not None
        key = Talk(supervisor, kv, first).chain(known)[0]
        (slot_bytes, _), other = store.slots.disk_bytes(key), store.slots.of_rank(1)
        assert slot_bytes == 2 * other.disk_bytes(key)[0]
        assert store.heads.kept.blocks[key].sizes.slot == slot_bytes
        end = BlockKey(key.model, known.end)
        assert other.has_state(end)
        assert known.num_bytes > store.slots.end_bytes(end) > 0
        await kv.delete(Whom(session_id="goes"))
        left = {one.name.partition(".")[0] for one in files(kv)}
        with store.heads.lock:
            named = {*store.heads.kept.blocks, *store.heads.ends}
        assert left <= {one.name.hex() for one in named}
        assert not other.has(key)
        assert not other.has_state(end)
        assert (await reused(supervisor, prompt(2))).tier == "hot"
        await kv.delete(Whom())
        assert files(kv) == []


@pytest.mark.parametrize("num_pauses", [0, 3, 10])
async def test_of_what_is_deleted_while_it_is_written_no_rank_has_a_file(
    home: Path, num_pauses: int
):
    folder = home / f"deleted after {num_pauses}"
    async with talking(home, kv_dir=folder, block_size=BLOCK) as (supervisor, kv):
        assert (await reused(supervisor, prompt(2), session_id="goes")).tier == "none"
        for _ in range(num_pauses):  # writing comes a little further each time
            await kv.loaded()[0].in_memory(())
        await kv.delete(Whom(session_id="goes"))
        assert files(kv) == []
        assert num_heads(kv) == 0


async def test_a_kill_while_ranks_write_leaves_nothing_that_is_wrong(
    home: Path, alone: tuple[str, str]
):
    async with talking(home, kv_dir=home / "killed", block_size=BLOCK) as (supervisor, kv):
        asking = asyncio.create_task(ask(supervisor, LONG))
        await until(lambda: of_rank_1(kv), "a rank writes")
        await Talk(supervisor, kv, await asking).kill()
        first = await ask(supervisor, LONG)
        assert first.text == alone[0]
        await Talk(supervisor, kv, first).published()
    async with talking(home, kv_dir=home / "killed", block_size=BLOCK) as (supervisor, kv):
        assert kv.store is not None or await kv.is_open()
        store = kv.store
        assert store is not None
        named = {*store.heads.kept.blocks, *store.heads.ends}
        assert store.slots.found().keys() <= named
        second = await Talk(supervisor, kv, first).go_on()
        assert second.text == alone[1]
        assert second.finished.usage.cache.num_tokens > 256


class OtherMachine:
    """Rank 1 with the same layers and a disk of its own, which does as it is told."""

    def __init__(self, model: LoadedModel, root: Path) -> None:
        self.model = model
        self.records: list[Record] = []
        self.runs: dict[int, RunKv] = {}
        self.slots = Slots(root).of_rank(1)
        self.parts = RankParts(model, Rank(1, 2, "tensor"))
        self.asked: queue.SimpleQueue[DiskRecord] = queue.SimpleQueue()
        self.questions = Questions(self.send, 1)
        self.ask = self.questions.ask
        self.disk = RankDisk(self.slots, self.parts, self.runs, self.asked, self._answer)

    def _answer(self, answer: Answer) -> None:
        self.questions.hear(1, answer)

    def send(self, record: Record) -> None:
        self.records.append(record)
        match record:
            case Have() | HaveAny() | Read() | Sync() | Remove():
                self.asked.put(record)
            case Cut(spans=spans, runs=runs):
                kv = self.model.new_kv()
                self.model.prefill([1, 2, 3], kv)
                self.runs.update(zip(runs, self.parts.cut(kv, spans), strict=True))
            case Write():
                self.disk.write(record)
            case _:
                pass

    def loaded(self) -> list[Loaded]:
        return [Loaded(needs_state=False, unsupported=None)]


class Apart:
    """Rank 0, which has a run of three tokens, and the other one's disk."""

    def __init__(self, home: Path, root: Path) -> None:
        model = load(home / "models" / "m")
        self.other = OtherMachine(model, root)
        lead = Leader(self.other)
        self.parts = LeaderParts(model, Rank(0, 2, "tensor"), lead)
        self.disks = OtherDisks(lead, are_away=True)
        kv = lead.share(model.new_kv())
        model.prefill([1, 2, 3], kv)
        (self.run,) = self.parts.cut(kv, [Span(0, 3, has_state=False)])

    def write(self, *names: bytes) -> None:
        packed = self.parts.packed(self.run)
        for name in names:
            about = SlotAbout(MODEL, name, packed.layout)
            self.disks.write(about, array("I", [1, 2, 3]), packed.share)
        self.disks.sync(MODEL)


def names(*numbers: int) -> list[bytes]:
    return [bytes([number]) * 16 for number in numbers]


async def test_a_rank_on_another_machine_has_its_part_on_its_own_disk(home: Path, tmp_path: Path):
    apart = Apart(home, tmp_path / "there")
    one, two = names(1, 2)
    apart.write(one)
    assert apart.disks.have(MODEL, [one, two]) == [Has(True, False), Has(False, False)]
    share = apart.disks.read(BlockKey(MODEL, one), Kept(0, 3, is_state=False))()
    number = number_of(share)
    read, cut = (apart.other.runs[n] for n in (number, number_of(apart.run.share)))
    assert all(mx.array_equal(a, b) for a, b in zip(read.slices, cut.slices, strict=True))
    del share
    apart.parts.give_back()
    freed = [n for one in apart.other.records if isinstance(one, Free) for n in one.numbers]
    assert number in freed
    apart.disks.remove(MODEL, [one])
    await until(lambda: not apart.disks.names_of(MODEL), "what was deleted is gone there")


async def test_what_one_rank_cannot_read_no_rank_takes_up(home: Path, tmp_path: Path):
    apart = Apart(home, tmp_path / "there")
    one, two, three = names(1, 2, 3)
    apart.write(one, two)
    spoil(apart.other.slots.path(BlockKey(MODEL, one)))
    span = Kept(0, 3, is_state=False)
    with pytest.raises(SlotDamaged, match="rank 1: the checksum differs"):
        apart.disks.read(BlockKey(MODEL, one), span)()
    with pytest.raises(SlotMissing, match="rank 1: "):
        apart.disks.read(BlockKey(MODEL, three), span)()
    with pytest.raises(SlotDamaged, match="rank 1: its tensors do not hold 4 tokens"):
        apart.disks.read(BlockKey(MODEL, two), span._replace(num_tokens=4))()
    assert apart.disks.names_of(MODEL) == set()


async def test_what_left_while_a_machine_was_away_goes_there_when_the_model_is_loaded(
    home: Path, tmp_path: Path
):
    """Its slots of blocks that rank 0 has stay, and its parts of the ends of heads."""
    apart, chain = Apart(home, tmp_path / "there"), HashChain(b"secret", MODEL, block_size=BLOCK)
    here, heads = Slots(tmp_path / "slots"), tmp_path / "heads"
    token_ids = array("I", range(BLOCK + 3))
    (block,) = chain.block_hashes(token_ids)
    end, gone = chain.end_hash(block, token_ids[BLOCK:]), names(9)[0]
    here.put(SlotAbout(MODEL, block), token_ids[:BLOCK], [])
    folder = head_folder(heads, BlockKey(MODEL, block))
    folder.mkdir(parents=True)
    head = Head("h", MODEL, Owner(b"", b"", b""), len(token_ids))
    write_head(folder / "h.safetensors", head, token_ids)
    apart.write(block, end, gone)
    reader = Reader(here, heads, lambda _: None, BLOCK, others=apart.disks)
    reader.ask(Tidy(MODEL, chain))
    reader.close()
    await until(lambda: apart.disks.names_of(MODEL) == {block, end}, "only what is there stays")


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
