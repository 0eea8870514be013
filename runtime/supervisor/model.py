"""`ModelActor`: the one owner of everything about one model: its state, its process, its requests.

Nothing here awaits. What it decides it has done by its effects, and every transition is published.
"""

from __future__ import annotations

import random
import time
from collections.abc import Mapping, Sequence
from copy import copy
from typing import Protocol

import structlog
from typing_extensions import override

from runtime.errors import (
    Aborted,
    HearthError,
    LoadFailed,
    MachineFailed,
    ModelUnavailable,
    Preempted,
    ShuttingDown,
    WorkerError,
)
from runtime.models.files import Fingerprint, fingerprint
from runtime.supervisor.blame import BLAMED
from runtime.supervisor.calls import LoadRequest, QueuedRequest
from runtime.supervisor.failures import LOST_LIMIT, CrashHistory, Verdict
from runtime.supervisor.generation import Generation
from runtime.supervisor.lifecycle import (
    FAILED,
    MODEL_STATES,
    Lifecycle,
    ModelEvent,
    ModelState,
    Stage,
    Transition,
)
from runtime.supervisor.swap_policy import Resident, Returns
from runtime.types import GenerateRequest, ModelSpec
from runtime.wire import Ready

_log = structlog.get_logger("hearth.model")


class WorkerHandle(Protocol):
    """A process, as the actor sees it."""

    spec: ModelSpec

    @property
    def state(self) -> ModelState: ...

    @property
    def load_fraction(self) -> float: ...

    @property
    def ready(self) -> Ready | None: ...

    @property
    def error(self) -> WorkerError | None: ...

    @property
    def pid(self) -> int | None: ...

    @property
    def lost_on(self) -> Sequence[GenerateRequest]:
        """What it computed for when it was lost."""
        ...

    @property
    def has_ended(self) -> bool:
        """Nothing more comes of it."""
        ...

    @property
    def is_gone(self) -> bool:
        """Its process has ended."""
        ...

    def submit(self, generation: Generation) -> None: ...

    def abort(self, generation: Generation) -> None: ...

    def kill(self) -> None: ...


class Effects(Protocol):
    """Who does what an actor decides; nothing is done before the actor has finished deciding."""

    def start_worker(self, spec: ModelSpec) -> WorkerHandle:
        """A process for this model, which begins to load it."""
        ...

    def prepare_worker(self, spec: ModelSpec) -> None:
        """Begin with what takes no memory of a model: it follows on one that has to leave."""
        ...

    def stop_worker(self, worker: WorkerHandle) -> None:
        """Have it write what is worth keeping and leave."""
        ...

    def publish(self, transition: Transition) -> None:
        """Tell everybody who listens."""
        ...

    def wake_at(self, due_s: float | None) -> None:
        """Have everything settled again at that time; instead of the time given before."""
        ...


class _Keeps:
    """How long a model is kept: as long as that name of it says that says so the longest."""

    def __init__(self, by_name: dict[str, tuple[float, float]] | None = None) -> None:
        self.by_name = by_name or {}
        """When each name was used last, and for how many seconds after that it is kept."""

    def until_s(self, ready_s: float) -> float | None:
        """Of a model that came up at that time; None is for ever."""
        keeps = self.by_name.values()
        if any(keep_s < 0 for _, keep_s in keeps):
            return None
        return max((max(used_s, ready_s) + keep_s for used_s, keep_s in keeps), default=ready_s)


