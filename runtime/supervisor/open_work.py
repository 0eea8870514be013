"""`OpenWork`: the generations that one worker works for, to their last chunk."""

from __future__ import annotations

from collections.abc import Iterable
from copy import copy

from runtime.errors import PromptChanged, WorkerDied, WorkerError, WorkerWedged
from runtime.supervisor.generation import Generation
from runtime.supervisor.worker_link import rejection
from runtime.types import GenerateRequest
from runtime.wire import Accepted, Chunks, Rejected, WorkerPhase
from runtime.work_page import Part, WorkPage

MAX_LEFT = 64
"""So many requests are known after their clients have left: the worker may still work on one."""


class OpenWork:
    """Belongs to the event loop."""

    def __init__(self) -> None:
        self._generations: dict[str, Generation] = {}
        self._left: dict[str, GenerateRequest] = {}

    def __len__(self) -> int:
        return len(self._generations)

    def add(self, generation: Generation) -> None:
        self._generations[generation.request.request_id] = generation

    def remove(self, generation: Generation) -> bool:
        """Forget it; False when it is not here."""
        request_id = generation.request.request_id
        is_here = request_id in self._generations
        if is_here:
            self._left[request_id] = generation.request
            self._left = dict([*self._left.items()][-MAX_LEFT:])
            del self._generations[request_id]
        return is_here

    def lost_on(
        self, error: WorkerError, phase: WorkerPhase, page: WorkPage
    ) -> list[GenerateRequest]:
        """What the worker computed for when that became of it, as its `page` says, whether or not
        anybody still wants it: anywhere, or in the part of it that was in that phase where it got
        no further.
        """
        stuck: Part = "intake" if phase == "intake" else "engine"
        parts: tuple[Part, ...] = ("intake", "engine")
        said = [page.read(one) for one in parts if one == stuck or not _is_stuck(error)]
        known = self._left | {key: one.request for key, one in self._generations.items()}
        return [known[request_id] for ids in said for request_id in ids if request_id in known]

    def on_event(self, event: Chunks | Accepted | Rejected) -> None:
        """What the worker says about requests; about those that left it is ignored."""
        match event:
            case Chunks(items=items, said=said):
                for token in said:
                    if (generation := self._generations.get(token.request_id)) is not None:
                        generation.note(token)
                for request_id, chunk in items:
                    if (generation := self._generations.get(request_id)) is not None:
                        generation.push(chunk)
                        if generation.is_finished:
                            del self._generations[request_id]
            case Accepted(request_id=request_id):
                if (generation := self._generations.get(request_id)) is not None:
                    read = event.prompt_digest, event.turns
                    generation.accept(event.num_prompt_tokens, event.cache, *read)
            case Rejected(request_id=request_id):
                if (generation := self._generations.pop(request_id, None)) is not None:
                    _refuse(generation, event)

    def take_all(self) -> list[Generation]:
        """All that are open; none is here any more."""
        generations, self._generations = self._generations, {}
        return list(generations.values())


def _is_stuck(error: WorkerError) -> bool:
    """One part of the worker got no further, and the others are innocent."""
    return isinstance(error, WorkerWedged)


def fail_all(
    generations: list[Generation], error: WorkerError, lost_on: Iterable[GenerateRequest]
) -> None:
    """End them with this error, which the requests `lost_on` may have caused."""
    blamed = {request.request_id for request in lost_on}
    innocent = copy(error)
    innocent.message = f"{error.message} It worked for another request then."
    for generation in generations:
        is_other = bool(blamed) and generation.request.request_id not in blamed
        generation.fail(innocent if is_other else error)


def _refuse(generation: Generation, refusal: Rejected) -> None:
    """The worker does not take it; of an answer that it cannot go on with the loss is told."""
    if refusal.code != PromptChanged.code:
        generation.fail(rejection(refusal))
        return
    generation.differs()
    why = f"Its worker was lost, and it cannot go on in another one. {refusal.message}"
    generation.fail(WorkerDied(why))
