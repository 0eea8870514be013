"""Processes that can be ended: where templates are rendered, texts tokenized and grammars tried.

None of the three can be interrupted in a thread, and a kilobyte can keep each of them busy for
hours. A process that is forked while the worker has one thread and no model, the fork server, forks
a lane whenever the worker wants one; whoever gives up on a lane has it killed. A lane sees the
tokenizer and what it is asked, and nothing of the model, the store or the server.
"""

from __future__ import annotations

import gc
import os
import pickle
import resource
import signal
import socket
import struct
import sys
import threading
import time
from array import array
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import msgspec
import psutil

from runtime.types import Struct
from runtime.worker.code_guard import run_only_installed_code
from runtime.worker.input.preparer import TEMPLATE_ERRORS, Complaint, GrammarRefused, PromptPreparer

_HEADER = struct.Struct("<cQ")
_NUMBER = struct.Struct("<q")
_EQUIP, _FORK, _KILL, _WORK = b"e", b"f", b"k", b"w"
_POLL_S = 0.02
_SEND_S = 30.0
_CHUNK_BYTES = 1 << 20
_NICENESS = 10
_REHEARSAL_CPU_S = 1.0
_REHEARSAL: tuple[tuple[str, tuple[object, ...]], ...] = (
    ("render", ([{"role": "user", "content": "."}], None, {"tokenize": False})),
    ("encode", (".", [], False)),
)


class LaneLost(Exception):
    """The process ended while it worked, and nobody had it killed."""


class SandboxGone(Exception):
    """The fork server has ended: nothing can be taken in any more."""


class Rendered(Struct, frozen=True, tag="rendered"):
    """UTF-8, in which half a surrogate pair may be."""

    text: bytes


class Encoded(Struct, frozen=True, tag="encoded"):
    """Token ids, four bytes each in this machine's order."""

    token_ids: bytes
    positions: tuple[int, ...]


class Tried(Struct, frozen=True, tag="tried"):
    """What is wrong with a grammar, if anything is."""

    complaint: Complaint | None = None
    reason: str = ""


class Unfit(Struct, frozen=True, tag="unfit"):
    """The template cannot show the messages, there is no memory, or another error of that name."""

    why: Literal["template", "memory", "error"]
    message: str = ""


Outcome = Rendered | Encoded | Tried | Unfit


class SandboxResult(Struct, frozen=True):
    """What came of a job, and what the lane has used so far of the processor, in seconds."""

    outcome: Outcome
    cpu_s: float


_decoder: msgspec.msgpack.Decoder[SandboxResult] = msgspec.msgpack.Decoder(SandboxResult)
Look = Callable[[float, int], None]
"""Called again and again while a lane works, with the seconds of processor time that the job has
taken and the bytes by which the lane has grown; what it raises ends both.
"""


