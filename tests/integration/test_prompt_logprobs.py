"""How likely a prompt's own tokens are: against a plain forward pass, whoever else is served."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
import pytest_asyncio
from mlx_lm.utils import load_model
from tokenizers import Tokenizer

from runtime.config.settings import ModelSettings
from runtime.supervisor.supervisor import Supervisor
from runtime.types import (
    CacheParams,
    PrefillProgress,
    Prompt,
    PromptLogprobs,
    SamplingParams,
    TextPrompt,
    TokenPrompt,
)
from tests.asking import Answer, answer, ask, first_chunks, request, supervising
from tests.tiny_models import write_model

pytestmark = pytest.mark.asyncio(loop_scope="module")

NUM_TOP = 3
SLICE = 64
SCORED: dict[str, Any] = {"scores_prompt": True, "top_logprobs": NUM_TOP, "ignore_eos": True}
LONG = tuple((7 * i * i + 11 * i) % 380 + 20 for i in range(600))

Forward = Callable[[tuple[int, ...]], mx.array]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("home")
    write_model(home / "models" / "m", max_position_embeddings=100_000)
    return home


@pytest.fixture(scope="module")
def tokenizer(home: Path) -> Tokenizer:
    return Tokenizer.from_file(str(home / "models" / "m" / "tokenizer.json"))


@pytest.fixture(scope="module")
def forward(home: Path) -> Forward:
    """The log probabilities `[tokens, vocab]` that the model itself gives, in one pass."""
    model, _ = load_model(home / "models" / "m")

    def logprobs(token_ids: tuple[int, ...]) -> mx.array:
        logits = model(mx.array(token_ids)[None])[0].astype(mx.float32)
        return logits - mx.logsumexp(logits, axis=-1, keepdims=True)

    return logprobs


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def supervisor(home: Path) -> AsyncGenerator[Supervisor]:
    models = {"m": ModelSettings(context=100_000)}
    async with supervising(home, models=models, prefill_slice=SLICE) as supervisor:
        yield supervisor


def slices(said: Answer) -> list[PromptLogprobs]:
    return [chunk for chunk in said.chunks if isinstance(chunk, PromptLogprobs)]


def check_exact(said: Answer, token_ids: tuple[int, ...], forward: Forward) -> None:
    """Every token of the prompt, and its alternatives, as the forward pass has them."""
    expected = forward(token_ids)
    first, *rest = said.scores
    assert first is None
    assert len(rest) == len(token_ids) - 1
    for place, one in enumerate(rest):
        assert one is not None
        row = expected[place]
        assert one.chosen.logprob == pytest.approx(row[token_ids[place + 1]].item(), abs=1e-4)
        best = mx.sort(row)[-NUM_TOP:].tolist()
        assert [other.logprob for other in reversed(one.top)] == pytest.approx(best, abs=1e-4)


@pytest.mark.parametrize("num_tokens", [1, 2, SLICE, SLICE + 2, len(LONG)])
async def test_a_prompts_tokens_are_as_likely_as_the_model_says(
    supervisor: Supervisor, forward: Forward, num_tokens: int
):
    token_ids = LONG[:num_tokens]
    said = await ask(supervisor, TokenPrompt(token_ids=token_ids), max_tokens=1, **SCORED)
    check_exact(said, token_ids, forward)
    # The token that follows comes of the same distribution that scores prompts.
    (drawn,) = said.logprobs
    assert drawn.chosen.logprob == pytest.approx(forward(token_ids)[-1].max().item(), abs=1e-4)
    told = sum(isinstance(chunk, PrefillProgress) for chunk in said.chunks)
    assert len(slices(said)) == told + 1 == max(1, -(-(num_tokens - 1) // SLICE))


async def test_a_text_comes_back_to_the_letter_and_says_where_each_token_begins(
    supervisor: Supervisor, tokenizer: Tokenizer, forward: Forward
):
    text = "the quick brown 狐 hums, naïvely 😀"
    said = await ask(supervisor, text, max_tokens=2, **SCORED)
    ids = tuple(tokenizer.encode(text).ids)
    check_exact(said, ids, forward)
    (told,) = slices(said)
    assert told.text == text
    assert list(told.offsets) == sorted(told.offsets)
    whole = [one for one in zip(told.tokens, told.offsets, strict=True) if "\ufffd" not in one[0]]
    assert len(ids) > len(whole) > 5  # some tokens are parts of characters
    assert all(text.startswith(token, at) for token, at in whole)


async def test_nothing_need_be_said_after_a_prompt(supervisor: Supervisor, forward: Forward):
    token_ids = LONG[100:180]
    said = await ask(supervisor, TokenPrompt(token_ids=token_ids), max_tokens=0, **SCORED)
    check_exact(said, token_ids, forward)
    assert (said.text, said.finished.reason) == ("", "length")
    usage = said.finished.usage
    assert (usage.num_prompt_tokens, usage.num_output_tokens) == (len(token_ids), 0)


async def test_a_prompt_is_scored_once_for_all_choices(supervisor: Supervisor, forward: Forward):
    token_ids = LONG[200:300]
    lively = SamplingParams(temperature=1.0, seed=3)
    how = SCORED | {"sampling": lively, "max_tokens": 4, "num_choices": 3}
    said = await ask(supervisor, TokenPrompt(token_ids=token_ids), **how)
    check_exact(said, token_ids, forward)
    assert len({said.choice(index).text for index in range(3)}) == 3


async def test_sampling_does_not_change_what_a_prompt_is_worth(
    supervisor: Supervisor, forward: Forward
):
    token_ids = LONG[300:340]
    bias = ((token_ids[1], 50.0), (token_ids[2], -50.0))
    sampling = SamplingParams(temperature=0.3, top_k=2, repetition_penalty=2.0, logit_bias=bias)
    how = SCORED | {"sampling": sampling, "max_tokens": 2}
    check_exact(await ask(supervisor, TokenPrompt(token_ids=token_ids), **how), token_ids, forward)


async def test_a_known_prompt_is_computed_anew_and_its_kv_serves_who_comes_next(
    supervisor: Supervisor, forward: Forward
):
    prompt = TokenPrompt(token_ids=LONG[40:240])
    longer = TokenPrompt(token_ids=(*prompt.token_ids, *LONG[:30]))
    how: dict[str, Any] = {"max_tokens": 4, "ignore_eos": True, "top_logprobs": 0}
    alone = await ask(supervisor, longer, cache=CacheParams(mode="off"), **how)
    for _ in range(2):
        said = await ask(supervisor, prompt, max_tokens=0, **SCORED)
        check_exact(said, prompt.token_ids, forward)
        use = said.finished.usage.cache
        assert (use.num_tokens, use.tier, use.reason) == (0, "none", "scored")
    after = await ask(supervisor, longer, **how)
    assert after.finished.usage.num_cached_tokens == len(prompt.token_ids) - 1
    assert [one.chosen.logprob for one in after.logprobs] == pytest.approx(
        [one.chosen.logprob for one in alone.logprobs], abs=1e-4
    )


async def test_together_each_prompt_is_worth_what_it_is_alone(
    supervisor: Supervisor, forward: Forward
):
    alone = await ask(supervisor, "the lazy dog", max_tokens=60, ignore_eos=True)
    running = supervisor.submit(request("a kettle hums", max_tokens=50_000, ignore_eos=True))
    await first_chunks(running)
    prompts: list[Prompt] = [TokenPrompt(token_ids=LONG[i : i + 150 + i]) for i in (0, 90, 250)]
    waiting = [ask(supervisor, prompt, max_tokens=1, **SCORED) for prompt in prompts]
    beside = ask(supervisor, TextPrompt(text="the lazy dog"), max_tokens=60, ignore_eos=True)
    *scored, said = await asyncio.gather(*waiting, beside)
    assert not running.is_finished
    chunks = await running.next_chunks()
    running.abort()
    assert chunks  # it went on in between
    assert said.text == alone.text
    for prompt, one in zip(prompts, scored, strict=True):
        assert isinstance(prompt, TokenPrompt)
        check_exact(one, prompt.token_ids, forward)


async def test_who_leaves_while_a_prompt_is_scored_leaves_nothing_behind(
    supervisor: Supervisor, forward: Forward
):
    long = TokenPrompt(token_ids=LONG * 20)
    leaving = supervisor.submit(request(long, max_tokens=0, **SCORED))
    chunks = await first_chunks(leaving)
    assert not leaving.is_finished
    assert any(isinstance(chunk, PromptLogprobs) for chunk in chunks)
    leaving.abort()
    prompt = TokenPrompt(token_ids=LONG[:90])
    said = await answer(supervisor.submit(request(prompt, max_tokens=0, **SCORED)))
    check_exact(said, prompt.token_ids, forward)