class ModelActor(Lifecycle):
    """`now_s` is always the time of one monotonic clock. Requests are granted by the scheduler."""

    def __init__(self, model: str, limits_s: Mapping[ModelState, float], effects: Effects) -> None:
        super().__init__(limits_s)
        self.model = model
        self.spec: ModelSpec | None = None
        """What the process was started with, or the last one."""
        self.worker: WorkerHandle | None = None
        self.last_worker: WorkerHandle | None = None
        self.running: dict[str, QueuedRequest] = {}
        self.cohort: frozenset[str] = frozenset()
        self.reserved_bytes = 0
        self.pinned: set[str] = set()
        """The names of it that are to stay loaded."""
        self.is_leaving = False
        self.last_error: WorkerError | None = None
        self.num_starts = 0
        self.num_crashes = 0
        self.is_explained = False
        self._effects = effects
        self._history = CrashHistory()
        self._ready_since_s: float | None = None
        self._last_finished_s: float | None = None
        self._returns = Returns()
        self._keeps = _Keeps()
        self._files: Fingerprint = ()
        self._abandoned: list[tuple[WorkerHandle, int]] = []

    @property
    @override
    def stage(self) -> Stage:
        """What its state comes down to: one that drains cannot be opened again if it must leave."""
        if self.is_leaving and self.state == "draining":
            return "leaving"
        return MODEL_STATES[self.state].stage

    @property
    def expires_s(self) -> float | None:
        """When it has been idle for long enough to be unloaded; None while or if it stays."""
        if self.state != "ready" or self.pinned:
            return None
        return self._keeps.until_s(self._ready_since_s or 0.0)

    @property
    def is_pinned(self) -> bool:
        """It stays loaded, for the sake of one of its names at least."""
        return bool(self.pinned)

    def num_running(self, name: str) -> int:
        """Requests in it that ask this name."""
        return sum(call.name == name for call in self.running.values())

    @property
    def last_used_s(self) -> float:
        """When its last request ended, or else when it came up; 0 before that."""
        return max(self._ready_since_s or 0.0, self._last_finished_s or 0.0)

    @property
    def abandoned_bytes(self) -> int:
        """What was reserved for processes that could not be ended and are still there."""
        if not self._abandoned:
            return 0
        return sum(num_bytes for worker, num_bytes in self._abandoned if not worker.is_gone)

    def resident(self) -> Resident | None:
        """What the swap policy has to know; None without a process."""
        stage = self.stage
        if stage == "away":
            return None
        return Resident(
            model=self.model,
            state=stage,
            reserved_bytes=self.reserved_bytes,
            ready_since_s=self._ready_since_s,
            num_running=len(self.running),
            is_interactive=any(call.priority == "interactive" for call in self.running.values()),
            last_finished_s=self._last_finished_s,
            returns_s=self._returns.last_s,
            is_pinned=bool(self.pinned),
            cohort=self.cohort,
        )

    # What the scheduler wants

    def asked(self, now_s: float) -> None:
        """A request for it came."""
        self._returns.asked(now_s)

    def ran_dry(self, now_s: float) -> None:
        """None of its requests runs any more, or waits."""
        self._returns.ran_dry(now_s)

    def want(self, now_s: float) -> None:
        """Somebody waits for it."""
        self._apply("wanted", now_s)

    def unwant(self, now_s: float) -> None:
        """Nobody waits for it."""
        self._apply("unwanted", now_s)

    def admit(
        self, asked: ModelSpec, keep_alive_s: float, reserved_bytes: int, now_s: float
    ) -> None:
        """There is room: have it loaded, and kept for so long if nobody asks it anything."""
        spec = asked.loaded
        self.want(now_s)
        if self._apply("admitted", now_s):
            self.spec = spec
            self.reserved_bytes = reserved_bytes
            self.num_starts += 1
            self._keeps = _Keeps({asked.id: (0.0, keep_alive_s)})
            self._files = fingerprint(spec.path)
            self.worker = self._effects.start_worker(spec)

    def grant(self, call: QueuedRequest, now_s: float) -> None:
        """Hand over a request, or tell that the model is there; its stage must be `ready`."""
        assert self.worker is not None
        if isinstance(call.job, LoadRequest):
            call.job.grant()
            return
        self.running[call.request_id] = call
        self._apply("taken", now_s)
        self.worker.submit(call.job)

    def finish(self, call: QueuedRequest, keep_alive_s: float, now_s: float) -> None:
        """A request that was handed over has ended, or waits again."""
        if self.running.pop(call.request_id, None) is None:
            return
        if call.is_use:
            self._last_finished_s = now_s
            self._keeps.by_name[call.name] = (now_s, keep_alive_s)
        if not self.running:
            if self.is_leaving and self.state == "draining":
                self._flush("drained", now_s)
            else:
                self._apply("idle", now_s)

    def close(self, now_s: float) -> None:
        """Another model needs its room: it serves its cohort and then runs dry."""
        self._apply("closed", now_s)

    def open(self, now_s: float) -> None:
        """Its room is not needed after all."""
        if not self.is_leaving:
            self._apply("opened", now_s)

    def leave(self, reason: str, now_s: float, drain_s: float | None = None) -> None:
        """Unload it, once its requests have ended or `drain_s` seconds have passed."""
        if self.is_leaving:
            return
        was_coming_up = self.stage == "loading"
        self.is_leaving = self.stage in ("loading", "ready")
        if self.state == "ready":
            self._flush("leave", now_s, reason)
        else:
            self._apply("leave", now_s, reason, drain_s)
        if was_coming_up and self.worker is not None:
            self._effects.stop_worker(self.worker)

    def quit(self, now_s: float) -> None:
        """The server stops: end its requests at once and have it leave."""
        self.leave("the server stops", now_s)
        if self.state == "draining":
            self.is_leaving = True
            self._cut_short(ShuttingDown())

    def forgive(self, now_s: float) -> None:
        """The operator says that it may be tried again, or what was wrong has changed."""
        self._history.forgive()
        self._apply("over", now_s)

    def has_changed_files(self) -> bool:
        """The files are not those that were loaded, or that could not be."""
        return self.spec is not None and fingerprint(self.spec.path) != self._files

    # What becomes of the process

    def on_change(self, worker: WorkerHandle, now_s: float) -> None:
        """The process is in another state, or gone."""
        if worker is not self.worker:
            return
        match worker.state:
            case "loading":
                self._apply("hello", now_s)
            case "warming":
                self._apply("read", now_s)
            case "ready":
                self._come_up(worker, now_s)
            case "stopping":
                self._apply("flushed", now_s)
            case "cold" | "crashed" | "wedged":
                self._on_exit(worker, now_s)
            case _:
                pass

    def on_overdue(self, now_s: float) -> None:
        """Its state has lasted too long: go on to the next, by force where there is a process."""
        before, was_coming_up = self.state, self.stage == "loading"
        if before == "draining":
            self.is_leaving = True
            self._cut_short(Preempted(self.model))
            if self.state == before:
                self._flush("overdue", now_s)
            return
        self._apply("overdue", now_s)
        is_last_means = was_coming_up or before in ("stopping", "wedged", "crashed")
        if is_last_means and self.worker is not None:
            self.worker.kill()
        if before == "crashed" and self.worker is not None:
            self.last_error = WorkerError(f"The process of the model {self.model} cannot be ended.")
            _log.error("process abandoned", model=self.model, pid=self.worker.pid)
            self._abandoned = [one for one in self._abandoned if not one[0].is_gone]
            self._abandoned.append((self.worker, self.reserved_bytes))
            self._release(self.worker)

    def make_way(self) -> None:
        """End what runs and yields."""
        for call in [one for one in self.running.values() if one.yields]:
            if self.worker is not None and call.generation is not None:
                self.worker.abort(call.generation)
            call.fail(Aborted("Another model is needed."))

    def _cut_short(self, error: HearthError) -> None:
        """End every request that still runs; the last one has the model drained."""
        for call in list(self.running.values()):
            if self.worker is not None and call.generation is not None:
                self.worker.abort(call.generation)
            call.fail(error)

    def _come_up(self, worker: WorkerHandle, now_s: float) -> None:
        if self.stage != "loading":
            return
        if self.has_changed_files():
            why = f"The files of the model {self.model} changed while it was being loaded."
            self.last_error = LoadFailed(why)
            self._apply("lost", now_s, why)
            worker.kill()
        elif self._apply("up", now_s):
            self._ready_since_s = now_s
            self._last_finished_s = None
            self._history.came_up()

    def _on_exit(self, worker: WorkerHandle, now_s: float) -> None:
        """Nothing more comes of the process; it may still have to end."""
        if worker.error is not None and MODEL_STATES[self.state].stage in ("loading", "ready"):
            self.last_error = worker.error
        event: ModelEvent = "stuck" if worker.state == "wedged" else "lost"
        reason = worker.error.message if worker.error is not None else ""
        was_there = worker.error is None or worker.error.cause != "not_started"
        if self._apply(event, now_s, reason) and was_there:
            self.num_crashes += 1
        if worker.is_gone:
            self._reap(worker, now_s)

    def _reap(self, worker: WorkerHandle, now_s: float) -> None:
        self._apply("gone", now_s)
        if self.state == "crashed":
            verdict = self._verdict(now_s)
            event: ModelEvent = "given_up" if verdict.is_final else "held"
            why = self.last_error.message if self.last_error is not None else ""
            self._apply(event, now_s, why, limit_s=verdict.hold_s)
        if self.stage == "away":
            self._release(worker)

    def _release(self, worker: WorkerHandle) -> None:
        self.last_worker, self.worker = worker, None
        self.reserved_bytes = 0
        self.is_leaving = self.is_explained = False
        self.cohort = frozenset()
        self._ready_since_s = None

    def _verdict(self, now_s: float) -> Verdict:
        culprit = BLAMED[self.last_error.cause].model if self.last_error is not None else "crash"
        match culprit:
            case "unfit":
                return self._history.unloadable()
            case "machine":
                return self._history.machine_lacks()
            case "nobody":
                return self._lost_to_others()
            case "crash":
                pass
        healthy_s = 0.0 if self._ready_since_s is None else now_s - self._ready_since_s
        return self._history.crashed(now_s, healthy_s, _jitter(), is_explained=self.is_explained)

    def _lost_to_others(self) -> Verdict:
        """Nobody here is to blame for the end of the process."""
        verdict, last = self._history.lost_to_others(_jitter()), self.last_error
        if verdict.is_final and last is not None:
            what = f"{LOST_LIMIT} processes of the model {self.model} were lost one after the other"
            self.last_error = MachineFailed(f"{what}. {last.message}", last.cause)
        return verdict

    def _flush(self, event: ModelEvent, now_s: float, reason: str = "") -> None:
        """Nothing runs any more, or may: have the process write what is worth keeping and end."""
        if self._apply(event, now_s, reason) and self.worker is not None:
            self._effects.stop_worker(self.worker)

    def _apply(
        self, event: ModelEvent, now_s: float, reason: str = "", limit_s: float | None = None
    ) -> bool:
        before = self.apply(event, now_s, limit_s)
        if before is None:
            return False
        step = Transition(
            model=self.model,
            before=before,
            event=event,
            after=self.state,
            at_s=time.time(),
            reason=reason,
        )
        # An operator is told of failures; how a model comes and goes is for who debugs it.
        log = _log.info if self.state in FAILED else _log.debug
        log("model state", model=self.model, was=before, on=event, now=self.state, why=reason)
        self._effects.publish(step)
        return True


def _jitter() -> float:
    return random.random()  # noqa: S311 - only a pause


def refusal_of(actor: ModelActor, now_s: float) -> WorkerError:
    """Why nobody may wait for a model now."""
    wait_s = max(1, round(actor.due_s - now_s))
    if isinstance(actor.last_error, LoadFailed | MachineFailed):
        error = copy(actor.last_error)
        error.retry_after_s = wait_s
        return error
    last = actor.last_error.message if actor.last_error is not None else "it was lost."
    return ModelUnavailable(
        f"The model {actor.model} failed and is tried again in {wait_s} s, or as soon as it is "
        f"restarted (POST /admin/models/{actor.model}/restart). The last failure: {last}",
        wait_s,
    )
