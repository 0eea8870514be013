"""A short prompt does not wait for a long one, and taking turns computes nothing twice."""

import asyncio
import random
from collections.abc import AsyncGenerator

import psutil
import pytest
import pytest_asyncio

from runtime.config.settings import ModelSettings
from runtime.supervisor.generation import Generation
from runtime.supervisor.supervisor import Supervisor
from runtime.types import CacheParams, Chunk, PrefillProgress, TokenPrompt
from tests.asking import Answer, answer, ask, request, supervising, worker_of
from tests.tiny_models import write_model

pytestmark = pytest.mark.asyncio(loop_scope="module")

OFF = CacheParams(mode="off")


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=("qwen3", "qwen3_5"))
async def supervisor(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncGenerator[Supervisor]:
    home = tmp_path_factory.mktemp(request.param)
    write_model(home / "models" / "m", request.param, max_position_embeddings=100_000)
    models = {"m": ModelSettings(context=100_000)}
    async with supervising(home, models=models, prefill_slice=256) as one:
        await ask(one, "Wake up.", max_tokens=1)
        yield one


def new_ids(seed: int, number: int) -> tuple[int, ...]:
    dice = random.Random(seed)
    return tuple(dice.randrange(10, 400) for _ in range(number))


async def said_together(supervisor: Supervisor, *prompts: tuple[int, ...]) -> list[Answer]:
    """Answers to prompts that the worker hears of at once, in their order."""
    worker = psutil.Process(worker_of(supervisor).pid)
    worker.suspend()
    asked = [request(TokenPrompt(token_ids=ids), max_tokens=4, ignore_eos=True) for ids in prompts]
    generations = [supervisor.submit(one) for one in asked]
    worker.resume()
    said = await asyncio.gather(*(answer(one) for one in generations))
    ends = [one.finished_ns or 0 for one in generations]
    assert sorted(ends) == [ends[number] for number in by_length(prompts)]
    return said


def by_length(prompts: tuple[tuple[int, ...], ...]) -> list[int]:
    return sorted(range(len(prompts)), key=lambda number: len(prompts[number]))


async def alone(supervisor: Supervisor, ids: tuple[int, ...]) -> str:
    prompt = TokenPrompt(token_ids=ids)
    return (await ask(supervisor, prompt, max_tokens=4, ignore_eos=True, cache=OFF)).text


async def test_prompts_of_all_lengths_end_in_the_order_of_their_lengths(supervisor: Supervisor):
    prompts = tuple(new_ids(seed, number) for seed, number in enumerate((5000, 1700, 300, 900)))
    said = await said_together(supervisor, *prompts)
    for ids, one in zip(prompts, said, strict=True):
        assert one.finished.usage.num_cached_tokens == 0
        assert one.text == await alone(supervisor, ids)


async def test_what_prompts_share_is_computed_once_though_they_overtake_one_another(
    supervisor: Supervisor,
):
    shared = new_ids(10, 2048)
    prompts = (
        (*shared, *new_ids(11, 2400)),
        (*shared, *new_ids(12, 900)),
        (*shared, *new_ids(13, 300)),
        new_ids(14, 1200),
    )
    said = await said_together(supervisor, *prompts)
    usages = [one.finished.usage for one in said]
    num_computed = sum(one.num_prompt_tokens - one.num_cached_tokens for one in usages)
    num_distinct = len(shared) + 2400 + 900 + 300 + 1200
    assert num_computed <= 1.02 * num_distinct
    for ids, one in zip(prompts, said, strict=True):
        assert one.text == await alone(supervisor, ids)


async def test_a_begun_prompt_that_others_passed_knows_what_they_computed_of_it(
    supervisor: Supervisor,
):
    """It lacks less than a longer one that shares as much, and so ends before that."""
    # Their lengths are far apart, as some of one is computed until the next one arrives.
    shared = new_ids(20, 2048)
    prompts = tuple((*shared, *new_ids(21 + n, own)) for n, own in enumerate((6500, 3000, 100)))
    generations: list[Generation] = []
    heard: list[list[Chunk]] = []
    for ids in prompts:  # each lacks less than those that are begun before it, and passes them
        one = request(TokenPrompt(token_ids=ids), max_tokens=1, ignore_eos=True)
        generations.append(supervisor.submit(one))
        await generations[-1].accepted()
        heard.append(await generations[-1].next_chunks() or [])
    # The last one may find all that is shared, and has one slice to compute then.
    assert all(isinstance(one[0], PrefillProgress) for one in heard[:-1])
    await asyncio.gather(*map(answer, generations, heard))
    longest, long, short = (one.finished_ns or 0 for one in generations)
    assert short < long < longest
