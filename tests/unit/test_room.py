"""Room for blocks, their index and the cold store, case by case. `test_heads` mixes them all."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from uuid import uuid4

import pytest
from msgspec.structs import replace

from migrations.run import upgrade
from store.block_names import HashChain
from store.cold import ColdDirectory, ColdSlot
from store.cold_blocks import ColdBlocks, cold_id
from store.database import Database
from store.errors import ColdAway, SlotMissing, StoreFailed
from store.file_kinds import INDEX
from store.head_file import KEPT, Head, HeadFile, KnownHead, Owner, read_end, write_head
from store.heads import BlockFile, Heads, Published, TurnedAway, Whom
from store.index import Change, Index
from store.kv_file import Tensor
from store.opening import open_database
from store.room import MAX_STATES, Limits, Room, Surroundings, file_bytes
from store.slots import BlockKey, SlotAbout, Slots
from store.tree import Block
from store.types import Instant
from store.upkeep import DiskRoom
from tests.disk_observer import bytes_at_once

BLOCK = 4
MODEL = b"m" * 16
CHAIN = HashChain(b"secret", MODEL, block_size=BLOCK)
DAY_S = 86_400.0
LOOSE = Limits(1 << 40)
LARGE = DiskRoom(1 << 50, 1 << 49)


class Cold(ColdDirectory):
    is_away = False

    def put(self, slot_id: str, chunks: Iterable[bytes]) -> ColdSlot:
        self.check()
        return super().put(slot_id, chunks)

    def get(self, slot_id: str):
        self.check()
        return super().get(slot_id)

    def delete(self, slot_id: str) -> bool:
        self.check()
        return super().delete(slot_id)

    def check(self) -> None:
        if self.is_away:
            raise ColdAway("it is away")


@dataclass
class Store:
    root: Path
    limits: Limits = LOOSE
    disk: DiskRoom = LARGE
    cold: Cold | None = None
    seconds: float = 1e9
    heads: Heads = field(init=False)
    room: Room = field(init=False)
    database: Database | None = None

    def __post_init__(self) -> None:
        self.open()

    def open(self) -> None:
        self.close()
        read = lambda: Instant(self.seconds, self.seconds, "boot")  # noqa: E731
        self.database = open_database(self.root / "index", upgrade, kind=INDEX, read=read)
        self.slots = Slots(self.root / "slots")
        self.index = Index(self.database)
        now_s = self.database.clock.now_s
        self.heads = Heads(self.root / "heads", self.slots, lambda _: CHAIN, now_s, self.index)
        self.cold_blocks = ColdBlocks(self.heads, self.cold) if self.cold else None
        self.room = Room(
            self.heads,
            self.limits,
            Surroundings(lambda: self.disk, lambda: 0),
            lambda: self.seconds,
            self.cold_blocks,
        )

    def close(self) -> None:
        if self.database is not None:
            self.database.close()

    def turn(
        self,
        tokens: list[int],
        session: bytes = b"s",
        *,
        before: KnownHead | None = None,
        ttl_s: float | None = None,
        is_pinned: bool = False,
        with_states: bool = False,
        end_bytes: int = 0,
        age_s: float = 0.0,
    ) -> KnownHead:
        keys = keys_of(tokens)
        for number, key in enumerate(keys):
            ids = tokens[number * BLOCK : (number + 1) * BLOCK]
            about, kv = SlotAbout(MODEL, key.name), Tensor("kv", "U8", (BLOCK,), bytes(BLOCK))
            self.slots.put(about, ids, [kv])
            if with_states:
                self.slots.put_state(about, [kv])
        head = head_of(tokens, session, before, ttl_s, is_pinned=is_pinned)
        staged = self.heads.staging_path()
        end = [Tensor("kv", "U8", (end_bytes,), bytes(end_bytes))] if end_bytes else []
        write_head(staged, replace(head, layout="end" if end else ""), tokens, end)
        published = self.heads.publish(staged, self.heads.number, age_s=age_s)
        assert isinstance(published, Published)
        return published.known

    def there(self, tokens: list[int]) -> list[int]:
        return [n for n, key in enumerate(keys_of(tokens)) if self.slots.has(key)]

    def tiers(self, tokens: list[int]) -> list[str]:
        return [self.heads.kept.blocks[key].sizes.tier for key in keys_of(tokens)]


def keys_of(tokens: list[int]) -> list[BlockKey]:
    return [BlockKey(MODEL, name) for name in CHAIN.block_hashes(tokens)]


def head_of(
    tokens: list[int],
    session: bytes,
    before: KnownHead | None = None,
    ttl_s: float | None = None,
    *,
    is_pinned: bool = False,
) -> Head:
    return Head(
        id=uuid4().hex,
        model=MODEL,
        owner=Owner(b"asked", session, b""),
        num_tokens=len(tokens),
        continues=before.end if before else b"",
        ttl_s=ttl_s,
        pins=(KEPT,) if is_pinned else (),
    )


def tokens_of(first: int, num_blocks: int) -> list[int]:
    return [first, *range(BLOCK * num_blocks - 1)]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    made = Store(tmp_path)
    yield made
    made.close()


@pytest.fixture
def with_cold(tmp_path: Path) -> Iterator[tuple[Store, Cold]]:
    cold = Cold(tmp_path / "cold")
    made = Store(tmp_path, Limits(1 << 40, 1 << 40, 1000.0), cold=cold)
    yield made, cold
    made.close()


def test_a_start_reads_no_head_that_the_rows_know(store: Store, monkeypatch: pytest.MonkeyPatch):
    first, second = store.turn(tokens_of(1, 3)), store.turn(tokens_of(2, 2), b"t")
    store.index.flush()
    read: list[Path] = []

    def unread(path: Path) -> HeadFile:
        read.append(path)
        raise SlotMissing("it is not to be read")

    monkeypatch.setattr("store.heads.read_head", unread)
    store.open()
    assert not read
    assert store.heads.known == {first.head.id: first, second.head.id: second}


@pytest.mark.parametrize("damage", ["gone", "zeros", "cut"])
def test_without_its_index_a_store_has_all_but_the_times(store: Store, damage: str):
    store.seconds += 50
    known = store.turn(tokens_of(1, 3))
    store.close()
    path = store.root / "index"
    content = path.read_bytes()
    path.unlink()
    if damage != "gone":
        path.write_bytes(bytes(100_000) if damage == "zeros" else content[:5000])
    store.seconds += 50
    store.open()
    now_s = store.heads.now_s()
    found = store.heads.known[known.head.id]
    assert found == known._replace(created_s=now_s, last_used_s=now_s)
    assert store.tiers(tokens_of(1, 3)) == ["warm"] * 3


def test_damage_that_is_found_late_costs_the_rows_only(store: Store):
    known = store.turn(tokens_of(1, 3))
    many = [(BlockKey(MODEL, b"%016d" % number), Block(None)) for number in range(20_000)]
    store.index.write(Change(blocks=many))
    store.index.flush()
    store.close()
    path = store.root / "index"
    content = path.read_bytes()
    half = len(content) // 2
    path.write_bytes(content[:half] + b"\xff" * (len(content) - half))
    store.open()
    assert store.heads.known[known.head.id].head == known.head
    assert store.tiers(tokens_of(1, 3)) == ["warm"] * 3
    other = store.turn(tokens_of(2, 3), b"t")
    store.open()
    assert {*store.heads.known} == {known.head.id, other.head.id}
    assert store.there(tokens_of(1, 3)) == store.there(tokens_of(2, 3)) == [0, 1, 2]
    store.index.flush()
    assert len(store.index.load()[1]) == 6


def test_rows_are_mended_by_a_start(store: Store):
    known = store.turn(tokens_of(1, 3))
    store.turn(tokens_of(2, 3), b"t")
    store.close()
    assert known.path is not None
    known.path.unlink()
    store.slots.remove(keys_of(tokens_of(2, 3))[2])
    store.open()
    store.index.flush()
    heads, blocks = store.index.load()
    assert [one.head.owner.session for one in heads] == [b"t"]
    assert {key: one.sizes.tier for key, one in blocks.items()} == dict(
        zip(keys_of(tokens_of(2, 3)), ["warm", "warm", "missing"], strict=True)
    )
    assert not store.there(tokens_of(1, 3))


def test_what_was_evicted_is_known_and_owned_at_once_when_it_is_back(store: Store):
    tokens = tokens_of(1, 3)
    store.turn(tokens)
    store.heads.remove_files([BlockFile(keys_of(tokens)[2])])
    assert store.tiers(tokens) == ["warm", "warm", "missing"]
    store.turn(tokens, b"other")
    assert store.tiers(tokens) == ["warm"] * 3
    assert store.heads.delete(Whom(session=b"other")) == []
    assert store.there(tokens) == [0, 1, 2]


def test_rows_that_cannot_be_written_fail_nothing(store: Store):
    store.close()
    known = store.turn(tokens_of(1, 3))
    assert store.index.num_lost
    store.open()
    assert store.heads.known[known.head.id].head == known.head


# Heads in memory


def test_a_head_in_memory_has_no_file_and_no_row(store: Store):
    tokens = tokens_of(1, 3)
    published = store.heads.publish(HeadFile(head_of(tokens, b"s"), tokens), 0)
    assert isinstance(published, Published)
    assert not published.lacking
    assert not list((store.root / "heads").rglob("*.safetensors"))
    store.index.flush()
    assert store.index.load() == ([], {})
    assert list(store.heads.read(published.known.head.id).token_ids) == tokens
    assert {*store.heads.delete(Whom(session=b"s"))} == {*keys_of(tokens)}


def test_a_server_without_a_disk_has_them_too(tmp_path: Path):
    heads = Heads(None, Slots(tmp_path / "none"), lambda _: CHAIN, lambda: 0.0)
    tokens = tokens_of(1, 3)
    first = heads.publish(HeadFile(head_of(tokens, b"s"), tokens), 0)
    assert isinstance(first, Published)
    longer = [*tokens, *range(9)]
    second = heads.publish(HeadFile(head_of(longer, b"s", first.known), longer), 0)
    assert isinstance(second, Published)
    assert {*heads.known} == {second.known.head.id}
    heads.fork(second.known.head.id, b"fork", 6)
    end = BlockKey(MODEL, second.known.end)
    assert {*heads.delete(Whom(session=b"s"))} == {*keys_of(longer)[1:], end}
    again = heads.publish(HeadFile(head_of(longer, b"s"), longer), 0)
    assert isinstance(again, TurnedAway)
    assert {*again.gone} == {*keys_of(longer)[1:], end}
    with pytest.raises(StoreFailed):
        heads.staging_path()
    assert list(tmp_path.iterdir()) == []


def test_a_head_in_memory_replaces_none_on_disk(store: Store):
    tokens = tokens_of(1, 3)
    kept = store.turn(tokens)
    longer = [*tokens, 7]
    store.heads.publish(HeadFile(head_of(longer, b"s", kept), longer), 0)
    assert kept.head.id in store.heads.known
    assert len(store.heads.known) == 2


def test_the_disk_keeps_nothing_for_a_head_in_memory(store: Store):
    """Whose block is on disk for another's sake only loses it with that other."""
    tokens = tokens_of(1, 3)
    store.turn(tokens)
    store.heads.publish(HeadFile(head_of(tokens, b"memory"), tokens), 0)
    assert store.heads.delete(Whom(session=b"s")) == []
    assert store.there(tokens) == []


