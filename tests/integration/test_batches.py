"""Requests that share a batch: each gets exactly what it gets alone, in every kind of model."""

import asyncio
from collections.abc import AsyncGenerator
from typing import NamedTuple

import pytest
import pytest_asyncio

from runtime.config.settings import ModelSettings
from runtime.errors import Aborted
from runtime.supervisor.generation import Generation
from runtime.supervisor.supervisor import Supervisor
from runtime.types import (
    GenerateRequest,
    PrefillProgress,
    SamplingParams,
    TextPrompt,
    TokenPrompt,
)
from tests.asking import (
    GREEDY,
    PATIENCE_S,
    Answer,
    answer,
    ask,
    ask_for_a_while,
    first_chunks,
    request,
    status_of,
    supervising,
    worker_of,
)
from tests.tiny_models import write_model
from tests.waiting import until

pytestmark = pytest.mark.asyncio(loop_scope="module")

FAMILIES = ("qwen3", "gemma3_text", "lfm2", "qwen3_moe", "llama4")
LONG = TokenPrompt(token_ids=tuple(9 + i % 400 for i in range(60_000)))


class Served(NamedTuple):
    family: str
    supervisor: Supervisor


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=FAMILIES)
async def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncGenerator[Served]:
    home = tmp_path_factory.mktemp(request.param)
    write_model(home / "models" / "m", request.param, max_position_embeddings=100_000)
    models = {"m": ModelSettings(context=100_000)}
    async with supervising(home, models=models, prefill_slice=32) as supervisor:
        yield Served(request.param, supervisor)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def narrow(tmp_path_factory: pytest.TempPathFactory) -> AsyncGenerator[Supervisor]:
    """Room for one sequence and a very long context; loaded, for deadlines count that as well."""
    home = tmp_path_factory.mktemp("narrow")
    write_model(home / "models" / "m", max_position_embeddings=100_000)
    models = {"m": ModelSettings(context=100_000)}
    async with supervising(home, models=models, max_batch=1, prefill_slice=32) as supervisor:
        await ask(supervisor, "a", max_tokens=1)
        yield supervisor


def different_requests() -> list[GenerateRequest]:
    """Short and long prompts, every sampling parameter, stops, choices."""
    samplings = [
        GREEDY,
        SamplingParams(temperature=0.8, top_p=0.9, seed=5),
        SamplingParams(temperature=1.2, top_k=20, min_p=0.02, seed=6, frequency_penalty=0.5),
        SamplingParams(temperature=0.0, repetition_penalty=1.3, presence_penalty=0.7),
        SamplingParams(temperature=0.7, seed=7, logit_bias=((20, 3.0), (30, -5.0))),
    ]
    prompts = [
        TextPrompt(text="the quick brown fox"),
        TokenPrompt(token_ids=tuple(range(10, 180))),
        TokenPrompt(token_ids=(42,)),
        TextPrompt(text="a kettle hums on the hearth while rain falls"),
        TokenPrompt(token_ids=tuple(range(300, 200, -1))),
    ]
    return [
        request(
            prompt,
            sampling=sampling,
            max_tokens=30 + 4 * i,
            ignore_eos=True,
            top_logprobs=2,
            num_choices=2 if i == 1 else 1,
        )
        for i, (prompt, sampling) in enumerate(zip(prompts, samplings, strict=True))
    ]


def tokens_of(said: Answer) -> list[bytes]:
    return [one.chosen.token_bytes for one in said.logprobs]


def logprobs_of(said: Answer) -> list[float]:
    return [one.chosen.logprob for one in said.logprobs]


async def test_together_each_gets_what_it_gets_alone(served: Served):
    alone = [await answer(served.supervisor.submit(one)) for one in different_requests()]
    generations = [served.supervisor.submit(one) for one in different_requests()]
    together = await asyncio.gather(*(answer(generation) for generation in generations))
    assert len({said.text for said in alone}) == len(alone)
    for lonely, said in zip(alone, together, strict=True):
        for index in (0, 1):
            assert tokens_of(said.choice(index)) == tokens_of(lonely.choice(index))
            assert said.choice(index).text == lonely.choice(index).text
            assert logprobs_of(said.choice(index)) == pytest.approx(
                logprobs_of(lonely.choice(index)), abs=1e-3
            )


