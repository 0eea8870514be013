"""Merging: what a chain becomes is found, restored to the bit, and taken over by a worker."""

from __future__ import annotations

import time
from collections.abc import Generator
from pathlib import Path

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

from runtime.cache.compaction import MAX_STATES, compact, merge, plans
from runtime.cache.inventory import Inventory
from runtime.cache.owned import Merged, OpenStore
from runtime.cache.store_opening import open_store
from runtime.kv.cursor import CacheCursor
from runtime.slot_events import KnownSlot, SlotStaged
from runtime.worker.model import LoadedModel
from store.clock import Trusted, TrustedClock
from store.errors import SlotDamaged
from store.keyed_names import Asker
from store.recovery import Recovery
from store.slots import read_header
from store.upkeep import slot_files
from tests.kv_sessions import Session, ids, load
from tests.tiny_models import write_model

NUM_TURNS = 18


@pytest.fixture(scope="module", params=["qwen3", "lfm2", "qwen3 quantised from 48"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    path = tmp_path_factory.mktemp("model")
    if request.param == "qwen3 quantised from 48":
        return load(write_model(path, head_dim=64), 8, 48)
    return load(write_model(path, request.param))


@pytest.fixture
def store(tmp_path: Path) -> Generator[OpenStore]:
    one = open_store(tmp_path / "kv", None)
    yield one
    one.close()


class Talk:
    """A conversation of many short turns; `ends` are where each answer ended."""

    def __init__(self, model: LoadedModel, store: OpenStore) -> None:
        self.model, self.store = model, store
        self.token_ids: list[int] = []
        self.ends: list[int] = []
        self.session = self.new_session()

    def new_session(self) -> Session:
        """A worker that knows what is on disk now."""
        session = Session(self.model, self.store.root)
        session.tiers.learn(list(map(KnownSlot.of, self.store.index.all_slots())))
        return session

    def say(self, num_turns: int) -> None:
        """Turns that are all on disk afterwards."""
        self.publish(self.stage(num_turns))

    def stage(self, num_turns: int) -> list[SlotStaged]:
        """Turns that are written and have no names yet: what the worker would tell."""
        for _ in range(num_turns):
            prompt = [*self.token_ids, *ids(len(self.ends), 20)]
            answer = ids(1000 + len(self.ends), 5)
            self.session.turn(prompt, answer, asker=Asker("m", "mine"))
            self.token_ids = [*prompt, *answer]
            self.ends.append(len(self.token_ids))
        self.session.wait_until_written()
        staged = [
            SlotStaged(
                header=job.header,
                path=str(one.path),
                num_bytes=one.num_bytes,
                asker=job.asker,
                parent=job.parent,
            )
            for job, one in self.session.written
        ]
        self.session.written.clear()
        return staged

    def publish(self, staged: list[SlotStaged]) -> None:
        published = self.store.publish(staged)
        assert not published.refused
        self.session.tiers.on_saved([row.header.id for row in published.saved])

    def merge(self) -> list[Merged]:
        """Compaction; what workers would be told."""
        news = compact(self.store, lambda: {b"model"}, lambda: False)
        return [one for one in news if isinstance(one, Merged)]

    def tell(self, session: Session, news: list[Merged]) -> None:
        for one in news:
            session.tiers.hear(one.told)
            session.check()

    def kv_at(self, session: Session, num_tokens: int) -> list[mx.array]:
        """Every array of the layer caches that are taken up for the first tokens."""
        cursor = session.cursor([*self.token_ids[:num_tokens], 7])
        kv, found = session.take_up(cursor)
        assert found == num_tokens
        arrays = [one for _, one in tree_flatten([cache.state for cache in kv])]
        return [one for one in arrays if isinstance(one, mx.array)]

    def check(self, session: Session, num_tokens: int) -> CacheCursor:
        """The first tokens are taken up as they were kept, and what follows is computed right."""
        prompt = [*self.token_ids[:num_tokens], 7, 8, 9]
        cursor = session.cursor(prompt)
        kv, start = session.take_up(cursor)
        session.compute(cursor, kv, start)
        said = session.forward(prompt[-1:], kv)
        plain = Session(self.model)
        off = plain.cursor(prompt, mode="off")
        kv, _ = plain.take_up(off)
        plain.compute(off, kv, 0)
        assert mx.allclose(said, plain.forward(prompt[-1:], kv), rtol=1e-4, atol=1e-5)
        return cursor


@pytest.fixture
def talk(model: LoadedModel, store: OpenStore) -> Talk:
    one = Talk(model, store)
    one.say(NUM_TURNS)
    return one


def test_a_worker_goes_on_from_what_its_runs_became(talk: Talk):
    before = len(talk.store.index.places())
    end, session = talk.ends[-1], talk.session
    news = talk.merge()
    assert news
    assert len(talk.store.index.places()) < before / 2
    talk.tell(session, news)
    assert talk.check(session, end).use.tier == "hot"
    talk.say(1)
    assert talk.store.index.all_slots()[-1].header.start >= end
    assert talk.check(talk.new_session(), talk.ends[-1]).use.num_tokens == talk.ends[-1]


def test_who_is_restoring_a_chain_while_it_is_merged_gets_it(talk: Talk):
    late, early = talk.new_session(), talk.new_session()
    cursors = [one.cursor([*talk.token_ids, 5]) for one in (late, early)]
    late.tiers.begin(cursors[0])
    early.tiers.begin(cursors[1])
    news = talk.merge()
    talk.tell(early, news)
    for session, cursor in zip((late, early), cursors, strict=True):
        while cursor.is_waiting:
            session.hear()
        _, num_tokens = session.tiers.restore(cursor)
        assert (num_tokens, cursor.use.tier) == (talk.ends[-1], "warm")
    talk.tell(late, news)
    assert talk.check(late, talk.ends[-1]).use.num_tokens == talk.ends[-1]
    assert talk.merge() == []
    files = {path.stem for path in slot_files(talk.store.root)}
    assert files == {place.id for place in talk.store.index.places()}


@pytest.mark.parametrize("is_told_first", [True, False])
def test_what_is_staged_while_its_chain_is_merged_is_written_right_after(
    talk: Talk, is_told_first: bool
):
    staged = talk.stage(2)
    news = talk.merge()
    assert news
    if is_told_first:
        talk.tell(talk.session, news)
    talk.publish(staged)
    if not is_told_first:
        talk.tell(talk.session, news)
    hot = talk.session.tiers.hot
    assert all(hot[run].is_saved for run in hot.tree)
    assert talk.check(talk.new_session(), talk.ends[-1]).use.num_tokens == talk.ends[-1]
    talk.merge()
    assert talk.merge() == []
    assert talk.check(talk.new_session(), talk.ends[-1]).use.num_tokens == talk.ends[-1]
    check_agrees(talk.store)


def check_agrees(store: OpenStore) -> None:
    """Rows and files say the same of each other, so that either could be lost."""
    rows = {row.header.id: row for row in store.index.all_slots()}
    files = {path.stem: read_header(path) for path in slot_files(store.root)}
    assert files == {name: row.header for name, row in rows.items()}
    assert {row.parent for row in rows.values()} <= {None, *rows}
    assert not Recovery(store.root, store.database, None, time.time()).run().has_changed


def test_a_chain_that_is_continued_before_it_is_replaced_is_continued_after_it(talk: Talk):
    (segments,) = plans(talk.store.index.all_slots(), ())
    old = {link.row.header.id for segment in segments for link in segment}
    staged = talk.stage(1)
    talk.publish(staged)
    news, places = merge(talk.store, segments)
    talk.store.unlink(places)
    rows = {row.header.id: row for row in talk.store.index.all_slots()}
    assert not old & set(rows)
    assert {one.header.id for one in staged} < set(rows)
    assert rows[staged[0].header.id].parent in {slot.id for slot in news.told.slots} | set(rows)
    assert talk.check(talk.new_session(), talk.ends[-1]).use.num_tokens == talk.ends[-1]
    check_agrees(talk.store)


def test_a_chain_is_not_merged_when_something_continues_what_would_be_cut_off(talk: Talk):
    (segments,) = plans(talk.store.index.all_slots(), ())
    last = segments[-1][-1]
    staged = talk.stage(1)
    talk.publish(staged)
    segments[-1][-1] = last._replace(leave=last.leave - 1)
    before = talk.store.index.places()
    with pytest.raises(SlotDamaged):
        merge(talk.store, segments)
    assert talk.store.index.places() == before
    assert talk.check(talk.new_session(), talk.ends[-1]).use.num_tokens == talk.ends[-1]


def test_deleting_leaves_no_file_of_what_was_merged(talk: Talk):
    assert talk.merge()
    assert len(list(slot_files(talk.store.root))) > len(talk.store.index.places())
    Inventory(talk.store).remove_conversation("mine")
    assert not list(slot_files(talk.store.root))


class Died(Exception):
    """The process is gone, with what it would have done next."""


def test_what_is_deleted_while_it_is_merged_never_comes_back(talk: Talk):
    (segments, *_) = plans(talk.store.index.all_slots(), ())
    links = [link for segment in segments for link in segment]
    store, clock = talk.store, talk.store.clock

    class Looked(TrustedClock):
        num_looks = 0

        def now_s(self) -> float:
            self.num_looks += 1
            if self.num_looks > 1:
                store.clock = clock
                Inventory(store).remove_conversation("mine")
                raise Died
            return clock.now_s()

    store.clock = Looked(Trusted())
    with pytest.raises(Died):
        merge(store, [links[:9], links[9:]])
    assert list(slot_files(store.root)), "the first of the new ones has its name"
    Recovery(store.root, store.database, None, time.time()).run()
    assert not store.index.places()
    assert not list(slot_files(store.root))


def test_at_most_so_many_states_are_left_and_each_of_them_resumes(talk: Talk):
    if not talk.session.tiers.needs_state:
        pytest.skip("only layers with a state")
    before = {end: talk.kv_at(talk.session, end) for end in talk.ends}
    talk.merge()
    kept = [row.header.end for row in talk.store.index.all_slots() if row.header.has_state]
    assert 2 < len(kept) <= MAX_STATES
    assert kept[-1] == talk.ends[-1]
    for end in set(kept) & set(talk.ends):
        after = talk.kv_at(talk.new_session(), end)
        assert all(map(mx.array_equal, before[end], after))
    between = next(end for end in talk.ends if end not in kept and end > kept[0])
    cursor = talk.check(talk.new_session(), between)
    assert cursor.use.num_tokens == max(end for end in kept if end <= between)
