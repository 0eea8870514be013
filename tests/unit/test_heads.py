"""Blocks and heads in random interleavings beside plain dictionaries, with kills before any change.

Nothing is ever wrong, nothing that was kept is lost by what others do, nothing that was deleted
comes back, and no slot stays without a head.
"""

from __future__ import annotations

import itertools
import shutil
import tempfile
from array import array
from collections.abc import Callable, Iterable, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple
from uuid import uuid4

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from store.block_names import HashChain, pack_ids
from store.blocks.head_file import Head, Owner, Turn, read_head, write_head
from store.blocks.heads import Heads, Published, Whom, heads_behind
from store.blocks.kv_file import Tensor
from store.blocks.slots import BlockKey, SlotAbout, Slots
from store.errors import SlotDamaged, SlotForeign
from store.temp_names import TEMPORARY

BLOCK = 4
MODEL = b"m" * 16
CHAIN = HashChain(b"secret", MODEL, block_size=BLOCK)
SYSTEMS = [list(range(1, 1 + number)) for number in (0, 3, 4, 9)]


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


def kv_of(token_ids: Sequence[int], start: int, end: int) -> bytes:
    """One byte for each token, which depends on all before it."""
    prefixes = (pack_ids(token_ids[: at + 1]) for at in range(start, end))
    return b"".join(blake2b(one, digest_size=1).digest() for one in prefixes)


def head_of(session: bytes, token_ids: Sequence[int], num_before: int) -> Head:
    before = token_ids[:num_before]
    names = CHAIN.block_hashes(before)
    last = names[-1] if names else CHAIN.root
    return Head(
        id=uuid4().hex,
        model=MODEL,
        owner=Owner(b"asked", session, b""),
        num_tokens=len(token_ids),
        continues=CHAIN.end_hash(last, before[len(names) * BLOCK :]) if before else b"",
        turns=(Turn(blake2b(pack_ids(token_ids), digest_size=8).digest(), len(token_ids)),),
    )


