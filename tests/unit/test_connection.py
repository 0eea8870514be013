"""The worker's end of the socket."""

from __future__ import annotations

import socket
import threading

from runtime.wire import Heartbeat, Hello
from runtime.worker.connection import Sender
from tests.waiting import PATIENCE_S


def test_nobody_waits_for_what_is_said_when_the_server_is_gone():
    """A worker that did held its memory for its whole grace: twenty seconds."""
    ours, theirs = socket.socketpair()
    sender = Sender(ours, lambda: Heartbeat(step=0, is_busy=False, phase="starting"))
    theirs.close()
    sending = threading.Thread(target=sender.run, daemon=True)
    flushing = threading.Thread(target=sender.flush, args=(2 * PATIENCE_S,), daemon=True)
    with ours:
        sending.start()
        sender.send(Hello(pid=1))
        flushing.start()
        flushing.join(PATIENCE_S)
        assert not flushing.is_alive()
        sender.close()
        sending.join(PATIENCE_S)
        assert not sending.is_alive()