class Sandbox:
    """The worker's end of the fork server. From any thread."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._lock = threading.Lock()
        self._rehearsed: Lane | None = None

    @classmethod
    def start(cls) -> Sandbox:
        """Fork the fork server; call it while this process has one thread."""
        ours, theirs = socket.socketpair()
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if pid == 0:
            try:
                if os.fork() == 0:  # nobody's child: the worker's are the ranks of its model
                    _withdraw(theirs)
                    _ForkServer(theirs).run()
            finally:
                os._exit(0)
        os.waitpid(pid, 0)
        theirs.close()
        return cls(ours)

    def equip(self, bench: PromptPreparer) -> None:
        """What lanes forked from now on work with. Raises SandboxGone."""
        if (before := self._take_rehearsed()) is not None:
            before.end()
        equipment = (bench.tokenizer, bench.vocab_size, sorted(bench.eos_token_ids))
        payload = pickle.dumps(equipment)
        with self._lock:
            try:
                self._control.sendall(_HEADER.pack(_EQUIP, len(payload)) + payload)
            except OSError as error:
                raise SandboxGone from error

    def rehearse(self) -> None:
        """Have a lane work for the first time, which takes longest, and keep it for `lane()`."""
        lane = Lane(self)
        with suppress(LaneLost):
            for job in _REHEARSAL:
                lane.call(pickle.dumps(job), _REHEARSAL_CPU_S, _look_away)
            self._rehearsed = lane

    def lane(self) -> Lane:
        """A lane, forked when it is first used unless it has rehearsed."""
        return self._take_rehearsed() or Lane(self)

    def _take_rehearsed(self) -> Lane | None:
        with self._lock:
            lane, self._rehearsed = self._rehearsed, None
        return lane

    def fork(self, sock: socket.socket) -> int:
        """A process that works for whoever has the other end of that socket; its id.

        Raises:
            SandboxGone: there is none that could be forked.
        """
        return self._ask(_HEADER.pack(_FORK, 0), [sock.fileno()])

    def kill(self, pid: int) -> None:
        """End a lane, whatever it does; it is gone when this returns. Raises SandboxGone."""
        self._ask(_HEADER.pack(_KILL, _NUMBER.size) + _NUMBER.pack(pid), [])

    def close(self) -> None:
        """The fork server ends, and all lanes with it."""
        self._control.close()

    def _ask(self, message: bytes, fds: list[int]) -> int:
        with self._lock:
            try:
                socket.send_fds(self._control, [message], fds)
                answer = _received(self._control, _NUMBER.size)
            except OSError as error:
                raise SandboxGone from error
        if answer is None:
            raise SandboxGone
        return int(_NUMBER.unpack(answer)[0])


class Lane:
    """One process that works. Belongs to one thread."""

    def __init__(self, sandbox: Sandbox) -> None:
        self._sandbox = sandbox
        self._sock: socket.socket | None = None
        self._process: psutil.Process | None = None
        self._cpu_s = 0.0
        self._rss = 0

    def call(self, job: bytes, cpu_limit_s: float, look: Look) -> tuple[Outcome, float]:
        """Have a job done; what came of it, and the seconds of processor time it took.

        The kernel ends the lane some time after `cpu_limit_s`, whoever looks or does not.

        Raises:
            LaneLost: the process ended.
            Exception: what `look` raises; the process is ended then.
        """
        before_s = self._cpu_s
        try:
            sock = self._sock or self._open()
            sock.settimeout(_SEND_S)
            limit_s = int(before_s + cpu_limit_s) + 2
            sock.sendall(_HEADER.pack(_WORK, len(job)) + _NUMBER.pack(limit_s) + job)
            reply = _decoder.decode(self._hear(sock, look))
        except (OSError, msgspec.MsgspecError) as error:
            self.end()
            raise LaneLost from error
        except BaseException:
            self.end()
            raise
        self._cpu_s = reply.cpu_s
        return reply.outcome, reply.cpu_s - before_s

    def yield_to_others(self) -> None:
        """It takes long: what others do goes first."""
        if self._process is not None:
            with suppress(psutil.Error, OSError):
                self._process.nice(_NICENESS)

    def end(self) -> None:
        """Kill the process, if there is one; the next call has another one forked."""
        if self._process is not None:
            with suppress(SandboxGone):
                self._sandbox.kill(self._process.pid)
        if self._sock is not None:
            self._sock.close()
        self._sock, self._process, self._cpu_s = None, None, 0.0

    def _open(self) -> socket.socket:
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                pid = self._sandbox.fork(theirs)
            self._process = psutil.Process(pid)
            self._rss = self._process.memory_info().rss
        except (psutil.Error, OSError) as error:
            ours.close()
            raise LaneLost from error
        self._sock = ours
        return ours

    def _hear(self, sock: socket.socket, look: Look) -> bytes:
        sock.settimeout(_POLL_S)
        data = bytearray()
        size: int | None = None
        while size is None or len(data) < size:
            try:
                piece = sock.recv(_CHUNK_BYTES)
            except TimeoutError:
                self._look(look)
                continue
            if not piece:
                raise LaneLost
            data += piece
            if size is None and len(data) >= _NUMBER.size:
                size = _NUMBER.size + int(_NUMBER.unpack_from(data)[0])
        return bytes(memoryview(data)[_NUMBER.size :])

    def _look(self, look: Look) -> None:
        assert self._process is not None
        cpu_s, growth = 0.0, 0
        with suppress(psutil.Error):  # it has just ended, which its socket tells
            times = self._process.cpu_times()
            cpu_s = times.user + times.system - self._cpu_s
            growth = self._process.memory_info().rss - self._rss
        look(cpu_s, growth)


def _look_away(_: float, __: int) -> None:
    """The kernel's limit is enough."""


# What runs in the fork server and in its lanes.