# Lives


def test_heads_expire_by_the_clock_that_nobody_sets(store: Store):
    short, used = tokens_of(1, 2), tokens_of(2, 2)
    store.turn(short, b"short", ttl_s=100.0)
    known = store.turn(used, b"used", ttl_s=100.0)
    store.turn(tokens_of(3, 2), b"ever")
    store.turn(tokens_of(4, 2), b"pinned", ttl_s=100.0, is_pinned=True)
    store.seconds += 90
    store.heads.touch(known.head.id)
    store.seconds += 20
    store.open()
    assert {*store.heads.expire()} == {*keys_of(short)}
    assert store.there(short) == []
    assert len(store.heads.known) == 3


def test_who_goes_on_from_more_than_his_last_turn_has_one_conversation(store: Store):
    """Others may have said what comes next; they keep what is theirs."""
    tokens = [*tokens_of(1, 3), 7]
    others = [store.turn(tokens[:5], b"other"), store.turn([*tokens[:5], 99], b"")]
    store.turn(tokens[:5], b"")
    last = store.turn(tokens, b"")
    assert {*store.heads.known} == {one.head.id for one in (*others, last)}


# Room


def test_a_worker_is_given_what_the_cap_leaves(store: Store):
    around = Surroundings(lambda: store.disk, lambda: 40_000)
    store.room = Room(store.heads, Limits(100_000), around, lambda: 0.0)
    assert store.room.allow("a", 50_000) == 50_000
    assert store.room.allow("b", 50_000) == 10_000
    store.room.settle("a", 20_000)
    assert store.room.allow("b", 50_000) == 20_000
    store.room.leave("a", MODEL, 0.0)
    assert store.room.allow("b", 50_000) == 30_000


