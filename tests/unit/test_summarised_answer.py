"""An answer that waits for summaries: what is sent again, what it costs, how it is given up."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from api.http.answer import Answer
from api.http.summarised import MOST_NESTED, NOT_SUMMARISED, SummarisedAnswer
from api.observe.metrics import Metrics
from runtime.cache.figures import DiskFigures, KvFigures
from runtime.errors import Aborted, ContextTooLong, HearthError, NoSummary, SummaryWanted
from runtime.prompt.compaction import REQUEST
from runtime.supervisor.generation import Generation
from runtime.types import (
    CacheUse,
    ChatPrompt,
    Finished,
    GenerateRequest,
    Message,
    TextDelta,
    Usage,
)
from tests.lone_worker import Alone
from tests.waiting import until

MESSAGES = tuple(
    Message(role=role, text=str(number))
    for number, role in enumerate(("user", "assistant", "user", "assistant", "user"))
)
ASKED = GenerateRequest(
    request_id="r",
    model="m",
    prompt=ChatPrompt(messages=MESSAGES),
    max_tokens=7,
    stop=("!",),
    context=1024,
    overflow="summarise",
)


class Worker:
    """All that was submitted, to be answered by the test as a worker would."""

    def __init__(self, asked: GenerateRequest = ASKED) -> None:
        self.metrics = Metrics(list, lambda: KvFigures({}, {}, DiskFigures()))
        self.sent: list[Generation] = []
        self.answer = self._answer(asked)

    def _submit(self, request: GenerateRequest) -> Generation:
        self.sent.append(Generation(request, Alone()))
        return self.sent[-1]

    def _answer(self, request: GenerateRequest) -> Answer:
        generations = [self._submit(request)]
        meter = self.metrics.meter(request.model)
        return SummarisedAnswer(generations, meter, self._submit, self._answer)

    async def nth(self, number: int) -> Generation:
        await until(lambda: len(self.sent) > number, f"request {number} is submitted")
        return self.sent[number]


def says(generation: Generation, text: str, num_prompt: int = 100, num_cached: int = 90) -> None:
    generation.accept(num_prompt, CacheUse())
    if text:
        generation.push(TextDelta(index=0, text=text))
    cache = CacheUse(tier="hot", num_tokens=num_cached)
    usage = Usage(num_prompt_tokens=num_prompt, num_output_tokens=len(text), cache=cache)
    generation.push(Finished(index=0, reason="stop", usage=usage))


async def test_the_request_is_sent_again_with_a_summary_of_what_the_worker_names():
    worker = Worker()
    accepting = asyncio.create_task(worker.answer.accepted())
    worker.sent[0].fail(SummaryWanted(2))
    summing = await worker.nth(1)
    prompt = summing.request.prompt
    assert isinstance(prompt, ChatPrompt)
    assert prompt.messages == (*MESSAGES[:2], Message(role="user", text=REQUEST))
    assert (summing.request.max_tokens, summing.request.stop) == (128, ())
    assert worker.answer.phase == "summary: queued"
    accepting.cancel()  # its client has waited enough for the headers, and is told more later
    accepting = asyncio.create_task(worker.answer.accepted())
    says(summing, " Foxes. ")
    again = await worker.nth(2)
    assert [(one.first, one.text) for one in again.request.summaries] == [(2, "Foxes.")]
    assert again.request.prompt == ASKED.prompt
    assert again.request.max_tokens == 7
    says(again, "Yes.", num_prompt=50)
    await accepting
    chunks = await worker.answer.next_chunks()
    assert chunks is not None
    assert chunks[0] == TextDelta(index=0, text="Yes.")
    assert worker.answer.tally.num_prompt_tokens == 50
    assert worker.answer.tally.summaries == (1, 100, 90, 8)


async def test_a_summary_that_needs_one_itself_has_it_made_first_and_both_are_told():
    worker = Worker()
    accepting = asyncio.create_task(worker.answer.accepted())
    worker.sent[0].fail(SummaryWanted(4))
    (await worker.nth(1)).fail(SummaryWanted(2))
    says(await worker.nth(2), "a")
    second = await worker.nth(3)
    assert [(one.first, one.text) for one in second.request.summaries] == [(2, "a")]
    says(second, "bc")
    last = await worker.nth(4)
    assert [(one.first, one.text) for one in last.request.summaries] == [(4, "bc")]
    says(last, "Yes.")
    await accepting
    assert worker.answer.tally.summaries == (2, 200, 180, 3)


async def test_without_a_summary_it_goes_on_and_says_so():
    worker = Worker()
    accepting = asyncio.create_task(worker.answer.accepted())
    worker.sent[0].fail(SummaryWanted(2))
    says(await worker.nth(1), "")
    again = await worker.nth(2)
    assert [(one.first, one.text) for one in again.request.summaries] == [(2, "")]
    says(again, "Yes.")
    await accepting
    assert worker.answer.tally.notes == [NOT_SUMMARISED]


@pytest.mark.parametrize("no_room", [SummaryWanted(2), ContextTooLong(200, 100)])
async def test_where_the_request_for_a_summary_has_no_room_it_goes_on_and_says_so(
    no_room: HearthError,
):
    """It fits without what it is to sum up only: then it would want that summed up, for ever."""
    worker = Worker()
    accepting = asyncio.create_task(worker.answer.accepted())
    worker.sent[0].fail(SummaryWanted(2))
    (await worker.nth(1)).fail(no_room)
    again = await worker.nth(2)
    assert [(one.first, one.text) for one in again.request.summaries] == [(2, "")]
    says(again, "Yes.")
    await accepting
    assert worker.answer.tally.notes == [NOT_SUMMARISED]
    assert len(worker.sent) == 3


async def test_summaries_of_summaries_have_an_end_and_what_is_not_summed_up_is_told():
    num_turns = 2 * MOST_NESTED
    messages = MESSAGES[:2] * num_turns + MESSAGES[:1]
    worker = Worker(msgspec.structs.replace(ASKED, prompt=ChatPrompt(messages=messages)))
    accepting = asyncio.create_task(worker.answer.accepted())
    for number in range(MOST_NESTED + 1):
        (await worker.nth(number)).fail(SummaryWanted(2 * (num_turns - number)))
    assert worker.answer.phase == "summary: queued"
    for number in range(MOST_NESTED + 1):
        says(await worker.nth(MOST_NESTED + 1 + number), "a")
    await accepting
    assert len(worker.sent) == 2 * (MOST_NESTED + 1)
    assert worker.answer.tally.notes == [NOT_SUMMARISED]
    assert worker.answer.tally.summaries is not None
    assert worker.answer.tally.summaries.num_summaries == MOST_NESTED


async def test_a_worker_that_wants_the_same_again_ends_it():
    worker = Worker()
    accepting = asyncio.create_task(worker.answer.accepted())
    worker.sent[0].fail(SummaryWanted(2))
    says(await worker.nth(1), "a")
    (await worker.nth(2)).fail(SummaryWanted(2))
    with pytest.raises(NoSummary):
        await accepting


async def test_a_client_that_leaves_ends_the_summary_as_well():
    worker = Worker()
    accepting = asyncio.create_task(worker.answer.accepted())
    worker.sent[0].fail(SummaryWanted(2))
    summing = await worker.nth(1)
    worker.answer.close()
    with pytest.raises(Aborted):
        await accepting
    assert summing.is_finished
    assert len(worker.sent) == 2
