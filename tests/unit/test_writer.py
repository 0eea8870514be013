"""The writer: bounded, the newest turns first; a failing disk ends nothing."""

import queue
import threading
from array import array
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from runtime.kv.writer import Packed, SlotWriter, WriteFailed, WriteJob, rest_share
from store import slots
from store.disk import CHUNK_BYTES
from store.keyed_names import NOBODY, Asker
from store.slots import StagedSlot
from store.types import TensorData
from tests.slot_samples import sample, slot_id
from tests.waiting import PATIENCE_S

LARGE_BYTES = 16 << 20

MINE = Asker("m", "mine")


class Writing:
    """A writer over real files, and what it said."""

    def __init__(self, root: Path, max_bytes: int, num_threads: int = 1, **how: Any) -> None:
        self.root = root
        self.staged: queue.SimpleQueue[StagedSlot] = queue.SimpleQueue()
        self.failed: queue.SimpleQueue[WriteFailed] = queue.SimpleQueue()
        self.askers: list[Asker] = []
        self.writer = SlotWriter(
            root, max_bytes, self._on_staged, self.failed.put, num_threads=num_threads, **how
        )
        self.thread = threading.Thread(target=self.writer.run)
        self.writer.set_idle(is_idle=True)

    def _on_staged(self, job: WriteJob, staged: StagedSlot) -> None:
        self.askers.append(job.asker)
        self.staged.put(staged)

    def start(self) -> None:
        self.thread.start()

    def finish(self) -> None:
        """Close it and wait until it has ended; it may not have been started."""
        self.writer.close()
        if self.thread.ident is None:
            self.thread.start()
        self.thread.join(PATIENCE_S)
        assert not self.thread.is_alive()

    def next_staged(self) -> str:
        return self.staged.get(timeout=PATIENCE_S).id

    def failures(self) -> list[tuple[str, str]]:
        return [(one.slot_id, one.reason) for one in drained(self.failed)]


class Ticking:
    """A clock that goes on by so many seconds whenever it is read."""

    def __init__(self, tick_s: float) -> None:
        self.now_s = 0.0
        self._tick_s = tick_s

    def __call__(self) -> float:
        self.now_s += self._tick_s
        return self.now_s


def drained(source: "queue.SimpleQueue[Any]") -> list[Any]:
    found: list[Any] = []
    while not source.empty():
        found.append(source.get())
    return found


def job(number: int, num_layers: int = 2) -> WriteJob:
    header, ids, tensors = sample(number, num_layers=num_layers)
    return WriteJob(header, array("I", ids), Packed(header.layout, tensors))


def large_job(number: int) -> WriteJob:
    """Writing it takes a while."""
    plain = job(number)
    big = TensorData("big", "U8", (LARGE_BYTES,), memoryview(bytes(LARGE_BYTES)))
    packed = plain.packed._replace(tensors=[*plain.packed.tensors, big])
    return replace(plain, packed=packed)


JOB_BYTES = job(0).packed.nbytes


@pytest.fixture
def writing(tmp_path: Path) -> Iterator[Writing]:
    """Room for three jobs in the queue."""
    one = Writing(tmp_path / "store", 3 * JOB_BYTES)
    yield one
    one.finish()


def test_slots_are_staged_in_order_whole_and_publishable(writing: Writing):
    for number in range(3):
        writing.writer.put(job(number))
    assert writing.writer.num_queued_bytes == 3 * JOB_BYTES
    writing.start()
    for number in range(3):
        staged = writing.staged.get(timeout=PATIENCE_S)
        assert staged.id == slot_id(number)
        verified = slots.verify(slots.publish(staged))
        assert verified.header == job(number).header
        assert verified.token_ids == job(number).token_ids
    assert writing.writer.num_queued_bytes == 0
    assert writing.failures() == []


