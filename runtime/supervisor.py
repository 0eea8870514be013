"""The supervisor owns the workers and the queue: every request gets its model or a clear error.

It belongs to the event loop; every decision is made in one go, without an await between reading
and acting.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Literal

import msgspec
import structlog

from runtime import placement
from runtime.catalog import Catalog
from runtime.errors import HearthError, Overloaded, WorkerError
from runtime.generation import Generation
from runtime.kv_store import KvStore
from runtime.settings import Settings
from runtime.types import GenerateRequest, ModelSpec, Struct
from runtime.worker_process import WorkerProcess

_log = structlog.get_logger("hearth.supervisor")
_MAX_LOADED = 1

ModelState = Literal["cold", "loading", "ready", "busy", "stopping", "failed"]


class ModelStatus(Struct, frozen=True):
    """What is known of one model. Counts are since the server started."""

    spec: ModelSpec
    state: ModelState
    num_running: int = 0
    num_waiting: int = 0
    pid: int | None = None
    num_starts: int = 0
    num_crashes: int = 0
    last_error: str | None = None
    load_ms: float | None = None


class _Record:
    """What is remembered of a model beyond its processes."""

    def __init__(self) -> None:
        self.num_starts = 0
        self.num_crashes = 0
        self.is_unloadable = False
        self.last_error: str | None = None
        self.last_worker: WorkerProcess | None = None


class Supervisor:
    """Takes requests for any model of the catalog and keeps the workers that serve them."""

    def __init__(self, settings: Settings, catalog: Catalog, kv: KvStore) -> None:
        self._settings = settings
        self._catalog = catalog
        self._kv = kv
        self._workers: dict[str, WorkerProcess] = {}
        self._records: dict[str, _Record] = {}
        self._waiting: list[tuple[ModelSpec, Generation]] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._preloading: set[str] = set()
        self._is_stopping = False

    @property
    def is_ready(self) -> bool:
        """Every model to be preloaded is loaded, or has failed to."""
        return not self._preloading and not self._is_stopping

    @property
    def is_idle(self) -> bool:
        """No request is open."""
        return self._num_open == 0

    async def start(self) -> None:
        """Begin to load what is to be loaded at boot; a model that fails is no failure to boot."""
        names = self._settings.preload
        specs = (
            [self._catalog.default()]
            if names is None
            else [self._catalog.resolve(name) for name in names]
        )
        self._preloading = {spec.id for spec in specs[:_MAX_LOADED]}
        for spec in specs[:_MAX_LOADED]:
            self._load(spec)

    async def stop(self) -> None:
        """Refuse what is new and what waits, then let the workers leave."""
        self._is_stopping = True
        waiting, self._waiting = self._waiting, []
        for _, generation in waiting:
            generation.fail(_stopping())
        workers = list(self._workers.values())
        await asyncio.gather(*(worker.stop() for worker in workers))
        while self._tasks:
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def kill(self) -> None:
        """End every worker at once."""
        for worker in self._workers.values():
            worker.kill()

    def submit(self, request: GenerateRequest) -> Generation:
        """Queue a request for its model.

        Raises:
            UnknownModel: there is no such model.
            Overloaded: the queue is full or the server is stopping.
        """
        if self._is_stopping:
            raise _stopping()
        spec = self._catalog.resolve(request.model)
        if self._num_open >= self._settings.max_queue:
            raise Overloaded(
                f"{self._num_open} requests are open, the limit (max_queue) is "
                f"{self._settings.max_queue}."
            )
        sampling = request.sampling.over(spec.sampling)
        cache = request.cache
        if cache.ttl_s is None:
            cache = msgspec.structs.replace(cache, ttl_s=self._settings.kv_ttl_s)
        request = msgspec.structs.replace(request, sampling=sampling, cache=cache)
        generation = Generation(request, self)
        self._waiting.append((spec, generation))
        self._dispatch()
        return generation

    def status(self) -> tuple[ModelStatus, ...]:
        """Every model that can be named, in the catalog's order."""
        return tuple(self._status(spec) for spec in self._catalog.models())

    def stderr_tail(self, model: str) -> str:
        """The last lines that the model's latest process to end printed."""
        worker = self._record(model).last_worker
        return worker.stderr_tail if worker is not None else ""

    @property
    def _num_open(self) -> int:
        return len(self._waiting) + sum(w.num_running for w in self._workers.values())

    # The owner of the generations

    def lost(self, generation: Generation, error: WorkerError) -> bool:
        """No second try."""
        del generation, error
        return False

    def spoke(self, generation: Generation) -> None:
        """Nothing follows from that."""

    def ended(self, generation: Generation) -> None:
        """The worker tells that it has nothing to do."""

    def aborted(self, generation: Generation) -> None:
        """Neither wait for it nor work for it."""
        self._waiting = [(spec, other) for spec, other in self._waiting if other is not generation]
        for worker in self._workers.values():
            worker.abort(generation)
        self._dispatch()

    def _dispatch(self) -> None:
        """Hand requests to workers that are ready; let the oldest of the others get its model.

        Only the requests before the first one that must wait for another model pass.
        """
        while self._waiting:
            spec, generation = self._waiting[0]
            worker = self._workers.get(spec.id)
            if worker is None:
                self._make_room(spec)
                break
            if worker.state != "ready":
                break
            self._waiting.pop(0)
            worker.submit(generation)
        self._tell_phases()

    def _make_room(self, spec: ModelSpec) -> None:
        residents = [
            placement.Resident(
                model=worker.spec.id,
                is_busy=worker.num_running > 0 or worker.state != "ready",
                last_used_s=worker.last_used_s,
            )
            for worker in self._workers.values()
        ]
        victims = placement.victims(residents, _MAX_LOADED)
        if victims == ():
            self._load(spec)
        for model in victims or ():
            self._spawn(self._workers[model].stop())

    def _load(self, spec: ModelSpec) -> None:
        worker = WorkerProcess(self._settings, self._kv.channel(spec), self._on_change)
        self._workers[spec.id] = worker
        self._record(spec.id).num_starts += 1
        self._spawn(self._run_load(worker))

    async def _run_load(self, worker: WorkerProcess) -> None:
        model = worker.spec.id
        try:
            await worker.start()
            self._record(model).is_unloadable = False
        except WorkerError as error:
            _log.error("model not loaded", model=model, error=error.message)
        finally:
            self._preloading.discard(model)
            self._dispatch()

    def _on_change(self, worker: WorkerProcess) -> None:
        model = worker.spec.id
        if worker.state == "stopped" and self._workers.get(model) is worker:
            del self._workers[model]
            self._record(model).last_worker = worker
            self._spawn(worker.gone())
            if worker.error is not None:
                self._bury(model, worker.error, was_loaded=worker.ready is not None)
        if not self._is_stopping:
            self._dispatch()

    def _bury(self, model: str, error: WorkerError, *, was_loaded: bool) -> None:
        record = self._record(model)
        record.last_error = error.message
        record.num_crashes += 1
        record.is_unloadable = not was_loaded
        if not was_loaded:
            self._fail_waiting(model, error)

    def _fail_waiting(self, model: str, error: HearthError) -> None:
        failed = [g for spec, g in self._waiting if spec.id == model]
        self._waiting = [(spec, g) for spec, g in self._waiting if spec.id != model]
        for generation in failed:
            generation.fail(error)

    def _tell_phases(self) -> None:
        for position, (spec, generation) in enumerate(self._waiting, 1):
            worker = self._workers.get(spec.id)
            if worker is not None and worker.state in ("starting", "loading", "warming"):
                generation.phase = f"loading {worker.load_fraction * 100:.0f} %"
            else:
                generation.phase = f"queued {position}"

    def _status(self, spec: ModelSpec) -> ModelStatus:
        record = self._record(spec.id)
        worker = self._workers.get(spec.id)
        num_waiting = sum(waiting.id == spec.id for waiting, _ in self._waiting)
        return ModelStatus(
            spec=spec,
            state=_state(worker, record),
            num_running=worker.num_running if worker is not None else 0,
            num_waiting=num_waiting,
            pid=worker.pid if worker is not None else None,
            num_starts=record.num_starts,
            num_crashes=record.num_crashes,
            last_error=record.last_error,
            load_ms=worker.ready.load_ms if worker is not None and worker.ready else None,
        )

    def _record(self, model: str) -> _Record:
        return self._records.setdefault(model, _Record())

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _stopping() -> Overloaded:
    return Overloaded("The server is stopping.", retry_after_s=5)


def _state(worker: WorkerProcess | None, record: _Record) -> ModelState:
    if worker is None:
        return "failed" if record.is_unloadable else "cold"
    match worker.state:
        case "starting" | "loading" | "warming":
            return "loading"
        case "ready":
            return "busy" if worker.num_running else "ready"
        case "flushing" | "stopping" | "stopped":
            return "stopping"
