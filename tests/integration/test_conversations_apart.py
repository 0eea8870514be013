"""No conversation is needed by another: against a plain dictionary of what each must still have.

The store is a real one and the worker's tiers are; the KV of a token is a hash of all tokens up to
it. The dictionary knows what each conversation said, and which of its positions were lost: to
damage, to a cap, or because they were not on disk yet when everything was killed; of the last ones
the reason says so, and of no others.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import count, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from runtime.cache.compaction import compact, cut_ends
from runtime.cache.inventory import Inventory
from runtime.cache.maintenance import StoreLimits, keep_within_caps, usage_of
from runtime.cache.owned import Merged, News, OpenStore, lost, note
from runtime.cache.repair import repair
from runtime.cache.service import KvStore
from runtime.cache.store_opening import open_store
from runtime.config.settings import Settings
from runtime.errors import UnknownConversation
from runtime.kv.cursor import CacheCursor
from runtime.kv.prefix_tree import num_common
from runtime.slot_events import (
    Forget,
    KnownSlot,
    Lost,
    SlotBad,
    SlotPart,
    SlotsDemoted,
    SlotsGone,
    SlotsPromoted,
    SlotsWanted,
    TurnEnded,
)
from store.conversations import Conversations
from store.disk import disk_bytes
from store.keyed_names import Asker, Whom
from store.recovery import Recovery
from store.slot_file import bounds
from store.slots import SLOTS, read_contents, read_header, slot_path
from store.types import ConversationRow, SlotRow
from store.upkeep import slot_files
from tests.crash.server_store import check_bytes_add_up
from tests.integration.test_kv_replay import Hashing
from tests.kv_sessions import Session
from tests.slot_samples import is_served

BLOCK = 4
NUM_TALKS = 30
MAX_TOKENS = 160
MODEL = b"model"
CHOICE = st.integers(0, 1 << 30)


@dataclass
class Talk:
    """A conversation as the dictionary knows it; `lost` are positions that need not be there."""

    name: str
    ids: list[int]
    lost: set[int] = field(default_factory=set[int])


class Harm(NamedTuple):
    """The positions `span` of a slot that has these tokens from `start` on are lost."""

    start: int
    tokens: list[int]
    span: range


class ConversationsApart(RuleBasedStateMachine):
    """`undurable` are tokens that were computed and not on disk since."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="apart-"))
        self.fresh, self.names = count(10), count()
        self.talks: dict[str, Talk] = {}
        self.deleted: set[int] = set()
        self.undurable: set[int] = set()
        self.unseen: dict[str, list[Harm]] = {}
        self.model = Hashing(is_hybrid=False)
        self.open()

    def open(self) -> None:
        self.store: OpenStore = open_store(self.folder / "kv", str(self.folder / "cold"))
        self.session = self.worker()

    def worker(self) -> Session:
        """One that knows what is on disk, and nothing else."""
        session = Session(self.model, self.store.root, block_size=BLOCK, secret=self.store.secret)
        session.tiers.learn(list(map(KnownSlot.of, self.store.index.all_slots())))
        session.tiers.hear(Lost(rows=tuple(lost(self.store, MODEL, is_alone=False))))
        return session

    # What conversations do

    @rule(choice=CHOICE, num_new=st.integers(1, 40), num_said=st.integers(1, 9))
    def say(self, choice: int, num_new: int, num_said: int) -> None:
        talk = self.chosen(choice)
        if talk is None or len(talk.ids) + num_new + num_said > MAX_TOKENS:
            talk = self.begun([])
        self.turn(talk, num_new, num_said)
        self.publish(talk)

    @precondition(lambda self: self.talks and len(self.talks) < NUM_TALKS)
    @rule(choice=CHOICE, at=CHOICE, num_new=st.integers(1, 12))
    def branch(self, choice: int, at: int, num_new: int) -> None:
        """A sibling, or an edit: it begins like another one."""
        source = self.some(choice)
        cut = at % (len(source.ids) + 1)
        talk = self.begun(source.ids[:cut])
        talk.lost = {one for one in source.lost if one < cut}
        self.turn(talk, num_new, 2)
        self.publish(talk)

    @precondition(lambda self: self.talks)
    @rule(choice=CHOICE)
    def delete(self, choice: int) -> None:
        talk = self.some(choice)
        del self.talks[talk.name]
        self.deleted |= set(talk.ids) - {one for other in self.talks.values() for one in other.ids}
        whom = Whom(session_id=talk.name)
        self.session.forget(Forget(number=1, whom=whom, secret=self.store.secret))
        Inventory(self.store, self.tell).remove_conversation(talk.name)
        said = {one for path in self.whole_files() for one in tokens_of(path)}
        assert not said & self.deleted, "what was deleted is on disk"
        hot = self.session.tiers.hot
        held = {one for run in hot.tree if run.token_ids for one in run.token_ids}
        assert not held & self.deleted, "what was deleted is in memory"

    # What happens to them

    @precondition(lambda self: self.whole_files())
    @rule(choice=CHOICE, at=CHOICE, is_seen_by_server=st.booleans())
    def damage(self, choice: int, at: int, is_seen_by_server: bool) -> None:
        path = self.whole_files()[choice % len(self.whole_files())]
        data = bytearray(path.read_bytes())
        span, start = harmed(path, at % len(data)), read_header(path).start
        harm = Harm(start, tokens_of(path), span)
        self.unseen.setdefault(path.stem, []).append(harm)
        self.lose(harm, self.talks.values())
        data[at % len(data)] ^= 1
        path.write_bytes(data)
        if is_seen_by_server:
            self.tell(repair(self.store, path.stem))

    def lose_a_byte_at(self, position: int) -> None:
        """Of the KV at a position of the only conversation there is; the server sees it."""
        [talk] = self.talks.values()
        paths = {read_header(path).end: path for path in self.whole_files()}
        path = paths[min(end for end in paths if end > position)]
        with path.open("r+b") as file:
            contents = read_contents(file.fileno())
            entry, row = contents.tensors[1], position - contents.header.start
            at = contents.payload_start + entry.start
            at += row * (entry.num_bytes // contents.header.num_tokens)
            self.lose(Harm(contents.header.start, tokens_of(path), harmed(path, at)), [talk])
            os.pwrite(file.fileno(), bytes([os.pread(file.fileno(), 1, at)[0] ^ 1]), at)
        self.tell(repair(self.store, path.stem))

    @rule(share=st.integers(1, 9))
    def evict(self, share: int) -> None:
        cap = max(usage_of(self.store).fast_bytes * share // 10, 1)
        there = {path.stem: path for path in self.whole_files()}
        held = {name: (read_header(path), tokens_of(path)) for name, path in there.items()}
        for news in keep_within_caps(self.store, StoreLimits(cap, 1 << 40, 1e9)):
            for header, tokens in (held[one] for one in news.ids if one in held):
                if isinstance(news, SlotsGone):
                    harm = Harm(header.start, tokens, range(header.start, header.end))
                    self.lose(harm, self.talks.values())
            self.tell(news)

    @rule()
    def merge(self) -> None:
        for news in compact(self.store, lambda: {MODEL}, lambda: False):
            self.tell(news)

    @precondition(lambda self: self.whole_files())
    @rule(choice=CHOICE)
    def demote(self, choice: int) -> None:
        path = self.whole_files()[choice % len(self.whole_files())]
        self.store.demote(path.stem)
        self.tell(SlotsDemoted((path.stem,)))

    @rule()
    def restart(self) -> None:
        self.session.close()
        self.store.close()
        self.open()

    @rule(choice=CHOICE, num_new=st.integers(1, 20))
    def kill(self, choice: int, num_new: int) -> None:
        """In the midst of a turn of which nothing is on disk; its files are left unfinished."""
        talk = self.chosen(choice)
        if talk is not None and len(talk.ids) + num_new + 2 <= MAX_TOKENS:
            start = len(talk.ids)
            cursor = self.turn(talk, num_new, 2)
            self.session.wait_until_written()
            self.serve(self.session)
            talk.lost |= set(range(start, len(talk.ids)))
            self.session.tiers.note_durable(cursor)
            talk.lost -= set(range(cursor.use.num_durable))
            self.lose_unseen(talk)
            self.undurable |= {one for job, _ in self.session.written for one in job.token_ids}
            self.note()
        self.session.close()
        self.store.close()
        self.open()
        Recovery(self.store.root, self.store.database, self.store.cold, 2e9).run()
        self.session.close()
        self.session = self.worker()

    # What must be so

    @invariant()
    def each_has_what_it_must_have(self) -> None:
        for talk in list(self.talks.values())[-3:]:
            self.look(talk)

    @invariant()
    def own_and_shared_bytes_add_up(self) -> None:
        check_bytes_add_up(self.store)

    @invariant()
    def files_are_what_the_index_says(self) -> None:
        rows = {row.header.id: row for row in self.store.index.all_slots()}
        warm = {path.stem for path in self.files()}
        assert warm == {name for name, row in rows.items() if row.tier == "warm"}
        assert all(rows[p.stem].disk_bytes == disk_bytes(p) for p in self.files())
        self.session.check()

    def teardown(self) -> None:
        for talk in self.talks.values():
            self.look(talk)
        self.session.close()
        self.store.close()
        shutil.rmtree(self.folder)

    # How it is done

    def look(self, talk: Talk) -> None:
        """A worker that has just started takes up all but what was lost, and about a block each."""
        worker = self.worker()
        cursor = worker.cursor([*talk.ids, 1])
        cursor.ttl_s = 0.0
        _, num_reused = self.computed(worker, cursor)
        worker.close()
        lost = {position - position % BLOCK for position in talk.lost}
        allowed = len(lost) * BLOCK + len(holes(talk.lost)) * BLOCK
        assert num_reused >= len(talk.ids) - allowed, f"{num_reused} of {talk}"
        said, at = cursor.use.reason, cursor.use.at
        is_undurable = at < len(talk.ids) and talk.ids[at] in self.undurable
        true = ("not_yet_durable", "damaged") if is_undurable else ("not_yet_durable",)
        assert (said in true) == is_undurable, f"{said} at {at} of {talk}"

    def chosen(self, choice: int) -> Talk | None:
        """One of the conversations, or none."""
        number = choice % (len(self.talks) + 1)
        return [*self.talks.values(), None][number]

    def some(self, choice: int) -> Talk:
        return list(self.talks.values())[choice % len(self.talks)]

    def begun(self, ids: list[int]) -> Talk:
        talk = Talk(f"talk {next(self.names)}", list(ids))
        self.talks[talk.name] = talk
        return talk

    def turn(self, talk: Talk, num_new: int, num_said: int) -> CacheCursor:
        prompt = [*talk.ids, *(next(self.fresh) for _ in range(num_new))]
        said = [next(self.fresh) for _ in range(num_said)]
        cursor = self.session.cursor(prompt, asker=Asker("m", talk.name))
        kv, _ = self.computed(self.session, cursor)
        whole = [*prompt, *said]
        for at in range(len(prompt) - 1, len(whole)):
            self.model.compute(kv, whole, at, at + 1)
        self.session.tiers.on_finished(cursor, said, kv)
        talk.ids = whole
        return cursor

    def computed(self, session: Session, cursor: CacheCursor) -> tuple[list[Any], int]:
        """As the engine: take up, compute what is missing, take up what is known behind it.

        Caches with all but the last token, and how many tokens were taken up.
        """
        tiers, ids, last = session.tiers, cursor.token_ids, len(cursor.token_ids) - 1
        tiers.begin(cursor)
        self.serve(session)
        while cursor.is_waiting:
            session.hear()
            self.serve(session)
        kv, at = tiers.restore(cursor)
        num_reused = at
        self.model.check(kv, ids, at)
        while at < last:
            if tiers.knows_more(cursor, at):
                num_reused -= at
                kv, at = tiers.restore(cursor, num_had=at)
                num_reused += at
                self.model.check(kv, ids, at)
                continue
            end = min([at + 32, last, *(one for one in cursor.boundaries if one > at)])
            self.model.compute(kv, ids, at, end)
            tiers.on_prefill(cursor, kv, (at, end), 0.001)
            at = end
        return kv, num_reused

    def serve(self, session: Session) -> None:
        """What the server does about what a worker reports. One that only looks repairs nothing."""
        reports, session.reports[:] = list(session.reports), []
        for report in reports:
            match report:
                case SlotsWanted(ids=ids):
                    there = [one for one in ids if self.store.promote(one)]
                    session.tiers.hear(SlotsPromoted(ids=tuple(there)))
                    session.tiers.on_gone([one for one in ids if one not in there], "evicted")
                case SlotBad(parts=parts) if session is self.session and parts:
                    news = repair(self.store, report.id, parts)
                    saved = [one.id for one in news.told.slots] if isinstance(news, Merged) else []
                    session.tiers.on_saved(saved)
                    session.tiers.on_gone([p.id for p in parts if p.id not in saved], "evicted")
                case SlotBad() if session is self.session:
                    self.tell(SlotsGone(self.store.drop_bad(report.id), "damaged"))
                case TurnEnded():
                    self.store.end_turn(MODEL, report)
                case _:
                    pass

    def publish(self, talk: Talk) -> None:
        """All that a turn computed is on disk now, also what was lost before."""
        session = self.session
        session.wait_until_written()
        staged = [job.staged(file) for job, file in session.written]
        session.written.clear()
        self.note()
        published = self.store.publish(staged)
        assert not published.refused
        session.tiers.on_saved([row.header.id for row in published.saved])
        self.serve(session)
        talk.lost.clear()
        self.undurable -= {one for row in published.saved for one in self.tokens_in(row)}
        there = {path.stem for path in self.files()}
        for harm in [one for name, all_ in self.unseen.items() if name in there for one in all_]:
            self.lose(harm, [talk])

    def note(self) -> None:
        """What the server does about what a worker has in memory only."""
        noted, self.session.noted[:] = list(self.session.noted), []
        for one in noted:
            note(self.store, MODEL, one)

    def tokens_in(self, row: SlotRow) -> list[int]:
        return tokens_of(slot_path(self.store.root, row.header.id))

    def tell(self, news: News) -> None:
        self.session.tiers.hear(news.told if isinstance(news, Merged) else news)

    def whole_files(self) -> list[Path]:
        return [path for path in self.files() if is_served(path)]

    def files(self) -> list[Path]:
        replaced = {place.id for place in self.store.replaced}
        there = [path for path in slot_files(self.store.root) if path.stem not in replaced]
        return sorted(there, key=lambda path: path.stat().st_mtime_ns)

    def lose_unseen(self, talk: Talk) -> None:
        """Nobody knows yet of this damage."""
        there = {path.stem for path in self.files()}
        for harm in [one for name, all_ in self.unseen.items() if name in there for one in all_]:
            self.lose(harm, [talk])

    def lose(self, harm: Harm, talks: Iterable[Talk]) -> None:
        """Whoever said these tokens may lose those of the span; tokens are never the same twice."""
        for talk in talks:
            num_shared = num_common(array("I", harm.tokens), 0, talk.ids, harm.start)
            talk.lost |= {one for one in harm.span if one < harm.start + num_shared}


def tokens_of(path: Path) -> list[int]:
    """The token ids in a slot file, damaged or not."""
    with path.open("rb") as file:
        contents = read_contents(file.fileno())
        data = os.pread(file.fileno(), contents.tensors[0].end, contents.payload_start)
    return array("I", data).tolist()


def harmed(path: Path, at: int) -> range:
    """The positions whose KV, or whose description, the byte `at` of a slot file is of."""
    with path.open("rb") as file:
        contents = read_contents(file.fileno())
    header = contents.header
    if at < contents.payload_start:
        return range(header.start, header.end)
    at -= contents.payload_start
    entry = next(one for one in contents.tensors if one.start <= at < one.end)
    row = (at - entry.start) // (entry.num_bytes // header.num_tokens)
    [span] = [range(a, b) for a, b in pairwise(bounds(header)) if a <= row < b]
    return range(header.start + span.start, header.start + span.stop)


def holes(lost: set[int]) -> list[int]:
    """Where lost pieces begin."""
    return [one for one in lost if one - 1 not in lost]


QUIET = (HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large)


def test_what_others_wrote_of_a_conversation_stays_its_own_when_they_are_deleted():
    """Its own turn was lost, and so was the next one, which had told that these are on disk."""
    machine = ConversationsApart()
    machine.say(choice=0, num_new=20, num_said=4)
    machine.kill(choice=0, num_new=10)
    [talk] = machine.talks.values()
    num_tokens = len(talk.ids)
    machine.branch(choice=0, at=num_tokens, num_new=6)
    machine.kill(choice=0, num_new=10)
    assert min(talk.lost) == num_tokens, "the first turns are on disk"
    machine.delete(choice=1)
    assert list(machine.talks) == [talk.name]
    machine.look(talk)
    machine.own_and_shared_bytes_add_up()
    machine.teardown()


def test_a_slot_within_a_block_between_two_lost_ones_costs_nothing_of_what_follows():
    machine = ConversationsApart()
    for num_new, num_said in ((16, 4), (1, 1), (1, 1), (26, 4)):
        machine.say(choice=0, num_new=num_new, num_said=num_said)
    [talk] = machine.talks.values()
    machine.lose_a_byte_at(15)
    machine.lose_a_byte_at(22)
    assert talk.lost == {15, 22, 23}, "from 20 to 22 is a slot"
    machine.look(talk)
    machine.restart()
    machine.look(talk)
    machine.teardown()


def test_turns_that_go_on_within_a_block_are_taken_up_though_the_index_was_lost():
    machine = ConversationsApart()
    machine.say(choice=0, num_new=13, num_said=4)
    for number in range(5):
        talk = [*machine.talks.values()][-1]
        machine.branch(choice=number, at=len(talk.ids) - 1, num_new=9)
    talk = [*machine.talks.values()][-1]
    starts = {row.header.start for row in machine.store.index.all_slots()}
    assert any(start % BLOCK for start in starts - {one.header.end for one in rows_of(machine)})
    machine.session.close()
    machine.store.close()
    for path in (machine.folder / "kv").glob("index.db*"):
        path.unlink()
    machine.open()
    Recovery(machine.store.root, machine.store.database, machine.store.cold, 2e9).run()
    worker = machine.worker()
    cursor = worker.cursor([*talk.ids, 1])
    _, num_reused = machine.computed(worker, cursor)
    worker.close()
    assert num_reused == len(talk.ids)
    machine.teardown()


def test_a_repair_that_fails_in_its_midst_leaves_nothing_that_the_index_does_not_know():
    """It was broken off when the slot was deleted, and left a part of what was deleted."""
    machine = ConversationsApart()
    machine.say(choice=0, num_new=30, num_said=2)
    [row, *_] = rows_of(machine)
    [path] = [one for one in machine.whole_files() if one.stem == row.header.id]
    data = bytearray(path.read_bytes())
    at = next(at for at in range(len(data)) if harmed(path, at) == range(12, 16))
    data[at] ^= 1
    path.write_bytes(data)
    there = machine.store.root / SLOTS / "bb"
    there.rmdir()
    there.write_text("no folder")
    parts = [SlotPart("aa" * 16, 0, 12), SlotPart("bb" * 16, 16, row.header.end)]
    machine.tell(repair(machine.store, row.header.id, parts))
    machine.files_are_what_the_index_says()
    machine.session.close()
    machine.store.close()
    shutil.rmtree(machine.folder)


def test_what_is_repaired_before_it_is_cut_has_nothing_of_what_was_deleted():
    """A worker found the damage and called what is whole, before the deletion cut the file."""
    machine = ConversationsApart()
    machine.say(choice=0, num_new=30, num_said=2)
    machine.branch(choice=0, at=16, num_new=5)
    store = machine.store
    [row] = [one for one in rows_of(machine) if one.header.start == 0 and one.header.end > 16]
    [path] = [one for one in machine.whole_files() if one.stem == row.header.id]
    data = bytearray(path.read_bytes())
    at = next(at for at in range(len(data)) if harmed(path, at) == range(12, 16))
    data[at] ^= 1
    path.write_bytes(data)
    gone = set(machine.talks.pop("talk 0").ids) - set(machine.talks["talk 1"].ids)
    key = store.conversation_key("talk 0")
    store.unlink(Conversations(store.database).drop(key).result())
    parts = [SlotPart("aa" * 16, 0, 12), SlotPart("bb" * 16, 16, row.header.end)]
    news = repair(store, row.header.id, parts)
    assert isinstance(news, Merged)
    assert [(one.start, one.end) for one in news.told.slots] == [(0, 12)]
    assert not list(cut_ends(store))
    assert not gone & {one for path in machine.files() for one in tokens_of(path)}
    machine.session.close()
    store.close()
    shutil.rmtree(machine.folder)


def test_what_is_needed_further_while_it_is_cut_is_cut_there():
    machine = ConversationsApart()
    for number in (0, 2):
        machine.say(choice=len(machine.talks), num_new=30, num_said=2)
        machine.branch(choice=number, at=12, num_new=5)
    store, conversations = machine.store, Conversations(machine.store.database)
    for name in ("talk 0", "talk 2"):
        store.unlink(conversations.drop(store.conversation_key(name)).result())
    (_, needed), (later, also) = store.index.to_cut()
    assert (needed, also) == (12, 12)
    cutting = cut_ends(store)
    next(cutting)
    key, leaf = store.conversation_key("another"), later.header.id
    another = ConversationRow(key, later.header.model, leaf, 16, last_used_s=1.0, created_s=1.0)
    conversations.advance(another).result()
    assert [one.told.slots[0].end for one in cutting if isinstance(one, Merged)] == [16]
    assert not store.index.to_cut()
    machine.session.close()
    store.close()
    shutil.rmtree(machine.folder)


@pytest.mark.parametrize("is_asked_again", [True, False])
def test_a_deletion_that_was_broken_off_is_finished_when_the_store_opens_or_when_asked_again(
    is_asked_again: bool,
):
    machine = ConversationsApart()
    machine.say(choice=0, num_new=30, num_said=2)
    machine.branch(choice=0, at=12, num_new=5)
    gone = set(machine.talks.pop("talk 0").ids) - set(machine.talks["talk 1"].ids)
    store = machine.store
    key = store.conversation_key("talk 0")
    store.unlink(Conversations(store.database).drop(key).result())
    assert gone & {one for path in machine.files() for one in tokens_of(path)}
    machine.session.close()
    if is_asked_again:
        with pytest.raises(UnknownConversation):
            Inventory(store).remove_conversation("talk 0")
        store.close()
    else:
        store.close()
        asyncio.run(opened_and_closed(machine.folder))
    machine.open()
    assert not gone & {one for path in machine.files() for one in tokens_of(path)}
    machine.each_has_what_it_must_have()
    machine.teardown()


async def opened_and_closed(home: Path) -> None:
    """As a server does."""
    store = KvStore(Settings(home=home))
    store.start()
    await store.settled()
    await store.stop()


def rows_of(machine: ConversationsApart) -> list[SlotRow]:
    return machine.store.index.all_slots()


def test_what_was_damaged_is_not_called_not_yet_durable_for_a_deletion_beside_it():
    machine = ConversationsApart()
    machine.say(choice=0, num_new=25, num_said=3)
    machine.branch(choice=0, at=12, num_new=1)
    [first] = (row.header.id for row in rows_of(machine) if row.header.start == 0)
    files = [path.stem for path in machine.whole_files()]
    machine.damage(choice=files.index(first), at=0, is_seen_by_server=True)
    machine.delete(choice=0)
    machine.say(choice=1, num_new=5, num_said=2)
    machine.restart()
    machine.each_has_what_it_must_have()
    machine.teardown()


@pytest.mark.parametrize("share", [0.3, 0.5, 0.7, 0.9, 1.0])
def test_a_conversation_is_durable_up_to_what_it_has_lost(share: float):
    machine = ConversationsApart()
    machine.say(choice=0, num_new=30, num_said=4)
    [talk] = machine.talks.values()
    assert [view.num_durable for view in Inventory(machine.store).conversations()] == [34]
    # That of the prompt: which of the two was written first is left to the writer's threads.
    files = machine.whole_files()
    [prompt] = (number for number, path in enumerate(files) if read_header(path).start == 0)
    num_bytes = files[prompt].stat().st_size
    machine.damage(choice=prompt, at=int(share * num_bytes) - 1, is_seen_by_server=True)
    assert talk.lost
    [view] = Inventory(machine.store).conversations()
    assert view.num_durable == min(talk.lost)
    assert not view.is_durable
    machine.teardown()


@pytest.mark.parametrize("share", [0.5, 0.9, 0.93, 0.97, 1.0])
def test_a_conversation_is_durable_up_to_what_its_last_slot_has_lost(share: float):
    """The beginning of that slot is kept, and counts."""
    machine = ConversationsApart()
    machine.say(choice=0, num_new=30, num_said=20)
    [talk] = machine.talks.values()
    files = machine.whole_files()
    last = max(range(len(files)), key=lambda one: read_header(files[one]).end)
    num_bytes = files[last].stat().st_size
    machine.damage(choice=last, at=int(share * num_bytes) - 1, is_seen_by_server=True)
    [view] = Inventory(machine.store).conversations()
    assert view.num_durable == min(talk.lost)
    assert not view.is_durable
    machine.teardown()


def test_no_conversation_is_needed_by_another():
    short = settings(
        max_examples=12, stateful_step_count=25, deadline=None, suppress_health_check=QUIET
    )
    run_state_machine_as_test(ConversationsApart, settings=short)


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_no_conversation_is_needed_by_another_for_long():
    long = settings(
        max_examples=300,
        stateful_step_count=50,
        derandomize=False,
        deadline=None,
        suppress_health_check=QUIET,
    )
    run_state_machine_as_test(ConversationsApart, settings=long)
