"""What rank 0 asks of the other ranks."""

from __future__ import annotations

import queue
import threading

from runtime.worker.distributed.questions import Questions
from runtime.worker.distributed.records import Answer, HaveAny, Question

NUM_WRITERS = 4
NUM_QUESTIONS = 10
NUM_OTHERS = 2


def test_threads_that_ask_at_once_each_get_the_answers_to_their_own_question():
    asked: queue.SimpleQueue[Question] = queue.SimpleQueue()
    questions = Questions(asked.put, NUM_OTHERS)
    given: dict[bytes, list[bytes]] = {}

    def ask(first: int) -> None:
        names = [b"%d" % number for number in range(first, first + NUM_QUESTIONS)]
        waiting = [questions.ask(HaveAny(ask=0, model=name)) for name in names]
        for name, wait in zip(names, waiting, strict=True):
            given[name] = [one.found for one in wait()]

    writers = [
        threading.Thread(target=ask, args=(number * NUM_QUESTIONS,))
        for number in range(NUM_WRITERS)
    ]
    for writer in writers:
        writer.start()
    every = [asked.get() for _ in range(NUM_WRITERS * NUM_QUESTIONS)]
    for question in reversed(every):
        assert isinstance(question, HaveAny)
        for rank in (2, 1):
            questions.hear(rank, Answer(ask=question.ask, found=b"%d " % rank + question.model))
    for writer in writers:
        writer.join()
    assert given == {b"%d" % n: [b"1 %d" % n, b"2 %d" % n] for n in range(len(every))}
