"""The index against a model of it that is a dict, through anything that may happen to it."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import msgspec
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

from migrations.run import upgrade
from store.database import Database
from store.eviction import choose
from store.index import SlotIndex
from store.opening import open_database
from store.types import Candidate, SlotRow
from tests.slot_samples import slot_id
from tests.store_samples import NOW_S, row

TTLS_S = (60.0, 3600.0, None)


class IndexMachine(RuleBasedStateMachine):
    """`known` is what the index must hold; `number` names the next slot."""

    def __init__(self) -> None:
        super().__init__()
        self.root = Path(tempfile.mkdtemp(prefix="index-machine-"))
        self.known: dict[str, SlotRow] = {}
        self.condemned: set[str] = set()
        self.lost: list[SlotRow] = []
        self.number = 0
        self.after_s = 0.0
        self.open()

    def open(self) -> None:
        self.database: Database = open_database(self.root / "index.db", upgrade)
        self.index = SlotIndex(self.database)

    def now(self) -> float:
        return NOW_S + self.after_s

    def children(self, name: str) -> list[str]:
        return [one.header.id for one in self.known.values() if one.parent == name]

    def join(self, one: SlotRow, parent: str | None) -> None:
        self.known[one.header.id] = msgspec.structs.replace(one, parent=parent)

    def forget(self, name: str) -> None:
        """What continues it stays, and waits for these tokens to come again."""
        self.lost.append(self.known.pop(name))
        self.condemned.add(name)
        for child in self.children(name):
            self.join(self.known[child], None)

    @rule(choice=st.integers(0, 1 << 30), ttl_s=st.sampled_from(TTLS_S), count=st.integers(1, 3))
    def put(self, choice: int, ttl_s: float | None, count: int) -> None:
        names = [None, *self.known]
        name = names[choice % len(names)]
        parent = self.known[name].header if name else None
        rows: list[SlotRow] = []
        for _ in range(count):
            self.number += 1
            new = row(self.number, parent, ttl_s=ttl_s, last_used_s=self.now())
            rows.append(new)
            parent = new.header
        assert self.index.insert(rows).result() == count
        self.known |= {one.header.id: one for one in rows}

    @precondition(lambda self: self.lost)
    @rule(choice=st.integers(0, 1 << 30))
    def compute_again(self, choice: int) -> None:
        """As a slot of another name, with the tokens of one that was dropped."""
        lost = self.lost.pop(choice % len(self.lost))
        self.number += 1
        header = msgspec.structs.replace(lost.header, id=slot_id(self.number))
        again = msgspec.structs.replace(lost, header=header, last_used_s=self.now(), parent=None)
        assert self.index.insert([again]).result() == 1
        before = header.start_hash
        ending = [name for name, one in self.known.items() if one.header.end_hash == before]
        following = [
            one
            for one in self.known.values()
            if one.parent is None and one.header.start and one.header.start_hash == header.end_hash
        ]
        self.join(again, ending[0] if before and ending else None)
        for one in following:
            self.join(one, header.id)

    @rule(seconds=st.sampled_from((1.0, 30.0, 100.0, 4000.0)))
    def wait(self, seconds: float) -> None:
        self.after_s += seconds

    @precondition(lambda self: self.known)
    @rule(choice=st.integers(0, 1 << 30))
    def touch(self, choice: int) -> None:
        name: str | None = list(self.known)[choice % len(self.known)]
        path: list[str] = []
        while name:
            path.append(name)
            name = self.known[name].parent
        self.index.touch(path, self.now()).result()
        for name in path:
            one = self.known[name]
            self.known[name] = msgspec.structs.replace(one, last_used_s=self.now())

    @precondition(lambda self: self.known)
    @rule(choice=st.integers(0, 1 << 30))
    def drop(self, choice: int) -> None:
        name = list(self.known)[choice % len(self.known)]
        places = self.index.drop([name]).result()
        self.forget(name)
        assert [place.id for place in places] == [name]

    @rule(num_slots=st.integers(1, 3))
    def evict(self, num_slots: int) -> None:
        candidates: list[Candidate] = self.index.candidates()
        assert {one.id for one in candidates} == set(self.known)
        order = choose(candidates, num_slots * 4096, self.now())
        for name in order:
            assert self.children(name) == []
            self.forget(name)
        assert {place.id for place in self.index.drop(order).result()} == set(order)

    @rule()
    def expire(self) -> None:
        over = self.index.expired(self.now())
        now_s = self.now()
        for name in over:
            one = self.known[name]
            assert one.header.ttl_s is not None
            assert now_s - one.last_used_s > one.header.ttl_s
            assert self.children(name) == []
            self.forget(name)
        for name, one in self.known.items():
            is_over = one.header.ttl_s and now_s - one.last_used_s > one.header.ttl_s
            assert not is_over or self.children(name)
        assert {place.id for place in self.index.drop(over).result()} == set(over)

    @rule()
    def unlink(self) -> None:
        self.index.unlinked(self.index.condemned()).result()
        self.condemned.clear()

    @rule(is_clean=st.booleans())
    def restart(self, is_clean: bool) -> None:
        """A crash is a copy of the files as they are while the index is open."""
        crashed = Path(tempfile.mkdtemp(prefix="index-machine-"))
        shutil.copytree(self.root, crashed, dirs_exist_ok=True)
        self.database.close()
        kept, gone = (self.root, crashed) if is_clean else (crashed, self.root)
        shutil.rmtree(gone)
        self.root = kept
        self.open()
        assert not list(self.root.glob("*.aside-*"))

    @invariant()
    def agrees(self) -> None:
        expected = {
            name: (one.header, one.parent, one.last_used_s, len(self.children(name)))
            for name, one in self.known.items()
        }
        candidates = self.index.candidates(with_pinned=True)
        num_children = {one.id: one.num_children for one in candidates}
        found = {
            row.header.id: (row.header, row.parent, row.last_used_s, num_children[row.header.id])
            for row in self.index.all_slots()
        }
        assert found == expected
        assert {place.id for place in self.index.condemned()} == self.condemned

    def teardown(self) -> None:
        assert self.database.check()
        with self.database.reading() as connection:
            assert connection.exec_driver_sql("PRAGMA foreign_key_check").all() == []
        self.database.close()
        shutil.rmtree(self.root)


QUIET = (HealthCheck.too_slow, HealthCheck.filter_too_much)


def test_the_index_is_what_a_dict_would_be():
    short = settings(
        max_examples=8, stateful_step_count=20, deadline=None, suppress_health_check=QUIET
    )
    run_state_machine_as_test(IndexMachine, settings=short)


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_the_index_is_what_a_dict_would_be_for_long():
    long = settings(
        max_examples=400,
        stateful_step_count=60,
        derandomize=False,
        deadline=None,
        suppress_health_check=QUIET,
    )
    run_state_machine_as_test(IndexMachine, settings=long)
