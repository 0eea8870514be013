"""The supervisor: every request gets its model or a clear error, whatever the workers do.

It belongs to the event loop. `RequestScheduler` decides; here are the processes, the clock, the
catalog, and what the operator may ask for.
"""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import Coroutine, Sequence
from itertools import count

import structlog
from msgspec import structs

from runtime.cache.channel import KvServer
from runtime.cache.deletion_log import Receipt
from runtime.config.settings import Settings
from runtime.errors import HearthError, UnknownRequest, WorkerError
from runtime.memory import Departure
from runtime.models.catalog import Catalog
from runtime.supervisor.boot import BootLoads, models_at_boot, names_at_boot
from runtime.supervisor.calls import LoadRequest, QueuedRequest
from runtime.supervisor.generation import Generation
from runtime.supervisor.lifecycle import HELD_BACK, ModelState, Transition
from runtime.supervisor.memory import Budgets, MemoryLedger
from runtime.supervisor.model import WorkerHandle
from runtime.supervisor.names import Names
from runtime.supervisor.news import News
from runtime.supervisor.process import WorkerProcess
from runtime.supervisor.running_time import running_s
from runtime.supervisor.scheduler import RequestScheduler
from runtime.supervisor.spawned import WorkerSource
from runtime.supervisor.standby import StandbyPool
from runtime.supervisor.status import ModelStatus, status_of
from runtime.supervisor.supervision_rules import rules_of, with_settings
from runtime.supervisor.swap_cost import SwapCosts
from runtime.supervisor.timer import ResettableTimer
from runtime.types import GenerateRequest, ModelSpec, Priority

_log = structlog.get_logger("hearth.supervisor")


