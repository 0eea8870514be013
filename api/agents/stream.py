"""A generate as a stream of `chat.completion.chunk` events, so that OpenAI's clients read it."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from typing_extensions import override

from api.agents.schemas import AgentMark
from api.agents.turn import AgentTurn
from api.observe.record import Tally
from api.openai.calls import CallFormat
from api.openai.chat import ChatStream
from api.openai.frame import END, CompletionEnvelope, comment, error_event
from api.openai.schemas import ChunkChoice
from runtime.errors import HearthError
from runtime.types import Chunk


class AgentStream:
    """What the answer's envelope says is known only when the turn has begun."""

    def __init__(self, turn: AgentTurn, frame: CompletionEnvelope, *, has_usage: bool) -> None:
        self._turn = turn
        self._frame = frame
        self._has_usage = has_usage
        self._chunks: _Chunks | None = None

    def opening(self) -> bytes:
        plan = self._turn.plan
        self._frame.model = plan.model
        mark = AgentMark(plan.agent_id, plan.base + 1)
        tally = self._turn.answer.tally
        self._chunks = _Chunks(self._frame, tally, mark, has_usage=self._has_usage, form=plan.form)
        return self._chunks.opening()

    def chunks(self, chunks: Sequence[Chunk]) -> bytes:
        return self._begun.chunks(chunks)

    def sign_of_life(self, phase: str) -> bytes:
        return comment(phase)

    def failure(self, error: HearthError) -> bytes:
        return error_event(error)

    def closing(self) -> bytes:
        return self._begun.closing()

    @property
    def _begun(self) -> _Chunks:
        assert self._chunks is not None, "opening() comes first"
        return self._chunks


class _Chunks(ChatStream):
    """Chunks of which the last says which turn the answer became."""

    def __init__(
        self,
        frame: CompletionEnvelope,
        tally: Tally,
        mark: AgentMark,
        *,
        has_usage: bool,
        form: CallFormat,
    ) -> None:
        super().__init__(frame, tally, has_usage=has_usage, form=form)
        self._mark = b',"agent":' + msgspec.json.encode(mark) + END

    @override
    def _event(self, choice: ChunkChoice) -> bytes:
        event = super()._event(choice)
        if choice.finish_reason is None:
            return event
        return event.removesuffix(END) + self._mark
