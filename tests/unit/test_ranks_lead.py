"""What rank 0 tells the other ranks, and asks of them."""

from __future__ import annotations

import queue
import threading

from runtime.kv.writer import Packed
from runtime.worker.distributed.leader import Leader
from runtime.worker.distributed.records import Give, HasRead, Loaded, Record

NUM_WRITERS = 4
NUM_RUNS = 10
LINK_S = 0.002


class Others:
    """One other rank at the end of a link, which answers in the order in which it is asked."""

    def __init__(self) -> None:
        self._answers: queue.SimpleQueue[Packed] = queue.SimpleQueue()
        self._link = threading.Event()

    def send(self, record: Record) -> None:
        assert isinstance(record, Give)
        self._answers.put(Packed(f"of run {record.run}", []))
        self._link.wait(LINK_S)

    def given(self) -> list[Packed]:
        return [self._answers.get()]

    def loaded(self) -> list[Loaded]:
        return []

    def has_read(self) -> list[HasRead]:
        return []


def test_writers_that_ask_at_once_each_get_the_parts_of_their_own_run():
    lead = Leader(Others())
    given: dict[int, str] = {}

    def write(first: int) -> None:
        for run in range(first, first + NUM_RUNS):
            [part] = lead.given(Give(run=run, has_state=False))
            given[run] = part.layout

    writers = [
        threading.Thread(target=write, args=(number * NUM_RUNS,)) for number in range(NUM_WRITERS)
    ]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert given == {run: f"of run {run}" for run in range(NUM_WRITERS * NUM_RUNS)}
