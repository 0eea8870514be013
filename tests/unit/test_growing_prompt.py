"""What goes on from a summary is computed piece by piece while it is written, and ends with it."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from pathlib import Path

import pytest

from runtime.cache.deletion_log import Receipt
from runtime.config.settings import Settings
from runtime.errors import Aborted, HearthError
from runtime.prewarm.growing import GrowingPrompt, GrowingPrompts
from runtime.prompt.compaction import INTRODUCTION
from runtime.supervisor.generation import Generation
from runtime.types import (
    CacheParams,
    ChatPrompt,
    Failed,
    Finished,
    GenerateRequest,
    Message,
    TextDelta,
    TextWasReasoning,
    Usage,
)
from store.keyed_names import Asker, Whom
from tests.lone_worker import Alone
from tests.waiting import until

PIECE = "word " * 60
HOME = Path("nowhere")


def request(name: str, tenant: str = "") -> GenerateRequest:
    prompt = ChatPrompt(messages=(Message(role="user", text="hi"), Message(role="user", text="")))
    cache = CacheParams(session_id="s", tenant=tenant)
    return GenerateRequest(request_id=name, model="m", prompt=prompt, cache=cache)


class Summary:
    """A summary that is being written, and what was begun of that which goes on from it."""

    def __init__(self) -> None:
        self.writer = Generation(request("r", tenant="t"), Alone())
        self.pieces: list[Generation] = []
        self.is_time = True
        self.growing = GrowingPrompt(self.writer, self.following, self.warm)
        self.task = asyncio.create_task(self.growing.run())

    async def following(self) -> GenerateRequest:
        return request("")

    def warm(self, piece: GenerateRequest, received: Receipt | None) -> Generation | None:
        assert received is self.writer.received
        if not self.is_time:
            return None
        generation = Generation(piece, Alone())
        generation.accept(1, generation.cache)
        self.pieces.append(generation)
        return generation

    def say(self, text: str) -> None:
        self.growing.hear(TextDelta(index=0, text=text))

    def done(self) -> None:
        """The piece that is open is computed."""
        self.pieces[-1].push(Finished(index=0, reason="stop", usage=Usage(1, 0)))

    async def begun(self, number: int) -> str:
        """The text of that piece, once it is begun."""
        await until(lambda: len(self.pieces) == number, f"piece {number} is begun")
        prompt = self.pieces[-1].request.prompt
        assert isinstance(prompt, ChatPrompt)
        return prompt.messages[-1].text


async def begun() -> Summary:
    summary = Summary()
    summary.writer.accept(1, summary.writer.cache)
    assert await summary.begun(1) == INTRODUCTION.rstrip()
    return summary


async def test_what_precedes_the_summary_is_first_and_each_piece_goes_on_from_the_last() -> None:
    summary = await begun()
    summary.say(PIECE)
    summary.say("and ")
    assert len(summary.pieces) == 1
    summary.done()
    assert await summary.begun(2) == INTRODUCTION + PIECE + "and"
    summary.done()
    summary.say("too little")
    summary.say(PIECE)
    assert await summary.begun(3) == INTRODUCTION + PIECE + "and too little" + PIECE.rstrip()
    asked = [one.request for one in summary.pieces]
    assert {(one.work, one.priority, one.written_by) for one in asked} == {
        ("prefill", "background", "r")
    }
    assert {one.cache.tenant for one in asked} == {"t"}
    assert len({one.request_id for one in asked}) == 3
    summary.growing.close()
    await summary.task


async def test_thoughts_are_no_part_of_it() -> None:
    summary = await begun()
    summary.say(PIECE * 2)
    summary.growing.hear(TextWasReasoning(index=0))
    summary.say(PIECE)
    summary.done()
    assert await summary.begun(2) == INTRODUCTION + PIECE.rstrip()
    summary.growing.close()
    await summary.task


async def test_when_its_answer_is_closed_what_is_computed_ends_and_nothing_is_begun() -> None:
    summary = await begun()
    summary.growing.close()
    await summary.task
    assert summary.pieces[0].is_finished
    summary.say(PIECE)
    assert len(summary.pieces) == 1
    assert not summary.growing.is_open


@pytest.mark.parametrize(
    "end",
    [Finished(index=0, reason="stop", usage=Usage(1, 0)), Failed(code="model_error", message="")],
)
async def test_when_the_summary_is_complete_what_is_computed_ends(end: Finished | Failed) -> None:
    """What goes on from it comes next: with the piece's name, that would be open already."""
    summary = await begun()
    summary.growing.hear(end)
    assert summary.pieces[0].is_finished
    await summary.task
    assert not summary.growing.is_open


async def test_it_waits_for_the_next_words_where_it_is_no_time() -> None:
    summary = Summary()
    summary.is_time = False
    summary.writer.accept(1, summary.writer.cache)
    summary.say("some")
    await asyncio.sleep(0)
    summary.is_time = True
    summary.say(" more")
    assert await summary.begun(1)
    summary.growing.close()
    await summary.task


@pytest.mark.parametrize("error", [Aborted("left"), HearthError("refused")])
async def test_a_summary_that_is_refused_is_followed_by_nothing(error: HearthError) -> None:
    summary = Summary()
    summary.writer.fail(error)
    await summary.task
    assert (summary.pieces, summary.growing.is_open) == ([], False)


async def test_what_had_to_make_way_is_not_begun_again() -> None:
    summary = await begun()
    summary.pieces[0].push(Failed(code=Aborted.code, message="Another model is needed."))
    await summary.task
    summary.say(PIECE)
    assert (len(summary.pieces), summary.growing.is_open) == (1, False)


@pytest.mark.parametrize(
    ("whom", "is_open"),
    [
        (Whom(session_id="s"), False),
        (Whom(session_id="other"), True),
        (Whom(model="m"), False),
        (Whom(), False),
    ],
)
async def test_it_ends_when_its_conversation_or_its_model_is_forgotten(
    whom: Whom, is_open: bool
) -> None:
    summary, tasks = await begun(), list[asyncio.Task[None]]()
    prompts = GrowingPrompts(
        Settings(home=HOME), summary.warm, lambda work: tasks.append(asyncio.ensure_future(work))
    )
    growing = prompts.begin(summary.writer, summary.following)
    assert growing is not None
    await summary.begun(2)
    prompts.forget(lambda one: whom.means(Asker(one.model, one.cache.session_id), b""))
    assert (growing.is_open, summary.pieces[1].is_finished) == (is_open, not is_open)
    growing.close()
    summary.growing.close()
    await asyncio.gather(summary.task, *tasks)


async def test_so_many_are_open_and_none_where_it_is_not_wanted() -> None:
    summary, tasks = Summary(), list[asyncio.Task[None]]()

    def spawn(work: Coroutine[None, None, None]) -> None:
        tasks.append(asyncio.ensure_future(work))

    off = GrowingPrompts(Settings(home=HOME, prewarm=False), summary.warm, spawn)
    assert off.begin(summary.writer, summary.following) is None
    prompts = GrowingPrompts(Settings(home=HOME), summary.warm, spawn)
    made = [prompts.begin(summary.writer, summary.following) for _ in range(9)]
    assert made[-1] is None
    assert made[0] is not None
    made[0].close()
    assert prompts.begin(summary.writer, summary.following) is not None
    summary.writer.fail(Aborted("left"))
    await asyncio.gather(summary.task, *tasks)
