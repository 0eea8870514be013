"""The writer: bounded, the newest turns first; a failing disk ends nothing."""

from __future__ import annotations

import queue
import threading
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from runtime.kv.deletions import Recognised
from runtime.kv.others import Alone, Has
from runtime.kv.pack import PackedKv
from runtime.kv.writer import (
    AllowedBytes,
    BlockJob,
    HeadJob,
    Writer,
    Written,
)
from runtime.kv_messages import Allow, Allowance, Ended, Trouble
from store.disk import file_bytes
from store.head_file import HEAD, Head, Owner, read_head
from store.keyed_names import Asker
from store.kv_file import Tensor, open_file
from store.slots import BlockKey, Slots, nothing
from tests.waiting import PATIENCE_S

MODEL, BLOCK, BLOCK_BYTES = b"m" * 16, 4, 4096
LARGE_BYTES = 16 << 20


def name_of(number: int) -> bytes:
    return number.to_bytes(16, "big")


def block(number: int, num_bytes: int = BLOCK_BYTES) -> BlockJob:
    tensor = Tensor("kv.0", "U8", (num_bytes,), bytes([number % 256]) * num_bytes)
    ids = array("I", range(number, number + BLOCK))
    return BlockJob(BlockKey(MODEL, name_of(number)), ids, PackedKv("{}", [tensor]))


def head(
    head_id: str, numbers: Sequence[int], continues: bytes = b"", session: str = "s"
) -> HeadJob:
    """Of these blocks, and three tokens behind them."""
    ids = array("I", range(BLOCK * len(numbers) + 3))
    end_name = b"end of " + head_id.encode()
    told = Ended(head_id="", received=0, asker=Asker("m", session))
    owner = Owner(session.encode(), b"", b"")
    one = Head(id=head_id, model=MODEL, owner=owner, num_tokens=len(ids), continues=continues)
    end = PackedKv("end", [Tensor("kv.0", "U8", (3,), b"end")])
    return HeadJob(one, ids, tuple(map(name_of, numbers)), end_name, told, len(ids) - 1, end=end)


class Writing:
    """A writer over real files, and what it said."""

    def __init__(
        self,
        root: Path,
        max_bytes: int = 1 << 30,
        before_change: Callable[[], None] = nothing,
    ) -> None:
        self.root, self.heads = root, root / "heads"
        self.slots = Slots(root / "slots", before_change)
        self.said: queue.SimpleQueue[Ended | Trouble | Written] = queue.SimpleQueue()
        self.allow: Callable[[Allow], Allowance] = lambda one: Allowance(num_bytes=one.num_bytes)
        self.allowed = AllowedBytes(self._ask)
        put = self.said.put
        self.writer = Writer(self.slots, self.heads, max_bytes, put, put, self.allowed)
        self.writer.set_idle(is_idle=True)
        self.thread = threading.Thread(target=self.writer.run)

    def _ask(self, asked: Allow) -> None:
        threading.Thread(target=lambda: self.allowed.hear(self.allow(asked))).start()

    def put(self, *numbers: int) -> None:
        for number in numbers:
            self.writer.put([block(number)])

    def start(self) -> None:
        self.heads.mkdir(parents=True, exist_ok=True)
        self.thread.start()

    def finish(self) -> list[Any]:
        """Close it and wait until it has ended; what it said that nobody has heard."""
        self.writer.close()
        if self.thread.ident is None:
            self.start()
        self.thread.join(PATIENCE_S)
        assert not self.thread.is_alive()
        return self.drained()

    def drained(self) -> list[Any]:
        found: list[Any] = []
        while not self.said.empty():
            found.append(self.said.get())
        return found

    def next(self) -> Any:
        return self.said.get(timeout=PATIENCE_S)

    def has(self, number: int) -> bool:
        one = block(number)
        found = self.slots.read(one.key, one.token_ids)
        assert found is None or bytes(found.tensors[0].data) == one.packed.tensors[0].data
        return found is not None


