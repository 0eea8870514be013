"""Prompts that are to be warm: who wants each of them, and what became of it."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Iterator
from typing import Literal

import msgspec

from runtime.cache.deletion_log import Receipt
from runtime.errors import Overloaded
from runtime.keys import owned
from runtime.types import CacheTier, ChatPrompt, GenerateRequest

Source = Literal["config", "request", "compaction"]
State = Literal["waiting", "queued", "running", "completed", "failed", "cancelled"]

_MAX_REMEMBERED = 512
_MAX_FORESIGHT_S = 60.0
_NO_PROMPT = ChatPrompt(())


class PrewarmTask(msgspec.Struct, eq=False):
    """One prompt that is to be warm. Token counts and times are known once it is."""

    id: str
    source: Source
    request: GenerateRequest
    since_s: float
    state: State = "queued"
    num_tokens: int | None = None
    num_cached_tokens: int | None = None
    tier: CacheTier | None = None
    elapsed_ms: float | None = None
    error: str | None = None
    is_pinned: bool = False
    received: Receipt | None = None
    """When somebody asked for it, if anybody did."""

    @property
    def is_open(self) -> bool:
        return self.state in ("waiting", "queued", "running")

    @property
    def is_foreseen(self) -> bool:
        """Nobody asked for it: it is what a client is about to send after a compaction."""
        return self.source == "compaction"

    @property
    def model(self) -> str:
        return self.request.model

    def end(self, state: State) -> None:
        """It is remembered without its prompt, which may be long."""
        self.state, self.received = state, None
        self.request = msgspec.structs.replace(self.request, prompt=_NO_PROMPT)

    def put_off(self) -> None:
        """It made way. What was foreseen is asked for before it could be tried again."""
        if self.is_foreseen:
            self.end("cancelled")
        else:
            self.state = "waiting"

    def end_if_late(self, now_s: float) -> None:
        """What was foreseen and had no turn for so long was asked for by now, or will not be."""
        if self.is_foreseen and self.is_open and now_s - self.since_s > _MAX_FORESIGHT_S:
            self.end("cancelled")


class TaskTable:
    """The prompts that were to be warm lately, by their ids, oldest first."""

    def __init__(self) -> None:
        self._tasks: OrderedDict[str, PrewarmTask] = OrderedDict()

    def __iter__(self) -> Iterator[PrewarmTask]:
        return iter(list(self._tasks.values()))

    def get(self, task_id: str) -> PrewarmTask | None:
        return self._tasks.get(task_id)

    def add(
        self,
        request: GenerateRequest,
        source: Source,
        now_s: float,
        received: Receipt | None = None,
    ) -> PrewarmTask:
        """A prompt that is computed in the background, under an id of its tenant's."""
        cache = request.cache
        task_id = owned(cache.tenant, f"prewarm-{time.time_ns():x}{len(self._tasks):03x}")
        if cache.pin == "":
            cache = msgspec.structs.replace(cache, pin=task_id)
        request = msgspec.structs.replace(
            request, request_id=task_id, work="prefill", priority="background", cache=cache
        )
        task = PrewarmTask(task_id, source, request, since_s=now_s, received=received)
        task.is_pinned = cache.pin is not None
        self._tasks[task_id] = task
        while len(self._tasks) > _MAX_REMEMBERED:
            self._tasks.popitem(last=False)
        return task

    def check_room(self, limit: int) -> None:
        """See that clients may ask for one more. Raises Overloaded."""
        num_open = sum(one.is_open for one in self if one.source == "request")
        if num_open >= limit:
            raise Overloaded(
                f"{num_open} prompts are to be warmed, the limit (max_queue) is {limit}."
            )

    def foreseen(self) -> list[PrewarmTask]:
        """What is foreseen and not done yet."""
        return [one for one in self if one.is_foreseen and one.is_open]

    def foreseen_of(self, session: str | None) -> list[PrewarmTask]:
        """That of one conversation; none of one without a name."""
        found = self.foreseen() if session is not None else []
        return [one for one in found if one.request.cache.session_id == session]

    def take_back(self, model: str) -> None:
        """What was not warmed while the model was loaded before is all wanted anew."""
        for task in self:
            is_again = task.source != "request" and not task.is_foreseen
            if task.model == model and is_again and task.state in ("waiting", "queued"):
                task.end("cancelled")
                del self._tasks[task.id]
