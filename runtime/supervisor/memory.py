"""Memory as the supervisor deals it out: what models need, what hot tiers may take, hard times."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import NamedTuple

import msgspec
import psutil
import structlog

from runtime import kv_sizes, nvidia
from runtime.config.settings import Settings
from runtime.errors import MemoryShort
from runtime.kv_messages import HotBudget
from runtime.memory import Departure, available_bytes
from runtime.supervisor import placement, pressure
from runtime.supervisor.lifecycle import MemoryEvent, Transition
from runtime.supervisor.model import ModelActor
from runtime.supervisor.placement import LoadCapacity, Need, Profile, Unreturned
from runtime.supervisor.pressure import MemoryPressure
from runtime.supervisor.process import WorkerProcess
from runtime.supervisor.running_time import running_s
from runtime.types import ModelSpec
from store.types import ModelRow

_log = structlog.get_logger("hearth.memory")


class Budgets(NamedTuple):
    """In bytes: what all loaded models may reserve together, and take for their hot tiers."""

    reserved: int
    hot: int


class MemoryLedger:
    """What models need, by their files and what former runs needed, and what they may use."""

    def __init__(self, settings: Settings) -> None:
        self._total_bytes = psutil.virtual_memory().total
        budget = settings.memory_budget
        if budget is None:
            gpu_bytes = nvidia.memory_bytes() if nvidia.is_used() else None
            budget = placement.memory_budget(self._total_bytes, gpu_bytes)
        self._room = LoadCapacity(num_bytes=budget, num_models=settings.max_loaded_models)
        self._floor_bytes = settings.memory_floor or pressure.floor_bytes(self._total_bytes)
        self._hot_bytes = settings.hot_bytes
        self._models = settings.models
        self._rows: Mapping[str, ModelRow] = {}
        self._started: dict[str, ModelRow] = {}
        self._needs: dict[str, tuple[ModelSpec, Need]] = {}
        """By the files that they were worked out for, and what former runs showed."""
        self._strain = MemoryPressure()
        self._unreturned: tuple[Unreturned, ...] = ()
        self._free_bytes = budget

    def learn(self, rows: Mapping[str, ModelRow]) -> None:
        """What former runs needed, by model id."""
        self._rows = rows
        self._needs.clear()

    def started(self, spec: ModelSpec, start_ms: float) -> None:
        """What a model's start took just now: how long others take, too."""
        self._started[spec.id] = ModelRow(
            hash=b"", label=spec.id, weights_bytes=spec.nbytes, load_ms=start_ms
        )
        self._needs.clear()

    def remembered(self, model: str) -> ModelRow | None:
        """What former runs showed of a model."""
        return self._rows.get(model)

    def need(self, spec: ModelSpec) -> Need:
        known = self._needs.get(spec.id)
        if known is None or known[0] != spec:
            known = self._needs[spec.id] = (spec, placement.need(self._profile(spec)))
        return known[1]

    def room(self) -> LoadCapacity:
        """What all models may take together."""
        return self._room

    def room_now(self) -> LoadCapacity:
        """The same without what ended processes have not given back."""
        if not self._unreturned:
            return self._room
        return placement.room_left(self._room, self._unreturned, self._free_bytes)

    def unreturned_bytes(self, model: str) -> int:
        """What processes of a model held and did not give back when they ended."""
        return sum(one.num_bytes for one in self._unreturned if one.model == model)

    def departed(
        self, model: str, departure: Departure, actors: Mapping[str, ModelActor]
    ) -> Transition | None:
        """A process has ended and its memory was looked for; news if some of it is missing."""
        if not departure.is_memory_suspect:
            return None
        self._free_bytes = _free_bytes(actors)
        lost = Unreturned(
            model=model,
            num_bytes=departure.footprint_bytes - max(departure.freed_bytes, 0),
            free_bytes=self._free_bytes,
        )
        self._unreturned += (lost,)
        self.share(actors)
        return _news(actors[model], "unreturned", f"{lost.num_bytes / 1e9:.2f} GB are missing")

    def found_again(self, actors: Mapping[str, ModelActor]) -> list[Transition]:
        """Look whether missing memory has come back; the news of it."""
        if not self._unreturned:
            return []
        self._free_bytes = _free_bytes(actors)
        before = {one.model for one in self._unreturned}
        self._unreturned = placement.still_missing(self._unreturned, self._free_bytes)
        back = before - {one.model for one in self._unreturned}
        return [_news(actors[model], "returned", "its memory is there again") for model in back]

    def check(self) -> None:
        """See that there is memory for one more request.

        Raises:
            MemoryShort: the machine has none to spare.
        """
        if self._strain.refuses:
            raise MemoryShort

    def hot_budgets(self, actors: Mapping[str, ModelActor]) -> dict[str, int]:
        """How large the hot tier of each model with a process may be, in bytes."""
        return {model: one.num_bytes for model, one in self._dealt(actors).items()}

    def _dealt(self, actors: Mapping[str, ModelActor]) -> dict[str, HotBudget]:
        """What each model with a process may take, all its ranks here together."""
        loaded = {name: one for name, one in actors.items() if one.stage != "away"}
        wishes = {name: self._wish(one.spec) for name, one in loaded.items() if one.spec}
        held = sum(one.reserved_bytes for one in loaded.values())
        held += sum(one.abandoned_bytes for one in actors.values())
        spare_bytes = self.room_now().num_bytes - held
        if self._strain.lendable_bytes is not None:
            spare_bytes = min(spare_bytes, self._strain.lendable_bytes)
        hot = placement.hot_budgets(wishes, spare_bytes)
        profiles = {name: self._profile(one.spec) for name, one in loaded.items() if one.spec}
        reserves = {name: placement.rows_reserve(one) for name, one in profiles.items()}
        pools = placement.kv_pools(reserves, hot, spare_bytes)
        alone = {
            name: self._room.num_bytes - placement.reservation(one, 0) + reserves[name]
            for name, one in profiles.items()
        }
        return {
            name: HotBudget(
                num_bytes=num_bytes,
                pool_bytes=pools[name],
                most_bytes=max(alone[name], pools[name]),
            )
            for name, num_bytes in hot.items()
        }

    def _profile(self, spec: ModelSpec) -> Profile:
        profile = Profile.of(spec, self._rows.get(spec.id), self._models.get(spec.id))
        known = [*self._rows.values(), *self._started.values()]
        return msgspec.structs.replace(profile, start_s=placement.start_s(known))

    def budgets(self, actors: Mapping[str, ModelActor]) -> Budgets:
        """How much there is to deal out now."""
        return Budgets(self._room.num_bytes, sum(self.hot_budgets(actors).values()))

    def kv_share(self, actors: Mapping[str, ModelActor], model: str) -> HotBudget | None:
        """What each process of a model may take for KV: ranks here divide it."""
        budget = self._dealt(actors).get(model)
        return None if budget is None else self._part(model, budget)

    def share(self, actors: Mapping[str, ModelActor]) -> None:
        """Tell the workers how large their hot tiers may be now."""
        for model, budget in self._dealt(actors).items():
            worker = actors[model].worker
            if isinstance(worker, WorkerProcess):
                worker.kv.set_budget(self._part(model, budget))

    def relieve(self, actors: Mapping[str, ModelActor], awaited: frozenset[str]) -> None:
        """Look at the machine's memory, and make room if it runs short."""
        idle = [
            one
            for one in actors.values()
            if one.state == "ready" and not one.is_pinned and one.model not in awaited
        ]
        idle.sort(key=lambda one: one.last_used_s)
        num_available = available_bytes()
        relief = pressure.relieve(
            self._strain,
            available_bytes=num_available,
            floor_bytes=self._floor_bytes,
            lent_bytes=sum(self._lent_bytes(one) for one in actors.values()),
            idle=[one.model for one in idle],
        )
        if relief.strain != self._strain or relief.leaves is not None:
            _log.warning(
                "memory budget changed",
                available_bytes=num_available,
                floor_bytes=self._floor_bytes,
                hot_bytes=relief.strain.lendable_bytes,
                leaves=relief.leaves,
                refuses=relief.strain.refuses,
            )
        self._strain = relief.strain
        if relief.leaves is not None:
            actors[relief.leaves].leave("memory is short", running_s())
        self.share(actors)

    def _part(self, model: str, budget: HotBudget) -> HotBudget:
        own = self._models.get(model)
        num_ranks = own.num_ranks_here if own is not None else 1
        return HotBudget(
            num_bytes=budget.num_bytes // num_ranks,
            pool_bytes=None if budget.pool_bytes is None else budget.pool_bytes // num_ranks,
            most_bytes=None if budget.most_bytes is None else budget.most_bytes // num_ranks,
        )

    def _lent_bytes(self, actor: ModelActor) -> int:
        """What its hot tiers hold beyond the least, which its reservation has."""
        worker = actor.worker
        if not isinstance(worker, WorkerProcess):
            return 0
        own = self._models.get(actor.model)
        num_bytes = worker.kv.counts.hot_bytes * (own.num_ranks_here if own is not None else 1)
        return max(num_bytes - kv_sizes.MIN_HOT_BYTES, 0)

    def _wish(self, spec: ModelSpec) -> int:
        return self._hot_bytes or kv_sizes.hot_budget(self._total_bytes, spec.nbytes)


def _news(actor: ModelActor, event: MemoryEvent, reason: str) -> Transition:
    """Of a model that stays in its state."""
    return Transition(
        model=actor.model,
        before=actor.state,
        event=event,
        after=actor.state,
        at_s=time.time(),
        reason=reason,
    )


def _free_bytes(actors: Mapping[str, ModelActor]) -> int:
    """What models could have if all of them left."""
    workers = [one.worker for one in actors.values()]
    held = [one.crash_reporter.footprint_bytes for one in workers if isinstance(one, WorkerProcess)]
    return available_bytes() + sum(held)
