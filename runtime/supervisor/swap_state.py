"""How things stand, as the swap policy sees it: who waits, who is there, what fits."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from runtime.supervisor.calls import QueuedRequest
from runtime.supervisor.model import ModelActor
from runtime.supervisor.placement import LoadCapacity, Need
from runtime.supervisor.swap_policy import Resident, SwapState, Waiting
from runtime.types import ModelSpec


class MemoryView(Protocol):
    """What models need and what there is."""

    def need(self, spec: ModelSpec) -> Need: ...

    def room(self) -> LoadCapacity:
        """What all models may take together."""
        ...

    def room_now(self) -> LoadCapacity:
        """The same without what ended processes have not given back."""
        ...


def room_for(actors: Iterable[ModelActor], memory: MemoryView) -> LoadCapacity:
    """What models may take now: not what processes hold that nobody could end."""
    room = memory.room_now()
    held = sum(actor.abandoned_bytes for actor in actors)
    return LoadCapacity(num_bytes=room.num_bytes - held, num_models=room.num_models)


def missing_bytes(actors: Iterable[ModelActor], memory: MemoryView) -> int:
    """How much of their room models cannot have, though none of them has it."""
    return memory.room().num_bytes - room_for(actors, memory).num_bytes


def swap_state_of(
    calls: Iterable[QueuedRequest], actors: Iterable[ModelActor], memory: MemoryView, now_s: float
) -> SwapState:
    """How things stand, as the swap policy sees it."""
    waiting: list[Waiting] = []
    residents: list[Resident] = []
    specs: dict[str, ModelSpec] = {}
    for call in calls:
        specs[call.model] = call.spec.loaded
        waiting.append(
            Waiting(
                request_id=call.request_id,
                model=call.model,
                since_s=call.since_s,
                priority=call.priority,
            )
        )
    everybody = list(actors)
    for actor in everybody:
        resident = actor.resident()
        if resident is not None and actor.spec is not None:
            residents.append(resident)
            specs[actor.model] = actor.spec
    return SwapState(
        waiting=tuple(waiting),
        residents=tuple(residents),
        needs={model: memory.need(spec) for model, spec in specs.items()},
        room=room_for(everybody, memory),
        now_s=now_s,
    )
