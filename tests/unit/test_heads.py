"""Blocks and heads in random interleavings beside plain dictionaries, with kills before any change.

Nothing is ever wrong; nothing that was kept is lost by what others do; nothing that was deleted
comes back, on the fast disk, in the index or in the cold store; no slot stays without a head; rows
are as the files after each start; and what is there is never more than the cap.
"""

from __future__ import annotations

import itertools
import shutil
import tempfile
from array import array
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple
from uuid import uuid4

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from msgspec.structs import replace

from migrations.run import upgrade
from store.block_names import HashChain, pack_ids
from store.cold import ColdDirectory, ColdSlot
from store.cold_blocks import ColdBlocks, cold_id
from store.errors import ColdAway, SlotDamaged, SlotForeign, SlotMissing, StoreFull
from store.file_kinds import INDEX
from store.head_file import (
    KEPT,
    Head,
    HeadFile,
    Owner,
    heads_behind,
    read_head,
    write_head,
)
from store.heads import Heads, Published, TurnedAway, Whom
from store.index import Index
from store.kv_file import Tensor
from store.opening import open_database
from store.room import Limits, Room, Surroundings, file_bytes
from store.slots import BlockKey, SlotAbout, Slots
from store.temp_names import TEMPORARY
from store.turns import Said, Turn, digests_of, packed, unpacked
from store.types import Instant
from store.upkeep import DiskRoom
from tests.disk_observer import bytes_at_once

BLOCK = 4
MODEL = b"m" * 16
CHAIN = HashChain(b"secret", MODEL, block_size=BLOCK)
SYSTEMS = [list(range(1, 1 + number)) for number in (0, 3, 4, 9)]
FIRST = 0x5A3C0000
"""Tokens that conversations make up begin here."""

TTL_S = 100.0
COLD_TTL_S = 200.0
LOOSE_BYTES, TIGHT_BYTES = 1 << 40, 30 * 4096
WORKERS = ("a", "b")
MEMORY = Path("/dev/shm")

RARELY = st.integers(0, 7).map(lambda number: number == 7)
"""What ends all that is in flight; else nothing ever comes to its end."""


class Killed(Exception):
    """The process ended before a change of the disk."""


class InFlight(NamedTuple):
    conversation: int
    head: Head
    token_ids: list[int]
    received: int
    staged: Path
    worker: str


class Cold(ColdDirectory):
    """A cold store that may be away, and before whose changes the process may end."""

    is_away = False
    before_change: Callable[[], None]

    def check(self) -> None:
        if self.is_away:
            raise ColdAway("it is away")

    def put(self, slot_id: str, chunks: Iterable[bytes]) -> ColdSlot:
        self.check()
        self.before_change()
        return super().put(slot_id, chunks)

    def get(self, slot_id: str):
        self.check()
        return super().get(slot_id)

    def delete(self, slot_id: str) -> bool:
        self.check()
        self.before_change()
        return super().delete(slot_id)


@cache
def empty_index() -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "index"
        open_database(path, upgrade, kind=INDEX).close()
        return path.read_bytes()


def kv_of(token_ids: Sequence[int], start: int, end: int) -> bytes:
    """One byte for each token, which depends on all before it."""
    prefixes = (pack_ids(token_ids[: at + 1]) for at in range(start, end))
    return b"".join(blake2b(one, digest_size=1).digest() for one in prefixes)


def keys_of(token_ids: Sequence[int]) -> list[BlockKey]:
    return [BlockKey(MODEL, name) for name in CHAIN.block_hashes(token_ids)]


def digest_of(token_ids: Sequence[int]) -> bytes:
    return blake2b(pack_ids(token_ids), digest_size=16).digest()


def said_by(token_ids: Sequence[int]) -> bytes:
    """All of it is one turn."""
    turn = Turn(digest_of(token_ids), b"", 0, pack_ids(token_ids))
    return packed(Said((turn,)), token_ids)


