"""`WorkerProcess`: one worker on the server's side, from its start to its end.

It belongs to the event loop. A generation handed to it always ends: finished, refused, or failed
the moment the process is gone.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AbstractContextManager, nullcontext

import structlog

from runtime.cache.channel import Report, WorkerChannel
from runtime.config.settings import Settings
from runtime.errors import LoadFailed, MachineFailed, WorkerDied, WorkerError, WorkerWedged
from runtime.supervisor.blame import cause_of, died, sentence_of
from runtime.supervisor.crash_report import CrashReporter
from runtime.supervisor.generation import Generation
from runtime.supervisor.health import HealthLimits, Watchdog
from runtime.supervisor.lifecycle import MODEL_STATES, ModelEvent, ModelState, Stage
from runtime.supervisor.open_work import OpenWork, fail_all
from runtime.supervisor.running_time import RunningTimeout, running_s
from runtime.supervisor.shutdown import WorkerShutdown
from runtime.supervisor.spawn import Child
from runtime.supervisor.standby import StandbyPool
from runtime.supervisor.worker_clock import WorkerClock
from runtime.supervisor.worker_link import worker_options
from runtime.timeouts import term_grace_s
from runtime.types import GenerateRequest, ModelSpec
from runtime.wire import (
    Abort,
    Accepted,
    Chunks,
    Event,
    Flushed,
    Flushing,
    Heartbeat,
    Hello,
    Load,
    LoadError,
    LoadProgress,
    Ready,
    Rejected,
    Released,
    Stop,
    Submit,
    Warming,
)
from store.types import RunFigures

_log = structlog.get_logger("hearth.worker")
_REAP_S = 1.0
"""What a process may take from its last word to its exit status, on a machine that is busy."""
_LAST_LINES_S = 0.2
"""What the lines may take that a process printed before it ended; who inherited its end of the
pipe may hold that open.
"""


class WorkerProcess:
    """One worker: `start()`, then `submit()` and `abort()` while it is ready, then `stop()`.

    `on_change` is called after every change of `state`, of the load progress, when the process is
    gone, and when its memory was looked for. Once it has ended, `error` says why unless it was
    asked to. `standbys` may have a process. `event` holds what one frame, or its end, brings about.
    """

    def __init__(
        self,
        settings: Settings,
        kv: WorkerChannel,
        on_change: Callable[[WorkerProcess], None],
        standbys: StandbyPool | None = None,
        event: AbstractContextManager[None] = nullcontext(),  # noqa: B008 - it holds nothing
    ) -> None:
        self.kv = kv
        self.spec: ModelSpec = kv.spec
        self.state: ModelState = "spawning"
        self.load_fraction = 0.0
        self.ready: Ready | None = None
        self.error: WorkerError | None = None
        self.watchdog = Watchdog(HealthLimits.of(settings), running_s())
        self.clock = WorkerClock(is_first=standbys is not None and standbys.num_taken == 0)
        """What its start and its end cost, as far as they got."""
        own = settings.model(self.spec.id)
        self.lost_on: Sequence[GenerateRequest] = ()
        self.crash_reporter = CrashReporter(settings.home, self.spec.id, own.num_ranks_here)
        """Its peaks, and when it is gone its crash record and whether its memory came back."""
        self._settings = settings
        self._on_change = on_change
        self._spares = standbys
        self._event = event
        self._work = OpenWork()
        self._child: Child | None = None
        self._ending: WorkerShutdown | None = None
        self._asking: asyncio.Future[None] | None = None
        self._is_up = asyncio.Event()
        self._has_left = asyncio.Event()
        """Its process has ended, or is another model's."""
        self._concluding: asyncio.Task[None] | None = None
        self._is_buried = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def pid(self) -> int | None:
        return self._child.pid if self._child is not None else None

    @property
    def num_running(self) -> int:
        """Generations it works for."""
        return len(self._work)

    @property
    def stderr_tail(self) -> str:
        """The last lines it printed, stacks of a wedged worker among them."""
        return "\n".join(self._child.output) if self._child is not None else ""

    @property
    def stage(self) -> Stage:
        return MODEL_STATES[self.state].stage

    @property
    def has_ended(self) -> bool:
        """Nothing more comes of it. The process may still have to be ended; see `gone()`."""
        return self.state in ("cold", "crashed", "wedged")

    @property
    def is_gone(self) -> bool:
        """Its process has ended, is another model's, or never was."""
        return self._child is None or self._child.returncode is not None

    async def start(self) -> None:
        """Take or spawn a process and have it load the model.

        Raises:
            WorkerError: it could not be started, died, was stopped, or could not load the model.
        """
        try:
            await self._exec()
            if self.state == "stopping":  # asked to leave while it was being spawned
                await self._ask_to_leave()
                await self.stop()
            async with RunningTimeout(self._settings.load_timeout_s):
                await self._is_up.wait()
        except TimeoutError:
            limit = f"{self._settings.load_timeout_s:g} s"
            why = f"The model {self.spec.id} was not loaded within {limit}."
            await self._put_down(LoadFailed(why), is_silent=True)
        except OSError as error:
            why = f"A process for the model {self.spec.id} could not be started: {error}"
            self._die(MachineFailed(why, "not_started"))
        finally:
            if self._spares is not None:
                self._spares.rest()
        if self.state != "ready":
            raise self.error or WorkerDied(f"The worker for {self.spec.id} was stopped.")

    def submit(self, generation: Generation) -> None:
        """Hand over a generation; the worker must be ready."""
        assert self._child is not None
        self._work.add(generation)
        request = generation.sent(self._child.pid)
        self._child.send(Submit(request))

    def abort(self, generation: Generation) -> None:
        """Stop working for a generation; one that is not here is ignored."""
        if self._work.remove(generation) and self._child is not None:
            self._child.send(Abort(request_id=generation.request.request_id))

    async def stop(self) -> None:
        """Ask it to leave, and after a while make it leave; returns when the process has ended, or
        is another model's.

        It takes `stopping.stop_bound_s` at most. Called again it only waits.
        """
        has_kv = self.state == "ready"
        if self._apply("leave"):
            self._asking = asyncio.ensure_future(self._ask_to_leave(has_kv=has_kv))
        if self._asking is not None:
            await asyncio.shield(self._asking)
        if self._ending is not None and not self.has_ended:
            await self._ending.leave(self._has_left)
        await self.gone()

    def kill(self) -> None:
        """End it at once, whatever it does, and whatever is being done about it."""
        self._apply("leave")
        if self._child is not None:
            self._child.signal(signal.SIGKILL)

    async def gone(self) -> None:
        """Wait until the process has ended and a crash is on record, or is another model's.

        A stopped worker's process does not keep its model, if need be by force.
        """
        if self._child is not None:
            await self._is_buried.wait()

    # Events of the link

    def on_event(self, event: Event) -> None:
        """A message from the worker."""
        if isinstance(event, Report):
            self.kv.on_event(event)
            return
        match event:
            case Chunks() | Accepted() | Rejected():
                with self._event:
                    self._work.on_event(event)
            case Heartbeat():
                self.watchdog.beat(event, running_s())
                self.crash_reporter.heard(event)
                self.kv.on_beat(event)
            case Flushing() | Flushed():
                if self._ending is not None:
                    self._ending.on_event(event)
                self._apply("flushed" if isinstance(event, Flushed) else "leave")
            case Released():
                self._on_released(event)
            case _:
                self._on_load_event(event)

    def on_disconnect(self) -> None:
        """The worker closed its end: it is dead or about to be."""
        self._spawn(self._reap())

    def _on_load_event(self, event: Hello | LoadProgress | Warming | Ready | LoadError) -> None:
        now_s = time.monotonic()
        match event:
            case Hello():
                self.watchdog.moved("loading", running_s())
                self.clock.said_hello(now_s)
                self._apply("hello")
            case LoadProgress(fraction=fraction):
                self.watchdog.moved("loading", running_s())
                self.load_fraction = fraction
                self._on_change(self)
            case Warming():
                self.watchdog.moved("warming", running_s())
                if self._apply("read"):
                    self.clock.read_weights(now_s)
            case Ready(blindness=blindness):
                self.ready = event
                self.watchdog.moved("idle", running_s())
                self.clock.became_ready(now_s)
                self.kv.measured(RunFigures(self.clock.start_cost.total_ms, blindness=blindness))
                self._spawn(self._open())
            case LoadError(message=message, is_lacking=is_lacking):
                why = f"The model {self.spec.id} cannot be loaded: {message}"
                self._die(MachineFailed(why, "lacking") if is_lacking else LoadFailed(why))

    async def _open(self) -> None:
        """Take requests: they come after what is on disk for them, or would not find it."""
        await self.kv.told()
        if self._apply("up"):
            self._is_up.set()

    # Life and death

    async def _exec(self) -> None:
        self.clock.began(time.monotonic())
        child, was_spare = await _child_of(self._settings, self._spares)
        self._child = child
        self._ending = WorkerShutdown(child, self.clock, self._settings.stop_timeout_s)
        child.model = self.spec.id
        _log.info("loading the model", model=self.spec.id, pid=self.pid, spare=was_spare)
        self.watchdog = Watchdog(HealthLimits.of(self._settings), running_s())
        child.listen(self.on_event, self.on_disconnect)
        self._concluding = self._spawn(self._conclude(child))
        self._spawn(self._watch())
        kv = await self.kv.options()
        load = Load(spec=self.spec, options=worker_options(self._settings, self.spec.id), kv=kv)
        child.send(load)
        self.clock.sent_load(time.monotonic())
        self.kv.open(child.send)

    async def _reap(self) -> None:
        """Fail what is open, with the cause of death when the kernel tells it in time."""
        assert self._child is not None
        assert self._ending is not None
        if await self._child.wait(_REAP_S):
            await self._child.hear_out(_LAST_LINES_S)
        self._ended(self._child)
        if not await self._child.wait(term_grace_s(self._settings.stop_timeout_s)):
            await self._ending.finish()

    def _ended(self, child: Child) -> None:
        """Its process has ended, or its connection did."""
        if self.has_ended:
            return
        end = self.crash_reporter.end_of(child)
        how = "was stopped" if self.stage == "leaving" else sentence_of(end)
        log = _log.error if self.state == "ready" else _log.info
        log("worker ended", model=self.spec.id, pid=self.pid, cause=how)
        self._die(died(f"The process of the model {self.spec.id} {how}.", cause_of(end)))

    def _die(self, error: WorkerError, *, hangs_up: bool = True) -> None:
        """The end of it, whatever came first: remember why, fail what is open, listen no more."""
        if self.has_ended:
            return
        event: ModelEvent = "gone"
        if self.stage != "leaving":
            event = "stuck" if isinstance(error, WorkerWedged) else "lost"
            self.error = error
            self.crash_reporter.lost(error, self.watchdog, self.num_running)
            if self._child is not None:
                phase, page = self.watchdog.phase, self._child.page
                self.lost_on = self._work.lost_on(error, phase, page)
        with self._event:
            generations = self._work.take_all()
            self._apply(event)
            self._is_up.set()
            fail_all(generations, error, self.lost_on)
        if self._child is not None:
            (self._child.close if hangs_up else self._child.ignore)()
        if self.ready is not None and self.crash_reporter.working_bytes:
            self.kv.measured(RunFigures(peak_bytes=self.crash_reporter.working_bytes))
        self.kv.close()

    async def _watch(self) -> None:
        """Replace a worker that gives no sign of life, or is busy and does not step."""
        settings = self._settings
        period_s = min(1.0, settings.heartbeat_timeout_s / 4, settings.wedge_timeout_s / 4)
        while self.stage in ("loading", "ready"):
            await self._look_at_memory()
            await asyncio.sleep(period_s)
            child = self._child
            if child is not None and self.stage == "loading":
                self.watchdog.computed(child.cpu_s, running_s())
            complaint = self.watchdog.complaint(running_s())
            if complaint is None:
                continue
            if child is not None and child.is_stopped and self.watchdog.may_go_on(running_s()):
                self._go_on(child)
            elif self.stage in ("loading", "ready"):
                why = f"The model {self.spec.id} {complaint.text}; it is being replaced."
                _log.error("worker wedged", model=self.spec.id, pid=self.pid, why=complaint.text)
                await self._put_down(WorkerWedged(why), is_silent=complaint.is_silent)

    async def _look_at_memory(self) -> None:
        """In a thread: the loop would wait for the interpreter at each of a dozen system calls."""
        await asyncio.to_thread(self.crash_reporter.sample, self.pid, self.watchdog.last)

    def _go_on(self, child: Child) -> None:
        """Somebody stopped the process: nobody is to blame, and whoever waits for it shall not."""
        if self.num_running or self.stage == "loading":
            _log.warning("a worker was stopped and is continued", model=self.spec.id, pid=self.pid)
            self.watchdog.was_stopped(running_s())
            child.signal(signal.SIGCONT)

    async def _put_down(self, error: WorkerError, *, is_silent: bool) -> None:
        """Fail its requests at once, then end it."""
        self._die(error, hangs_up=False)
        if self._ending is not None:
            await self._ending.put_down(is_silent=is_silent)

    async def _ask_to_leave(self, *, has_kv: bool = False) -> None:
        """Once its KV can be written: its files may still be read for the name of it."""
        waited_s = await self.kv.named(self._settings.stop_timeout_s / 2) if has_kv else 0.0
        await self._look_at_memory()
        if self._ending is not None:
            is_one = self._settings.model(self.spec.id).together is None
            stays = has_kv and is_one and self._spares is not None and self._spares.is_wanted
            self._ending.ask(waited_s, stays=stays)

    def _on_released(self, released: Released) -> None:
        """The model has left. Its process is the next spare, if it has given all memory back."""
        child, spares = self._child, self._spares
        if child is None or self.has_ended or child.was_ended:
            return
        is_back = self.crash_reporter.is_given_back(released)
        log = _log.bind(model=self.spec.id, pid=child.pid)
        log = log.bind(allocated_bytes=released.after.allocated_bytes)
        log = log.bind(resident_bytes=released.after.resident_bytes)
        if spares is None or not spares.has_place or not is_back:
            log.info("worker ends with its model", before_bytes=released.before.resident_bytes)
            child.send(Stop())
            return
        log.info("worker waits for the next model")
        if self._concluding is not None:
            self._concluding.cancel()
        self.clock.exited(time.monotonic())
        self._child = None
        spares.give_back(child)
        self._die(died(f"The process of the model {self.spec.id} is another one's.", "told_to_end"))
        self._has_left.set()
        self._is_buried.set()
        self.crash_reporter.gave_back(released)
        self._on_change(self)

    async def _conclude(self, child: Child) -> None:
        """When the process has ended: hear it out, keep the record, see to its memory."""
        await child.wait()
        self._has_left.set()
        self.clock.exited(time.monotonic())
        await child.hear_out()
        self._ended(child)
        child.page.close()
        await self.crash_reporter.keep(child, self.watchdog)
        self._is_buried.set()
        self._on_change(self)
        if await self.crash_reporter.check_memory(was_asked=self.error is None):
            self._on_change(self)

    def _apply(self, event: ModelEvent) -> bool:
        """Whether it changes anything: hardly when the worker is made to leave or has ended."""
        after = MODEL_STATES[self.state].events.get(event)
        if after is None:
            return False
        self.state = after
        self._on_change(self)
        return True

    def _spawn(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


async def _child_of(settings: Settings, standbys: StandbyPool | None) -> tuple[Child, bool]:
    """A process, and whether it had been waiting. Raises OSError."""
    if standbys is not None:
        return await standbys.take()
    return await Child.start(settings.cpu_blas), False
