"""What a worker tells while it writes what is left, and that it ends."""

import subprocess
import sys
import threading
from array import array
from pathlib import Path

from runtime.kv.writer import Packed, SlotWriter, WriteJob
from runtime.wire import Event, Flushed, Flushing
from runtime.worker.shutdown import EXIT_OVERDUE, Deadline, flush
from store.slots import StagedSlot
from tests.slot_samples import sample
from tests.waiting import PATIENCE_S


def job(number: int) -> WriteJob:
    header, ids, tensors = sample(number)
    return WriteJob(header, array("I", ids), Packed(header.layout, tensors))


def test_a_flush_tells_how_much_is_left_and_ends_when_all_is_written(tmp_path: Path):
    staged: list[str] = []
    told: list[Event] = []

    def on_staged(_: WriteJob, slot: StagedSlot) -> None:
        # The disk is slow: the first slot is done when somebody was told about the others.
        is_told.wait(PATIENCE_S)
        staged.append(slot.id)

    def send(event: Event) -> None:
        told.append(event)
        is_told.set()

    is_told = threading.Event()
    jobs = [job(number) for number in range(3)]
    writer = SlotWriter(tmp_path / "store", 1 << 30, on_staged, lambda _: None)
    for one in jobs:
        writer.put(one)
    queued_bytes = writer.num_queued_bytes
    thread = threading.Thread(target=writer.run)
    deadline = Deadline()
    flushing = threading.Thread(target=lambda: flush((writer, thread), send, deadline))
    thread.start()
    flushing.start()
    flushing.join(PATIENCE_S)
    deadline.cancel()
    assert sorted(staged) == sorted(one.header.id for one in jobs)
    assert isinstance(told[0], Flushing)
    assert 0 < told[0].num_bytes <= queued_bytes
    assert told[-1] == Flushed(num_unwritten_bytes=0)


def test_without_anything_to_write_it_is_told_all_the_same():
    told: list[Event] = []
    flush(None, told.append, Deadline())
    assert told == [Flushing(num_bytes=0), Flushed(num_unwritten_bytes=0)]


OVERDUE = """
import threading
from runtime.worker.shutdown import Deadline
deadline = Deadline()
deadline.phase_s = 0.05
deadline.set()
threading.Event().wait()
"""


def test_a_phase_that_takes_too_long_ends_the_process():
    root = Path(__file__).parents[2]
    ended = subprocess.run([sys.executable, "-c", OVERDUE], cwd=root, timeout=60, check=False)
    assert ended.returncode == EXIT_OVERDUE
