"""The index of slots: what is inserted, used, expires, is pinned, compacted and dropped."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import permutations
from pathlib import Path

import msgspec
import pytest
from sqlalchemy import select

from store import listing, pins
from store.conversations import Conversations
from store.database import Database
from store.errors import StoreError
from store.eviction import choose
from store.index import SlotIndex
from store.records import MAX_REQUESTS, Records, day_of
from store.tables import Layout
from store.types import (
    HIT_HALF_LIFE_S,
    ConversationRow,
    FileStamp,
    ModelRow,
    RequestRow,
    RunFigures,
    SlotPlace,
    SlotRow,
    TierTotal,
)
from tests.slot_samples import slot_id
from tests.store_samples import MODEL, NOW_S, chain, opened, row

DAY_S = 86_400.0
YEAR_S = 365 * DAY_S


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Database]:
    with opened(tmp_path) as database:
        yield database


@pytest.fixture
def index(database: Database) -> SlotIndex:
    return SlotIndex(database)


def ids(*numbers: int) -> tuple[str, ...]:
    return tuple(slot_id(number) for number in numbers)


def left(index: SlotIndex) -> set[str]:
    return {place.id for place in index.places()}


def num_children(index: SlotIndex) -> dict[str, int]:
    return {one.id: one.num_children for one in index.candidates(with_pinned=True)}


def parts_of(database: Database, key: bytes) -> list[tuple[str | None, int]]:
    """Where a conversation ends, and how many slots it is part of."""
    found = database.read(lambda connection: listing.named(connection, [key]))
    return [(one.leaf, one.num_slots) for one in found]


def layouts(database: Database) -> list[str]:
    texts = select(Layout.text)
    return list(database.read(lambda connection: connection.execute(texts).scalars()))


def test_what_is_inserted_comes_back_with_blocks_and_children_counted(index: SlotIndex):
    rows = chain(1, 2, 3)
    assert index.insert(rows).result() == 3
    assert index.insert(rows).result() == 0
    assert index.slots_of(MODEL) == rows
    assert index.all_slots() == rows
    assert num_children(index) == {slot_id(1): 1, slot_id(2): 1, slot_id(3): 0}
    assert index.slots_of(b"other") == []
    assert index.totals() == [TierTotal(MODEL, "warm", 3, 1536, 3 * 4096)]


def test_a_layout_goes_with_the_last_slot_that_has_it(database: Database, index: SlotIndex):
    own = row(4, layout='{"offset":512}')
    index.insert([*chain(1, 2), own]).result()
    index.drop([own.header.id, slot_id(2)]).result()
    assert layouts(database) == ['{"layers":1}']
    index.drop([slot_id(1)]).result()
    assert layouts(database) == []


def test_a_slot_waits_for_the_one_before_it(index: SlotIndex):
    first, second, third = chain(1, 2, 3)
    index.insert([third]).result()
    index.insert([second, first]).result()
    assert index.slots_of(MODEL) == [first, second, third]
    assert num_children(index) == {slot_id(1): 1, slot_id(2): 1, slot_id(3): 0}


def test_what_does_not_come_before_a_slot_is_not_taken_for_it(index: SlotIndex):
    first, second = chain(1, 2)
    other_model = msgspec.structs.replace(second, header=bent(second, model=b"x" * 32))
    later = row(3, first.header)
    too_late = msgspec.structs.replace(later, header=bent(later, start=513, end=1025))
    index.insert([first, other_model, too_late]).result()
    assert [one.parent for one in index.all_slots()] == [None, None, None]


def bent(one: SlotRow, **fields: object):
    return msgspec.structs.replace(one.header, **fields)


def test_hits_decay_between_uses(index: SlotIndex):
    index.insert(chain(1, 2)).result()
    index.touch(ids(1), NOW_S).result()
    index.touch(ids(1, 99), NOW_S + HIT_HALF_LIFE_S).result()
    first, second = index.all_slots()
    assert (first.hits, first.last_used_s) == (1.5, NOW_S + HIT_HALF_LIFE_S)
    assert (second.hits, second.last_used_s) == (0.0, NOW_S)


def test_a_use_makes_a_life_longer_and_never_shorter(index: SlotIndex):
    short, pinned = row(1, ttl_s=5.0, ttl_class="short"), row(2, ttl_s=None, ttl_class="pinned")
    index.insert([short, pinned]).result()
    for life_s in (86_400.0, 60.0):
        index.touch(ids(1, 2), NOW_S, {slot_id(1): life_s, slot_id(2): life_s}).result()
    assert [(one.header.ttl_s, one.header.ttl_class) for one in index.all_slots()] == [
        (86_400.0, "long"),
        (None, "pinned"),
    ]


def test_dropping_takes_the_subtree_children_first_and_condemns_the_files(index: SlotIndex):
    rows = chain(1, 2, 3)
    index.insert([*rows, row(4, rows[0].header), row(5)]).result()
    index.set_tier(slot_id(3), "cold", 100).result()
    places = index.drop(ids(2, 3, 77)).result()
    assert places == (SlotPlace(slot_id(3), "cold"), SlotPlace(slot_id(2), "warm"))
    assert set(index.condemned()) == set(places)
    assert num_children(index) == {slot_id(1): 1, slot_id(4): 0, slot_id(5): 0}
    index.unlinked(places).result()
    assert index.condemned() == []
    assert set(index.drop(ids(1, 4)).result()) == {(name, "warm") for name in ids(1, 4)}
    assert left(index) == {slot_id(5)}


def test_eviction_by_the_index_leaves_leaf_first(index: SlotIndex):
    index.insert([*chain(1, 2, 3), row(9, last_used_s=NOW_S + 1)]).result()
    order = choose(index.candidates(), 2 * 4096, NOW_S)
    assert order == ids(3, 2)
    index.drop(order).result()
    assert left(index) == set(ids(1, 9))


def test_pins_keep_slots_also_those_yet_to_come(index: SlotIndex):
    rows = chain(1, 2)
    assert index.pin(MODEL, rows[1].header.end_hash, "config").result() == 0
    index.insert(rows).result()
    assert index.pin(MODEL, rows[1].header.end_hash, "api").result() == 1
    assert [one.is_pinned for one in index.all_slots()] == [False, True]
    assert choose(index.candidates(), 1 << 40, NOW_S) == ()
    index.expired(NOW_S + 0)
    assert index.expired(NOW_S + 60) == ()
    index.unpin(MODEL, rows[1].header.end_hash, "api").result()
    assert [one.is_pinned for one in index.all_slots()] == [False, True]
    index.unpin(MODEL, rows[1].header.end_hash, "config").result()
    assert [one.is_pinned for one in index.all_slots()] == [False, False]


def test_a_pinned_conversation_stays_pinned_as_it_goes_on(index: SlotIndex, database: Database):
    rows, key, source = chain(1, 2), b"k" * 16, pins.source_of((b"k" * 16).hex())
    conversations = Conversations(database)
    database.submit(lambda c: pins.pin_ahead(c, MODEL, source)).result()
    for number, one in enumerate(rows):
        index.insert([one]).result()
        conversations.advance(spoken(key, one)).result()
        assert [slot.is_pinned for slot in index.all_slots()] == [False] * number + [True]
    conversations.advance(spoken(b"o" * 16, rows[0])).result()
    assert [one.source for one in index.pins()] == [source], "others are nobody's wish"
    assert choose(index.candidates(), 1 << 40, NOW_S) == ()
    assert database.submit(lambda c: pins.drop(c, source)).result() == 1
    assert not any(slot.is_pinned for slot in index.all_slots())


@pytest.mark.parametrize("order", list(permutations(range(3))))
@pytest.mark.parametrize("num_before", [0, 2, 8])
def test_a_conversation_ends_where_its_turn_does_in_whatever_order_its_slots_come(
    index: SlotIndex, database: Database, num_before: int, order: tuple[int, ...]
):
    """Also where it was longer before: its client went back to an earlier message."""
    key, conversations = b"k" * 16, Conversations(database)
    before, turn = chain(*range(10, 10 + num_before)), chain(1, 2, 3)
    for one in before:
        row_of = msgspec.structs.replace(spoken(key, one), num_turns=int(one is before[-1]))
        conversations.publish([one], [row_of]).result()
    for number in order:
        ends = msgspec.structs.replace(spoken(key, turn[number]), num_turns=int(number == 2))
        conversations.publish([turn[number]], [ends]).result()
    (found,) = conversations.listing()
    assert (found.leaf, found.num_tokens) == (turn[-1].header.id, turn[-1].header.end)
    assert found.num_turns == 1 + bool(before)
    assert parts_of(database, key) == [(turn[-1].header.id, len(before) + len(turn))]
    assert {one.id for one in conversations.drop(key).result()} == {
        one.header.id for one in (*before, *turn)
    }
    assert not left(index)


def spoken(key: bytes, leaf: SlotRow) -> ConversationRow:
    header = leaf.header
    return ConversationRow(
        key=key,
        model=MODEL,
        leaf=header.id,
        num_tokens=header.end,
        last_used_s=NOW_S,
        created_s=NOW_S,
    )


def test_a_slot_expires_only_after_all_that_continues_it(index: SlotIndex):
    rows = chain(1, 2)
    child = row(3, rows[1].header, ttl_s=7200.0)
    index.insert([*[forget_after(one, 3600.0) for one in rows], child, row(4, ttl_s=None)]).result()
    assert index.expired(NOW_S + 0) == ()
    assert index.expired(NOW_S + 3700) == ()
    assert index.expired(NOW_S + 7300) == ids(3, 2, 1)
    index.touch(ids(1, 2, 3), NOW_S + 7300).result()
    assert index.expired(NOW_S + 7400) == ()


def forget_after(one: SlotRow, ttl_s: float) -> SlotRow:
    return msgspec.structs.replace(one, header=msgspec.structs.replace(one.header, ttl_s=ttl_s))


def test_what_was_written_into_an_empty_index_is_due_at_the_first_look(index: SlotIndex):
    index.insert([forget_after(one, 60.0) for one in chain(1, 2)]).result()
    assert index.expired(NOW_S + 7300) == ids(2, 1)


def conversation(number: int, leaf: int | None, **fields: object) -> ConversationRow:
    plain = ConversationRow(
        key=bytes([number]) * 16,
        model=MODEL,
        leaf=None if leaf is None else slot_id(leaf),
        num_tokens=1024,
        last_used_s=NOW_S,
        created_s=NOW_S,
    )
    return msgspec.structs.replace(plain, **fields)


def test_a_conversation_owns_what_nobody_else_is_part_of(database: Database, index: SlotIndex):
    conversations = Conversations(database)
    rows = chain(1, 2, 3)
    index.insert([*rows, row(4, rows[0].header), row(5, rows[1].header)]).result()
    conversations.advance(conversation(1, 3)).result()
    conversations.advance(conversation(1, 5, num_tokens=2000)).result()
    conversations.advance(conversation(2, 4)).result()
    [mine] = [one for one in conversations.listing() if one.key == bytes([1]) * 16]
    assert (mine.leaf, mine.num_turns, mine.num_tokens) == (slot_id(5), 2, 2000)
    [held] = database.read(lambda c: listing.named(c, [mine.key]))
    assert (held.num_slots, held.disk_bytes) == (4, 4 * 4096)
    dropped = conversations.drop(bytes([1]) * 16).result()
    assert {place.id for place in dropped} == set(ids(2, 3, 5))
    assert left(index) == set(ids(1, 4))
    assert [one.key for one in conversations.listing()] == [bytes([2]) * 16]


def test_a_conversation_ends_where_its_slots_do(database: Database, index: SlotIndex):
    conversations = Conversations(database)
    index.insert(chain(1, 2, 3)).result()
    conversations.advance(conversation(1, 3)).result()
    assert type(conversations.advance(conversation(1, 99)).exception()) is StoreError
    index.drop(ids(3)).result()
    assert parts_of(database, bytes([1]) * 16) == [(slot_id(2), 2)]
    index.drop(ids(2)).result()
    assert parts_of(database, bytes([1]) * 16) == [(slot_id(1), 1)]
    index.drop(ids(1)).result()
    assert parts_of(database, bytes([1]) * 16) == [(None, 0)]
    assert conversations.forget_idle(NOW_S).result() == 0
    assert conversations.forget_idle(NOW_S + 1).result() == 1
    assert conversations.listing() == []


def test_who_only_began_as_others_do_is_forgotten_in_the_end(database: Database, index: SlotIndex):
    conversations = Conversations(database)
    head, own = chain(1, 2)
    index.insert([head, own, row(3, head.header)]).result()
    index.pin(MODEL, head.header.end_hash, "config:all").result()
    later_s = NOW_S + DAY_S
    conversations.advance(conversation(1, 2)).result()
    conversations.advance(conversation(2, 3, last_used_s=later_s)).result()
    assert conversations.forget_idle(later_s).result() == 0, "it has something of its own"
    index.drop([own.header.id]).result()
    own_pin = (MODEL, head.header.end_hash, pins.source_of((bytes([1]) * 16).hex()))
    index.pin(*own_pin).result()
    assert conversations.forget_idle(later_s).result() == 0, "it is pinned"
    index.unpin(*own_pin).result()
    assert conversations.forget_idle(later_s).result() == 1
    assert [one.leaf for one in conversations.listing()] == [slot_id(3)]
    assert conversations.forget_idle(later_s + 1).result() == 0, "nobody later is part of it"


def test_compaction_replaces_a_chain_for_its_conversations(database: Database, index: SlotIndex):
    conversations = Conversations(database)
    rows = chain(1, 2, 3)
    index.insert(rows).result()
    conversations.advance(conversation(1, 3)).result()
    merged = row(9, rows[0].header, end=rows[2].header.end)
    branch = row(4, rows[1].header)
    index.insert([branch]).result()
    assert type(index.replace([merged], ids(2, 3)).exception()) is StoreError
    assert left(index) == set(ids(1, 2, 3, 4))
    index.drop(ids(4)).result()
    assert {place.id for place in index.replace([merged], ids(2, 3)).result()} == set(ids(2, 3))
    assert parts_of(database, bytes([1]) * 16) == [(slot_id(9), 2)]
    assert num_children(index) == {slot_id(1): 1, slot_id(9): 0}


def test_who_ends_within_a_compacted_slot_has_no_more_on_disk_than_its_own(
    database: Database, index: SlotIndex
):
    conversations = Conversations(database)
    rows = chain(1, 2, 3)
    index.insert(rows).result()
    middle, end = rows[1].header.end, rows[2].header.end
    conversations.advance(conversation(1, 2, num_tokens=middle)).result()
    conversations.advance(conversation(2, 3, num_tokens=end)).result()
    index.replace([row(9, rows[0].header, end=end)], ids(2, 3)).result()
    keys = [bytes([1]) * 16, bytes([2]) * 16]
    found = database.read(lambda connection: listing.named(connection, keys))
    assert {one.id: one.num_durable for one in found} == {keys[0].hex(): middle, keys[1].hex(): end}
    assert {one.leaf for one in found} == {slot_id(9)}


def test_of_many_requests_the_latest_are_remembered(database: Database):
    records = Records(database)
    rows = [
        RequestRow(str(n), "tiny", NOW_S, 1, 0, 1, "none", "first_seen", "stop")
        for n in range(MAX_REQUESTS + 5)
    ]
    records.add_requests(rows[:5], NOW_S).result()
    records.add_requests(rows[5:], NOW_S).result()
    assert records.requests(len(rows)) == rows[:4:-1]
    records.add_requests([], NOW_S).result()
    assert len(records.requests(len(rows))) == MAX_REQUESTS


def test_models_digests_requests_and_counters_are_remembered(database: Database):
    records = Records(database)
    records.put_model(ModelRow(hash=MODEL, label="a", weights_bytes=9, load_ms=5.0)).result()
    records.put_model(ModelRow(hash=MODEL, label="b", peak_bytes=7, last_used_s=NOW_S)).result()
    expected = ModelRow(
        hash=MODEL, label="b", weights_bytes=9, load_ms=5.0, peak_bytes=7, last_used_s=NOW_S
    )
    assert records.models() == [expected]

    assert records.measured(MODEL, RunFigures(load_ms=15.0, peak_bytes=100)).result()
    assert records.measured(MODEL, RunFigures(peak_bytes=50, blindness="why")).result()
    assert [(one.load_ms, one.peak_bytes) for one in records.models()] == [(8.0, 95)]
    assert records.measured(MODEL, RunFigures(load_ms=8.0, peak_bytes=200)).result()
    assert [(one.load_ms, one.peak_bytes) for one in records.models()] == [(8.0, 200)]
    assert [one.blindness for one in records.models()] == ["why"], "as it was found last"
    assert records.measured(MODEL, RunFigures(blindness="")).result()
    assert [one.blindness for one in records.models()] == [""]
    assert not records.measured(b"?" * 32, RunFigures(load_ms=1.0)).result()
    assert len(records.models()) == 1

    stamp = FileStamp(1, 2**63 - 1, 3, 4, 5)
    assert not records.has_other_digest(stamp)
    records.put_digest(stamp, b"d" * 32, NOW_S).result()
    records.put_digest(stamp, b"e" * 32, NOW_S).result()
    assert records.digest(stamp) == b"e" * 32
    assert not records.has_other_digest(stamp)
    for other in (stamp._replace(mtime_ns=5), stamp._replace(ctime_ns=6)):
        assert records.digest(other) is None
        assert records.has_other_digest(other)
    assert not records.has_other_digest(stamp._replace(inode=7))

    request = RequestRow(
        id="r1",
        model="tiny",
        finished_s=NOW_S,
        num_prompt_tokens=10,
        num_cached_tokens=8,
        num_output_tokens=2,
        tier="warm",
        reason="first_seen",
        finish_reason="stop",
        prefill_ms=1.5,
    )
    records.add_requests([request], NOW_S).result()
    records.add_requests([request], NOW_S).result()
    assert records.requests() == [request]

    records.count({"hits": 1.0, "bytes": 100.0}, NOW_S).result()
    records.count({"hits": 2.0}, NOW_S + DAY_S).result()
    assert records.counters() == {"bytes": 100.0, "hits": 3.0}
    assert records.counters(NOW_S + DAY_S) == {"hits": 2.0}
    assert day_of(0.0) == "1970-01-01"
    assert records.trim(NOW_S + DAY_S).result() == 2
    assert records.requests() == []
