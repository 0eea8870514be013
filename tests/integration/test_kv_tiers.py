"""The tiers over a real model and a real store: what is damaged, late, gone, private or doubled."""

from __future__ import annotations

import copy
import functools
import shutil
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest

from runtime.kv.cursor import CacheCursor
from runtime.slot_events import HotBudget, SlotBad, SlotsPromoted, SlotsUsed
from runtime.worker.model import LoadedModel
from store.keyed_names import Asker
from store.slots import read_contents, slot_path
from store.types import DEFAULT_TTL_S
from tests.kv_sessions import (
    BLOCK_TOKENS,
    FIRST,
    NEXT,
    SAID,
    TURN_2,
    Session,
    Stored,
    check_right,
    ids,
    last_logits,
    load,
    reused,
)
from tests.tiny_models import write_model


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load(write_model(tmp_path_factory.mktemp("dense"), num_hidden_layers=1))


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load(write_model(tmp_path_factory.mktemp("hybrid"), "lfm2"))


@pytest.fixture(params=["dense", "hybrid"])
def model(request: pytest.FixtureRequest) -> LoadedModel:
    return request.getfixturevalue(request.param)


@pytest.fixture
def stored(model: LoadedModel, tmp_path: Path) -> Stored:
    return Stored(model, tmp_path / "store")


