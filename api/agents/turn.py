"""`AgentTurn`: one generate, from its place in the agent's queue to its place in the history.

To `api/sse` it is an answer like any other. Its last chunk is passed on only after the turn is in
the history, so what a client saw end is kept; what breaks off before that leaves nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import NamedTuple

from api.agents.locks import AgentLocks
from api.http.answer import Answer
from api.http.draft import Draft, settled
from api.http.sse import unheard
from api.openai.calls import PLAIN, CallFormat
from runtime.errors import HearthError, Overloaded
from runtime.supervisor.running_time import RunningTimeout
from runtime.types import CacheUse, Chunk, Finished, GenerateRequest, Message
from store.history.agent_rows import TurnRow


class TurnPlan(NamedTuple):
    """What a generate is to do, once it is its turn. `base` is the turn it continues from.

    `cut` is the turn that it goes on with and takes the place of; its messages are the new ones.
    `ignored` has no effect.
    """

    agent_id: str
    session: str
    base: int
    model: str
    new_messages: tuple[Message, ...]
    request: GenerateRequest
    cut: TurnRow | None = None
    form: CallFormat = PLAIN
    ignored: tuple[str, ...] = ()


class Steps(NamedTuple):
    """How a turn is planned, submitted and kept; all may raise HearthError."""

    plan: Callable[[], Coroutine[None, None, TurnPlan]]
    submit: Callable[[GenerateRequest], Answer]
    keep: Callable[[TurnPlan, Draft], Coroutine[None, None, None]]


class AgentTurn:
    """Joins the queue when it is made; `close()` must be called whatever happens."""

    def __init__(self, locks: AgentLocks, agent_id: str, steps: Steps, patience_s: float) -> None:
        self.draft = Draft()
        self._told: list[Chunk] = []
        self._locks = locks
        self._agent_id = agent_id
        self._steps = steps
        self._patience_s = patience_s
        self._plan: TurnPlan | None = None
        self._answer: Answer | None = None
        self._starting: asyncio.Task[None] | None = None
        self._keeping: asyncio.Task[None] | None = None
        self._error: HearthError | None = None
        self._is_held = False
        self._place = locks.join(agent_id, self)

    @property
    def plan(self) -> TurnPlan:
        """What it does; known once it was accepted."""
        assert self._plan is not None, "the turn has not begun"
        return self._plan

    @property
    def answer(self) -> Answer:
        """What it became; known once it was accepted."""
        assert self._answer is not None, "the turn has not begun"
        return self._answer

    @property
    def phase(self) -> str:
        """What it waits for, in words for people."""
        if self._answer is not None:
            return self._answer.phase
        return f"queued behind {self._locks.num_before(self._agent_id, self._place)} of this agent"

    @property
    def planned_cache(self) -> CacheUse:
        """What the prompt is about to reuse, once it was accepted."""
        return self.answer.planned_cache

    async def accepted(self) -> None:
        """Wait for its turn, then for the worker. May be cancelled and called again.

        Raises:
            HearthError: it was refused, ended, or waited for too long.
        """
        if self._error is not None:
            raise self._error
        if self._starting is None:
            self._starting = asyncio.create_task(self._start())
            self._starting.add_done_callback(unheard)
        try:
            await asyncio.shield(self._starting)
        except HearthError as error:
            raise self._error or error from error
        except asyncio.CancelledError:
            if self._error is not None:
                raise self._error from None
            raise

    async def next_chunks(self, timeout_s: float | None = None) -> list[Chunk] | None:
        """As `Answer.next_chunks`; the end of the answer comes after it was kept.

        Raises:
            HearthError: it was ended, or could not be kept.
        """
        chunks = await self.answer.next_chunks(timeout_s)
        if self._error is not None:
            raise self._error
        self._told += chunks or ()
        if any(isinstance(chunk, Finished) for chunk in chunks or ()):
            for chunk in settled(self._told):
                self.draft.add(chunk)
            await self._keep()
        return chunks

    def hold(self) -> None:
        """As `Answer.hold`, once there is one."""
        self._is_held = True

    def end(self, error: HearthError) -> None:
        """Give up with this error, unless it is being kept already."""
        if self._keeping is None and self._error is None:
            self._error = error
            self._abandon()

    def close(self) -> None:
        """Give up what is not finished and let the next begin; any number of times."""
        self._abandon()
        if self._keeping is None or self._keeping.done():
            self._locks.leave(self._agent_id, self._place)
        else:
            self._keeping.add_done_callback(lambda _: self.close())

    def _abandon(self) -> None:
        if self._starting is not None and not self._starting.done():
            self._starting.cancel()
        if self._answer is not None:
            self._answer.close()

    async def _start(self) -> None:
        try:
            async with RunningTimeout(self._patience_s):
                await self._place.is_first.wait()
        except TimeoutError:
            raise Overloaded(
                f"The agent was busy with earlier requests for {self._patience_s:g} s."
            ) from None
        self._plan = await self._steps.plan()
        self.draft.customs = self._plan.form.customs
        self._answer = self._steps.submit(self._plan.request)
        if self._is_held:
            self._answer.hold()
        self._answer.tally.ignored += self._plan.ignored
        await self._answer.accepted()

    async def _keep(self) -> None:
        """Once begun it is finished, whether somebody still waits or not."""
        if self._keeping is None:
            keeping = self._steps.keep(self.plan, self.draft)
            self._keeping = asyncio.create_task(keeping)
            self._keeping.add_done_callback(unheard)
            await asyncio.shield(self._keeping)