class Crossing:
    """Called before each change of the disk: has two threads write side by side, and the one that
    began first name its file while the other one has made its own.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._first: int | None = None
        self._num_by_first = self._num_by_other = 0
        self.first_came, self._other_came = threading.Event(), threading.Event()
        self._first_made, self._other_made = threading.Event(), threading.Event()

    def __call__(self) -> None:
        me = threading.get_ident()
        with self._lock:
            self._first = self._first or me
            is_first = me == self._first
            self._num_by_first += is_first
            self._num_by_other += not is_first
            number = self._num_by_first if is_first else self._num_by_other
        if is_first and number == 1:
            self.first_came.set()
            assert self._other_came.wait(PATIENCE_S)
        elif is_first and number == 2:
            self._first_made.set()
            assert self._other_made.wait(PATIENCE_S)
        elif not is_first and number == 1:
            self._other_came.set()
            assert self._first_made.wait(PATIENCE_S)
        elif not is_first:
            self._other_made.set()


def tensors_of(path: Path) -> list[str]:
    with open_file(path, HEAD) as file:
        return [one.name for one in file.front.entries]


def heads_in(said: list[Any]) -> list[Ended]:
    return [one for one in said if isinstance(one, Ended)]


def written(said: list[Any]) -> list[tuple[int, str | None]]:
    those = [one for one in said if isinstance(one, Written)]
    return [(int.from_bytes(name, "big"), one.reason) for one in those for name in one.names]


@pytest.fixture
def writing(tmp_path: Path) -> Iterator[Writing]:
    """Room for three blocks in the queue."""
    one = Writing(tmp_path, 3 * BLOCK_BYTES)
    yield one
    one.finish()


def test_what_is_queued_again_while_it_is_written_is_not_written_by_two_at_once(tmp_path: Path):
    writing = Writing(tmp_path, before_change=(crossing := Crossing()))
    writing.start()
    writing.put(0)
    assert crossing.first_came.wait(PATIENCE_S)
    writing.put(0, 1)
    said = writing.finish()
    assert not [one for one in said if isinstance(one, Trouble)]
    assert sorted(written(said)) == [(0, None), (0, None), (1, None)]
    assert writing.has(0)
    assert writing.has(1)


def test_what_was_put_is_there_as_it_was(writing: Writing):
    writing.put(0, 1, 2)
    assert writing.writer.num_queued_bytes == 3 * BLOCK_BYTES
    assert sorted(written(writing.finish())) == [(n, None) for n in range(3)]
    assert all(writing.has(number) for number in range(3))
    assert writing.writer.num_queued_bytes == 0


def test_a_full_queue_drops_the_oldest(writing: Writing):
    writing.put(0, 1, 2, 3, 4)
    assert written(writing.drained()) == [(0, "full"), (1, "full")]
    assert writing.writer.num_queued_bytes == 3 * BLOCK_BYTES
    assert writing.writer.num_dropped == 2
    writing.finish()
    assert [writing.has(number) for number in range(5)] == [False, False, True, True, True]


def test_a_block_larger_than_the_queue_is_written_alone(writing: Writing):
    writing.put(0)
    writing.writer.put([block(1, 20 * BLOCK_BYTES)])
    assert written(writing.finish()) == [(0, "full"), (1, None)]


def test_the_newest_turn_is_written_first(tmp_path: Path):
    writing = Writing(tmp_path)
    writing.put(0, 1, 2)
    writing.writer.put_head(head("h", [2]))
    writing.writer.set_idle(is_idle=False)
    writing.start()
    assert written([writing.next()]) == [(2, None)]
    writing.finish()


def test_a_head_is_staged_behind_its_blocks_and_again_with_its_end(writing: Writing):
    writing.put(0, 1)
    writing.writer.put_head(head("h", [0, 1]))
    said = writing.finish()
    first, second = (number for number, one in enumerate(said) if isinstance(one, Ended))
    assert {number for number, _ in written(said[:first])} == {0, 1}
    bare, whole = (Path(said[number].path) for number in (first, second))
    assert (tensors_of(bare), tensors_of(whole)) == (["tokens"], ["tokens", "kv.0"])
    assert read_head(whole).head.continues == b"end of h", "it takes the place of the first one"


def test_a_head_that_is_staged_with_its_end_is_the_same_once_the_first_is_answered(
    tmp_path: Path,
):
    writing = Writing(tmp_path)
    writing.writer.put_head(head("answered", [], session="a"))
    writing.writer.put_head(head("open", [], session="b"))
    writing.start()
    first = [writing.next(), writing.next()]
    assert {one.head_id for one in heads_in(first)} == {"answered", "open"}
    assert writing.writer.answered("answered") is not None
    again = {one.asker.session_id: one.head_id for one in heads_in(writing.finish())}
    assert again["a"] == "answered"
    assert again["b"] != "open", "its two answers can be told apart"


def test_a_turn_that_goes_on_leaves_no_end_of_the_last_one(writing: Writing):
    writing.writer.put_head(head("first", []))
    writing.writer.put_head(head("second", [0], continues=b"end of first"))
    writing.put(0)
    told = heads_in(writing.finish())
    assert told[0].head_id == "second"
    assert len(told) == 2, "without its end, and with it"


def test_a_turn_that_goes_on_tells_what_is_in_memory_of_the_last_one(writing: Writing):
    first = head("first", [])
    first = replace(first, told=structs.replace(first.told, ends=(1, 2)))
    writing.writer.put_head(first)
    writing.writer.put_head(head("second", [0], continues=b"end of first"))
    writing.put(0)
    assert [one.ends for one in heads_in(writing.finish())] == [(1, 2), (1, 2)]


def with_ends(said: list[Any]) -> list[Ended]:
    return [one for one in heads_in(said) if len(tensors_of(Path(one.path or ""))) > 1]


def answered_otherwise(before: HeadJob, num_prompt: int) -> HeadJob:
    """A later head of a longer prompt that has the first tokens of another one."""
    ids = before.token_ids[:num_prompt] + array("I", range(777, 877))
    one = structs.replace(before.head, id="later", num_tokens=len(ids), pins=())
    later = replace(before, head=one, token_ids=ids, end_name=b"later", num_prompt=len(ids) - 1)
    return replace(later, ended_s=before.ended_s + 1)


@pytest.mark.parametrize("is_staged", [False, True])
@pytest.mark.parametrize(
    ("session", "num_shared", "is_left"),
    [(b"s", 42, True), (b"s", 26, True), (b"s", 25, False), (b"", 42, True), (b"", 41, False)],
)
def test_an_answer_that_its_client_leaves_out_leaves_no_end(
    writing: Writing, session: bytes, num_shared: int, is_left: bool, is_staged: bool
):
    """Its prompt has 42 tokens. In a session the last of them may be what opens the answer."""
    first = head("first", range(10))
    owner = Owner(b"asked", session, b"")
    first = replace(first, head=structs.replace(first.head, owner=owner))
    if is_staged:
        writing.start()
        writing.writer.put_head(first)
        while not heads_in([writing.next()]):
            pass
        writing.writer.put_head(answered_otherwise(first, num_shared))
    else:
        writing.writer.put_head(first)
        writing.writer.put_head(answered_otherwise(first, num_shared))
    assert len(with_ends(writing.finish())) == (1 if is_left else 2)


@pytest.mark.parametrize("how", ["asked again", "a part of it", "earlier"])
def test_an_answer_that_its_client_may_go_on_from_has_its_end(writing: Writing, how: str):
    first = head("first", range(10))
    later = answered_otherwise(first, 42)
    if how == "asked again":  # or one more answer to the same request
        later = replace(later, num_prompt=first.num_prompt)
    elif how == "a part of it":
        one = structs.replace(later.head, num_tokens=42)
        later = replace(later, head=one, token_ids=first.token_ids[:42])
    else:
        later = replace(later, ended_s=first.ended_s - 1)
    writing.writer.put_head(first)
    writing.writer.put_head(later)
    told = with_ends(writing.finish())
    assert any(read_head(Path(one.path or "")).token_ids == first.token_ids for one in told)


def test_an_end_that_somebody_pinned_is_written_whatever_is_said_later(writing: Writing):
    first = head("first", range(10))
    first = replace(first, head=structs.replace(first.head, pins=("prompt",)))
    writing.writer.put_head(first)
    writing.writer.put_head(answered_otherwise(first, 42))
    assert len(with_ends(writing.finish())) == 2


def test_what_is_there_already_is_not_counted_again(writing: Writing):
    writing.allowed.advance_bytes = 1
    writing.put(1)
    writing.start()
    assert written([writing.next()]) == [(1, None)]
    writing.writer.put_head(replace(head("first", [1]), end=None), [block(1)])
    (told,) = heads_in(writing.finish())
    assert told.path is not None
    slot, own = writing.slots.path(block(1).key), Path(told.path)
    assert told.num_bytes == sum(file_bytes(one.stat().st_size) for one in (slot, own))


def test_closing_writes_what_is_queued_whoever_is_running(writing: Writing):
    writing.writer.set_idle(is_idle=False)
    writing.put(0, 1, 2)
    assert sorted(written(writing.finish())) == [(n, None) for n in range(3)]


def test_a_failing_disk_is_told_and_tried_again_once_it_may_work(writing: Writing):
    (writing.root / "slots").write_text("in the way")
    writing.put(0)
    writing.start()
    assert isinstance(writing.next(), Trouble)
    assert written([writing.next()]) == [(0, "failed")]
    writing.put(1)
    assert written([writing.next()]) == [(1, "paused")]
    (writing.root / "slots").unlink()
    writing.writer.resume()
    writing.put(2)
    assert written([writing.next()]) == [(2, None)]


def test_nothing_is_written_that_is_not_allowed(writing: Writing):
    writing.allow = lambda _: Allowance(num_bytes=0)
    writing.put(0)
    writing.start()
    assert isinstance(writing.next(), Trouble)
    ((number, reason),) = written([writing.next()])
    assert number == 0
    assert reason is not None
    assert not writing.has(0)


def test_a_head_that_is_not_allowed_costs_itself_and_stops_nobody(writing: Writing):
    allowances = iter([Allowance(num_bytes=0)])
    writing.allow = lambda one: next(allowances, Allowance(num_bytes=one.num_bytes))
    writing.allowed.advance_bytes = 0
    writing.start()
    writing.writer.put_head(head("refused", []))
    assert isinstance(writing.next(), Trouble)
    assert not writing.writer.is_busy
    writing.put(0)
    assert written([writing.next()]) == [(0, None)]
    writing.writer.put_head(head("other", [0], session="other"))
    assert {one.asker.session_id for one in heads_in(writing.finish())} == {"other"}


def test_what_is_pinned_is_asked_for_as_that(writing: Writing):
    writing.allow = lambda one: Allowance(num_bytes=one.num_bytes if one.is_pinned else 0)
    writing.allowed.advance_bytes = 0
    writing.put(0)
    writing.start()
    assert isinstance(writing.next(), Trouble)
    assert written([writing.next()])[0][1] is not None
    pinned = head("pinned", [0, 1])
    pinned = replace(pinned, head=structs.replace(pinned.head, pins=("prompt",)))
    writing.writer.put_head(pinned, [block(0), block(1)])
    said = writing.finish()
    assert sorted(written(said)) == [(0, None), (1, None)]
    assert {one.head_id for one in heads_in(said)} >= {"pinned"}


def test_each_block_is_written_or_left_while_others_are_dropped(tmp_path: Path):
    """Whether requests run or not."""
    writing = Writing(tmp_path)
    writing.start()
    left: set[int] = set()
    for number in range(60):
        writing.writer.set_idle(is_idle=number % 7 > 2)
        writing.put(number)
        if number % 5 == 0:
            left.add(number)
            writing.writer.drop_blocks([name_of(number)])
    said = written(writing.finish())
    assert len(said) == len({number for number, _ in said})
    assert {number for number in range(60) if writing.has(number)} == {*range(60)} - left
    assert writing.writer.num_queued_bytes == 0


def test_what_is_being_written_is_gone_once_it_is_dropped(tmp_path: Path):
    writing = Writing(tmp_path)
    writing.start()
    for number in range(1, 9):
        writing.writer.put([block(number, LARGE_BYTES)])
        while not list(tmp_path.rglob("*.safetensors")):
            pass
        if not writing.writer.drop_blocks([name_of(number)]):
            writing.slots.remove(BlockKey(MODEL, name_of(number)))  # it may have been done before
        assert not list(tmp_path.rglob("*.safetensors"))
    writing.finish()


def test_all_that_was_used_is_told_in_the_end_whatever_is_dropped_meanwhile(tmp_path: Path):
    writing, granted = Writing(tmp_path), list[int]()

    def grant(asked: Allow) -> Allowance:
        granted.append(asked.num_bytes)
        return Allowance(num_bytes=asked.num_bytes)

    writing.allow = grant
    writing.start()
    for number in range(60):
        name = f"{number}"
        writing.put(number)
        writing.writer.put_head(head(name, [number], session=name))
        if number % 3 == 1:
            writing.writer.drop_blocks([name_of(number - 1)])
        if number % 3 == 2:
            writing.writer.withdraw(lambda one, name=name: one.asker.session_id == name)
            writing.writer.drop_blocks([name_of(number)])
    writing.writer.put_head(replace(head("last", []), end=None))
    told = heads_in(writing.finish())
    left_bytes = writing.allowed._num_left + writing.writer._untold_bytes
    assert sum(one.num_bytes for one in told) == sum(granted) - left_bytes
    assert not writing.writer._used


class SlowRanks(Alone):
    """They take their time to say what they have."""

    def __init__(self) -> None:
        self.is_asked, self.may_answer = threading.Event(), threading.Event()

    def have(self, _: bytes, names: Sequence[bytes]) -> list[Has]:
        self.is_asked.set()
        self.may_answer.wait(PATIENCE_S)
        return super().have(_, names)


def test_what_was_there_before_it_was_to_be_written_again_stays_when_that_is_dropped(
    writing: Writing,
):
    """The server removes what it deletes; another conversation may go through this."""
    writing.put(1)
    writing.start()
    assert written([writing.next()]) == [(1, None)]
    writing.writer.others = ranks = SlowRanks()
    writing.put(1)
    assert ranks.is_asked.wait(PATIENCE_S)
    dropping = threading.Thread(target=writing.writer.drop_blocks, args=([name_of(1)],))
    dropping.start()
    while not writing.writer._unwanted:
        pass
    ranks.may_answer.set()
    dropping.join(PATIENCE_S)
    writing.finish()
    assert writing.has(1)


def test_a_head_that_was_withdrawn_is_neither_told_nor_there(tmp_path: Path):
    writing = Writing(tmp_path)
    writing.writer.put_head(head("goes", [], session="goes"))
    writing.writer.put_head(head("stays", [], session="stays"))

    def is_meant(one: Recognised) -> bool:
        return one.asker.session_id == "goes"

    assert [one.head.id for one in writing.writer.withdraw(is_meant)] == ["goes"]
    told = heads_in(writing.finish())
    assert {one.asker.session_id for one in told} == {"stays"}
    assert len([*writing.heads.iterdir()]) == len(told)