def test_a_full_queue_drops_the_oldest(writing: Writing):
    for number in range(5):
        writing.writer.put(job(number))
    assert writing.failures() == [(slot_id(0), "queue_full"), (slot_id(1), "queue_full")]
    assert writing.writer.num_queued_bytes == 3 * JOB_BYTES
    assert writing.writer.num_dropped == 2
    writing.start()
    assert [writing.next_staged() for _ in range(3)] == [slot_id(n) for n in (2, 3, 4)]


def test_what_is_preferred_is_written_first_in_its_order(writing: Writing):
    """The newest turn before older ones; of it the beginning first."""
    for number in range(3):
        writing.writer.put(job(number))
    writing.writer.prefer([slot_id(7), slot_id(2)])
    writing.writer.prefer([slot_id(0), slot_id(1)])
    writing.start()
    assert [writing.next_staged() for _ in range(3)] == [slot_id(n) for n in (0, 1, 2)]


def test_what_is_preferred_is_the_newest_when_room_is_made(writing: Writing):
    for number in range(3):
        writing.writer.put(job(number))
    writing.writer.prefer([slot_id(0)])
    writing.writer.put(job(3))
    assert writing.failures() == [(slot_id(1), "queue_full")]
    writing.start()
    assert [writing.next_staged() for _ in range(3)] == [slot_id(n) for n in (0, 2, 3)]


def test_a_slot_larger_than_the_queue_is_written_alone(writing: Writing):
    writing.writer.put(job(0))
    writing.writer.put(job(1, num_layers=20))
    assert writing.failures() == [(slot_id(0), "queue_full")]
    writing.start()
    assert writing.next_staged() == slot_id(1)


def test_closing_writes_what_is_queued_whoever_is_running(writing: Writing):
    writing.writer.set_idle(is_idle=False)
    for number in range(3):
        writing.writer.put(job(number))
    writing.finish()
    assert [one.id for one in drained(writing.staged)] == [slot_id(n) for n in range(3)]


def test_a_failing_disk_fails_all_that_waits_and_then_what_comes(writing: Writing):
    writing.root.mkdir()
    (writing.root / "slots").write_text("in the way")
    for number in range(3):
        writing.writer.put(job(number))
    writing.start()
    for number in range(3):
        said = writing.failed.get(timeout=PATIENCE_S)
        assert said == WriteFailed(slot_id(number), "failed")
    assert writing.writer.num_queued_bytes == 0
    (writing.root / "slots").unlink()
    writing.writer.put(job(4))
    assert writing.failures() == [(slot_id(4), "paused")]
    assert writing.staged.empty()


def test_after_the_pause_writing_goes_on(tmp_path: Path):
    writing = Writing(tmp_path / "store", 3 * JOB_BYTES)
    writing.writer.pause_s = 0.0
    writing.root.mkdir()
    (writing.root / "slots").write_text("in the way")
    writing.writer.put(job(0))
    writing.start()
    assert writing.failed.get(timeout=PATIENCE_S).reason == "failed"
    (writing.root / "slots").unlink()
    writing.writer.put(job(1))
    assert writing.next_staged() == slot_id(1)
    writing.finish()


def test_a_job_that_contradicts_itself_is_refused(writing: Writing):
    wrong = job(0)
    writing.writer.put(WriteJob(wrong.header, wrong.token_ids[1:], wrong.packed))
    writing.start()
    assert writing.failed.get(timeout=PATIENCE_S) == WriteFailed(slot_id(0), "refused")


@pytest.mark.parametrize("num_threads", [1, 2, 5])
def test_however_many_write_each_slot_is_written_once(tmp_path: Path, num_threads: int):
    """Whether requests run or not, and while some are forgotten."""
    writing = Writing(tmp_path, 1 << 30, num_threads)
    done: queue.SimpleQueue[int] = queue.SimpleQueue()
    writing.start()
    for number in range(60):
        writing.writer.set_idle(is_idle=number % 7 > 2)
        writing.writer.put(job(number))
        if number % 5 == 0:
            writing.writer.forget({slot_id(number)}, lambda _: False, partial(done.put, number))
    writing.finish()
    assert sorted(drained(done)) == list(range(0, 60, 5))
    staged = drained(writing.staged)
    ids = [one.id for one in staged]
    assert len(ids) == len(set(ids))
    assert {slot_id(number) for number in range(60) if number % 5} <= set(ids)
    assert {one.path for one in staged} == {one for one in tmp_path.rglob("*") if one.is_file()}
    assert writing.failures() == []
    assert writing.writer.num_queued_bytes == 0