class Supervisor:
    """Takes requests for any model of the catalog and keeps the workers that serve them."""

    def __init__(
        self, settings: Settings, catalog: Catalog, kv: KvServer, source: WorkerSource | None = None
    ) -> None:
        self.news: News[Transition] = News()
        self.boot_loads = BootLoads()
        self._entered: defaultdict[str, Counter[ModelState]] = defaultdict(Counter)
        self._settings = settings
        self._catalog = catalog
        self._kv = kv
        self._source = source or WorkerSource(settings.cpu_blas)
        self._spares = StandbyPool(settings, self._source)
        self.prepare_worker = self._spares.prepare
        self._costs = SwapCosts()
        self._workers: dict[WorkerProcess, None] = {}
        self._tasks: set[asyncio.Task[object]] = set()
        self._numbers = count()
        self._stop_bound_s = rules_of(settings).limits_s["flushing"]
        self._memory = MemoryLedger(settings)
        self._scheduler = RequestScheduler(
            rules_of(settings), self, self._memory, settings.keep_alive_of, running_s
        )
        self.refuse_waiting = self._scheduler.refuse_waiting
        """Refuse what is new and what waits for a model, at once; what runs may end."""
        self._timer = ResettableTimer(self._scheduler.reconcile)
        pinned = (model for model, own in settings.named_models.items() if own.pinned)
        self._names = Names(catalog, self._scheduler, pinned)

    @property
    def is_ready(self) -> bool:
        """Every model to be preloaded is loaded, or has failed to."""
        return self.boot_loads.is_over and not self._scheduler.is_stopping

    @property
    def is_idle(self) -> bool:
        """No request is open."""
        return self._scheduler.num_open == 0

    def budgets(self) -> Budgets:
        """What the models may reserve together, and what their hot tiers may take."""
        return self._memory.budgets(self._scheduler.actors)

    async def start(self) -> None:
        """Begin to load what is to be loaded at boot; a model that fails is no failure to boot."""
        names = names_at_boot(self._settings, self._catalog)
        self._spawn(self._preload(self.boot_loads.expect(models_at_boot(names, self._catalog))))
        self._names.await_arrivals(names, lambda spec: self._spawn(self._try_load(spec.id)))

    async def stop(self) -> None:
        """Refuse what is new and what waits, then let the workers leave.

        It takes as long as the slowest of them may (`stopping.stop_bound_s`).
        """
        self._scheduler.close()
        await self._names.stop()
        await self._spares.stop()
        if self._tasks:  # a process that the kernel does not let go of is left to it
            await asyncio.wait(self._tasks, timeout=self._stop_bound_s)
        self._source.forget_first()
        self._timer.cancel()

    def kill(self) -> None:
        """End every worker at once."""
        self._scheduler.close()
        self._spares.kill()
        for worker in self._workers:
            worker.kill()

    def submit(self, request: GenerateRequest, received: Receipt | None = None) -> Generation:
        """Queue a request for its model; it came with that receipt, or now.

        Raises:
            UnknownModel: there is no such model.
            RequestRejected: too much is open, the server is stopping, the model is too large,
                memory is short.
            PoisonRequest: workers died of this request.
        """
        self._memory.check()
        spec = self._names.resolve(request.model)
        received = received or self._kv.receive()
        generation, call = _generation(request, spec, self._scheduler, self._settings, received)
        self._scheduler.submit(call)
        return generation

    def warm(self, request: GenerateRequest, received: Receipt | None = None) -> Generation | None:
        """Have a background prefill done in a model that is loaded; None when this is no time.

        It came with that receipt, or now. It makes way for everything else, and its generation then
        ends as one that was cancelled. Raises as `submit`.
        """
        if self._scheduler.is_stopping:
            return None
        spec = self._names.resolve(request.model)
        received = received or self._kv.receive()
        generation, call = _generation(request, spec, self._scheduler, self._settings, received)
        call.yields = True
        return generation if self._scheduler.warm(call) else None

    def is_asked(self, session_id: str) -> bool:
        """Whether a request of this conversation is open."""
        return self._scheduler.is_asked(session_id)

    def status(self) -> tuple[ModelStatus, ...]:
        """Every model that can be named, in the catalog's order, then what else is loaded."""
        return tuple(map(self._status, self._names.all()))

    def status_of(self, name: str) -> ModelStatus:
        """One model, by its name or an alias. Raises UnknownModel."""
        return self._status(self._names.resolve(name))

    def names_of(self, engine: str) -> tuple[str, ...]:
        """All names that the process serves that goes by this one."""
        return self._names.of(engine)

    def worker(self, model: str) -> WorkerHandle | None:
        """The process of a model, if there is one."""
        return self._names.actor(model).worker

    def stderr_tail(self, model: str) -> str:
        """The last lines that the model's latest process to end printed."""
        worker = self._names.actor(model).last_worker
        return worker.stderr_tail if isinstance(worker, WorkerProcess) else ""

    # What the operator may ask for

    def load(self, name: str) -> LoadRequest:
        """Have a model loaded as if a request named it; wait for `LoadRequest.granted()`.

        Raises:
            UnknownModel: there is no such model.
            RequestRejected: it cannot be waited for now.
        """
        return self._wish(self._names.resolve(name), "default")

    def unload(self, name: str) -> ModelStatus:
        """Have a model leave once its requests have ended, with all names that share its process.

        Raises UnknownModel.
        """
        return self._take_away(name, "the operator unloads it")

    def restart(self, name: str, reason: str = "the operator restarts it") -> LoadRequest:
        """Forget its failures, replace its process if it has one, and load it.

        Raises:
            UnknownModel: there is no such model.
            RequestRejected: it cannot be waited for now.
        """
        spec = self._names.resolve(name)
        with self._scheduler.reconcile:
            self._scheduler.actor(spec.engine).forgive(running_s())
            self._take_away(name, reason)
            return self._wish(spec, "default")

    def pin(self, name: str, *, is_pinned: bool) -> ModelStatus:
        """Keep a model loaded once it is, whoever else wants room; or no longer.

        It stays for as long as any name that shares its process is pinned.

        Raises:
            UnknownModel: there is no such model.
        """
        spec = self._names.resolve(name)
        self._names.pin(spec, is_pinned=is_pinned)
        self._scheduler.reconcile()
        return self._status(spec)

    def cancel(self, request_id: str) -> int:
        """End a request, wherever it is; how many prompts of it were open.

        Raises:
            UnknownRequest: none is.
        """
        calls = self._scheduler.find(request_id)
        with self._scheduler.reconcile:
            for call in calls:
                if call.generation is not None:
                    call.generation.abort()
        if not calls:
            raise UnknownRequest(f"No request {request_id[:80]!r} is open.")
        return len(calls)

    async def relieve(self) -> None:
        """See to it that the rest of the machine has memory; to be called now and then."""
        if self._scheduler.is_stopping:
            return
        for news in self._memory.found_again(self._scheduler.actors):
            self.news.publish(news)
        self._memory.relieve(self._scheduler.actors, self._scheduler.awaited)
        self._scheduler.reconcile()

    # The effects of the scheduler

    def start_worker(self, spec: ModelSpec) -> WorkerProcess:
        """A process for this model, which begins to load it."""
        actors = self._scheduler.actors
        channel = self._kv.channel(spec, self._memory.kv_share(actors, spec.id))
        worker = WorkerProcess(
            self._settings, channel, self._on_change, self._spares, self._scheduler.reconcile
        )
        self._memory.share(actors)
        self._workers[worker] = None
        self._spawn(self._run(worker))
        return worker

    def stop_worker(self, worker: WorkerHandle) -> None:
        """Have it write what is worth keeping and leave."""
        if isinstance(worker, WorkerProcess):
            self._spawn(worker.stop())

    def publish(self, transition: Transition) -> None:
        """Count it, tell who listens, and see to it that what is pinned comes back."""
        self._entered[transition.model][transition.after] += 1
        self._costs.observe(transition)
        self.news.publish(transition)
        if transition.after == "cold" and transition.before in HELD_BACK:
            actor = self._scheduler.actor(transition.model)
            if actor.is_pinned:
                self._spawn(self._try_load(actor.model))

    def wake_at(self, due_s: float | None) -> None:
        """Reconcile again at that time."""
        self._timer.set(due_s)

    def _on_change(self, worker: WorkerProcess) -> None:
        with self._scheduler.reconcile:
            self._scheduler.on_change(worker.spec.id, worker)
            departure = worker.crash_reporter.departure
            if departure is not None:  # which comes last of all changes, and once
                self._departed(worker.spec.id, departure)

    def _departed(self, model: str, departure: Departure) -> None:
        news = self._memory.departed(model, departure, self._scheduler.actors)
        if news is not None:
            self.news.publish(news)
            self._scheduler.reconcile()

    async def _run(self, worker: WorkerProcess) -> None:
        """One process from its start to its end."""
        try:
            await worker.start()
            self._costs.started(worker.spec.id, worker.clock.start_cost)
            self._memory.started(worker.spec, worker.clock.start_cost.total_ms)
        except WorkerError as error:
            log = _log.info if worker.error is None else _log.error
            log("model not loaded", model=worker.spec.id, error=error.message)
        await worker.gone()
        if worker.error is None:
            self._costs.left(worker.spec.id, worker.clock.leave_cost)
        self._workers.pop(worker, None)
        self._memory.share(self._scheduler.actors)
        self._memory.learn(await self._kv.remembered())

    async def _preload(self, specs: Sequence[ModelSpec]) -> None:
        self._memory.learn(await self._kv.remembered())
        await self.boot_loads.load(specs, self._load_if_it_fits)
        self._spares.want()

    async def _load_if_it_fits(self, spec: ModelSpec) -> str:
        if self._scheduler.fits(spec):
            return await self._try_load(spec.id)
        _log.warning("not preloaded: no room beside the others", model=spec.id)
        return "there is no room beside the others"

    async def _try_load(self, model: str) -> str:
        """Why it is not loaded; nothing if it is."""
        try:
            await self._wish(self._names.resolve(model), "background").granted()
        except HearthError as error:
            _log.warning("not loaded", model=model, why=error.message)
            return error.message
        return ""

    def _wish(self, spec: ModelSpec, priority: Priority) -> LoadRequest:
        wish = LoadRequest()
        self._scheduler.submit(
            call_of(spec, wish, f"load-{next(self._numbers)}", priority, self._settings.max_wait_s)
        )
        return wish

    def _take_away(self, name: str, reason: str) -> ModelStatus:
        spec = self._names.resolve(name)
        actor = self._scheduler.actor(spec.engine)
        actor.leave(reason, running_s(), self._settings.stop_timeout_s)
        self._scheduler.reconcile()
        return self._status(spec)

    def _status(self, spec: ModelSpec) -> ModelStatus:
        model = spec.engine
        actor, row = self._scheduler.actor(model), self._memory.remembered(model)
        num_waiting = self._scheduler.num_waiting(spec)
        return structs.replace(
            status_of(spec, actor, num_waiting, running_s(), row),
            swap_cost=self._costs.of(model),
            entered=tuple(self._entered[model].items()),
            unreturned_bytes=self._memory.unreturned_bytes(model) + actor.abandoned_bytes,
        )

    def _spawn(self, work: Coroutine[None, None, object]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def call_of(
    spec: ModelSpec,
    job: Generation | LoadRequest,
    request_id: str,
    priority: Priority,
    max_wait_s: float,
) -> QueuedRequest:
    """What waits for the model from now on, for `max_wait_s` at most."""
    now_s = running_s()
    return QueuedRequest(
        spec,
        job,
        request_id=request_id,
        priority=priority,
        since_s=now_s,
        until_s=now_s + max_wait_s,
    )


def _generation(
    request: GenerateRequest,
    spec: ModelSpec,
    scheduler: RequestScheduler,
    settings: Settings,
    received: Receipt,
) -> tuple[Generation, QueuedRequest]:
    """What a request becomes, with the settings of its model, and what waits for it."""
    cache = structs.replace(request.cache, after_deletion=received.number)
    request = with_settings(structs.replace(request, cache=cache), spec, settings)
    generation = Generation(request, scheduler)
    generation.received = received
    priority = request.priority or "default"
    max_wait_s = request.idle_s + settings.max_wait_s
    call = call_of(spec, generation, request.request_id, priority, max_wait_s)
    return generation, call
