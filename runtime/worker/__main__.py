"""The worker process: `python -m runtime.worker --fd N --page M`, started by the server with a
socket and a work page.
"""

from __future__ import annotations

import argparse
import faulthandler
import gc
import os
import queue
import signal
import socket
import sys
import traceback

import mlx.core as mx
from msgspec import structs

from runtime.wire import Heartbeat, Hello, Load, MemoryUse, Prepare, Released, Stop
from runtime.work_page import WorkPage
from runtime.worker.code_guard import run_only_installed_code
from runtime.worker.connection import Sender, commands
from runtime.worker.input.sandbox import Sandbox
from runtime.worker.kernels import open_libraries
from runtime.worker.preparing import Preparation
from runtime.worker.running_time import running_s
from runtime.worker.session import Process, Session, give_memory_back, memory_use, started
from runtime.worker.shutdown import Deadline
from runtime.worker.stacks import print_stacks_when_asked


class Worker:
    """The process: it waits for a model, serves it, and may wait for the next one after that.

    One thread reads, one sends; the main thread is the one for mlx.
    """

    def __init__(self, sock: socket.socket, sandbox: Sandbox, page: WorkPage) -> None:
        self._sock = sock
        self._sender = Sender(sock, self._heartbeat)
        self._work: queue.SimpleQueue[Prepare | Session | None] = queue.SimpleQueue()
        self._session: Session | None = None
        self._before: MemoryUse | None = None
        """What the process took before the weights of its first model were read."""
        sending = started("sender", self._sender.run)
        preparation, deadline = Preparation(sandbox), Deadline()
        self._process = Process(sandbox, self._sender, sending, page, preparation, deadline)

    def run(self) -> int:
        """The mlx thread, until the process is to end; its exit status."""
        mx.random.seed(int.from_bytes(os.urandom(8)))  # forked processes would draw alike
        started("reader", self._read)
        self._sender.send(Hello(pid=os.getpid()))
        open_libraries()
        status: int | None = None
        while status is None:
            status = self._do(self._work.get())
        return status

    def _do(self, work: Prepare | Session | None) -> int | None:
        match work:
            case Prepare(spec=spec):
                self._process.preparation.prepare(spec)
                return None
            case Session():
                status = work.run()
                self._before = self._before or work.before
                if status is None:
                    self._session = work = None
                    give_memory_back()
                    self._sender.send(Released(before=self._before, after=memory_use()))
                return status
            case None:
                self._process.preparation.drop()
                return 0

    def _read(self) -> None:
        """The reader thread; what it cannot understand is the end, as if the server were gone."""
        try:
            for command in commands(self._sock):
                match command:
                    case Prepare():
                        self._work.put(command)
                    case Load():
                        self._session = Session(self._process, command)
                        self._work.put(self._session)
                    case _ if (session := self._session) is not None:
                        session.obey(command)
                    case Stop(exit_s=exit_s):
                        self._process.deadline.phase_s = exit_s
                        break
                    case _:
                        pass
        except Exception:
            traceback.print_exc()
        self._process.deadline.set()
        if (session := self._session) is not None:
            session.lost()
        self._work.put(None)

    def _heartbeat(self) -> Heartbeat:
        running_s()
        session = self._session
        beat = Heartbeat(step=0, is_busy=False, phase="starting")
        if session is not None:
            beat = session.heartbeat()
        peak_bytes = mx.get_peak_memory()
        mx.reset_peak_memory()
        return structs.replace(
            beat,
            active_bytes=mx.get_active_memory(),
            cache_bytes=mx.get_cache_memory(),
            peak_bytes=peak_bytes,
        )


def main() -> int:
    """Parse the command line, take the socket, run."""
    parser = argparse.ArgumentParser(prog="python -m runtime.worker")
    parser.add_argument("--fd", type=int, required=True, help="inherited socket to the server")
    told = "inherited memory, to say whose work is done"
    parser.add_argument("--page", type=int, required=True, help=told)
    arguments = parser.parse_args()
    sock = socket.socket(fileno=arguments.fd)
    faulthandler.enable()
    sandbox = Sandbox.start()  # while there is one thread, and nothing in memory but code
    print_stacks_when_asked()
    run_only_installed_code()
    # The terminal's Ctrl-C and hang-up are the server's to answer.
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    # What was imported stays: looking through it would only make every collection longer.
    gc.freeze()
    worker = Worker(sock, sandbox, WorkPage(arguments.page))
    os.close(arguments.page)
    return worker.run()


if __name__ == "__main__":
    code = 1
    try:
        code = main()
    except BaseException:
        traceback.print_exc()
    sys.stderr.flush()
    # Interpreter teardown with live mlx threads can abort; everything worth saving is saved.
    os._exit(code)