def test_a_long_slot_is_written_though_requests_never_stop(tmp_path: Path):
    writing = Writing(tmp_path / "store", 1 << 30)
    writing.writer.set_idle(is_idle=False)
    large = 2 * CHUNK_BYTES // job(0).packed.tensors[0].data.nbytes
    writing.writer.put(job(0, num_layers=large))
    writing.start()
    assert writing.next_staged() == slot_id(0)
    writing.finish()


@pytest.mark.parametrize(
    ("num_queued_bytes", "share"), [(0, 3.0), (16, 1.5), (32, 0.0), (512, 0.0)]
)
def test_the_more_is_queued_the_less_a_writer_rests(num_queued_bytes: int, share: float):
    assert rest_share(num_queued_bytes, 512) == share


def test_waiting_for_room_is_no_work_after_which_a_writer_rests(tmp_path: Path):
    """It would rest for five minutes here."""
    clock = Ticking(0.0)

    class Slow:
        def take(self, key: str, num_bytes: int, *, parent: str | None = None) -> None:
            clock.now_s += 100.0

        def leave(self, key: str) -> None:
            pass

    writing = Writing(tmp_path / "store", 1 << 30, room=Slow())
    writing.writer.clock = clock
    writing.writer.set_idle(is_idle=False)
    writing.writer.put(job(0))
    writing.start()
    assert writing.next_staged() == slot_id(0)
    writing.finish()


def test_two_write_without_a_rest_while_much_is_queued(tmp_path: Path):
    """None of the slots is written unless two threads have one in hand."""
    both = threading.Barrier(2, timeout=PATIENCE_S)

    class Together:
        def take(self, key: str, num_bytes: int, *, parent: str | None = None) -> None:
            both.wait()

        def leave(self, key: str) -> None:
            pass

    writing = Writing(tmp_path / "store", 4 * JOB_BYTES, 2, room=Together())
    writing.writer.clock = Ticking(100.0)
    writing.writer.set_idle(is_idle=False)
    for number in range(4):
        writing.writer.put(job(number))
    writing.start()
    assert {writing.next_staged() for _ in range(2)} == {slot_id(0), slot_id(1)}
    writing.finish()


def test_what_was_queued_is_not_written_once_it_is_forgotten(tmp_path: Path):
    writing = Writing(tmp_path, 1 << 30)
    for number in (1, 2, 3):
        writing.writer.put(replace(job(number), asker=MINE if number > 1 else NOBODY))
    done: list[bool] = []
    writing.writer.forget({slot_id(2)}, lambda one: one == MINE, lambda: done.append(True))
    assert done == [True]
    writing.finish()
    assert [writing.next_staged(), writing.next_staged()] == [slot_id(1), slot_id(3)]
    assert writing.staged.empty()
    assert writing.askers == [NOBODY, NOBODY]


def test_what_is_being_written_is_gone_once_it_is_forgotten(tmp_path: Path):
    writing = Writing(tmp_path, 1 << 30)
    writing.writer.set_idle(is_idle=False)
    writing.start()
    num_given_up = 0
    for number in range(1, 9):
        writing.writer.put(large_job(number))
        while not list(tmp_path.rglob("*.safetensors")):
            pass
        gone = threading.Event()
        writing.writer.forget({slot_id(number)}, lambda _: False, gone.set)
        assert gone.wait(PATIENCE_S)
        if writing.staged.empty():
            num_given_up += 1
        else:  # it was done a moment before
            writing.staged.get().path.unlink()
        assert not list(tmp_path.rglob("*.safetensors"))
    assert num_given_up
    writing.finish()
