"""What reaches the engine from other threads, and where its events go."""

from __future__ import annotations

import queue
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from runtime import kv_messages
from runtime.kv.by_blocks.reader import OnDisk, PieceRead
from runtime.kv.by_blocks.writer import Staged, Written
from runtime.kv.reader import SlotRead
from runtime.kv.writer import WriteFailed
from runtime.slot_events import KvNews
from runtime.wire import Event
from runtime.worker.sequence import SequenceGroup


@dataclass(frozen=True, slots=True)
class AbortRequest:
    """Stop working for this request, if it is here."""

    request_id: str


class Quit:
    """Leave the loop."""


KvArrival = KvNews | SlotRead | WriteFailed
BlockArrival = kv_messages.KvNews | OnDisk | PieceRead | Written | Staged
Arrival = SequenceGroup | AbortRequest | Quit | KvArrival | BlockArrival


class EngineChannel(NamedTuple):
    """The engine's two ends: what arrives, from any thread, and where its events go."""

    inbox: queue.SimpleQueue[Arrival]
    emit: Callable[[Event], None]