async def test_a_running_request_is_not_changed_by_who_joins_and_leaves(served: Served):
    alone = await ask(served.supervisor, "the lazy dog", max_tokens=150, ignore_eos=True)
    expected = alone.text.rstrip("\ufffd")  # the last character may be cut off
    running = served.supervisor.submit(request("the lazy dog", max_tokens=90_000, ignore_eos=True))
    chunks = await first_chunks(running)
    guests = [await answer(served.supervisor.submit(one)) for one in different_requests()[:3]]
    quitter = served.supervisor.submit(request("a kettle", max_tokens=90_000, ignore_eos=True))
    await first_chunks(quitter)
    quitter.abort()
    assert not running.is_finished
    while len(said := Answer(tuple(chunks)).text) < len(expected):
        chunks += await running.next_chunks(PATIENCE_S) or []
    running.abort()
    assert said.startswith(expected)
    again = [await answer(served.supervisor.submit(one)) for one in different_requests()[:3]]
    assert [tokens_of(guest) for guest in guests] == [tokens_of(one) for one in again]


async def settled(supervisor: Supervisor) -> None:
    """Wait until a heartbeat says that the worker has nothing to do."""
    watchdog = worker_of(supervisor).watchdog
    before = watchdog.last
    await until(lambda: watchdog.last is not before, "a heartbeat")
    await until(lambda: watchdog.last is not None and not watchdog.last.is_busy, "an idle worker")


async def expect_aborted(generation: Generation) -> None:
    with pytest.raises(Aborted):
        await generation.accepted()


async def test_an_abort_while_decoding_lets_the_next_one_in(narrow: Supervisor):
    running = narrow.submit(request("a", max_tokens=90_000, ignore_eos=True))
    waiting = narrow.submit(request("the quick", max_tokens=5))
    await first_chunks(running)
    assert not waiting.is_finished
    running.abort()
    running.abort()
    assert (await answer(waiting)).finished.usage.num_output_tokens == 5
    await settled(narrow)
    assert status_of(narrow).num_running == 0


async def test_an_abort_while_prefilling_lets_the_next_one_in(narrow: Supervisor):
    running = narrow.submit(request(LONG, max_tokens=5))
    chunks = await first_chunks(running)
    assert all(isinstance(chunk, PrefillProgress) for chunk in chunks)
    waiting = narrow.submit(request(LONG, max_tokens=5))
    await waiting.accepted()
    running.abort()
    chunks = await first_chunks(waiting)
    assert isinstance(chunks[0], PrefillProgress)
    waiting.abort()
    await settled(narrow)


async def test_an_abort_before_prefill_leaves_the_others_alone(narrow: Supervisor):
    running = narrow.submit(request("a", max_tokens=500, ignore_eos=True))
    queued = narrow.submit(request("a", max_tokens=90_000, ignore_eos=True))
    last = narrow.submit(request("a", max_tokens=5, ignore_eos=True))
    queued.abort()
    await expect_aborted(queued)
    assert (await answer(running)).finished.usage.num_output_tokens == 500
    assert (await answer(last)).finished.usage.num_output_tokens == 5
    await settled(narrow)


async def test_all_choices_of_an_aborted_request_leave(served: Served):
    running = served.supervisor.submit(
        request("a", max_tokens=90_000, ignore_eos=True, num_choices=3)
    )
    await first_chunks(running)
    running.abort()
    await settled(served.supervisor)
    assert (await ask(served.supervisor, "a", max_tokens=3)).finished


async def test_a_request_wider_than_the_batch_is_served(narrow: Supervisor):
    said = await ask(narrow, "a", num_choices=3, max_tokens=4, ignore_eos=True)
    assert [said.choice(i).finished.usage.num_output_tokens for i in range(3)] == [4, 4, 4]


async def test_the_deadline_ends_decoding(narrow: Supervisor):
    said = await ask_for_a_while(narrow, "a", max_tokens=90_000, ignore_eos=True)
    assert said.finished.reason == "length"
    assert 0 < said.finished.usage.num_output_tokens < 90_000
    assert said.text
    await settled(narrow)


async def test_the_deadline_ends_prefilling_and_waiting(narrow: Supervisor):
    running = narrow.submit(request(LONG, deadline_s=0.6))
    waiting = narrow.submit(request(LONG, deadline_s=0.3))
    for said in (await answer(running), await answer(waiting)):
        assert said.finished.reason == "length"
        assert said.finished.usage.num_output_tokens == 0
    await settled(narrow)


async def test_sequences_of_very_different_length_run_together(narrow: Supervisor):
    async with asyncio.timeout(PATIENCE_S):
        said = await ask(narrow, TokenPrompt(token_ids=LONG.token_ids[:5000]), max_tokens=5)
    assert said.finished.usage.num_prompt_tokens == 5000
