"""An answer whose conversation does not fit: the same model sums up first what goes of it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress

import msgspec
from typing_extensions import override

from api.http.answer import Answer
from api.http.errors import GenerationFailed
from api.http.sse import unheard
from api.observe.metrics import Meter
from api.observe.record import SummaryCost
from runtime.errors import ContextTooLong, NoSummary, SummaryWanted
from runtime.prompt.compaction import summary_request
from runtime.prompt.overflow import most_summary
from runtime.supervisor.generation import Generation
from runtime.types import ChatPrompt, Failed, GenerateRequest, Summary, TextDelta

NOT_SUMMARISED = "not_summarised"
"""The model wrote no summary, so that what does not fit was dropped."""

MOST_NESTED = 16
"""Summaries each of which waits for one of its own beginning; what is before that is dropped."""


class SummarisedAnswer(Answer):
    """The worker says what it wants a summary of; with it the request is sent again.

    `ask` gives the answer to a summary's request, which may want one of its own beginning first.
    """

    def __init__(
        self,
        generations: list[Generation],
        meter: Meter,
        submit: Callable[[GenerateRequest], Generation],
        ask: Callable[[GenerateRequest], Answer],
        on_closed: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(generations, meter, on_closed)
        self._submit = submit
        self._ask = ask
        self._all = generations
        self._summing: Answer | None = None
        self._accepting: asyncio.Task[None] | None = None
        self._is_closed = False
        self.num_above = 0
        """Answers that wait for this one, which is a summary if there are any."""

    @property
    @override
    def phase(self) -> str:
        if (at_work := self._summing) is None:
            return super().phase
        while isinstance(at_work, SummarisedAnswer) and at_work.waits_for is not None:
            at_work = at_work.waits_for
        return f"summary: {at_work.phase}"

    @property
    def waits_for(self) -> Answer | None:
        """The summary that is being made for it."""
        return self._summing

    @property
    @override
    def num_open(self) -> int:
        return max(super().num_open, int(self._summing is not None))

    @override
    async def accepted(self) -> None:
        """As `Answer.accepted`, after all that had to be summed up. May be cancelled and called
        again.

        Raises:
            HearthError: it, or a summary, was refused, cancelled, or its worker failed.
        """
        if self._accepting is None:
            self._accepting = asyncio.create_task(self._accept())
            self._accepting.add_done_callback(unheard)
        await asyncio.shield(self._accepting)

    @override
    def close(self) -> None:
        self._is_closed = True
        if self._summing is not None:
            self._summing.close()
        super().close()

    async def _accept(self) -> None:
        while (first := await self._wanted()) is not None:
            request = self._all[0].request
            if any(one.first == first for one in request.summaries):
                raise NoSummary
            made = Summary(first=first, text=await self._summary(request, first))
            again = msgspec.structs.replace(request, summaries=(*request.summaries, made))
            self._all[0] = self._source = generation = self._submit(again)
            if self._is_held:
                generation.hold(self._hear)
            if self._is_closed:
                generation.abort()

    async def _wanted(self) -> int | None:
        """Where what is to be summed up ends; None once the request was accepted."""
        try:
            await super().accepted()
        except SummaryWanted as wanted:
            return wanted.first
        return None

    async def _summary(self, request: GenerateRequest, first: int) -> str:
        """What stands for the messages before that one; nothing where none can be had of them.

        Raises:
            NoSummary: this answer is a summary itself, of these very messages.
        """
        prompt = request.prompt
        assert isinstance(prompt, ChatPrompt), "only conversations overflow"
        if self.num_above and first == len(prompt.messages) - 1:
            raise NoSummary
        text = ""
        if self.num_above < MOST_NESTED:
            with suppress(ContextTooLong, NoSummary):
                text = await self._summed_up(request, prompt, first)
        if not text and NOT_SUMMARISED not in self.tally.notes:
            self.tally.notes.append(NOT_SUMMARISED)
        return text

    async def _summed_up(self, request: GenerateRequest, prompt: ChatPrompt, first: int) -> str:
        """What the model says in place of these messages.

        Raises:
            ContextTooLong, NoSummary: beside the request for it there is no room for any of them.
        """
        beginning = msgspec.structs.replace(prompt, messages=prompt.messages[:first])
        window = request.context_within(0)
        asked = msgspec.structs.replace(
            request,
            request_id=f"{request.request_id}-summary-{first}",
            prompt=beginning,
            max_tokens=most_summary(window),
            num_choices=1,
            summaries=(),
            prediction="",
        )
        answer = self._summing = self._ask(summary_request(asked, window))
        if isinstance(answer, SummarisedAnswer):
            answer.num_above = self.num_above + 1
        texts: list[str] = []
        try:
            await answer.accepted()
            while chunks := await answer.next_chunks():
                for chunk in chunks:
                    if isinstance(chunk, Failed):
                        raise GenerationFailed(chunk)
                    texts += [chunk.text] if isinstance(chunk, TextDelta) else []
        finally:
            answer.close()
            self._summing = None
        self._tell_cost(answer)
        if NOT_SUMMARISED in answer.tally.notes:
            self.tally.notes.append(NOT_SUMMARISED)
        return "".join(texts).strip()

    def _tell_cost(self, answer: Answer) -> None:
        """With that of earlier summaries, and of those that this one needed."""
        mine = SummaryCost(
            1,
            answer.tally.num_prompt_tokens,
            answer.tally.num_cached_tokens,
            answer.tally.num_output_tokens,
        )
        costs = [one for one in (self.tally.summaries, answer.tally.summaries) if one is not None]
        self.tally.summaries = SummaryCost(*map(sum, zip(mine, *costs, strict=True)))