class _ForkServer:
    """Does no work itself, so that it always hears."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._bench: PromptPreparer | None = None
        self._lanes: set[int] = set()

    def run(self) -> None:
        """Until the worker is gone; then no lane is left."""
        try:
            while self._obey():
                self._reap()
        finally:
            for pid in self._lanes:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def _obey(self) -> bool:
        header, fds, _, _ = socket.recv_fds(self._control, _HEADER.size, 1)
        if not header:
            return False
        kind, size = _HEADER.unpack(header)
        payload = _received(self._control, size)
        if payload is None:
            return False
        match kind:
            case b"e":
                with suppress(Exception):  # each of its lanes says so
                    self._bench = PromptPreparer(*pickle.loads(payload))  # noqa: S301 - the worker's own
                run_only_installed_code()  # that pickle alone names classes
                gc.unfreeze()  # what was there for the model before goes
                gc.collect()
                gc.freeze()
            case b"f":
                self._fork(fds[0])
            case _:
                self._kill(int(_NUMBER.unpack(payload)[0]))
        return True

    def _fork(self, fd: int) -> None:
        pid = os.fork()
        if pid == 0:
            try:
                self._control.close()
                _work(socket.socket(fileno=fd), self._bench)
            finally:
                os._exit(0)
        os.close(fd)
        self._lanes.add(pid)
        self._control.sendall(_NUMBER.pack(pid))

    def _kill(self, pid: int) -> None:
        if pid in self._lanes:  # or it has ended, and the number may be another's
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            self._lanes.discard(pid)
        self._control.sendall(_NUMBER.pack(pid))

    def _reap(self) -> None:
        for pid in list(self._lanes):
            if os.waitpid(pid, os.WNOHANG)[0]:
                self._lanes.discard(pid)


def _withdraw(control: socket.socket) -> None:
    """Hold nothing of the worker's: its end is told by its descriptors' closing."""
    signal.set_wakeup_fd(-1)
    nothing = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(nothing, fd)
    for fd in [int(one.name) for one in Path("/dev/fd").iterdir()]:
        if fd > 2 and fd != control.fileno():
            with suppress(OSError):  # the one that listed them
                os.close(fd)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    gc.freeze()


def _work(sock: socket.socket, bench: PromptPreparer | None) -> None:
    """A lane: one job after the other, until nobody is at the other end."""
    while (header := _received(sock, _HEADER.size + _NUMBER.size)) is not None:
        _, size = _HEADER.unpack_from(header)
        _, most_s = resource.getrlimit(resource.RLIMIT_CPU)
        (limit_s,) = _NUMBER.unpack_from(header, _HEADER.size)
        resource.setrlimit(resource.RLIMIT_CPU, (limit_s, most_s))
        job = _received(sock, size)
        if job is None:
            return
        reply = SandboxResult(_outcome(bench, *pickle.loads(job)), time.process_time())  # noqa: S301
        payload = msgspec.msgpack.encode(reply)
        sock.sendall(_NUMBER.pack(len(payload)) + payload)


def _outcome(bench: PromptPreparer | None, name: str, arguments: Sequence[Any]) -> Outcome:
    if bench is None:
        return Unfit("error", "the tokenizer cannot be taken into another process")
    try:
        match name:
            case "render":
                text = bench.render(*arguments)
                return Rendered(text.encode("utf-8", "surrogatepass"))
            case "encode":
                text, at, adds_special = arguments
                marked = bench.encode(text, at, adds_special=adds_special)
                return Encoded(array("I", marked.token_ids).tobytes(), tuple(marked.positions))
            case "prepare":
                bench.prepare()
                return Tried()
            case _:
                bench.matcher(*arguments)
                return Tried()
    except GrammarRefused as error:
        return Tried(error.complaint, error.reason)
    except TEMPLATE_ERRORS as error:
        return Unfit("template" if name == "render" else "error", str(error))
    except MemoryError:
        return Unfit("memory")
    except Exception as error:
        return Unfit("error", type(error).__name__)


def _received(sock: socket.socket, num_bytes: int) -> bytes | None:
    data = bytearray()
    while len(data) < num_bytes:
        piece = sock.recv(min(num_bytes - len(data), _CHUNK_BYTES))
        if not piece:
            return None
        data += piece
    return bytes(data)
