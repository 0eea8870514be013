"""Where all threads of this process are, printed whenever the server asks by a signal."""

from __future__ import annotations

import faulthandler
import os
import signal
import threading
from types import FrameType


def print_stacks_when_asked() -> None:
    """Call it on the main thread.

    SIGUSR1 has them printed by a thread that holds the interpreter: of one that runs meanwhile a
    dump may read what is no longer there, and crash. It says nothing while another thread keeps
    the interpreter, and then nothing else runs: SIGUSR2 prints them from the signal's handler.
    """
    reads, writes = os.pipe()
    os.set_blocking(writes, False)
    signal.set_wakeup_fd(writes, warn_on_full_buffer=False)
    signal.signal(signal.SIGUSR1, _ignore)  # what listens is the descriptor's other end
    faulthandler.register(signal.SIGUSR2, all_threads=True)
    threading.Thread(target=_print, args=(reads,), name="stacks", daemon=True).start()


def _print(asked_fd: int) -> None:
    while os.read(asked_fd, 1):
        faulthandler.dump_traceback(all_threads=True)


def _ignore(_number: int, _frame: FrameType | None) -> None:
    return
