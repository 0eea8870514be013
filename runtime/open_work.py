"""`OpenWork`: the generations that one worker works for, to their last chunk."""

from __future__ import annotations

from collections.abc import Callable

from runtime.errors import WorkerError
from runtime.generation import Generation
from runtime.wire import Accepted, Chunks, Rejected
from runtime.worker_link import rejection


class OpenWork:
    """Belongs to the event loop. `on_idle` is called when the last one has left."""

    def __init__(self, on_idle: Callable[[], None]) -> None:
        self._on_idle = on_idle
        self._generations: dict[str, Generation] = {}

    def __len__(self) -> int:
        return len(self._generations)

    def add(self, generation: Generation) -> None:
        self._generations[generation.request.request_id] = generation

    def remove(self, generation: Generation) -> bool:
        """Forget it; False when it is not here."""
        request_id = generation.request.request_id
        is_here = request_id in self._generations
        if is_here:
            self._forget(request_id)
        return is_here

    def on_event(self, event: Chunks | Accepted | Rejected) -> None:
        """What the worker says about requests; about those that left it is ignored."""
        match event:
            case Chunks(items=items):
                for request_id, chunk in items:
                    if (generation := self._generations.get(request_id)) is not None:
                        generation.push(chunk)
                        if generation.is_finished:
                            self._forget(request_id)
            case Accepted(request_id=request_id):
                if (generation := self._generations.get(request_id)) is not None:
                    generation.phase = "prefill"
                    generation.accept(event.num_prompt_tokens, event.cache)
            case Rejected(request_id=request_id):
                if (generation := self._generations.get(request_id)) is not None:
                    generation.fail(rejection(event))
                    self._forget(request_id)

    def take_all(self) -> list[Generation]:
        """All that are open; none is here any more. `on_idle` is not called."""
        generations, self._generations = self._generations, {}
        return list(generations.values())

    def _forget(self, request_id: str) -> None:
        del self._generations[request_id]
        if not self._generations:
            self._on_idle()


def fail_all(generations: list[Generation], error: WorkerError) -> None:
    """End them with this error."""
    for generation in generations:
        generation.fail(error)
