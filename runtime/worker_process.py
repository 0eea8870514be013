"""`WorkerProcess`: one child process on the server's side, from spawn to burial.

It belongs to the event loop. A generation handed to it always ends: finished, refused, or failed
the moment the process is gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Literal

import msgspec
import structlog

from runtime.errors import LoadFailed, WorkerDied, WorkerError, WorkerWedged
from runtime.generation import Generation
from runtime.kv_channel import KvChannel
from runtime.pulse import Pulse
from runtime.settings import Settings
from runtime.types import ModelSpec
from runtime.wire import (
    Abort,
    Accepted,
    Chunks,
    Event,
    Heartbeat,
    Hello,
    Load,
    LoadError,
    LoadProgress,
    Ready,
    Rejected,
    SlotBad,
    SlotStaged,
    SlotsUsed,
    SlotsWanted,
    Stop,
    StoreTrouble,
    Submit,
)
from runtime.worker_link import Link, cause_of_death, rejection, spawn, worker_options

State = Literal["starting", "loading", "ready", "stopping", "stopped"]

_log = structlog.get_logger("hearth.worker")
_STDERR_LINES = 200
_REAP_S = 0.03
_STACKS_S = 0.1
_TERM_GRACE_S = 5.0
_LAST_WORDS_S = 5.0


class WorkerProcess:
    """One worker: `start()`, then `submit()` and `abort()` while it is ready, then `stop()`.

    `on_change` is called after every change of `state`, of the load progress, and when the last
    generation has left. Once stopped it stays stopped; `error` then says why, unless it was asked.
    """

    def __init__(
        self, settings: Settings, kv: KvChannel, on_change: Callable[[WorkerProcess], None]
    ) -> None:
        self.spec: ModelSpec = kv.spec
        self.state: State = "starting"
        self.load_fraction = 0.0
        self.ready: Ready | None = None
        self.error: WorkerError | None = None
        self.last_used_s = time.monotonic()
        self.pulse = _new_pulse(settings)
        self._settings = settings
        self._kv = kv
        self._on_change = on_change
        self._generations: dict[str, Generation] = {}
        self._process: asyncio.subprocess.Process | None = None
        self._link: Link | None = None
        self._is_up = asyncio.Event()
        self._stderr: deque[str] = deque(maxlen=_STDERR_LINES)
        self._term_grace_s = min(_TERM_GRACE_S, settings.stop_timeout_s)
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    @property
    def num_running(self) -> int:
        """Generations it works for."""
        return len(self._generations)

    @property
    def stderr_tail(self) -> str:
        """The last lines it printed, stacks of a wedged worker among them."""
        return "\n".join(self._stderr)

    async def start(self) -> None:
        """Spawn the process and have it load the model.

        Raises:
            WorkerError: it could not be started, died, was stopped, or could not load the model.
        """
        try:
            await self._exec()
            if self.state == "stopping":  # asked to leave while it was being spawned
                await self.stop()
            async with asyncio.timeout(self._settings.load_timeout_s):
                await self._is_up.wait()
        except TimeoutError:
            limit_s = self._settings.load_timeout_s
            await self._put_down(
                LoadFailed(f"The model {self.spec.id} was not loaded within {limit_s:g} s.")
            )
        except OSError as error:
            self._die(LoadFailed(f"The worker for {self.spec.id} did not start: {error}"))
        if self.state != "ready":
            raise self.error or WorkerDied(f"The worker for {self.spec.id} was stopped.")

    def submit(self, generation: Generation) -> None:
        """Hand over a generation; the worker must be ready."""
        request = generation.request
        self._generations[request.request_id] = generation
        rest = msgspec.structs.replace(request, deadline_s=generation.remaining_s)
        self._send(Submit(request=rest))

    def abort(self, generation: Generation) -> None:
        """Stop working for a generation; one that is not here is ignored."""
        request_id = generation.request.request_id
        if request_id in self._generations:
            self._send(Abort(request_id=request_id))
            self._forget(request_id)

    async def stop(self) -> None:
        """Ask it to leave, and after a while make it leave; returns when the process is gone."""
        self._set_state("stopping")
        self._send(Stop())
        await self._reap(self._settings.stop_timeout_s)

    def kill(self) -> None:
        """End it at once, whatever it does."""
        self._signal(signal.SIGKILL)

    async def gone(self) -> None:
        """Wait until the process has ended; a stopped worker's does, if need be by force."""
        if self._process is not None:
            await self._process.wait()

    # Events of the link

    def on_event(self, event: Event) -> None:
        """A message from the worker."""
        match event:
            case Chunks(items=items):
                for request_id, chunk in items:
                    if (generation := self._generations.get(request_id)) is not None:
                        generation.push(chunk)
                        if generation.is_finished:
                            self._forget(request_id)
            case Accepted(request_id=request_id):
                if (generation := self._generations.get(request_id)) is not None:
                    generation.phase = "prefill"
                    generation.accept(event.num_prompt_tokens, event.cache)
            case Rejected(request_id=request_id):
                if (generation := self._generations.get(request_id)) is not None:
                    generation.fail(rejection(event))
                    self._forget(request_id)
            case Heartbeat():
                self.pulse.beat(event, time.monotonic())
                self._kv.on_beat(event)
            case SlotStaged() | SlotBad() | SlotsUsed() | SlotsWanted() | StoreTrouble():
                self._kv.on_event(event)
            case _:
                self._on_load_event(event)

    def on_disconnect(self) -> None:
        """The worker closed its end: it is dead or about to be."""
        self._spawn(self._bury())

    def _on_load_event(self, event: Hello | LoadProgress | Ready | LoadError) -> None:
        match event:
            case Hello():
                self._set_state("loading")
            case LoadProgress(fraction=fraction):
                self.load_fraction = fraction
                self._on_change(self)
            case Ready():
                self.ready = event
                self.pulse = _new_pulse(self._settings)  # loading may take longer than a step may
                self._set_state("ready")
                self._is_up.set()
            case LoadError(message=message):
                self._die(LoadFailed(f"The model {self.spec.id} cannot be loaded: {message}"))

    def _forget(self, request_id: str) -> None:
        del self._generations[request_id]
        self.last_used_s = time.monotonic()
        if not self._generations:
            self._on_change(self)

    # Life and death

    async def _exec(self) -> None:
        options = asyncio.create_task(self._kv.options())  # beside the process's imports
        try:
            blas = self._settings.cpu_blas
            self._process, self._link = await spawn(blas, self.on_event, self.on_disconnect)
        except OSError:
            options.cancel()
            raise
        self._spawn(self._read_output(self._process))
        self._spawn(self._watch())
        _log.info("worker started", model=self.spec.id, pid=self.pid)
        kv = await options
        self._link.send(Load(spec=self.spec, options=worker_options(self._settings), kv=kv))
        self._kv.open(self._link.send)

    async def _bury(self) -> None:
        """Fail what is open, with the cause of death when the kernel tells it at once."""
        assert self._process is not None
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_REAP_S):
                await self._process.wait()
        was_asked = self.state == "stopping"
        cause = "was stopped" if was_asked else cause_of_death(self._process.returncode)
        log = _log.error if self.state == "ready" else _log.info
        log("worker ended", model=self.spec.id, pid=self.pid, cause=cause)
        self._die(WorkerDied(f"The process of the model {self.spec.id} {cause}."))
        await self._reap(self._term_grace_s)

    def _die(self, error: WorkerError) -> None:
        """The end of it, whatever came first: remember why, fail what is open."""
        if self.state == "stopped":
            return
        if self.state != "stopping":
            self.error = error
        generations, self._generations = self._generations, {}
        self._set_state("stopped")
        self._is_up.set()
        for generation in generations.values():
            generation.fail(error)
        if self._link is not None:
            self._link.close()
        self._kv.close()

    async def _watch(self) -> None:
        """Replace a worker that gives no sign of life, or is busy and does not step."""
        settings = self._settings
        period_s = min(1.0, settings.heartbeat_timeout_s / 4, settings.wedge_timeout_s / 4)
        while self.state in ("starting", "loading", "ready"):
            await asyncio.sleep(period_s)
            complaint = self.pulse.complaint(time.monotonic())
            # Importing and reading weights hold the interpreter for long; they have a limit.
            if complaint and self.state == "ready":
                _log.error("worker wedged", model=self.spec.id, pid=self.pid, why=complaint)
                await self._put_down(
                    WorkerWedged(f"The model {self.spec.id} {complaint}; it is being replaced.")
                )

    async def _put_down(self, error: WorkerError) -> None:
        """Ask for its stacks, fail its requests at once, then end it, softly first."""
        self._signal(signal.SIGUSR1)
        self._die(error)
        await asyncio.sleep(_STACKS_S)
        self._signal(signal.SIGTERM)
        await self._reap(self._term_grace_s)

    async def _reap(self, grace_s: float) -> None:
        """Wait for the exit; after `grace_s` seconds make it happen."""
        if self._process is None:
            return
        try:
            async with asyncio.timeout(grace_s):
                await self._process.wait()
        except TimeoutError:
            _log.warning("worker killed", model=self.spec.id, pid=self.pid)
            self.kill()
            await self._process.wait()
        await self._hear_out()
        self._die(WorkerDied(f"The process of the model {self.spec.id} was stopped."))

    async def _hear_out(self) -> None:
        """Read what the process sent before it ended: slots that it wrote last, above all."""
        if self._link is not None and self.state != "stopped":
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_LAST_WORDS_S):
                    await self._link.closed.wait()

    def _signal(self, number: signal.Signals) -> None:
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)

    def _set_state(self, state: State) -> None:
        # What a worker reports while it is made to leave changes nothing any more.
        is_leaving = self.state == "stopped" or (self.state == "stopping" and state != "stopped")
        if state != self.state and not is_leaving:
            self.state = state
            self._on_change(self)

    # Plumbing

    def _send(self, command: Submit | Abort | Stop) -> None:
        if self._link is not None:
            self._link.send(command)

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _read_output(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        while True:
            try:
                line = await process.stdout.readline()
            except ValueError:  # a line longer than the reader's buffer, which dropped it
                continue
            if not line:
                return
            text = line.decode(errors="replace").rstrip()
            self._stderr.append(text)
            _log.debug("worker says", model=self.spec.id, pid=process.pid, line=text)


def _new_pulse(settings: Settings) -> Pulse:
    return Pulse(
        silent_s=settings.heartbeat_timeout_s,
        stuck_s=settings.wedge_timeout_s,
        now_s=time.monotonic(),
    )