class Machine(RuleBasedStateMachine):
    @initialize()
    def begin(self) -> None:
        self.root = Path(tempfile.mkdtemp())
        self.fuse: int | None = None
        self.numbers = itertools.count(1)
        self.fresh = (0x5A3C0000 + 7919 * number for number in itertools.count())
        self.said: dict[int, list[int]] = {}
        self.head_ids: dict[int, str] = {}
        self.session: dict[int, bytes] = {}
        self.own_tokens: dict[int, list[int]] = {}
        self.deleted: set[int] = set()
        self.lost_slots: set[bytes] = set()
        self.headless: set[int] = set()
        self.open()
        for system in SYSTEMS[1:]:
            self.start_one(system, 3)
            self.write_one(self.flight[-1])
            self.publish_one(self.flight[-1])

    def before_change(self) -> None:
        if self.fuse is not None:
            if self.fuse == 0:
                raise Killed
            self.fuse -= 1

    def open(self) -> None:
        """A start: what was in flight is gone, and so is who wrote unfinished files."""
        self.fuse = None
        self.flight: list[InFlight] = []
        for path in self.root.rglob(f"{TEMPORARY}*"):
            path.unlink()
        self.slots = Slots(self.root / "slots", self.before_change)
        self.heads = Heads(self.root / "heads", self.slots, lambda _: CHAIN, self.before_change)

    def survives(self, work: Callable[[], None]) -> bool:
        """Do it; where it is killed there is a start."""
        try:
            work()
        except Killed:
            self.open()
            return False
        return True

    @property
    def live(self) -> list[int]:
        return sorted(one for one in self.said if one not in self.deleted)

    # What clients do

    def ask(self, conversation: int, said: list[int], num_new: int) -> None:
        new = [next(self.fresh) for _ in range(num_new)]
        self.own_tokens.setdefault(conversation, []).extend(new)
        head = head_of(self.session[conversation], [*said, *new], len(said))
        staged = self.heads.staging_path()
        self.flight.append(InFlight(conversation, head, [*said, *new], self.heads.number, staged))

    @rule(system=st.sampled_from(SYSTEMS), num=st.integers(3, 14), is_named=st.booleans())
    def start(self, system: list[int], num: int, is_named: bool) -> None:
        self.start_one(system, num, is_named=is_named)

    def start_one(self, system: list[int], num: int, *, is_named: bool = True) -> None:
        conversation = next(self.numbers)
        self.session[conversation] = b"s%d" % conversation if is_named else b""
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

    @precondition(lambda self: self.flight)
    @rule(data=st.data(), fuse=st.none() | st.none() | st.integers(0, 3))
    def finish(self, data: st.DataObject, fuse: int | None) -> None:
        """A turn is written and published, and nothing comes between but a kill."""
        one = data.draw(st.sampled_from(self.flight))
        self.write_one(one)
        if one in self.flight and one.staged.exists():
            self.fuse = fuse if self.fuse is None else self.fuse
            self.publish_one(one)

    @precondition(lambda self: self.flight)
    @rule(data=st.data())
    def write(self, data: st.DataObject) -> None:
        """A worker writes the slots of a turn, and stages its head."""
        self.write_one(data.draw(st.sampled_from(self.flight)))

    def write_one(self, one: InFlight) -> None:
        def work() -> None:
            self.check_known(one)
            self.put(one, range(len(CHAIN.block_hashes(one.token_ids))))
            write_head(one.staged, one.head, one.token_ids)

        self.survives(work)

    def put(self, one: InFlight, numbers: Iterable[int]) -> None:
        names = CHAIN.block_hashes(one.token_ids)
        for number in numbers:
            span = slice(number * BLOCK, (number + 1) * BLOCK)
            kv = Tensor("kv", "U8", (BLOCK,), kv_of(one.token_ids, span.start, span.stop))
            if self.slots.put(SlotAbout(MODEL, names[number]), one.token_ids[span], [kv]):
                self.lost_slots.discard(names[number])

    @precondition(lambda self: any(one.staged.exists() for one in self.flight))
    @rule(data=st.data())
    def publish(self, data: st.DataObject) -> None:
        """The turn's head is published, and its worker writes again what left meanwhile."""
        staged = [each for each in self.flight if each.staged.exists()]
        self.publish_one(data.draw(st.sampled_from(staged)))

    def publish_one(self, one: InFlight) -> None:
        self.flight.remove(one)
        names = CHAIN.block_hashes(one.token_ids)
        left = {name for name in names if not self.slots.has(BlockKey(MODEL, name))}
        answers: list[Published | None] = []

        def work() -> None:
            answer = self.heads.publish(one.staged, one.received)
            if answer is not None:
                self.put(one, [names.index(key.name) for key in answer.lacking])
            answers.append(answer)

        is_answered = self.survives(work)
        if one.head.id in self.heads.known:
            assert one.conversation not in self.deleted, "what was deleted stays deleted"
            self.keep(one.conversation, one.token_ids, one.head.id)
            last = names[-1] if names else CHAIN.root
            known = self.heads.known[one.head.id]
            assert known.path in heads_behind(self.root / "heads", BlockKey(MODEL, last))
            if not is_answered:  # what left under it was not written again
                self.lost_slots |= left
            self.survives(lambda: self.check_known(one))
        elif is_answered:
            assert answers == [None]
            assert one.conversation in self.deleted or self.begins_like_a_deleted(one)

    def keep(self, conversation: int, token_ids: list[int], head_id: str) -> None:
        self.said[conversation] = token_ids
        self.head_ids[conversation] = head_id
        self.headless.discard(conversation)

    @precondition(lambda self: self.flight)
    @rule(data=st.data())
    def lose_a_worker(self, data: st.DataObject) -> None:
        """What it had under way never comes, and what it wrote of that goes."""
        one = data.draw(st.sampled_from(self.flight))
        self.flight.remove(one)

        def work() -> None:
            one.staged.unlink(missing_ok=True)
            self.heads.sweep(before_s=float("inf"))

        self.survives(work)

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
        if one in self.flight and one.staged.exists():
            self.publish_one(one)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), num=st.integers(1, 14), fuse=st.integers(1, 3))
    def be_killed_at_the_end_of_a_turn(self, data: st.DataObject, num: int, fuse: int) -> None:
        self.go_on(data, num)
        for one in self.flight[-1:]:
            self.write_one(one)
            if one in self.flight and one.staged.exists():
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

        while not self.survives(work):  # who deletes asks until it is answered
            pass
        self.fuse = None

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        source = data.draw(st.sampled_from(self.live))
        end = data.draw(st.integers(1, len(self.said[source])))
        if source in self.headless:
            return
        conversation = next(self.numbers)
        session = self.session[conversation] = b"f%d" % conversation

        def work() -> None:
            self.heads.fork(self.head_ids[source], session, end)

        self.survives(work)
        its = (i for i, one in self.heads.known.items() if one.head.owner.session == session)
        if head_id := next(its, None):
            self.keep(conversation, self.said[source][:end], head_id)

    # What happens to the disk

    @rule(fuse=st.integers(0, 8), is_meant=RARELY)
    def be_killed_later(self, fuse: int, is_meant: bool) -> None:
        if is_meant:
            self.fuse = fuse

    @rule(is_meant=RARELY)
    def restart(self, is_meant: bool) -> None:
        if is_meant:
            self.open()

    def files(self, folder: str) -> list[Path]:
        found = (self.root / folder).rglob("*.safetensors")
        return sorted(one for one in found if not one.name.startswith(TEMPORARY))

    @rule(data=st.data(), is_removed=st.booleans())
    def take_a_slot(self, data: st.DataObject, is_removed: bool) -> None:
        """Damage or eviction: one file, and nothing else."""
        if files := self.files("slots"):
            path = data.draw(st.sampled_from(files))
            self.lost_slots.add(bytes.fromhex(path.stem))
            self.spoil(path, data, is_removed=is_removed)

    @rule(data=st.data(), is_meant=RARELY)
    def take_a_head(self, data: st.DataObject, is_meant: bool) -> None:
        """Damage of a head: its conversation is computed again, and nobody else's."""
        there = sorted({*self.live} - self.headless)
        if not (there and is_meant):
            return
        conversation = data.draw(st.sampled_from(there))
        path = self.heads.known[self.head_ids[conversation]].path
        self.spoil(path, data)
        try:
            read_head(path)
        except SlotForeign:  # the damaged byte said which format it has: such files are left alone
            path.unlink()
        except SlotDamaged:
            pass
        self.headless.add(conversation)
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
        names, whole = CHAIN.block_hashes(one.token_ids), 0
        for number, name in enumerate(names):
            span = slice(number * BLOCK, (number + 1) * BLOCK)
            slot = self.slots.read(BlockKey(MODEL, name), one.token_ids[span])
            if slot is None:
                break
            assert [each.data for each in slot.tensors] == [
                kv_of(one.token_ids, span.start, span.stop)
            ]
            whole = number + 1
        if one.conversation in {*self.live} - self.headless:
            kept = CHAIN.block_hashes(self.said[one.conversation])
            least = next((n for n, name in enumerate(kept) if name in self.lost_slots), len(kept))
            assert whole >= least, "what was kept is lost by nobody else's doing"

    @invariant()
    def what_was_deleted_is_nowhere(self) -> None:
        if not hasattr(self, "heads"):
            return
        others = {token for one in self.live for token in self.said[one]}
        others |= {token for one in self.flight for token in one.token_ids}
        gone = {token for one in self.deleted for token in self.own_tokens.get(one, ())}
        held = {token for path in self.root.rglob("*.safetensors") for token in tokens_in(path)}
        assert not (gone - others) & held

    @invariant()
    def slots_have_heads(self) -> None:
        if not hasattr(self, "heads") or self.flight or self.fuse is not None:
            return
        assert {path.stem for path in self.files("heads")} == set(self.heads.known)
        assert {self.head_ids[one] for one in {*self.live} - self.headless} == set(self.heads.known)
        there = [self.said[one] for one in {*self.live} - self.headless]
        owned = {BlockKey(MODEL, name) for said in there for name in CHAIN.block_hashes(said)}
        assert set(self.heads.owned) == owned
        assert set(self.slots.found()) <= owned

    def teardown(self) -> None:
        if hasattr(self, "root"):
            shutil.rmtree(self.root)


def tokens_in(path: Path) -> set[int]:
    """Tokens of those that are made up here, at any place of four bytes from the file's end."""
    data = path.read_bytes()
    if path.name.startswith(TEMPORARY):
        return set()
    start = 8 + int.from_bytes(data[:8], "little")
    payload = data[start : start + (len(data) - start) // 4 * 4]
    return {one for one in array("I", payload) if one >= 0x5A3C0000}


TestHeads = Machine.TestCase
TestHeads.settings = settings(
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
