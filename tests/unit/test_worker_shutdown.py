"""What a worker tells while it writes what is left, and that it ends."""

import subprocess
import sys
import threading
from pathlib import Path

from typing_extensions import override

from runtime.kv.writer import AllowedBytes, Writer
from runtime.wire import Event, Flushed, Flushing
from runtime.worker.shutdown import EXIT_OVERDUE, Deadline, flush
from store.slots import Slots
from tests.unit.test_writer import block
from tests.waiting import PATIENCE_S


def test_a_flush_tells_how_much_is_left_and_ends_when_all_is_written(tmp_path: Path):
    told: list[Event] = []
    is_told = threading.Event()

    def send(event: Event) -> None:
        told.append(event)
        is_told.set()

    class Slow(AllowedBytes):
        """The disk is: the first block is written when somebody was told about the others."""

        @override
        def take(self, num_bytes: int, made_s: float, *, is_pinned: bool = False) -> None:
            is_told.wait(PATIENCE_S)

    jobs = [block(number) for number in range(3)]
    slots = Slots(tmp_path)
    writer = Writer(slots, tmp_path, 1 << 30, told.append, lambda _: None, Slow(lambda _: None))
    writer.put(jobs)
    queued_bytes = writer.num_queued_bytes
    thread = threading.Thread(target=writer.run)
    deadline = Deadline()
    flushing = threading.Thread(target=lambda: flush((writer, thread), send, deadline))
    thread.start()
    flushing.start()
    flushing.join(PATIENCE_S)
    deadline.cancel()
    assert all(slots.has(one.key) for one in jobs)
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
