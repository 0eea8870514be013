"""The worker's end of the socket: one thread sends, one reads; nobody else touches it."""

from __future__ import annotations

import queue
import socket
import threading
import time
from collections.abc import Callable, Iterator

from runtime.wire import Command, Event, FrameReader, Heartbeat, pack, unpack_command

_RECV_BYTES = 1 << 18


class Sender:
    """Sends events in order from its own thread, and a heartbeat whenever one is due.

    A server that reads slowly holds up this thread, never the engine.
    """

    def __init__(self, sock: socket.socket, heartbeat: Callable[[], Heartbeat]) -> None:
        self._sock = sock
        self._heartbeat = heartbeat
        self.heartbeat_s = 1.0
        self._queue: queue.SimpleQueue[bytearray | threading.Event | None] = queue.SimpleQueue()

    def send(self, event: Event) -> None:
        """Queue an event; from any thread, without waiting."""
        self._queue.put(pack(event))

    def flush(self, timeout_s: float) -> None:
        """Wait until what was queued before is on its way; from any thread but the sender's."""
        is_sent = threading.Event()
        self._queue.put(is_sent)
        is_sent.wait(timeout_s)

    def close(self) -> None:
        """Send what is queued, then end `run()`."""
        self._queue.put(None)

    def run(self) -> None:
        """The thread: until closed. When the server is gone, nothing is waited for any more."""
        try:
            self._run()
        except OSError:  # the reader sees the end of file and ends the process
            while (frame := self._queue.get()) is not None:
                if isinstance(frame, threading.Event):
                    frame.set()

    def _run(self) -> None:
        due = time.monotonic()
        while True:
            now = time.monotonic()
            if now >= due:
                due = now + self.heartbeat_s
                self._sock.sendall(pack(self._heartbeat()))
            try:
                frame = self._queue.get(timeout=max(0.0, due - time.monotonic()))
            except queue.Empty:
                continue
            if frame is None:
                return
            if isinstance(frame, threading.Event):
                frame.set()
            else:
                self._sock.sendall(frame)


def commands(sock: socket.socket) -> Iterator[Command]:
    """The server's commands, until it closes the socket or dies."""
    reader = FrameReader()
    while True:
        try:
            data = sock.recv(_RECV_BYTES)
        except ConnectionError:
            return
        if not data:
            return
        for payload in reader.feed(data):
            yield unpack_command(payload)