def test_the_disk_keeps_its_floor(store: Store):
    total = 1 << 40
    store.disk = DiskRoom(total, store.disk.free_bytes)
    floor = min(store.disk.floor_bytes, total // 10)
    store.disk = DiskRoom(total, floor + 5000)
    assert store.room.allow("a", 50_000) == 5000
    assert store.room.allow("a", 50_000) == 0


def test_so_much_is_written_a_day(store: Store):
    store.limits = Limits(1 << 40, day_bytes=10_000)
    store.open()
    store.seconds = 10 * DAY_S + 5
    assert store.room.allow("a", 1 << 20) == 10_000
    assert store.room.allow("b", 1) == 0
    store.room.settle("a", 10_000)
    assert store.room.allow("a", 1) == 0
    assert store.room.allow("a", 5000, is_pinned=True) == 5000
    store.room.settle("a", 5000)
    assert store.room.allow("a", 1) == 0
    store.seconds += DAY_S
    assert store.room.allow("a", 1) == 1


def test_what_is_worth_least_makes_way_from_its_end(store: Store):
    old, new, pinned = tokens_of(1, 4), tokens_of(2, 4), tokens_of(3, 4)
    store.turn(pinned, b"pinned", is_pinned=True)
    store.turn(old, b"old")
    store.seconds += 3600
    store.turn(new, b"new")
    store.room._limits = Limits(store.room.used_bytes())
    assert store.room.allow("a", 2 * 4096) == 2 * 4096
    assert (store.there(old), store.there(new)) == ([0], [0, 1, 2, 3])  # a little more than asked
    assert store.tiers(old) == ["warm", "missing", "missing", "missing"]
    assert store.room.allow("a", 1 << 30) < 1 << 30
    assert (store.there(old), store.there(new)) == ([], [])
    assert store.there(pinned) == [0, 1, 2, 3]
    assert len(store.heads.known) == 3
    assert store.room.used_bytes() == sum(
        bytes_at_once(store.root / one) for one in ("slots", "heads")
    )


def test_what_is_behind_the_last_block_makes_way_before_that(store: Store):
    old, new, pinned = ([*tokens_of(n, 2), n] for n in (1, 2, 3))
    ends = {
        name: store.turn(tokens, name, end_bytes=50_000, is_pinned=name == b"pinned").head.id
        for name, tokens in ((b"pinned", pinned), (b"old", old))
    }
    store.seconds += 3600
    ends[b"new"] = store.turn(new, b"new", end_bytes=50_000).head.id

    def with_end() -> list[bytes]:
        paths = {name: store.heads.known[one].path for name, one in ends.items()}
        return [name for name, path in paths.items() if path and read_end(path)]

    assert [store.heads.known[one].end_bytes // 1000 for one in ends.values()] == [50, 50, 50]
    store.room._limits = Limits(store.room.used_bytes())
    assert store.room.allow("a", 40_000) == 40_000
    assert with_end() == [b"pinned", b"new"]
    assert store.there(old) == [0, 1]
    assert [*store.heads.read(ends[b"old"]).token_ids] == old
    assert store.room.allow("a", 1 << 30) < 1 << 30
    assert with_end() == [b"pinned"]
    assert (store.there(old), store.there(new), store.there(pinned)) == ([], [], [0, 1])
    assert store.room.used_bytes() == sum(
        bytes_at_once(store.root / one) for one in ("slots", "heads")
    )
    store.open()
    assert [store.heads.known[one].end_bytes // 1000 for one in ends.values()] == [50, 0, 0]


def test_states_go_before_their_slots_and_are_thinned(store: Store):
    tokens = tokens_of(1, 30)
    known = store.turn(tokens, with_states=True)
    store.room.settle("a", 0, known)
    states = [n for n, key in enumerate(keys_of(tokens)) if store.slots.has_state(key)]
    assert len(states) == MAX_STATES
    assert states[0] == 0
    assert states[-2:] == [28, 29]
    assert store.there(tokens) == list(range(30))
    store.room._limits = Limits(store.room.used_bytes())
    store.room.allow("a", 4096)
    assert sum(store.slots.has_state(key) for key in keys_of(tokens)) < MAX_STATES
    assert store.there(tokens) == list(range(30))
    assert store.room.used_bytes() == sum(
        bytes_at_once(store.root / one) for one in ("slots", "heads")
    )


def test_states_at_pinned_ends_stay(store: Store):
    tokens = tokens_of(1, 30)
    store.turn(tokens[: 4 * BLOCK], b"pinned", is_pinned=True)
    store.room.settle("a", 0, store.turn(tokens, with_states=True))
    states = [n for n, key in enumerate(keys_of(tokens)) if store.slots.has_state(key)]
    assert len(states) == 4 + MAX_STATES
    assert states[:4] == [0, 1, 2, 3], "the other one begins with these, too"


def test_what_a_dead_worker_left_is_counted_until_it_goes(store: Store):
    key = keys_of(tokens_of(1, 1))[0]
    store.slots.put(SlotAbout(MODEL, key.name), [], [])
    store.room.allow("a", file_bytes(4096))
    store.room.leave("a", MODEL, before_s=0.0)
    assert store.room.used_bytes() == 4096
    assert store.room.leave("a", MODEL, before_s=float("inf")) == [key]
    assert store.room.used_bytes() == 0


def test_a_dead_worker_takes_nothing_away_that_one_of_another_model_writes(store: Store):
    key = keys_of(tokens_of(1, 1))[0]
    store.slots.put(SlotAbout(MODEL, key.name), [], [])
    assert store.room.leave("a", b"o" * 16, before_s=float("inf")) == []
    assert store.room.used_bytes() == 4096


# The cold store


def test_what_rests_goes_to_the_cold_store_and_comes_back(with_cold: tuple[Store, Cold]):
    store, cold = with_cold
    tokens = tokens_of(1, 3)
    store.turn(tokens, ttl_s=100.0, with_states=True)
    before = {path: path.read_bytes() for path in (store.root / "slots").rglob("*.safetensors")}
    store.seconds += 101
    assert store.room.keep() == []
    assert store.tiers(tokens) == ["cold"] * 3
    assert len([*cold.slots()]) == 6
    store.open()
    assert store.tiers(tokens) == ["cold"] * 3
    assert store.room.bring(keys_of(tokens)) == keys_of(tokens)
    assert store.tiers(tokens) == ["warm"] * 3
    assert before == {p: p.read_bytes() for p in (store.root / "slots").rglob("*.safetensors")}
    store.seconds += 1000
    assert {*store.room.keep()} == {*keys_of(tokens)}
    assert [*cold.slots()] == []


def test_what_is_deleted_while_the_cold_store_is_away_goes_later(with_cold: tuple[Store, Cold]):
    store, cold = with_cold
    tokens = tokens_of(1, 3)
    store.turn(tokens, ttl_s=100.0)
    store.seconds += 101
    store.room.keep()
    cold.is_away = True
    assert {*store.heads.delete(Whom(session=b"s"))} == {*keys_of(tokens)}
    assert not store.cold_blocks.finish()  # pyright: ignore[reportOptionalMemberAccess]
    store.open()
    assert {*store.heads.left_cold} == {*keys_of(tokens)}
    cold.is_away = False
    assert store.cold_blocks.finish()  # pyright: ignore[reportOptionalMemberAccess]
    assert [*cold.slots()] == []
    store.index.flush()
    assert store.index.load() == ([], {})


def test_without_its_index_a_store_looks_into_the_cold_store(with_cold: tuple[Store, Cold]):
    store, cold = with_cold
    tokens = tokens_of(1, 3)
    store.turn(tokens, ttl_s=100.0, with_states=True)
    store.seconds += 101
    store.room.keep()
    store.close()
    (store.root / "index").unlink()
    cold.put("ab" * 16, [b"of nobody"])
    store.open()
    assert store.tiers(tokens) == ["missing"] * 3
    store.room.keep()
    assert store.tiers(tokens) == ["cold"] * 3
    assert len([*cold.slots()]) == 6
    assert store.room.bring(keys_of(tokens)) == keys_of(tokens)


@pytest.mark.parametrize("damage", ["gone", "cut", "flipped"])
def test_what_is_damaged_there_is_a_miss(with_cold: tuple[Store, Cold], damage: str):
    store, _ = with_cold
    tokens = tokens_of(1, 3)
    store.turn(tokens, ttl_s=100.0)
    store.seconds += 101
    store.room.keep()
    keys = keys_of(tokens)
    (path,) = (store.root / "cold").rglob(f"{cold_id(keys[1], is_state=False)}*")
    content = path.read_bytes()
    if damage == "gone":
        path.unlink()
    elif damage == "cut":
        path.write_bytes(content[:-30])
    else:
        path.write_bytes(content[:-9] + bytes([content[-9] ^ 1]) + content[-8:])
    assert store.room.bring(keys) == keys[:1]
    assert store.tiers(tokens) == ["warm", "missing", "cold"]
    assert not list((store.root / "slots").rglob(".tmp-*"))


def test_what_makes_way_goes_to_the_cold_store_unless_it_is_away(with_cold: tuple[Store, Cold]):
    store, cold = with_cold
    tokens = tokens_of(1, 4)
    store.turn(tokens)
    store.room._limits = Limits(store.room.used_bytes(), 1 << 40)
    store.room.allow("a", 4096)
    assert store.tiers(tokens) == ["warm", "warm", "cold", "cold"]
    cold.is_away = True
    store.room.allow("a", 2 * 4096)
    assert store.there(tokens) == []
    cold.is_away = False
    store.room._limits = LOOSE
    assert store.room.bring(keys_of(tokens)[2:]) == keys_of(tokens)[2:]
    assert store.room.bring(keys_of(tokens)) == []
    assert store.tiers(tokens)[0] == "missing"


def test_the_cold_store_has_a_cap_of_its_own(with_cold: tuple[Store, Cold]):
    store, cold = with_cold
    tokens = tokens_of(1, 4)
    store.turn(tokens, ttl_s=100.0)
    store.room._limits = Limits(1 << 40, 2 * 4096, 1000.0)
    store.seconds += 101
    store.room.keep()
    assert store.tiers(tokens) == ["cold", "cold", "missing", "missing"]
    assert sum(one.num_bytes for one in cold.slots()) == store.heads.kept.cold_bytes == 2 * 4096


def test_what_is_deleted_while_it_is_demoted_does_not_stay(
    with_cold: tuple[Store, Cold], monkeypatch: pytest.MonkeyPatch
):
    store, cold = with_cold
    tokens = tokens_of(1, 1)
    store.turn(tokens, ttl_s=100.0)
    store.seconds += 101
    put = cold.put

    def put_and_delete(slot_id: str, chunks: Iterable[bytes]) -> ColdSlot:
        found = put(slot_id, chunks)
        store.heads.delete(Whom())
        return found

    monkeypatch.setattr(cold, "put", put_and_delete)
    store.room.keep()
    store.room.keep()
    assert [*cold.slots()] == []
    assert store.there(tokens) == []


def test_a_damaged_slot_is_still_had_from_the_cold_store(with_cold: tuple[Store, Cold]):
    store, cold = with_cold
    tokens = tokens_of(1, 1)
    (key,) = keys_of(tokens)
    store.turn(tokens, ttl_s=100.0)
    store.seconds += 101
    store.room.keep()
    store.room.bring([key])
    path = store.slots.path(key)
    path.write_bytes(path.read_bytes()[:-1])
    store.room.keep()
    assert store.tiers(tokens) == ["cold"]
    assert store.room.bring([key]) == [key]
    store.heads.delete(Whom())
    store.room.keep()
    assert [*cold.slots()] == []


def test_a_kill_right_after_something_is_put_leaves_a_row_of_it(
    with_cold: tuple[Store, Cold], monkeypatch: pytest.MonkeyPatch
):
    store, cold = with_cold
    tokens = tokens_of(1, 1)
    store.turn(tokens, ttl_s=100.0)
    store.seconds += 101
    put = cold.put

    def put_and_die(slot_id: str, chunks: Iterable[bytes]) -> ColdSlot:
        put(slot_id, chunks)
        raise KeyboardInterrupt

    monkeypatch.setattr(cold, "put", put_and_die)
    with pytest.raises(KeyboardInterrupt):
        store.room.keep()
    store.open()
    assert store.tiers(tokens) == ["warm"]
    store.heads.delete(Whom())
    store.room.keep()
    assert [*cold.slots()] == []


def test_what_rests_stays_here_while_the_cold_store_is_away(with_cold: tuple[Store, Cold]):
    store, cold = with_cold
    tokens = tokens_of(1, 3)
    store.turn(tokens, ttl_s=100.0)
    store.seconds += 101
    cold.is_away = True
    assert store.room.keep() == []
    assert store.there(tokens) == [0, 1, 2]
    cold.is_away = False
    store.room.keep()
    assert store.tiers(tokens) == ["cold"] * 3


def test_what_has_no_room_is_known_before_anything_leaves(tmp_path: Path):
    store = Store(tmp_path, Limits(100_000))
    store.turn(tokens_of(1, 3))
    store.turn(tokens_of(2, 3), b"t", is_pinned=True)
    pinned_bytes = sum(store.heads.kept.blocks[one].sizes.warm for one in keys_of(tokens_of(2, 3)))
    head_bytes = sum(one.num_bytes for one in store.heads.known.values())
    most_bytes = 100_000 - pinned_bytes - head_bytes
    assert store.room.spare_bytes() < most_bytes
    assert store.room.could_have(most_bytes)
    assert not store.room.could_have(most_bytes + 1)
    assert store.there(tokens_of(1, 3)) == [0, 1, 2]
    assert store.room.allow("import", most_bytes) == most_bytes
    assert store.there(tokens_of(1, 3)) == []
    assert store.room.spare_bytes() == 0
    store.room.finish("import")
    assert store.room.spare_bytes() == most_bytes
    store.close()


def test_what_is_published_late_was_used_when_its_turn_ended(store: Store):
    store.seconds += 1000
    newest, older = tokens_of(1, 4), tokens_of(2, 4)
    assert store.turn(newest, b"newest", age_s=1).last_used_s == store.heads.now_s() - 1
    store.turn(older, b"older", age_s=9)
    store.room._limits = Limits(store.room.used_bytes())
    store.room.allow("a", 2 * 4096)
    assert (store.there(newest), len(store.there(older)) < 4) == ([0, 1, 2, 3], True)


def test_nothing_makes_way_for_what_was_computed_before_it_was_used(store: Store):
    store.seconds += 1000
    newest, older = tokens_of(1, 4), tokens_of(2, 4)
    store.turn(newest, b"newest", age_s=1)
    store.turn(older, b"older", age_s=9)
    store.room._limits = Limits(store.room.used_bytes())
    assert store.room.allow("a", 4096, age_s=10) == 0
    assert store.room.allow("a", 1 << 30, age_s=5) < 1 << 30
    assert (store.there(newest), store.there(older)) == ([0, 1, 2, 3], [])


def test_a_head_that_is_written_again_with_its_end_was_not_used_again(store: Store):
    tokens = tokens_of(1, 2)
    first = store.turn(tokens)
    store.seconds += 100
    again = store.turn(tokens, before=first, end_bytes=50_000, age_s=100)
    assert (again.last_used_s, again.hits) == (first.last_used_s, first.hits)
    assert [*store.heads.known] == [again.head.id]
    store.seconds += 100
    used = store.turn([*tokens, 7], before=again)
    assert used.last_used_s == first.last_used_s + 200
    assert used.hits > again.hits
