"""What reaches the engine from other threads, and where its events go."""

from __future__ import annotations

import queue
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from runtime.kv.reader import FilesRead, OnDisk
from runtime.kv.writer import Written
from runtime.kv_messages import KvNews
from runtime.wire import Event
from runtime.worker.sequence import SequenceGroup


@dataclass(frozen=True, slots=True)
class AbortRequest:
    """Stop working for this request, if it is here."""

    request_id: str


class Quit:
    """Leave the loop."""


KvArrival = KvNews | OnDisk | FilesRead | Written
Arrival = SequenceGroup | AbortRequest | Quit | KvArrival


class EngineChannel(NamedTuple):
    """The engine's ends: what arrives, from any thread, where its events go, and where it says
    whose work comes now: should the process die of it, that is what it died of.
    """

    inbox: queue.SimpleQueue[Arrival]
    emit: Callable[[Event], None]
    work_on: Callable[[Sequence[str]], None]
