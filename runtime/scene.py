"""How things stand, as the swap policy sees it: who waits, who is there, what fits."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from runtime.calls import Call
from runtime.model_actor import ModelActor
from runtime.placement import Need, Room
from runtime.swap import Resident, Scene, Waiting
from runtime.types import ModelSpec


class Memory(Protocol):
    """What models need and what there is."""

    def need(self, spec: ModelSpec) -> Need: ...

    def room(self) -> Room:
        """What all models may take together."""
        ...

    def room_now(self) -> Room:
        """The same without what ended processes have not given back."""
        ...


def room_for(actors: Iterable[ModelActor], memory: Memory) -> Room:
    """What models may take now: not what processes hold that nobody could end."""
    room = memory.room_now()
    held = sum(actor.abandoned_bytes for actor in actors)
    return Room(num_bytes=room.num_bytes - held, num_models=room.num_models)


def missing_bytes(actors: Iterable[ModelActor], memory: Memory) -> int:
    """How much of their room models cannot have, though none of them has it."""
    return memory.room().num_bytes - room_for(actors, memory).num_bytes


def scene_of(
    calls: Iterable[Call], actors: Iterable[ModelActor], memory: Memory, now_s: float
) -> Scene:
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
    return Scene(
        waiting=tuple(waiting),
        residents=tuple(residents),
        needs={model: memory.need(spec) for model, spec in specs.items()},
        room=room_for(everybody, memory),
        now_s=now_s,
    )
