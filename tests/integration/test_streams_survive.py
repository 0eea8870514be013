"""A worker is killed in mid-answer, and its clients are told the answer as if it had not been."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.errors import WorkerDied
from runtime.supervisor.generation import WORKER_LOST, Generation
from runtime.supervisor.supervisor import Supervisor
from runtime.types import (
    ChatPrompt,
    Chunk,
    Constraint,
    Finished,
    GenerateRequest,
    Message,
    PrefillProgress,
    ReasoningDelta,
    SamplingParams,
    TextDelta,
    TextPrompt,
    Thinking,
    Tool,
    ToolCallDelta,
    ToolChoice,
)
from tests.asking import GREEDY, PATIENCE_S, Answer, answer, request, supervising
from tests.examples import usual
from tests.tiny_models import write_model

PARAMETERS = """{"type": "object", "properties": {"at": {"type": "integer"}, "says":
{"type": "string", "maxLength": 40}}, "required": ["at", "says"], "additionalProperties": false}"""
TOOLS = (
    Tool(name="look", parameters=PARAMETERS, is_strict=True),
    Tool(name="listen", parameters=PARAMETERS),
)
SCHEMA = Constraint(kind="json_schema", text=PARAMETERS)
WORDS = Constraint(kind="regex", text="([a-z]{1,7} ){20,60}")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("home")
    write_model(home / "models" / "m")
    return home


def chat(**fields: Any) -> ChatPrompt:
    return ChatPrompt((Message(role="user", text="What does the fox say?"),), **fields)


def prompts() -> st.SearchStrategy[dict[str, Any]]:
    """Each with what it demands of the answer."""
    calling = ToolChoice(mode="required")
    return st.sampled_from(
        [
            {"prompt": TextPrompt(text="the quick brown fox")},
            {"prompt": TextPrompt(text="the quick brown fox"), "constraint": WORDS},
            {"prompt": chat()},
            {"prompt": chat(), "constraint": SCHEMA},
            {"prompt": chat(tools=TOOLS)},
            {"prompt": chat(tools=TOOLS, tool_choice=calling)},
            {"prompt": chat(thinking=Thinking(is_enabled=True, budget_tokens=30))},
        ]
    )


def samplings() -> st.SearchStrategy[SamplingParams]:
    return st.sampled_from(
        [
            GREEDY,
            SamplingParams(temperature=0.0, frequency_penalty=0.4, repetition_penalty=1.1),
            SamplingParams(temperature=1.1, seed=5),
            SamplingParams(temperature=0.8, seed=-3, top_p=0.9, top_k=50, presence_penalty=0.5),
        ]
    )


@st.composite
def requests(draw: st.DrawFn) -> GenerateRequest:
    return request(
        **draw(prompts()),
        sampling=draw(samplings()),
        max_tokens=draw(st.integers(20, 160)),
        num_choices=draw(st.sampled_from([1, 1, 2])),
        stop=draw(st.sampled_from([(), (), ("e",), ("the fox", "  ", "a b")])),
        top_logprobs=draw(st.sampled_from([None, None, 2])),
        ignore_eos=draw(st.booleans()),
    )


@dataclass
class Told:
    """What a client can tell of a choice: every piece in its place, ids of calls aside."""

    pieces: list[tuple[str, str, str, int]]
    logprobs: list[tuple[str, ...]]
    end: tuple[Any, ...]

    @classmethod
    def of(cls, said: Answer, index: int) -> Told:
        pieces: list[tuple[str, str, str, int]] = []
        for chunk in said.chunks:
            match chunk:
                case TextDelta() | ReasoningDelta() if chunk.index == index:
                    pieces.append((type(chunk).__name__, chunk.text, "", len(chunk.logprobs)))
                case ToolCallDelta() if chunk.index == index:
                    name = chunk.name or ""
                    pieces.append((f"call {chunk.call_index}", chunk.arguments, name, 0))
                case _:
                    pass
        choice = said.choice(index)
        logprobs = [
            tuple(other.token for other in (one.chosen, *one.top)) for one in choice.logprobs
        ]
        end = choice.finished
        usage = end.usage
        counts = usage.num_prompt_tokens, usage.num_output_tokens, usage.num_reasoning_tokens
        notes = tuple(note for note in end.notes if note != WORKER_LOST)
        return cls(pieces, logprobs, (end.reason, end.stop, notes, counts))


def told(said: Answer, num_choices: int) -> list[Told]:
    return [Told.of(said, index) for index in range(num_choices)]


async def answer_with_kills(generation: Generation, kills: Sequence[int]) -> tuple[Answer, int]:
    """The answer, whose worker is killed whenever so many pieces of it have come; how often.

    Where more had come by then, the next worker is given as many as planned all the same.
    """
    due, chunks, killed = list(kills), list[Chunk](), set[int]()
    async with asyncio.timeout(PATIENCE_S):
        await generation.accepted()
        while arrived := await generation.next_chunks():
            chunks += arrived
            num_pieces = sum(not isinstance(one, PrefillProgress) for one in chunks)
            pid = generation.worker_pid
            is_due = due and num_pieces >= due[0] and not generation.is_finished
            if is_due and pid is not None and pid not in killed:
                killed.add(pid)
                late = num_pieces - due.pop(0)
                due = [one + late for one in due]
                os.kill(pid, signal.SIGKILL)
    return Answer(tuple(chunks)), len(killed)


def again(asked: GenerateRequest) -> GenerateRequest:
    return msgspec.structs.replace(asked, request_id=f"{asked.request_id}-again")


async def compare(supervisor: Supervisor, asked: GenerateRequest, kills: Sequence[int]) -> int:
    undisturbed = await answer(supervisor.submit(asked))
    generation = supervisor.submit(again(asked))
    killed, num_kills = await answer_with_kills(generation, kills)
    assert isinstance(killed.chunks[-1], Finished), killed.chunks[-1]
    assert told(killed, asked.num_choices) == told(undisturbed, asked.num_choices)
    ids = [call.id for call in killed.calls]
    assert len(ids) == len(set(ids))
    return num_kills


async def test_a_stream_goes_on_in_another_worker_with_the_words_it_would_have_said(home: Path):
    """Any request, killed anywhere: what its client is told is what it would have been told."""
    async with supervising(home, spare_worker=True) as supervisor:
        loop = asyncio.get_running_loop()

        async def run(asked: GenerateRequest, at: int) -> None:
            if await compare(supervisor, asked, [at]):
                await supervisor.restart("m").granted()  # or the third crash opens the breaker

        @settings(max_examples=usual(24), deadline=None)
        @given(requests(), st.integers(1, 60))
        def check(asked: GenerateRequest, at: int) -> None:
            fresh = request(asked.prompt)
            asked = msgspec.structs.replace(asked, request_id=fresh.request_id)
            asyncio.run_coroutine_threadsafe(run(asked, at), loop).result()

        await asyncio.to_thread(check)


async def test_it_goes_on_twice_and_not_a_third_time(home: Path):
    async with supervising(home, spare_worker=True) as supervisor:
        sampling = SamplingParams(temperature=1.0, seed=1)
        asked = request("a", max_tokens=1000, ignore_eos=True, sampling=sampling)
        assert await compare(supervisor, asked, [20, 120]) == 2
        await supervisor.restart("m").granted()
        asked = request("b", max_tokens=4000, ignore_eos=True)
        generation = supervisor.submit(asked)
        killed, num_kills = await answer_with_kills(generation, [20, 120, 220])
        assert num_kills == 3
        assert killed.failed.code == WorkerDied.code


async def test_who_lost_a_worker_is_told_so_and_what_was_reused_when_the_answer_began(home: Path):
    async with supervising(home, spare_worker=True) as supervisor:
        asked = request("the fox says " * 80, max_tokens=400, ignore_eos=True)
        assert (await answer(supervisor.submit(asked))).choice(0).finished.notes == ()
        generation = supervisor.submit(again(asked))
        await generation.accepted()
        begun = generation.cache
        assert begun.num_tokens > 256
        killed, num_kills = await answer_with_kills(generation, [20])
        end = killed.choice(0).finished
        assert (num_kills, end.notes) == (1, (WORKER_LOST,))
        found = end.usage.cache
        figures = found.tier, found.num_tokens, found.reason, found.at
        assert figures == (begun.tier, begun.num_tokens, begun.reason, begun.at)
        assert generation.cache == begun


async def test_neighbours_go_on_as_well(home: Path):
    """All that ran in the worker, of whom nobody knows which one it died of."""
    asked = [
        request(f"{number}", max_tokens=400, ignore_eos=True, num_choices=2 - number % 2)
        for number in range(4)
    ]
    async with supervising(home, spare_worker=True) as supervisor:
        undisturbed = [
            told(one, of.num_choices)
            for of, one in zip(
                asked,
                await asyncio.gather(*(answer(supervisor.submit(one)) for one in asked)),
                strict=True,
            )
        ]
        generations = [supervisor.submit(again(one)) for one in asked]
        first = asyncio.create_task(answer_with_kills(generations[0], [1]))
        others = await asyncio.gather(*map(answer, generations[1:]))
        killed, num_kills = await first
        assert num_kills == 1
        ends = zip(asked, [killed, *others], strict=True)
        assert [told(one, of.num_choices) for of, one in ends] == undisturbed