def spoil(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def test_a_stored_conversation_is_read_once_and_reported(stored: Stored):
    session = stored.session()
    assert reused(check_right(session, TURN_2)) == (120, "warm", "first_seen")
    assert session.reports == [SlotsUsed(ids=(stored.prompt.id, stored.answer.id))]
    assert session.tiers.counts.num_restored_bytes > 0
    assert reused(check_right(session, [*FIRST, *SAID, 9, 8, 7]))[:2] == (120, "hot")


def test_what_there_is_no_room_for_twice_is_moved_and_right(stored: Stored):
    session = stored.session(hot_bytes=1)
    assert reused(check_right(session, TURN_2)) == (120, "warm", "first_seen")
    assert session.tiers.hot.num_evicted > 0
    assert reused(check_right(session, [*FIRST, *SAID, 9, 8, 7]))[:2] == (120, "warm")


class Long:
    """A conversation of three slots: tokens 0 to 2048, to 2499 and to 2520."""

    def __init__(self, model: LoadedModel, root: Path) -> None:
        self.model, self.root, self.ids = model, root, ids(4, 2500)
        session = Session(model, root)
        session.turn(self.ids, SAID)
        self.known = session.publish()
        self.next_turn = [*self.ids, *SAID, *NEXT]

    def copied(self, root: Path) -> Long:
        """The same in a directory of its own, where it can be damaged."""
        other = copy.copy(self)
        other.root = shutil.copytree(self.root, root)
        return other

    def session(self) -> Session:
        session = Session(self.model, self.root)
        session.tiers.learn(self.known)
        return session

    def spoil(self, number: int, position: int, tensor: str = "kv.0") -> None:
        """Damage what a slot has for the token at a position."""
        slot = self.known[number]
        path = slot_path(self.root, slot.id)
        with path.open("rb") as file:
            contents = read_contents(file.fileno())
        entry = next(one for one in contents.tensors if one.name == tensor)
        row_bytes = entry.num_bytes // entry.shape[0]
        spoil(path, contents.payload_start + entry.start + (position - slot.start) * row_bytes)


@pytest.fixture(scope="module")
def long(tmp_path_factory: pytest.TempPathFactory) -> Callable[[LoadedModel], Long]:
    """Of a model; computed once."""
    return functools.cache(lambda model: Long(model, tmp_path_factory.mktemp("long")))


@pytest.mark.parametrize("at", [300, 9])
def test_a_slot_whose_header_is_damaged_is_a_miss_and_what_follows_it_is_used(
    long: Callable[[LoadedModel], Long], model: LoadedModel, tmp_path: Path, at: int
):
    stored = long(model).copied(tmp_path / "store")
    spoil(slot_path(stored.root, stored.known[0].id), at)
    session = stored.session()
    cursor = check_right(session, stored.next_turn)
    assert reused(cursor)[0] == 2520 - 2048
    (report, *_) = session.reports
    assert isinstance(report, SlotBad)
    assert (report.id, report.parts) == (stored.known[0].id, ())
    assert session.tiers.counts.num_damaged == 1
    assert session.tiers.hot.find(stored.known[1].id) is not None
    assert reused(check_right(session, [*stored.next_turn, 5]))[1] == "hot"


@pytest.mark.parametrize("tensor", ["tokens", "kv.0", "kv.1"])
@pytest.mark.parametrize("positions", [(0,), (2047,), (1000,), (3, 500, 501, 2000)])
def test_damage_costs_the_blocks_that_it_is_in(
    long: Callable[[LoadedModel], Long],
    dense: LoadedModel,
    tmp_path: Path,
    positions: tuple[int, ...],
    tensor: str,
):
    stored = long(dense).copied(tmp_path / "store")
    for position in positions:
        stored.spoil(0, position, tensor)
    blocks = {position // BLOCK_TOKENS for position in positions}
    session = stored.session()
    cursor = check_right(session, stored.next_turn)
    assert reused(cursor) == (2520 - len(blocks) * BLOCK_TOKENS, "warm", "damaged")
    (report,) = [one for one in session.reports if isinstance(one, SlotBad)]
    whole = {one for part in report.parts for one in range(part.start, part.end)}
    damaged = {at for block in blocks for at in range(block * 16, block * 16 + 16)}
    assert whole == set(range(2048)) - damaged
    assert session.tiers.counts.num_damaged == 1
    session.tiers.on_saved([part.id for part in report.parts])
    assert reused(check_right(session, [*stored.next_turn, 5]))[0] == 2549


def test_a_damaged_state_costs_the_state(
    long: Callable[[LoadedModel], Long], hybrid: LoadedModel, tmp_path: Path
):
    stored = long(hybrid).copied(tmp_path / "store")
    spoil(slot_path(stored.root, stored.known[2].id), -1)
    session = stored.session()
    assert reused(check_right(session, stored.next_turn))[0] == 2499
    (report,) = [one for one in session.reports if isinstance(one, SlotBad)]
    assert [(part.start, part.end) for part in report.parts] == [(2499, 2520)]


def test_what_precedes_a_damaged_slot_is_used(stored: Stored):
    spoil(slot_path(stored.root, stored.answer.id), -1)
    session = stored.session()
    # The prompt's last token was computed by the decoder: it is the first of the answer's slot.
    whole = 99 if session.tiers.needs_state else 112
    assert reused(check_right(session, TURN_2)) == (whole, "warm", "damaged")


def waiting_for_a_missing_file(stored: Stored) -> tuple[Session, CacheCursor, Path]:
    """The prompt's slot is not where it was, and the store was told; where it is now."""
    path = slot_path(stored.root, stored.prompt.id)
    elsewhere = path.rename(stored.root / "elsewhere")
    session = stored.session()
    cursor = session.cursor(TURN_2)
    session.tiers.begin(cursor)
    while cursor.waiting and not session.reports:
        session.hear()
    (report,) = session.reports
    assert isinstance(report, SlotBad)
    assert (report.id, report.reason) == (stored.prompt.id, "missing")
    assert cursor.is_waiting
    return session, cursor, elsewhere


def test_a_missing_file_is_a_miss_once_the_store_says_that_it_is_gone(stored: Stored):
    session, cursor, _ = waiting_for_a_missing_file(stored)
    session.tiers.on_gone([stored.prompt.id], "evicted")
    while cursor.is_waiting:
        session.hear()
    session.tiers.restore(cursor)
    assert reused(cursor) == (0, "none", "evicted")
    assert session.tiers.counts.num_damaged == 0


def test_a_file_that_left_for_the_cold_store_is_read_when_it_is_back(stored: Stored):
    session, cursor, elsewhere = waiting_for_a_missing_file(stored)
    elsewhere.rename(slot_path(stored.root, stored.prompt.id))
    session.tiers.hear(SlotsPromoted(ids=(stored.prompt.id,)))
    while cursor.is_waiting:
        session.hear()
    session.tiers.restore(cursor)
    assert reused(cursor)[0] == 120


def test_a_whole_file_that_is_not_what_the_index_says_is_a_miss(stored: Stored, tmp_path: Path):
    other = Session(stored.model, stored.root)
    other.turn(ids(7, 100), SAID)
    foreign = other.publish()[0]
    lie = msgspec.structs.replace(stored.prompt, id=foreign.id)
    session = Session(stored.model, stored.root)
    session.tiers.learn([lie])
    assert reused(check_right(session, TURN_2)) == (0, "none", "damaged")
    without_state = msgspec.structs.replace(stored.prompt, has_state=not stored.prompt.has_state)
    session = Session(stored.model, stored.root)
    session.tiers.learn([without_state])
    assert reused(check_right(session, FIRST))[0] == 0


def test_an_index_that_makes_no_sense_is_not_believed(stored: Stored):
    session = Session(stored.model, stored.root)
    prompt, answer = stored.prompt, stored.answer
    replace = msgspec.structs.replace
    nonsense = [
        replace(prompt, start=1),
        replace(prompt, end=0),
        replace(prompt, block_hashes=prompt.block_hashes[1:]),
        replace(answer, start_hash=b"short"),
    ]
    session.tiers.learn(nonsense)
    assert len(session.tiers.hot.tree) == 0
    nowhere = replace(answer, id="e" * 32, start=200, end=220)
    session.tiers.learn([prompt, prompt, nowhere, answer, answer])
    session.check()
    assert len(session.tiers.hot.tree) == 3
    assert reused(check_right(session, TURN_2))[0] == 120


def test_tokens_decide_when_hashes_agree(dense: LoadedModel):
    session = Session(dense)
    cursor = session.turn(FIRST, SAID)
    assert cursor.leaf is not None
    (run,) = [run for run in session.tiers.hot.tree if run.start == 0]
    assert run.token_ids is not None
    run.token_ids[40] += 1
    assert reused(check_right(session, TURN_2))[0] == 0
    assert session.tiers.counts.exact_key_rejected_by_model_lcp == 1


def test_reading_that_takes_longer_than_prefill_is_not_begun(stored: Stored):
    session = stored.session()
    session.tier_state.rates.read_bytes_per_s = 10.0
    session.tier_state.rates.prefill_s_per_token = 1e-6
    assert reused(check_right(session, TURN_2)) == (0, "none", "slower_than_prefill")


def test_what_leaves_the_disk_stays_in_memory_and_is_written_again(stored: Stored):
    session = stored.session()
    check_right(session, FIRST)
    session.tiers.on_gone([stored.answer.id, stored.prompt.id], "expired")
    session.check()
    assert reused(check_right(session, FIRST))[:2] == (99, "hot")
    assert [job.header.id for job, _ in session.finish()] == [stored.prompt.id]
    session = stored.session()
    session.tiers.on_gone([stored.answer.id], "expired")
    assert reused(check_right(session, TURN_2)) == (99, "warm", "expired")


def test_two_that_want_the_same_slot_both_get_it(stored: Stored):
    session = stored.session()
    cursors = [session.cursor(one) for one in (TURN_2, FIRST[:23], FIRST, TURN_2)]
    for cursor in cursors:
        session.tiers.begin(cursor)
    while any(cursor.is_waiting for cursor in cursors):
        session.hear()
    num_tokens = [session.tiers.restore(cursor)[1] for cursor in cursors]
    short = 0 if session.tiers.needs_state else 22
    assert num_tokens == [120, short, 99, 120]
    session.check()
    assert all(session.tiers.hot[run].num_readers == 0 for run in session.tiers.hot.tree)


def test_who_leaves_while_others_wait_harms_nobody(stored: Stored):
    session = stored.session()
    cursors = [session.cursor(TURN_2) for _ in range(2)]
    for cursor in cursors:
        session.tiers.begin(cursor)
    session.tiers.release(cursors[0])
    while cursors[1].is_waiting:
        session.hear()
    assert session.tiers.restore(cursors[1])[1] == 120
    assert all(session.tiers.hot[run].num_readers == 0 for run in session.tiers.hot.tree)


def test_what_is_known_twice_is_kept_when_one_of_them_goes(stored: Stored):
    session = Session(stored.model, stored.root)
    session.turn(FIRST, SAID)
    session.tiers.learn(stored.known)
    session.check()
    assert reused(check_right(session, TURN_2))[:2] == (120, "hot")
    for run in [run for run in session.tiers.hot.tree if run.parent is None]:
        if session.tiers.hot[run].kv is not None:
            session.tier_state.forget(run, "evicted")
    assert reused(check_right(session, TURN_2))[:2] == (149, "warm")


def test_a_prompt_longer_than_a_slot_becomes_several(model: LoadedModel, tmp_path: Path):
    long = ids(4, 2500)
    session = Session(model, tmp_path)
    session.turn(long, SAID)
    known = session.publish()
    assert [(one.start, one.end) for one in known] == [(0, 2048), (2048, 2499), (2499, 2520)]
    assert [one.parent for one in known] == [None, known[0].id, known[1].id]
    assert sum(len(one.block_hashes) for one in known) == 2520 // BLOCK_TOKENS
    session = Session(model, tmp_path)
    session.tiers.learn(known)
    assert reused(check_right(session, [*long, *SAID, 5, 6]))[:2] == (2520, "warm")


def test_only_what_is_new_is_written(stored: Stored):
    session = stored.session()
    session.turn(TURN_2, SAID)
    known = session.publish()
    assert [(one.start, one.end) for one in known] == [(120, 149), (149, 170)]
    assert known[0].parent == stored.answer.id


def test_the_last_slot_of_an_answer_says_that_a_turn_ends(dense: LoadedModel, tmp_path: Path):
    session = Session(dense, tmp_path)
    session.turn([*ids(4, 2500)], SAID, asker=Asker("m", "mine"))
    session.turn([*ids(4, 2500), *SAID, *NEXT], SAID, asker=Asker("m", "mine"))
    assert [job.ends_turn for job, _ in session.finish()] == [False, False, True, False, True]


def test_a_request_that_must_leave_nothing_on_disk_leaves_nothing(
    dense: LoadedModel, tmp_path: Path
):
    session = Session(dense, tmp_path)
    session.turn(FIRST, SAID, ttl_s=0.0)
    assert reused(session.turn(FIRST, SAID, ttl_s=0.0))[:2] == (99, "hot")
    session.turn([*FIRST[:50], *NEXT], SAID, ttl_s=0.0)
    assert session.publish() == []


def test_who_begins_like_a_private_prompt_is_kept_and_the_private_rest_is_not(
    model: LoadedModel, tmp_path: Path
):
    session = Session(model, tmp_path)
    session.turn(FIRST, SAID, ttl_s=0.0)
    own = [[*FIRST[:50], *NEXT], [*FIRST[:40], *ids(5, 60)]]
    for prompt in (*own, own[0]):
        session.turn(prompt, SAID)
    known = session.publish()
    said = {
        tuple(job.token_ids[n : n + 2])
        for job, _ in session.written
        for n in range(len(job.token_ids))
    }
    assert not said & set(pairwise(FIRST[50:]))
    assert sum(one.end - one.start for one in known if one.start < 40) < 2 * len(FIRST)
    again = Session(model, tmp_path)
    again.tiers.learn(known)
    for prompt in own:
        end = len(prompt) + len(SAID)
        assert reused(check_right(again, [*prompt, *SAID, 7]))[:2] == (end, "warm")


def test_conversations_that_begin_with_the_same_few_tokens_do_not_need_each_other(
    dense: LoadedModel, tmp_path: Path
):
    session = Session(dense, tmp_path)
    session.turn(FIRST, SAID)
    session.turn([*FIRST[:5], *reversed(FIRST[5:])], SAID)
    known = session.publish()
    assert [one.start for one in known if one.parent is None] == [0, 0]


def test_who_wants_it_for_longer_than_the_first_one_is_heard(dense: LoadedModel, tmp_path: Path):
    session = Session(dense, tmp_path)
    session.turn(FIRST, SAID, ttl_s=5.0, ttl_class="short")
    known = session.publish()
    again = Session(dense, tmp_path)
    again.tiers.learn(known)
    prompt, answer = (one.id for one in known)
    for ttl_s, longer in (
        (1.0, {}),
        (60.0, {prompt: 60.0, answer: 60.0}),
        (60.0, {}),
        (None, {prompt: DEFAULT_TTL_S, answer: DEFAULT_TTL_S}),
    ):
        wish = {} if ttl_s is None else {"ttl_s": ttl_s, "ttl_class": "short"}
        again.take_up(again.cursor(TURN_2, **wish))
        assert again.reports.pop() == SlotsUsed(ids=(prompt, answer), longer=longer)


def test_who_says_all_of_a_private_prompt_may_keep_it(dense: LoadedModel, tmp_path: Path):
    session = Session(dense, tmp_path)
    session.turn(FIRST, SAID, ttl_s=0.0)
    session.turn(TURN_2, SAID)
    assert [one.start for one in session.publish()] == [0, 99, 120, 149]


def test_a_slot_that_was_not_written_is_written_with_the_next_turn(
    model: LoadedModel, tmp_path: Path
):
    root = tmp_path / "store"
    root.mkdir()
    (root / "slots").write_text("in the way")
    session = Session(model, root)
    assert session.writer is not None
    session.writer.pause_s = 0.0
    session.turn(FIRST, SAID)
    while session.tiers.counts.num_unwritten < 2:
        session.hear()
    session.check()
    (root / "slots").unlink()
    session.turn(TURN_2, SAID)
    known = session.publish()
    assert [one.start for one in known] == [0, 99, 120, 149]
    session = Session(model, root)
    session.tiers.learn(known)
    assert reused(check_right(session, [*TURN_2, *SAID, 5]))[:2] == (170, "warm")


def test_state_is_never_kept_for_another_position(hybrid: LoadedModel):
    """The run of a prefix is evicted between its commit and the end of its prompt."""
    session = Session(hybrid)
    cursor = session.cursor(FIRST, mode="prefix", prefix_end=40, boundaries=(40,))
    kv, _ = session.take_up(cursor)
    for start, end in ((0, 32), (32, 40)):
        session.forward(FIRST[start:end], kv)
        session.tiers.on_prefill(cursor, kv, (start, end), 0.001)
    assert cursor.leaf is not None
    session.tiers.hear(HotBudget(num_bytes=1))
    assert cursor.leaf not in session.tiers.hot
    session.compute(cursor, kv, 40)
    assert reused(check_right(session, FIRST))[0] == 0


def test_a_boundary_inside_a_known_run_gets_its_state(hybrid: LoadedModel):
    session = Session(hybrid)
    session.turn(FIRST, SAID)
    for end in (48, 77):
        prompt = [*FIRST[:end], *ids(end, 20)]
        last_logits(session, prompt, session.cursor(prompt, boundaries=(end,)))
        assert reused(check_right(session, [*FIRST[:end], 9, 8, 7]))[:2] == (end, "hot")
    num_runs = len(session.tiers.hot.tree)
    check_right(session, FIRST[:49])
    check_right(session, FIRST[:78])
    assert len(session.tiers.hot.tree) == num_runs


def test_a_recomputed_sequence_takes_up_what_its_trail_kept(model: LoadedModel):
    session = Session(model)
    cursor = session.turn(FIRST, [])
    longer = session.tiers.lengthened(cursor, [*FIRST, *SAID])
    kv, num_tokens = session.take_up(longer)
    assert num_tokens == 100
    assert longer.block_hashes == session.chain.block_hashes([*FIRST, *SAID])
    session.compute(longer, kv, num_tokens)
    assert isinstance(session.tiers.wire_counts().hot_bytes, int)
    assert reused(check_right(session, [*FIRST, *SAID, 7]))[0] == 119


def test_a_conversation_larger_than_memory_is_kept_by_parts_and_read_back_whole(
    model: LoadedModel, tmp_path: Path
):
    session = Session(model, tmp_path)
    session.turn(TURN_2, SAID)
    session.turn([*TURN_2, *SAID, *ids(4, 60)], SAID)
    whole_bytes = session.tiers.wire_counts().hot_bytes
    session.tiers.on_saved([one.id for one in session.publish()])
    session.tiers.hear(HotBudget(num_bytes=whole_bytes - 1))
    assert 0 < session.tiers.wire_counts().hot_bytes <= whole_bytes - 1
    cursor = check_right(session, [*TURN_2, *SAID, *ids(4, 60), *SAID, 5])
    assert cursor.use.tier == "warm"
    session.tiers.release(cursor)
    assert session.tiers.wire_counts().hot_bytes <= whole_bytes - 1


def test_what_no_disk_takes_is_cut_only_as_far_as_memory_holds_it(model: LoadedModel):
    session = Session(model)
    session.turn(FIRST, SAID)
    half = session.tiers.wire_counts().hot_bytes // 2
    small = Session(model, hot_bytes=half)
    cursor = small.turn(FIRST, SAID)
    assert small.tiers.wire_counts().hot_bytes <= half
    assert cursor.num_kept <= len(FIRST)
    check_right(small, [*FIRST, *SAID, 5])


def test_one_slow_read_does_not_end_reading(stored: Stored):
    session = stored.session()
    session.tier_state.rates.prefill_s_per_token = 1e-3
    session.tier_state.rates.on_read(1 << 21, 600.0)
    assert reused(check_right(session, TURN_2))[1] == "warm"
