"""What rank 0 asks the other ranks, from any thread, and what they answer, in any order."""

from __future__ import annotations

import itertools
import queue
from collections.abc import Callable

from msgspec import structs

from runtime.worker.distributed.records import Answer, Question


class Questions:
    """Those that wait for the answers of `num_others` ranks, all of which `send` tells."""

    def __init__(self, send: Callable[[Question], None], num_others: int) -> None:
        self._send = send
        self._num_others = num_others
        self._numbers = itertools.count(1)
        self._waiting: dict[int, queue.SimpleQueue[tuple[int, Answer]]] = {}

    def ask(self, question: Question) -> Callable[[], list[Answer]]:
        """Ask all of them; what is returned waits for their answers, in the order of ranks."""
        number = next(self._numbers)
        answers = self._waiting[number] = queue.SimpleQueue()
        self._send(structs.replace(question, ask=number))

        def wait() -> list[Answer]:
            found = dict(answers.get() for _ in range(self._num_others))
            del self._waiting[number]
            return [found[rank] for rank in sorted(found)]

        return wait

    def hear(self, rank: int, answer: Answer) -> None:
        """One of them answers."""
        self._waiting[answer.ask].put((rank, answer))
