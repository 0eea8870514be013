"""`RequestScheduler`: who waits, who runs where, and what happens next; the one owner of the queue.

Nothing here awaits: what follows from an event is decided and carried out in one go, at its end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from runtime.errors import (
    HearthError,
    InvalidRequest,
    ModelTooLarge,
    PoisonRequest,
    ShuttingDown,
    WorkerError,
)
from runtime.supervisor.blame import BLAMED
from runtime.supervisor.calls import QueuedRequest, content_digest
from runtime.supervisor.failures import Quarantine
from runtime.supervisor.generation import Generation, Queued
from runtime.supervisor.lifecycle import FAILED, HELD_BACK, LOADED, MODEL_STATES, ModelState
from runtime.supervisor.model import Effects, ModelActor, WorkerHandle, refusal_of
from runtime.supervisor.queue import RequestQueue
from runtime.supervisor.refusals import check_number, no_room, too_late
from runtime.supervisor.swap_policy import SwapPlan, Terms, plan
from runtime.supervisor.swap_state import MemoryView, missing_bytes, room_for, swap_state_of
from runtime.types import GenerateRequest, ModelSpec, Struct

MAX_REQUEUES = 2
MAX_REQUEUES_OF_INNOCENTS = 5
"""Of requests whose worker was lost while it computed for others."""
PATIENCE_S = 20.0
"""Requests wait for a model that holds back no longer than that; then they are told to retry."""


class SchedulerLimits(Struct, frozen=True):
    """The limits. `limits_s` is how long a model may stay in each state that does not rest."""

    limits_s: Mapping[ModelState, float]
    max_open: int = 256
    max_open_per_model: int = 256
    terms: Terms = Terms()


class OncePerEvent:
    """Does `work` once for one event, however often it becomes due in the course of that.

    An event lasts as long as the outermost `with`, or the call where there is none. What the work
    itself makes due is done right after it.
    """

    def __init__(self, work: Callable[[], None]) -> None:
        self._work = work
        self._is_due = False
        self._depth = 0

    def __enter__(self) -> None:
        self._depth += 1

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        if self._is_due and not self._depth:
            self._run()

    def __call__(self) -> None:
        """The work is due, now or at the end of the event that goes on."""
        self._is_due = True
        if not self._depth:
            self._run()

    def _run(self) -> None:
        self._depth += 1
        try:
            while self._is_due:
                self._is_due = False
                self._work()
        finally:
            self._depth -= 1


class RequestScheduler:
    """The owner of all generations. `keep_alive_s` says how long a model is kept by default.

    Call `reconcile()` when it is time to wake or anything changed outside. What belongs to one
    event, as the chunks of one frame do, is told inside of `with scheduler.reconcile:`.
    """

    def __init__(
        self,
        rules: SchedulerLimits,
        effects: Effects,
        memory: MemoryView,
        keep_alive_s: Callable[[str], float],
        clock: Callable[[], float],
    ) -> None:
        self.actors: dict[str, ModelActor] = {}
        self.is_stopping = False
        self._rules = rules
        self._effects = effects
        self._memory = memory
        self._keep_alive_s = keep_alive_s
        self._clock = clock
        self._queue: RequestQueue[QueuedRequest] = RequestQueue()
        self._quarantine = Quarantine()
        self._made_way: ModelSpec | None = None
        """What left last because another model needed its room: the first that may come back."""
        self.reconcile = OncePerEvent(self._reconcile)
        """Carries out everything that follows from how things stand."""

    @property
    def num_open(self) -> int:
        """Everything that waits or runs."""
        return len(self._queue) + sum(len(one.running) for one in self.actors.values())

    @property
    def awaited(self) -> frozenset[str]:
        """The models that something waits for."""
        return frozenset(call.model for call in self._due(self._clock()))

    def num_waiting(self, spec: ModelSpec) -> int:
        return sum(call.name == spec.id for call in self._queue.of(spec.engine))

    def actor(self, model: str) -> ModelActor:
        """The actor of a model, which is cold when it was never asked for."""
        if model not in self.actors:
            self.actors[model] = ModelActor(model, self._rules.limits_s, self._effects)
        return self.actors[model]

    def submit(self, call: QueuedRequest) -> None:
        """Let it wait for its model; it may be granted or have failed before this returns.

        Raises:
            RequestRejected: there are too many, or the model is too large for this machine.
            PoisonRequest: workers died of it.
        """
        self._check(call)
        actor = self.actor(call.model)
        if actor.state == "failed" and actor.has_changed_files():
            actor.forgive(self._clock())
        if call.is_use:
            actor.asked(self._clock())
        self._queue.add(call)
        self.reconcile()

    def find(self, request_id: str) -> list[QueuedRequest]:
        """What waits or runs under that id; all prompts of a request share its beginning."""
        begin = f"{request_id}-"
        opened = _opened(self._queue, self.actors.values())
        return [c for c in opened if c.request_id == request_id or c.request_id.startswith(begin)]

    def is_asked(self, session_id: str) -> bool:
        """Whether something that waits or runs is of this conversation."""
        opened = (one.generation for one in _opened(self._queue, self.actors.values()))
        return any(one and one.request.cache.session_id == session_id for one in opened)

    def warm(self, call: QueuedRequest) -> bool:
        """Hand over a call that yields, if its model is loaded and no other one is waited for.

        False when it is not wanted now. Raises as `submit`.
        """
        actor = self.actor(call.model)
        if actor.state not in LOADED or self.awaited - {call.model}:
            return False
        self.submit(call)
        if call.request_id in self._queue:
            self._queue.take(call.request_id)
            self.reconcile()
            return False
        return True

    def fits(self, spec: ModelSpec) -> bool:
        """Whether the model could be loaded now without another one having to leave, or is."""
        if self.actor(spec.engine).stage != "away":
            return True
        residents = (actor.resident() for actor in self.actors.values())
        held = [one.reserved_bytes for one in residents if one is not None]
        room = room_for(self.actors.values(), self._memory)
        return room.without(held).holds(self._memory.need(spec.loaded).num_bytes)

    def refuse_waiting(self) -> None:
        """The server is about to stop: nothing waits any more, what runs goes on."""
        self.is_stopping = True
        with self.reconcile:
            for call in self._queue:
                self._queue.take(call.request_id)
                call.fail(ShuttingDown())
            self.reconcile()

    def close(self) -> None:
        """The server stops: nothing waits any more, nothing runs on, every model leaves."""
        with self.reconcile:
            self.refuse_waiting()
            for actor in self.actors.values():
                actor.quit(self._clock())
            self.reconcile()

    # The owner of the generations

    def aborted(self, generation: Generation) -> None:
        """Neither wait for it nor work for it."""
        _drop(self._queue, generation)
        call, actor = _running(generation, self.actors.values())
        if call is not None and actor is not None and actor.worker is not None:
            actor.worker.abort(generation)

    def lost(self, generation: Generation, error: WorkerError) -> bool:
        """Its worker failed. True when that was not the end of it, or already is."""
        del error
        call, actor = _running(generation, self.actors.values())
        if call is None or actor is None:
            return False
        now_s = self._clock()
        actor.finish(call, self._keep_alive_s(call.name), now_s)
        refusal = self._refusal_of_lost(call, now_s)
        if refusal is not None:
            generation.fail(refusal)
            return True
        is_suspect = self._quarantine.is_suspect(call.digest, now_s)
        most = MAX_REQUEUES if is_suspect else MAX_REQUEUES_OF_INNOCENTS
        if call.num_requeues >= most or call.yields or not generation.go_on():
            return False
        call.wait_again(now_s)
        self._queue.add(call)
        self.reconcile()
        return True

    def spoke(self, generation: Generation) -> None:
        """The first byte: other suspects may run beside it now."""
        del generation
        if not self._quarantine.is_empty:
            self.reconcile()

    def ended(self, generation: Generation) -> None:
        """No further chunk will arrive."""
        _drop(self._queue, generation)
        call, actor = _running(generation, self.actors.values())
        if call is not None and actor is not None:
            asked_s = generation.request.keep_alive_s
            keep_s = self._keep_alive_s(call.name) if asked_s is None else asked_s
            actor.finish(call, keep_s, self._clock())
            if generation.usage is not None:
                self._quarantine.acquit(call.digest)
            if not actor.running:
                if call.is_use and not self._queue.num_of(call.model):
                    actor.ran_dry(self._clock())
                self._foresee()
        self.reconcile()

    # What the effects report

    def on_change(self, model: str, worker: WorkerHandle) -> None:
        """A process is in another state, or gone."""
        actor, now_s = self.actor(model), self._clock()
        before = MODEL_STATES[actor.state].stage
        if worker is actor.worker and before == "ready" and worker.has_ended:
            is_suspect = worker.error is not None and BLAMED[worker.error.cause].requests
            requests = worker.lost_on if is_suspect else ()
            lost_on = {content_digest(one): _num_said(actor, one) for one in requests}
            actor.is_explained = self._quarantine.died(lost_on, now_s, lost_on)
        actor.on_change(worker, now_s)
        if actor.state == "ready" and before == "loading":
            actor.cohort = frozenset(call.request_id for call in self._queue.of(model))
        self.reconcile()

    def _foresee(self) -> None:
        """Two models often take turns: have the other one prepared before it is asked for, as soon
        as nothing runs that would wait for a processor.
        """
        spec = self._made_way
        if spec is not None and self.actor(spec.id).state == "cold":
            self._effects.prepare_worker(spec)

    # What happens next

    def _reconcile(self) -> None:
        now_s = self._clock()
        for call in self._queue.take_late(now_s):
            call.fail(too_late(call, now_s))
        for actor in list(self.actors.values()):
            if actor.is_overdue(now_s):
                actor.on_overdue(now_s)
            if actor.state == "ready":
                _expire(self._queue, actor, now_s)
            elif actor.state in HELD_BACK:
                _turn_away(self._queue, actor, now_s)
        if self.is_stopping:
            self._effects.wake_at(self._next_due_s(None))
            return
        self._tell_who_is_wanted(self.awaited, now_s)
        steps = self._plan(now_s)
        self._carry_out(steps, now_s)
        _tell_phases(self._queue.in_order(), self.actors)
        self._effects.wake_at(self._next_due_s(steps.wake_s))

    def _tell_who_is_wanted(self, awaited: frozenset[str], now_s: float) -> None:
        """Where another model is waited for, nothing that yields goes on."""
        for actor in list(self.actors.values()):
            if awaited - {actor.model}:
                actor.make_way()
            if actor.state in LOADED:
                continue
            if actor.model in awaited:
                actor.want(now_s)
            else:
                actor.unwant(now_s)

    def _plan(self, now_s: float) -> SwapPlan:
        actors = self.actors.values()
        due = self._due(now_s)
        waiting = [call for call in due if self.actors[call.model].state not in FAILED]
        if not waiting:
            return SwapPlan()
        return plan(swap_state_of(waiting, actors, self._memory, now_s), self._rules.terms)

    def _due(self, now_s: float) -> list[QueuedRequest]:
        """What waits and may be served now."""
        actors = self.actors.values()
        return self._queue.due((call for one in actors for call in one.running.values()), now_s)

    def _carry_out(self, steps: SwapPlan, now_s: float) -> None:
        for actor in self.actors.values():
            if actor.model in steps.closed:
                actor.close(now_s)
            elif actor.state == "draining":
                actor.open(now_s)
        for request_id in steps.grants:
            self._grant(request_id, now_s)
        for model in steps.unloads:
            self._made_way = self.actors[model].spec
            self.actors[model].leave("another model needs its room", now_s)
        for model in steps.loads:
            asked = self._queue.of(model)[0].spec
            needed = self._memory.need(asked.loaded).num_bytes
            self.actor(model).admit(asked, self._keep_alive_s(asked.id), needed, now_s)
        if steps.follows is not None:
            self._effects.prepare_worker(self._queue.of(steps.follows)[0].spec.loaded)
        for model in steps.blocked:
            for call in self._queue.take_all_of(model):
                pinned = [one.model for one in self.actors.values() if one.is_pinned]
                missing = missing_bytes(self.actors.values(), self._memory)
                call.fail(no_room(call.name, pinned, missing))

    def _grant(self, request_id: str, now_s: float) -> None:
        call = self._queue.take(request_id)
        if call is None:
            return
        actor, quarantine = self.actors[call.model], self._quarantine
        others = list(actor.running.values())
        is_alone = bool(others) and _must_run_alone(call, others, quarantine, now_s)
        if actor.stage != "ready" or is_alone:
            self._queue.add(call)
        else:
            actor.grant(call, now_s)

    def _next_due_s(self, wake_s: float | None) -> float | None:
        times = [self._queue.due_s(self._clock()), wake_s]
        for actor in self.actors.values():
            times += [actor.due_s, None if self._queue.num_of(actor.model) else actor.expires_s]
        return min((time for time in times if time is not None), default=None)

    # Refusals

    def _check(self, call: QueuedRequest) -> None:
        if self.is_stopping:
            raise ShuttingDown
        rules, opened = self._rules, _opened(self._queue, self.actors.values())
        tenant, owners = call.tenant, [one.tenant for one in opened]
        check_number(tenant, owners, rules.max_open, "requests are open", "max_queue")
        of_model = [one.tenant for one in opened if one.name == call.name]
        what = f"requests for {call.name} are open"
        check_number(tenant, of_model, rules.max_open_per_model, what, "max_queue_per_model")
        if opened and self.find(call.request_id):
            raise InvalidRequest(f"A request {call.request_id} is open already.", "request_id")
        need, room = self._memory.need(call.spec.loaded).num_bytes, self._memory.room().num_bytes
        if need > room:
            raise ModelTooLarge(call.name, need, room)
        if call.generation is not None and (error := self._poison(call, self._clock())) is not None:
            raise error

    def _refusal_of_lost(self, call: QueuedRequest, now_s: float) -> HearthError | None:
        if self.is_stopping:
            return ShuttingDown()
        return self._poison(call, now_s)

    def _poison(self, call: QueuedRequest, now_s: float) -> PoisonRequest | None:
        until_s = self._quarantine.convicted_until_s(call.digest, now_s)
        if until_s is None:
            return None
        return PoisonRequest(
            f"Two processes of the model {call.name} died while they worked for this request. "
            f"It is not served again for {max(1, round(until_s - now_s))} s; change it."
        )


def _expire(queue: RequestQueue[QueuedRequest], actor: ModelActor, now_s: float) -> None:
    """Unload what nobody has used for long."""
    expires_s = actor.expires_s
    if expires_s is not None and expires_s <= now_s and not queue.num_of(actor.model):
        actor.leave("nobody used it", now_s)


def _turn_away(queue: RequestQueue[QueuedRequest], actor: ModelActor, now_s: float) -> None:
    """Nobody waits for a model that is not going to be tried before long."""
    if actor.state == "failed" or actor.due_s - now_s > PATIENCE_S:
        for call in queue.take_all_of(actor.model):
            call.fail(refusal_of(actor, now_s))


def _tell_phases(calls: Iterable[QueuedRequest], actors: Mapping[str, ModelActor]) -> None:
    """Say of each that waits what it waits for; they are in order."""
    for position, call in enumerate(calls, 1):
        actor = actors[call.model]
        if call.generation is None:
            continue
        if actor.stage == "loading" and actor.worker is not None:
            call.generation.loading(actor.worker.load_fraction)
        else:
            call.generation.waits_for = Queued(position)


def _opened(queue: Iterable[QueuedRequest], actors: Iterable[ModelActor]) -> list[QueuedRequest]:
    """Everything that waits or runs."""
    return [*queue, *(call for actor in actors for call in actor.running.values())]


def _drop(queue: RequestQueue[QueuedRequest], generation: Generation) -> None:
    """It waits no longer; another one of the same id, which kept it out, goes on."""
    request_id = generation.request.request_id
    if any(one.job is generation for one in queue if one.request_id == request_id):
        queue.take(request_id)


def _num_said(actor: ModelActor, request: GenerateRequest) -> int:
    """How far a request got, in tokens; 0 where nobody wants it any more."""
    call = actor.running.get(request.request_id)
    generation = call.generation if call is not None else None
    return generation.num_output_tokens if generation is not None else 0


def _running(
    generation: Generation, actors: Iterable[ModelActor]
) -> tuple[QueuedRequest | None, ModelActor | None]:
    for actor in actors:
        call = actor.running.get(generation.request.request_id)
        if call is not None and call.job is generation:
            return call, actor
    return None, None


def _must_run_alone(
    call: QueuedRequest, others: Sequence[QueuedRequest], quarantine: Quarantine, now_s: float
) -> bool:
    """Of two suspects that begin together nobody could tell which one did it, nor of one that is
    to run alone and any other.
    """
    if quarantine.is_empty or call.generation is None or not others:
        return False
    if any(quarantine.runs_alone(one.digest, now_s) for one in (call, *others)):
        return True
    return quarantine.is_suspect(call.digest, now_s) and any(
        not other.has_spoken and quarantine.is_suspect(other.digest, now_s) for other in others
    )
