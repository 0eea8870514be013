"""A real worker process without a supervisor: started, asked, ended."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from runtime.cache.service import KvStore
from runtime.config.settings import Settings
from runtime.errors import WorkerError
from runtime.supervisor.generation import Generation
from runtime.supervisor.lifecycle import ModelState
from runtime.supervisor.process import WorkerProcess
from runtime.supervisor.standby import StandbyPool
from runtime.types import GenerateRequest, ModelSpec


class Alone:
    """The owner of a generation whose worker has no successor."""

    def aborted(self, generation: Generation) -> None:
        """Nobody else has it."""

    def lost(self, generation: Generation, error: WorkerError) -> bool:
        return False

    def spoke(self, generation: Generation) -> None:
        """Nothing follows from that."""

    def ended(self, generation: Generation) -> None:
        """Nothing follows from that."""


class LoneWorker:
    """One worker for the model in `path`, and the states it went through."""

    def __init__(
        self,
        settings: Settings,
        kv: KvStore,
        path: Path,
        standbys: StandbyPool | None = None,
        kind: type[WorkerProcess] = WorkerProcess,
    ) -> None:
        context = 100_000
        spec = ModelSpec(
            id="m", path=str(path), context=context, model_type="qwen3", nbytes=1, created_s=1
        )
        self.states: list[ModelState] = ["spawning"]
        self.kv = kv
        self.process = kind(settings, kv.channel(spec), self._on_change, standbys)

    def submit(self, request: GenerateRequest) -> Generation:
        generation = Generation(request, Alone())
        self.process.submit(generation)
        return generation

    def _on_change(self, worker: WorkerProcess) -> None:
        if worker.state != self.states[-1]:
            self.states.append(worker.state)


def lone_settings(home: Path, **fields: Any) -> Settings:
    """Short times, no disk, unless the fields say otherwise."""
    defaults: dict[str, Any] = {"stop_timeout_s": 5.0, "kv_disk": False, "spare_worker": True}
    return Settings(home=home, **(defaults | fields))


@asynccontextmanager
async def lone_worker(
    settings: Settings,
    path: Path,
    standbys: StandbyPool | None = None,
    kind: type[WorkerProcess] = WorkerProcess,
) -> AsyncGenerator[LoneWorker]:
    """A worker that is ready; killed at the end if it still runs."""
    kv = KvStore(settings)
    kv.start()
    worker = LoneWorker(settings, kv, path, standbys, kind)
    try:
        await worker.process.start()
        yield worker
    finally:
        worker.process.kill()
        await worker.process.gone()
        await kv.stop()