class Machine(RuleBasedStateMachine):
    @initialize(is_tight=st.sampled_from([False, False, True]), has_cold=st.booleans())
    def begin(self, is_tight: bool, has_cold: bool) -> None:
        self.root = Path(tempfile.mkdtemp(dir=MEMORY if MEMORY.is_dir() else None))
        self.fuse: int | None = None
        self.full: int | None = None
        self.cap_bytes = TIGHT_BYTES if is_tight else LOOSE_BYTES
        self.cold = Cold(self.root / "cold") if has_cold else None
        if self.cold is not None:
            self.cold.before_change = self.before_change
        self.old_index = empty_index()
        self.wall_s = self.boot_s = 1e9
        self.boot = 1
        self.passed_s = 0.0
        self.numbers = itertools.count(1)
        self.fresh = (FIRST + 7919 * number for number in itertools.count())
        self.said: dict[int, list[int]] = {}
        self.head_ids: dict[int, str] = {}
        self.session: dict[int, bytes] = {}
        self.own_tokens: dict[int, list[int]] = {}
        self.used_s: dict[int, float] = {}
        self.in_memory: set[int] = set()
        self.pinned: set[int] = set()
        self.short: set[int] = set()
        self.deleted: set[int] = set()
        self.expired: set[int] = set()
        self.lost_slots: set[bytes] = set()
        self.headless: set[int] = set()
        self.has_compared_cold = True
        self.open()
        for system, kind in zip(SYSTEMS[1:], ("", "short", ""), strict=True):
            self.start_one(system, 3, kind=kind)
            self.write_one(self.flight[-1])
            if self.flight:
                self.publish_one(self.flight[-1])

    def before_change(self) -> None:
        if self.full is not None:
            self.full -= 1
            if self.full < 0:
                self.full = None
                raise StoreFull("a test's disk is full")
        if self.fuse is not None:
            if self.fuse == 0:
                raise Killed
            self.fuse -= 1

    def instant(self) -> Instant:
        return Instant(self.wall_s, self.boot_s, f"boot{self.boot}")

    def open(self, is_index_kept: bool = True) -> None:
        """A start: what was in flight is gone, and so is who wrote unfinished files."""
        self.fuse = self.full = None
        self.flight: list[InFlight] = []
        self.received: dict[int, int] = {}
        self.left_bytes = Counter[str]()
        for path in self.root.rglob(f"{TEMPORARY}*"):
            path.unlink()
        self.close()
        index = self.root / "index"
        if not index.exists():
            index.write_bytes(empty_index())
            index.chmod(0o600)
        self.database = open_database(index, upgrade, kind=INDEX, read=self.instant)
        self.index = Index(self.database)
        self.slots = Slots(self.root / "slots", self.before_change)
        self.heads = Heads(
            self.root / "heads",
            self.slots,
            lambda _: CHAIN,
            self.database.clock.now_s,
            self.index,
            self.before_change,
        )
        self.cold_blocks = ColdBlocks(self.heads, self.cold) if self.cold else None
        self.room = Room(
            self.heads,
            Limits(self.cap_bytes, LOOSE_BYTES, COLD_TTL_S),
            Surroundings(lambda: DiskRoom(1 << 50, 1 << 49), lambda: 0),
            lambda: self.wall_s,
            self.cold_blocks,
        )
        for one in self.in_memory & {*self.said}:  # nobody has them any more
            del self.said[one]
        if self.cold_blocks is not None:
            self.has_compared_cold &= is_index_kept
            if not self.has_compared_cold:
                self.has_compared_cold = self.cold_blocks.finish()
        self.rows_are_as_the_files()

    def close(self) -> None:
        if hasattr(self, "database"):
            self.database.close()

    def survives(self, work: Callable[[], object]) -> bool:
        """Do it; where it is killed there is a start, and where the disk is full that is all."""
        try:
            work()
        except StoreFull:
            return False
        except Killed:
            self.open()
            return False
        return True

    @property
    def live(self) -> list[int]:
        return sorted(one for one in self.said if one not in self.deleted | self.expired)

    @property
    def kept(self) -> list[int]:
        """Conversations with a head on disk."""
        return sorted({*self.live} - self.headless - self.in_memory)

    # What clients do

    def head_of(self, conversation: int, token_ids: Sequence[int], num_before: int) -> Head:
        before = token_ids[:num_before]
        names = CHAIN.block_hashes(before)
        last = names[-1] if names else CHAIN.root
        return Head(
            id=uuid4().hex,
            model=MODEL,
            owner=Owner(b"asked", self.session[conversation], b""),
            num_tokens=len(token_ids),
            continues=CHAIN.end_hash(last, before[len(names) * BLOCK :]) if before else b"",
            ttl_s=TTL_S if conversation in self.short else None,
            pins=(KEPT,) if conversation in self.pinned else (),
        )

    def ask(self, conversation: int, said: list[int], num_new: int) -> None:
        new = [next(self.fresh) for _ in range(num_new)]
        self.own_tokens.setdefault(conversation, []).extend(new)
        head = self.head_of(conversation, [*said, *new], len(said))
        staged, worker = self.heads.staging_path(), WORKERS[conversation % 2]
        one = InFlight(conversation, head, [*said, *new], self.heads.number, staged, worker)
        self.flight.append(one)
        if conversation in self.said and self.head_ids[conversation] in self.heads.known:
            self.heads.touch(self.head_ids[conversation])
            self.used_s[conversation] = self.passed_s

    @rule(
        system=st.sampled_from(SYSTEMS),
        num=st.integers(3, 14),
        is_named=st.booleans(),
        kind=st.sampled_from(["", "", "memory", "pinned", "short", "short"]),
    )
    def start(self, system: list[int], num: int, is_named: bool, kind: str) -> None:
        self.start_one(system, num, is_named=is_named, kind=kind)

    def start_one(
        self, system: list[int], num: int, *, is_named: bool = True, kind: str = ""
    ) -> None:
        conversation = next(self.numbers)
        self.session[conversation] = b"s%d" % conversation if is_named else b""
        kinds = {"memory": self.in_memory, "pinned": self.pinned, "short": self.short}
        if kind:
            kinds[kind].add(conversation)
        self.ask(conversation, system, num)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), num=st.integers(1, 14))
    def go_on_with_one(self, data: st.DataObject, num: int) -> None:
        self.go_on(data, num)

    def go_on(self, data: st.DataObject, num: int) -> None:
        idle = [one for one in self.live if all(one != each.conversation for each in self.flight)]
        if idle:
            conversation = data.draw(st.sampled_from(idle))
            self.ask(conversation, self.said[conversation], num)

    @precondition(lambda self: self.kept)
    @rule(data=st.data())
    def write_again(self, data: st.DataObject) -> None:
        """A worker stages a head that is there once more, as it does with what is behind its last
        whole block.
        """
        flying = {one.conversation for one in self.flight}
        there = [one for one in self.kept if self.head_ids[one] in self.heads.known]
        if idle := [one for one in there if one in self.received and one not in flying]:
            conversation = data.draw(st.sampled_from(idle))
            known, staged = self.heads.known[self.head_ids[conversation]], self.heads.staging_path()
            head = replace(known.head, continues=known.end, pins=())
            received, worker = self.received[conversation], WORKERS[conversation % 2]
            said = self.said[conversation]
            self.flight.append(InFlight(conversation, head, said, received, staged, worker))

    @precondition(lambda self: self.flight)
    @rule(data=st.data(), fuse=st.none() | st.none() | st.integers(0, 3))
    def finish(self, data: st.DataObject, fuse: int | None) -> None:
        """A turn is written and published, and nothing comes between but a kill."""
        one = data.draw(st.sampled_from(self.flight))
        self.write_one(one)
        if self.is_written(one):
            self.fuse = fuse if self.fuse is None else self.fuse
            self.publish_one(one)

    @precondition(lambda self: self.flight)
    @rule(data=st.data())
    def write(self, data: st.DataObject) -> None:
        """A worker writes the slots of a turn, and stages its head."""
        self.write_one(data.draw(st.sampled_from(self.flight)))

    def is_written(self, one: InFlight) -> bool:
        return one in self.flight and (one.conversation in self.in_memory or one.staged.exists())

    def write_one(self, one: InFlight) -> None:
        """What has no allowance is not kept: then the turn never comes."""

        def work() -> None:
            self.check_known(one)
            if self.is_written(one):
                return
            wanted = file_bytes(2000) * (2 * len(keys_of(one.token_ids)) + 2)
            self.get_allowance(one.worker, wanted)
            if self.left_bytes[one.worker] < wanted:
                self.flight.remove(one)
                self.heads.sweep(MODEL, before_s=float("inf"))
                return
            self.put(one, range(len(keys_of(one.token_ids))))
            self.before_change()
            write_head(one.staged, one.head, one.token_ids, (), said_by(one.token_ids))
            self.left_bytes[one.worker] -= file_bytes(2000)

        if not self.survives(work) and one in self.flight:
            self.flight.remove(one)  # the disk was full
            one.staged.unlink(missing_ok=True)
            self.survives(lambda: self.end_worker(one.worker))

    def get_allowance(self, worker: str, wanted: int) -> None:
        with self.evicting():
            missing = max(wanted - self.left_bytes[worker], 0)
            self.left_bytes[worker] += self.room.allow(worker, missing)

    def put(self, one: InFlight, numbers: Iterable[int]) -> None:
        names = CHAIN.block_hashes(one.token_ids)
        for number in numbers:
            span = slice(number * BLOCK, (number + 1) * BLOCK)
            about = SlotAbout(MODEL, names[number])
            kv = Tensor("kv", "U8", (BLOCK,), kv_of(one.token_ids, span.start, span.stop))
            if self.slots.put(about, one.token_ids[span], [kv]):
                self.lost_slots.discard(names[number])
                self.left_bytes[one.worker] -= file_bytes(2000)
            if number % 2 and self.slots.put_state(about, [kv]):
                self.left_bytes[one.worker] -= file_bytes(2000)

    @precondition(lambda self: any(map(self.is_written, self.flight)))
    @rule(data=st.data())
    def publish(self, data: st.DataObject) -> None:
        """The turn's head is published, and its worker writes again what left meanwhile."""
        self.publish_one(data.draw(st.sampled_from([*filter(self.is_written, self.flight)])))

    def publish_one(self, one: InFlight) -> None:
        keys = keys_of(one.token_ids)
        is_in_memory = one.conversation in self.in_memory
        left = {key.name for key in keys if not self.slots.has(key)} - self.cold_names()
        answers: list[Published | TurnedAway] = []

        def work() -> None:
            said = HeadFile(one.head, one.token_ids) if is_in_memory else one.staged
            answer = self.heads.publish(said, one.received)
            answers.append(answer)
            if isinstance(answer, Published) and answer.lacking:
                self.lost_slots |= {key.name for key in answer.lacking}
                wanted = file_bytes(2000) * 2 * len(answer.lacking)
                self.get_allowance(one.worker, wanted)
                if self.left_bytes[one.worker] >= wanted:
                    self.put(one, [keys.index(key) for key in answer.lacking])
                self.heads.note(answer.lacking)

        is_answered = self.survives(work)
        if (
            not is_answered
            and self.is_written(one)
            and (one.staged.exists() or one.head.id not in self.heads.known)
        ):
            return  # the disk was full
        if one in self.flight:
            self.flight.remove(one)
            spent = self.room.allowed[one.worker] - self.left_bytes[one.worker]
            said = answers[0] if answers else None
            known = said.known if isinstance(said, Published) else None
            if not self.survives(lambda: self.room.settle(one.worker, spent, known)):
                is_answered = False
        if one.head.id in self.heads.known:
            assert one.conversation not in self.deleted, "what was deleted stays deleted"
            self.keep(one.conversation, one.token_ids, one.head.id)
            self.received[one.conversation] = one.received
            if not is_in_memory:
                last = keys[-1] if keys else BlockKey(MODEL, CHAIN.root)
                known_head = self.heads.known[one.head.id]
                assert known_head.path in heads_behind(self.root / "heads", last)
            if not is_answered:  # what left under it was not written again
                self.lost_slots |= left
            self.survives(lambda: self.check_known(one))
        elif is_answered:
            self.survives(lambda: self.heads.sweep(MODEL, before_s=0.0))  # where it was full
            assert [type(one) for one in answers] == [TurnedAway]
            assert one.conversation in self.deleted or self.begins_like_a_deleted(one)

    def keep(self, conversation: int, token_ids: list[int], head_id: str) -> None:
        self.said[conversation] = token_ids
        self.head_ids[conversation] = head_id
        self.used_s[conversation] = self.passed_s
        self.headless.discard(conversation)
        self.expired.discard(conversation)

    @precondition(lambda self: self.flight)
    @rule(data=st.data())
    def lose_a_worker(self, data: st.DataObject) -> None:
        """What it had under way never comes, and what it wrote of that goes."""
        worker = data.draw(st.sampled_from(self.flight)).worker
        self.survives(lambda: self.end_worker(worker))

    def end_worker(self, worker: str) -> None:
        for one in [one for one in self.flight if one.worker == worker]:
            self.flight.remove(one)
            one.staged.unlink(missing_ok=True)
        self.left_bytes.pop(worker, None)
        try:
            self.room.leave(worker, MODEL, before_s=float("inf"))
        except StoreFull:
            self.room.leave(worker, MODEL, before_s=float("inf"))

    def begins_like_a_deleted(self, one: InFlight) -> bool:
        """It has no session and begins like one that was deleted while it was in flight: it is
        taken for that, and what it said is computed again.
        """
        gone = [self.said[each] for each in self.deleted if not self.session[each]]
        return not one.head.owner.session and any(each[0] == one.token_ids[0] for each in gone)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), fuse=st.none() | st.none() | st.integers(0, 12))
    def delete(self, data: st.DataObject, fuse: int | None) -> None:
        self.delete_one(data.draw(st.sampled_from(self.live)), fuse)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), num=st.integers(1, 14), is_written=st.booleans())
    def delete_what_is_answered(self, data: st.DataObject, num: int, is_written: bool) -> None:
        """Its turn ends later, and it may be written before or after the deletion."""
        self.go_on(data, num)
        flying = [one for one in self.flight if one.conversation in self.live]
        if flying:
            one = data.draw(st.sampled_from(flying))
            if is_written:
                self.write_one(one)
            if one.conversation in self.live:
                self.delete_one(one.conversation, None)

    @precondition(lambda self: self.live)
    @rule(system=st.sampled_from(SYSTEMS[2:]), num=st.integers(1, 9))
    def delete_who_began_alike(self, system: list[int], num: int) -> None:
        """While somebody who found their blocks there is answered."""
        self.start_one(system, num)
        one = self.flight[-1]
        self.write_one(one)
        for other in self.live:
            if self.said[other][: len(system)] == system:
                self.delete_one(other, None)
        if self.is_written(one):
            self.publish_one(one)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), num=st.integers(1, 14), fuse=st.integers(1, 3))
    def be_killed_at_the_end_of_a_turn(self, data: st.DataObject, num: int, fuse: int) -> None:
        self.go_on(data, num)
        for one in self.flight[-1:]:
            self.write_one(one)
            if self.is_written(one):
                self.fuse = fuse
                self.publish_one(one)

    def delete_one(self, conversation: int, fuse: int | None) -> None:
        session = self.session[conversation]
        if not session and conversation in self.headless:
            return  # nobody can name it any more
        self.deleted.add(conversation)
        self.fuse = fuse

        def work() -> None:
            if session:
                self.heads.delete(Whom(session=session))
            elif (head_id := self.head_ids[conversation]) in self.heads.known:
                self.heads.delete_head(head_id)
            else:
                self.heads.delete(Whom(session=b"nobody"))

        while not self.survives(work):  # who deletes asks until it is answered
            pass
        self.fuse = None

    @precondition(lambda self: self.kept)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        source = data.draw(st.sampled_from(self.kept))
        end = data.draw(st.integers(1, len(self.said[source])))
        conversation = next(self.numbers)
        session = self.session[conversation] = b"f%d" % conversation
        if source in self.short:
            self.short.add(conversation)

        def work() -> None:
            with self.evicting():
                wanted = file_bytes(2000)
                given = self.room.allow("server", wanted)
            if given >= wanted:
                self.heads.fork(self.head_ids[source], session, end)
            self.room.settle("server", given)

        self.survives(work)
        its = (i for i, one in self.heads.known.items() if one.head.owner.session == session)
        if head_id := next(its, None):
            self.keep(conversation, self.said[source][:end], head_id)
            self.received[conversation] = self.heads.number

    # What happens to the disk, and to time

    @rule(fuse=st.integers(0, 8), is_meant=RARELY)
    def be_killed_later(self, fuse: int, is_meant: bool) -> None:
        if is_meant:
            self.fuse = fuse

    @rule(full=st.integers(0, 8), is_meant=RARELY)
    def be_full_later(self, full: int, is_meant: bool) -> None:
        if is_meant:
            self.full = full

    @rule(data=st.data(), is_meant=RARELY, index=st.sampled_from(["", "", "gone", "cut", "old"]))
    def restart(self, data: st.DataObject, is_meant: bool, index: str) -> None:
        """With the index as it was, without one, with half of one, or with one of before."""
        if not is_meant:
            return
        path = self.root / "index"
        self.close()
        if index == "gone":
            path.unlink()
        elif index == "cut":
            content = path.read_bytes()
            path.write_bytes(content[: data.draw(st.integers(0, len(content)))])
        elif index == "old":
            path.write_bytes(self.old_index)
        self.open(is_index_kept=not index)
        self.database.checkpoint().result()
        self.old_index = path.read_bytes()

    @rule(
        seconds=st.sampled_from([1.0, 60.0, 150.0, 400.0]),
        fuse=st.none() | st.none() | st.integers(0, 6),
    )
    def wait(self, seconds: float, fuse: int | None) -> None:
        self.wait_for(seconds)
        self.fuse = fuse if self.fuse is None else self.fuse
        self.keep_house()

    def wait_for(self, seconds: float) -> None:
        self.wall_s += seconds
        self.boot_s += seconds
        self.passed_s += seconds

    @rule(seconds=st.sampled_from([-1e9, -1e4, 1e4, 1e9]))
    def set_the_clock(self, seconds: float) -> None:
        """Nobody is a second older by that."""
        self.wall_s += seconds

    @rule(is_meant=RARELY)
    def start_the_machine(self, is_meant: bool) -> None:
        if is_meant:
            self.close()
            self.boot, self.boot_s = self.boot + 1, 5.0
            self.open()

    def keep_house(self) -> None:
        """What rests goes to the cold store, or away; caps are kept."""
        before = {*self.heads.known}

        def work() -> None:
            with self.evicting(None if self.cap_bytes == TIGHT_BYTES else False):
                self.room.keep()

        if not self.survives(work):
            self.survives(work)
        gone = before - {*self.heads.known}
        lives_s = TTL_S + (COLD_TTL_S if self.cold else 0.0)
        for one in [one for one in self.kept if self.head_ids[one] in gone]:
            assert one in self.short
            assert self.passed_s - self.used_s[one] > lives_s
            self.headless.add(one)
            if all(one != each.conversation for each in self.flight):
                self.expired.add(one)

    @rule(
        share=st.sampled_from([0.1, 0.5, 1.0]),
        is_meant=RARELY | st.booleans(),
        fuse=st.none() | st.none() | st.integers(0, 6),
    )
    def make_way(self, share: float, is_meant: bool, fuse: int | None) -> None:
        """The cap is lowered for a moment: what is worth least leaves."""
        limits = self.room._limits
        used_bytes = self.heads.kept.warm_bytes
        if not is_meant or not used_bytes:
            return
        self.fuse = fuse if self.fuse is None else self.fuse
        self.room._limits = limits._replace(warm_bytes=int(self.room.used_bytes() * (1 - share)))

        def work() -> None:
            with self.evicting():
                self.room._make(0)

        self.survives(work)
        self.room._limits = limits

    @precondition(lambda self: self.cold)
    @rule(is_meant=st.sampled_from([False, False, True]))
    def lose_the_cold_store(self, is_meant: bool) -> None:
        assert self.cold is not None
        self.cold.is_away = is_meant

    @precondition(lambda self: self.cold and not self.cold.is_away)
    @rule()
    def make_way_in_the_cold_store(self) -> None:
        limits = self.room._limits
        self.room._limits = limits._replace(cold_bytes=self.heads.kept.cold_bytes // 2)

        def work() -> None:
            with self.evicting(may_lose=True):
                assert self.cold_blocks is not None
                self.room._keep_cold(self.cold_blocks)

        self.survives(work)
        self.room._limits = limits

    @contextmanager
    def evicting(self, may_lose: bool | None = None) -> Generator[None]:
        """Slots may leave; what leaves is behind all of a conversation that stays. Where there is a
        cold store that takes them none is lost.
        """
        if may_lose is None:
            may_lose = self.cold is None or self.cold.is_away or self.full is not None
        had = self.slot_names() | self.cold_names()
        counted = {key.name for key, one in self.heads.kept.blocks.items() if one.sizes.slot}
        warm = self.slot_names() & counted
        try:
            yield
        finally:
            there = self.slot_names()
            lost = had - there - self.cold_names() - self.lost_slots
            owned = {key.name for key in self.heads.kept.blocks}
            assert may_lose or not lost & owned, "there was room for what is lost"
            self.lost_slots |= lost
            for one in self.kept:
                names = CHAIN.block_hashes(self.said[one])
                gone = [number for number, name in enumerate(names) if name in warm - there]
                assert not (gone and one in self.pinned), "what is pinned stays"
                behind = {*names[gone[0] :]} if gone else set[bytes]()
                assert not behind & there & warm, "later positions go first"

    def slot_names(self) -> set[bytes]:
        return {bytes.fromhex(path.stem) for path in self.files("slots") if len(path.stem) == 32}

    def cold_names(self) -> set[bytes]:
        """All ids in the cold store: those of slots are the names of their blocks."""
        return {bytes.fromhex(one.id) for one in self.cold.slots()} if self.cold else set()

    def files(self, folder: str) -> list[Path]:
        found = (self.root / folder).rglob("*.safetensors")
        return sorted(one for one in found if not one.name.startswith(TEMPORARY))

    @rule(data=st.data(), is_removed=st.booleans())
    def take_a_slot(self, data: st.DataObject, is_removed: bool) -> None:
        """Damage or loss: one file, and nothing else."""
        if files := self.files("slots"):
            path = data.draw(st.sampled_from(files))
            if path.suffixes[:1] != [".state"]:
                self.lost_slots.add(bytes.fromhex(path.stem))
            self.spoil(path, data, is_removed=is_removed)

    @rule(data=st.data(), is_meant=RARELY, is_noticed=st.booleans())
    def take_a_head(self, data: st.DataObject, is_meant: bool, is_noticed: bool) -> None:
        """Damage of a head: its conversation is computed again, and nobody else's."""
        if not (self.kept and is_meant):
            return
        conversation = data.draw(st.sampled_from(self.kept))
        path = self.heads.known[self.head_ids[conversation]].path
        assert path is not None
        self.spoil(path, data)
        self.headless.add(conversation)
        try:
            read_head(path)
        except SlotForeign:  # the damaged byte said which format it has: such files are left alone
            path.unlink()
        except SlotDamaged:
            if not is_noticed:  # a worker that finds it so removes it
                path.unlink()
        else:
            path.unlink()  # the byte is in what only its reader looks at
        while path.exists():
            with suppress(SlotDamaged, SlotMissing):
                self.survives(lambda: self.heads.read(self.head_ids[conversation]))
        self.open()

    def spoil(self, path: Path, data: st.DataObject, *, is_removed: bool = False) -> None:
        if is_removed:
            path.unlink()
            return
        content = bytearray(path.read_bytes())
        content[data.draw(st.integers(0, len(content) - 1))] ^= 1
        path.write_bytes(content)

    # What must hold

    def check_known(self, one: InFlight) -> None:
        """What was kept is found as far as nothing took it, and none of it is wrong."""
        keys, whole = keys_of(one.token_ids), 0
        with self.evicting():
            self.room.bring(keys)
        for number, key in enumerate(keys):
            span = slice(number * BLOCK, (number + 1) * BLOCK)
            kv = [kv_of(one.token_ids, span.start, span.stop)]
            state = self.slots.read_state(key)
            assert state is None or [each.data for each in state.tensors] == kv
            slot = self.slots.read(key, one.token_ids[span])
            if slot is None:
                break
            assert [each.data for each in slot.tensors] == kv
            whole = number + 1
        if one.conversation in self.kept:
            kept = CHAIN.block_hashes(self.said[one.conversation])
            gone = self.lost_slots
            if self.cap_bytes == TIGHT_BYTES or (self.cold and self.cold.is_away):
                gone = gone | (self.cold_names() - self.slot_names())
            least = next((n for n, name in enumerate(kept) if name in gone), len(kept))
            assert whole >= least, "what was kept is lost by nobody else's doing"

    def rows_are_as_the_files(self) -> None:
        """After a start."""
        self.rows_are_what_is_known()
        for key, block in self.heads.kept.blocks.items():
            assert self.slots.disk_bytes(key) == block.sizes[:2]
        assert {path.stem for path in self.files("heads")} == {
            i for i, one in self.heads.known.items() if one.path
        }

    def rows_are_what_is_known(self) -> None:
        self.index.flush()
        heads, blocks = self.index.load()
        kept = [one for one in self.heads.known.values() if one.path]
        assert {one.head.id: one for one in heads} == {
            one.head.id: one._replace(path=None) for one in kept
        }
        for one in kept:
            assert one.path is not None
            with suppress(SlotDamaged, SlotMissing):
                head, token_ids, said = read_head(one.path)
                assert one.digests == b"".join(map(CHAIN.turn_name, digests_of(said)))
                assert one.num_turns == len(unpacked(said, token_ids).turns)
                found = self.heads.with_turns(MODEL, head.owner, digests_of(said), 99)
                assert one.path in found or not one.num_turns
        tree = self.heads.kept
        known = {key: (block.above, block.sizes) for key, block in tree.blocks.items()}
        left = {key: (block.above, block.sizes) for key, block in self.heads.left_cold.items()}
        blocks = {key: one for key, one in blocks.items() if key not in self.heads._leaving}
        assert {key: (block.above, block.sizes) for key, block in blocks.items()} == {
            **known,
            **left,
        }
        assert tree.warm_bytes == sum(one.sizes.warm for one in tree.blocks.values())
        assert tree.cold_bytes == sum(one.sizes.cold for one in tree.blocks.values())

    @invariant()
    def what_was_deleted_is_nowhere(self) -> None:
        if not hasattr(self, "room"):
            return
        others = {token for one in self.live for token in self.said[one]}
        others |= {token for one in self.flight for token in one.token_ids}
        gone = (
            {token for one in self.deleted | self.expired for token in self.own_tokens[one]}
            if (all(one in self.own_tokens for one in self.deleted | self.expired))
            else {
                token
                for one in self.deleted | self.expired
                for token in self.own_tokens.get(one, ())
            }
        )
        held = {token for path in self.root.rglob("*.safetensors") for token in tokens_in(path)}
        assert not (gone - others) & held
        hidden = {token for one in self.in_memory for token in self.own_tokens.get(one, ())}
        assert not hidden & held, "what is in memory only is not on disk"

    @invariant()
    def nothing_is_above_the_cap(self) -> None:
        if hasattr(self, "room"):
            folders = [one for one in (self.root / "slots", self.root / "heads") if one.is_dir()]
            assert sum(map(bytes_at_once, folders)) <= self.cap_bytes

    @invariant()
    def slots_have_heads(self) -> None:
        if not hasattr(self, "room") or self.fuse is not None or self.full is not None:
            return
        self.rows_are_what_is_known()
        kept = {self.head_ids[one] for one in self.kept}
        told = {self.head_ids[one] for one in self.in_memory & {*self.live}}
        assert {path.stem for path in self.files("heads")} - self.heads._replaced == kept
        assert {*self.heads.known} - self.heads._replaced == kept | told
        owned = {key for one in self.kept for key in keys_of(self.said[one])}
        if not self.heads._replaced:
            assert set(self.heads.kept.blocks) == owned
        if self.has_compared_cold:
            cold = [*self.heads.kept.blocks.items(), *self.heads.left_cold.items()]
            slots = {cold_id(key, is_state=False) for key, one in cold if one.sizes.cold_slot}
            states = {cold_id(key, is_state=True) for key, one in cold if one.sizes.cold_state}
            assert {name.hex() for name in self.cold_names()} <= slots | states
        if not self.flight:
            assert set(self.slots.found()) <= set(self.heads.kept.blocks)

    def teardown(self) -> None:
        if hasattr(self, "root"):
            self.close()
            shutil.rmtree(self.root)


def tokens_in(path: Path) -> set[int]:
    """Tokens of those that are made up here, at any place of four bytes from the file's end."""
    data = path.read_bytes()
    if path.name.startswith(TEMPORARY):
        return set()
    start = 8 + int.from_bytes(data[:8], "little")
    payload = data[start : start + (len(data) - start) // 4 * 4]
    return {one for one in array("I", payload) if one >= FIRST}


TestHeads = Machine.TestCase
TestHeads.settings = settings(
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)


@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_heads_for_long():
    many = settings(TestHeads.settings, max_examples=5000, phases=[Phase.generate])
    run_state_machine_as_test(Machine, settings=many)
