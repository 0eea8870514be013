"""Processes that do whatever a test says, beside a scheduler with a clock of the test's own."""

from __future__ import annotations

from collections.abc import Collection

from runtime.errors import (
    WorkerDied,
    WorkerError,
    WorkerWedged,
)
from runtime.supervisor.generation import Generation
from runtime.supervisor.lifecycle import RESTING, STATES, ModelState, Transition
from runtime.supervisor.model import WorkerHandle
from runtime.supervisor.placement import LoadCapacity, Need
from runtime.supervisor.scheduler import RequestScheduler, SchedulerLimits
from runtime.types import (
    CacheUse,
    Finished,
    GenerateRequest,
    ModelSpec,
    Usage,
)
from runtime.wire import Ready

MODELS = ("a", "b", "c")
NEEDS = {"a": 40, "b": 50, "c": 60}
ROOM = 100
LIMIT_S = 30.0
MAX_OPEN = 12
KEEP_ALIVE_S = 900.0


class Puppet:
    """A process that does what the test says, and sees that it is treated right."""

    def __init__(self, spec: ModelSpec) -> None:
        self.spec = spec
        self.state: ModelState = "spawning"
        self.load_fraction = 0.0
        self.ready: Ready | None = None
        self.error: WorkerError | None = None
        self.pid = 1
        self.is_gone = False
        self.is_dismissed = False
        self.is_killed = False
        self.open: dict[str, Generation] = {}
        self.lost_on: list[GenerateRequest] = []
        self.left: list[GenerateRequest] = []

    @property
    def has_ended(self) -> bool:
        return self.state in ("cold", "crashed", "wedged")

    def submit(self, generation: Generation) -> None:
        assert self.state == "ready", self.state
        assert not self.is_dismissed
        assert generation.request.request_id not in self.open
        assert not generation.is_finished
        generation.accept(1, CacheUse())
        self.open[generation.request.request_id] = generation

    def abort(self, generation: Generation) -> None:
        self.open.pop(generation.request.request_id, None)

    def kill(self) -> None:
        self.is_killed = True


class World:
    """The effects, the memory and the clock of one scheduler."""

    def __init__(self, max_loaded: int | None) -> None:
        self.now_s = 0.0
        self.puppets: list[Puppet] = []
        self.transitions: list[Transition] = []
        self.prepared: list[str] = []
        self.due_s: float | None = None
        self.num_reconciled = 0
        """It says when to wake whenever it has reconciled."""
        self.missing_bytes = 0
        self._room = LoadCapacity(num_bytes=ROOM, num_models=max_loaded)
        rules = SchedulerLimits(
            limits_s={state: LIMIT_S for state in STATES if state not in RESTING},
            max_open=MAX_OPEN,
            max_open_per_model=MAX_OPEN - 2,
        )
        self.scheduler = RequestScheduler(
            rules, self, self, lambda _: KEEP_ALIVE_S, lambda: self.now_s
        )

    def start_worker(self, spec: ModelSpec) -> Puppet:
        assert all(p.is_killed for p in self.alive() if p.spec.id == spec.id), spec.id
        self.puppets.append(Puppet(spec))
        return self.puppets[-1]

    def stop_worker(self, worker: WorkerHandle) -> None:
        assert isinstance(worker, Puppet)
        assert all(one.is_finished for one in worker.open.values())
        assert not worker.is_dismissed
        worker.is_dismissed = True

    def publish(self, transition: Transition) -> None:
        self.transitions.append(transition)

    def prepare_worker(self, spec: ModelSpec) -> None:
        """It takes no room, and is of a model that has none yet."""
        assert all(one.spec.id != spec.id or one.is_dismissed for one in self.alive())
        self.prepared.append(spec.id)

    def wake_at(self, due_s: float | None) -> None:
        self.due_s = due_s
        self.num_reconciled += 1

    def need(self, spec: ModelSpec) -> Need:
        return Need(num_bytes=NEEDS[spec.id], swap_s=2.0)

    def room(self) -> LoadCapacity:
        return self._room

    def room_now(self) -> LoadCapacity:
        num_bytes = self._room.num_bytes - self.missing_bytes
        return LoadCapacity(num_bytes=num_bytes, num_models=self._room.num_models)

    def pass_time(self, seconds: float) -> None:
        """Let the timer ring whenever it is due."""
        end_s = self.now_s + seconds
        num_rings = 0
        while self.due_s is not None and self.due_s <= end_s:
            num_rings += 1
            assert num_rings < 1000, f"it rings for ever at {self.due_s}"
            self.now_s = max(self.now_s, self.due_s)
            self.scheduler.reconcile()
        self.now_s = end_s

    def alive(self) -> list[Puppet]:
        return [puppet for puppet in self.puppets if not puppet.is_gone]

    def tell(self, puppet: Puppet) -> None:
        self.scheduler.on_change(puppet.spec.id, puppet)

    # What processes do

    def advance(self, puppet: Puppet) -> None:
        """The next thing that a healthy process would do."""
        steps: dict[ModelState, ModelState] = {
            "spawning": "loading",
            "loading": "warming",
            "warming": "ready",
            "flushing": "stopping",
            "stopping": "cold",
        }
        if puppet.is_killed or puppet.has_ended:
            self.end(puppet, None)
        elif puppet.is_dismissed and puppet.state not in ("flushing", "stopping"):
            puppet.state = "flushing" if puppet.state == "ready" else "stopping"
            self.tell(puppet)
        elif puppet.state in steps:
            puppet.state = steps[puppet.state]
            puppet.is_gone = puppet.state == "cold"
            self.tell(puppet)
        elif puppet.open:
            self.finish(puppet, next(iter(puppet.open)))

    def end(
        self,
        puppet: Puppet,
        error: WorkerError | None,
        *,
        is_gone: bool = True,
        lost_on: Collection[str] | None = None,
    ) -> None:
        """As a process is lost: its state first, then its requests, in the end the process.

        It computed for all requests that it had, or for those, and for what had left it.
        """
        if not puppet.has_ended:
            after: ModelState = "cold"
            if puppet.state not in ("flushing", "stopping"):
                after = "wedged" if isinstance(error, WorkerWedged) else "crashed"
                puppet.error = error
                ids = puppet.open if lost_on is None else lost_on
                puppet.lost_on = [*(puppet.open[one].request for one in ids), *puppet.left]
            puppet.state = after
            generations, puppet.open = list(puppet.open.values()), {}
            self.tell(puppet)
            for generation in generations:
                generation.fail(error or WorkerDied("It was stopped."))
        if is_gone and not puppet.is_gone:
            puppet.is_gone = True
            self.tell(puppet)

    def finish(self, puppet: Puppet, request_id: str) -> None:
        generation = puppet.open[request_id]
        generation.push(Finished(index=0, reason="stop", usage=Usage(num_prompt_tokens=1)))
        puppet.open.pop(request_id, None)


def spec_of(model: str) -> ModelSpec:
    return ModelSpec(
        id=model, path="/nowhere", context=1, model_type="x", nbytes=NEEDS[model], created_s=0
    )
