"""What requests reuse of each other while their worker lives, in every kind of model.

In Python's development mode workers recount their tiers whenever they fall idle, and die of what is
wrong; the fixtures see to it that the first one of each is the last.
"""

import asyncio
import random
from collections.abc import AsyncGenerator, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import pytest_asyncio
from tokenizers import Tokenizer

from runtime.supervisor.generation import Generation
from runtime.supervisor.supervisor import Supervisor
from runtime.types import (
    CacheParams,
    CacheUse,
    ChatPrompt,
    Chunk,
    Message,
    PrefillProgress,
    Prompt,
    SamplingParams,
    TokenPrompt,
)
from runtime.wire import KvCounts
from runtime.worker.output.detokenizer import token_bytes
from tests.asking import (
    Answer,
    answer,
    ask,
    ask_for_a_while,
    first_chunks,
    request,
    script,
    supervising,
    worker_of,
)
from tests.tiny_models import write_model
from tests.waiting import until

pytestmark = pytest.mark.asyncio(loop_scope="module")

KV_START = 48
QUANTISED = "qwen3 quantised from 48"
"""A dense model of which conversations of 48 tokens are quantised, in the midst of these tests'."""
FAMILIES = ("qwen3", "gemma3_text", "qwen3_5", "llama4", QUANTISED)
OFF = CacheParams(mode="off")
PREFIX = CacheParams(mode="prefix")
OPENING_TOKENS = 8
"""What all chats begin with: `<|im_start|>system` and a line's end."""
BLOCK = 16
SLICE = 32
NOT_WORTH_A_COPY = 511
"""Tokens that others have computed and that are computed once more."""
TOKEN_BYTES = 2 * 2 * 2 * 16 * 4
"""KV of one token in the dense model: two layers, keys and values, two heads of 16 floats."""


class Served(NamedTuple):
    supervisor: Supervisor
    tokenizer: Tokenizer
    needs_state: bool
    kv_start: int = 0


def new_ids(seed: int, num_tokens: int) -> list[int]:
    """Random tokens that no other seed begins with."""
    return [10 + seed, *random.Random(seed).choices(range(10, 400), k=num_tokens - 1)]


def tokens(ids: Sequence[int]) -> TokenPrompt:
    return TokenPrompt(token_ids=tuple(ids))


async def say(
    served: Served, prompt: Sequence[int] | Prompt, num_tokens: int = 8, **fields: Any
) -> Answer:
    """The answer of so many tokens."""
    chosen = tokens(prompt) if isinstance(prompt, list) else prompt
    assert not isinstance(chosen, Sequence)
    how: dict[str, Any] = {"max_tokens": num_tokens, "ignore_eos": True, "top_logprobs": 0} | fields
    return await ask(served.supervisor, chosen, **how)


def use_of(said: Answer) -> CacheUse:
    return said.finished.usage.cache


def reused(said: Answer) -> tuple[int, str | None, int]:
    use = use_of(said)
    assert use.tier == ("hot" if use.num_tokens else "none")
    return use.num_tokens, use.reason, use.at


def spoken(served: Served, said: Answer) -> list[int]:
    """The token ids of an answer."""
    tokenizer = served.tokenizer
    ids = {
        token_bytes(tokenizer.id_to_token(i) or "", is_byte_level=True): i
        for i in range(tokenizer.get_vocab_size())
    }
    return [ids[one.chosen.token_bytes] for one in said.logprobs]


async def counts(served: Served) -> KvCounts:
    """The tiers as the next heartbeat of an idle worker counts them."""
    watchdog = worker_of(served.supervisor).watchdog
    before = watchdog.last
    await until(lambda: watchdog.last is not before and not is_busy(served), "an idle worker")
    assert watchdog.last is not None
    assert watchdog.last.kv is not None
    return watchdog.last.kv


def is_busy(served: Served) -> bool:
    last = worker_of(served.supervisor).watchdog.last
    return last is None or last.is_busy


async def serving(folder: Path, family: str, **settings: object) -> AsyncGenerator[Served]:
    shape, name = {}, family
    if family == QUANTISED:
        shape, name = {"head_dim": 64}, "qwen3"
        settings |= {"kv_bits": 8, "quantized_kv_start": KV_START}
    path = write_model(folder / "models" / "m", name, **shape)
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    fields: dict[str, Any] = {"block_size": BLOCK, "prefill_slice": SLICE} | settings
    async with supervising(folder, **fields) as supervisor:
        start = KV_START if family == QUANTISED else 0
        served = Served(supervisor, tokenizer, name != "qwen3", start)
        await say(served, [9])
        pid = worker_of(supervisor).pid
        yield served
        await counts(served)
        assert worker_of(supervisor).pid == pid, "the worker died"
        assert "Traceback" not in worker_of(supervisor).stderr_tail


@pytest.fixture(scope="module", autouse=True)
def checks() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONDEVMODE", "1")
        yield


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=FAMILIES)
async def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncGenerator[Served]:
    async for one in serving(tmp_path_factory.mktemp(request.param), request.param):
        yield one


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def dense(tmp_path_factory: pytest.TempPathFactory) -> AsyncGenerator[Served]:
    async for one in serving(tmp_path_factory.mktemp("dense"), "qwen3"):
        yield one


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def small(tmp_path_factory: pytest.TempPathFactory) -> AsyncGenerator[Served]:
    """Room for 400 tokens in memory."""
    folder = tmp_path_factory.mktemp("small")
    async for one in serving(folder, "qwen3", hot_bytes=400 * TOKEN_BYTES):
        yield one


async def test_each_turn_computes_only_what_is_new_and_says_the_same_as_without(served: Served):
    said_before: list[int] = []
    known = 0
    for turn in range(4):
        prompt = [*said_before, *new_ids(1 if not turn else 390 - turn, 37 + 20 * turn)]
        said = await say(served, prompt, 9)
        assert reused(said) == (known, "first_seen", known)
        alone = await say(served, prompt, 9, cache=OFF)
        assert reused(alone) == (0, "off", 0)
        assert (said.text, spoken(served, said)) == (alone.text, spoken(served, alone))
        said_before = [*prompt, *spoken(served, said)]
        known = len(said_before)


async def test_a_retry_computes_only_the_last_token(served: Served):
    first = await say(served, new_ids(2, 100))
    again = await say(served, new_ids(2, 100))
    assert reused(first) == (0, "first_seen", 0)
    assert reused(again) == (99, None, 99)
    assert not any(isinstance(chunk, PrefillProgress) for chunk in again.chunks)
    assert again.text == first.text


async def test_the_beginning_of_a_known_prompt_can_be_retried_too(served: Served):
    await say(served, new_ids(3, 100))
    first = await say(served, new_ids(3, 70))
    again = await say(served, new_ids(3, 70))
    assert reused(first) == ((0, "no_checkpoint", 0) if served.needs_state else (69, None, 69))
    assert reused(again) == (69, None, 69)
    longer = await say(served, [*new_ids(3, 70), *new_ids(300, 30)])
    assert use_of(longer).num_tokens == (69 if served.needs_state else 70)
    assert again.text == first.text == (await say(served, new_ids(3, 70), cache=OFF)).text


async def test_an_edit_reuses_what_is_before_it_where_the_layers_can_be_cut(served: Served):
    prompt = new_ids(4, 120)
    await say(served, prompt)
    edited = [*prompt[:53], 409 - 5, *prompt[54:]]
    said = await say(served, edited)
    if served.needs_state:
        assert reused(said) == (0, "no_checkpoint", 0)
    else:
        assert reused(said) == (53, "diverged", 53)
    assert said.text == (await say(served, edited, cache=OFF)).text
    assert reused(await say(served, edited))[0] == 119


def chat(*texts: str, system: str = "the quick brown fox jumps over the lazy dog") -> ChatPrompt:
    roles = ("user", "assistant")
    spoken = [Message(role=roles[i % 2], text=text) for i, text in enumerate(texts)]
    return ChatPrompt(messages=(Message(role="system", text=system), *spoken))


def num_system_tokens(served: Served, system: str) -> int:
    return len(served.tokenizer.encode(f"<|im_start|>system\n{system}<|im_end|>\n").ids)


async def test_siblings_take_up_the_system_prompt(served: Served):
    system = "rain falls on the kettle while a fox answers " * 6
    first = await say(served, chat("let me see", system=system))
    second = await say(served, chat("a kettle hums", system=system))
    num_system = num_system_tokens(served, system)
    num_user = len(served.tokenizer.encode("<|im_start|>user\n").ids)
    assert reused(first)[0] <= OPENING_TOKENS
    assert reused(second)[0] == num_system + (0 if served.needs_state else num_user)
    assert second.text == (await say(served, chat("a kettle hums", system=system), cache=OFF)).text


async def test_siblings_at_the_same_moment_compute_the_system_prompt_once(served: Served):
    system = "def answer(question): return the naïve café " * 8
    prompts = [chat(text, system=system) for text in ("let me see", "a kettle hums", "42")]
    generations = [
        served.supervisor.submit(request(p, max_tokens=8, ignore_eos=True)) for p in prompts
    ]
    said = await asyncio.gather(*(answer(one) for one in generations))
    num_reused = sorted(use_of(one).num_tokens for one in said)
    num_system = num_system_tokens(served, system)
    assert sum(max(num_system - one, 0) for one in num_reused) <= num_system
    for prompt, one in zip(prompts, said, strict=True):
        assert one.text == (await say(served, prompt, cache=OFF)).text


async def test_choices_share_their_prompt_and_are_kept_each(served: Served):
    sampling = SamplingParams(temperature=0.9, seed=3)
    prompt = new_ids(5, 60)
    how: dict[str, Any] = {"sampling": sampling, "num_choices": 2}
    said = await say(served, prompt, **how)
    again = await say(served, prompt, **how)
    assert reused(again.choice(0)) == reused(again.choice(1)) == (59, None, 59)
    for index in (0, 1):
        one = said.choice(index)
        assert one.text == again.choice(index).text
        followed = [*prompt, *spoken(served, one), *new_ids(301, 9)]
        following = await say(served, followed)
        assert reused(following)[0] == 68
        assert following.text == (await say(served, followed, cache=OFF)).text


async def test_an_answer_that_ends_at_a_stop_string_is_gone_on_from(served: Served):
    ids = served.tokenizer.encode("let me see", add_special_tokens=False).ids
    prompt = new_ids(6, 50)
    how: dict[str, Any] = {"sampling": script([*ids, 300, 301]), "stop": ("me",)}
    said = await say(served, prompt, **how)
    assert (said.text, said.finished.reason) == ("let ", "stop")
    num_output = said.finished.usage.num_output_tokens
    followed = [*prompt, *ids[:num_output], *new_ids(302, 20)]
    following = await say(served, followed)
    assert reused(following) == (50 + num_output, "first_seen", 50 + num_output)
    assert following.text == (await say(served, followed, cache=OFF)).text


async def test_an_abort_while_decoding_keeps_the_prompt(served: Served):
    generation = served.supervisor.submit(
        request(tokens(new_ids(7, 80)), max_tokens=3000, ignore_eos=True)
    )
    chunks = await first_chunks(generation)
    while all(isinstance(chunk, PrefillProgress) for chunk in chunks):
        chunks = await generation.next_chunks() or []
    generation.abort()
    assert reused(await say(served, new_ids(7, 80))) == (79, None, 79)


async def begun(
    served: Served, prompt: Sequence[int], num_tokens: int = 1
) -> tuple[Generation, list[Chunk], int]:
    """A request of which so much of the prompt is computed, what was heard of it, and how many
    tokens that is at least: on a busy machine it may have ended by then.
    """
    generation = served.supervisor.submit(request(tokens(prompt), max_tokens=2, ignore_eos=True))
    heard: list[Chunk] = []
    num_done = 0
    while num_done < num_tokens:
        heard += await first_chunks(generation)
        last = heard[-1]
        num_done = last.num_done if isinstance(last, PrefillProgress) else len(prompt) - 1
    return generation, heard, num_done


async def test_prefill_that_nobody_waits_for_any_more_is_gone_on_from(served: Served):
    prompt = new_ids(80, 900)
    generation, _, num_done = await begun(served, prompt)
    generation.abort()
    use = use_of(await say(served, prompt, 1))
    assert use.num_tokens >= num_done - num_done % BLOCK > 0


@pytest.mark.parametrize(("seed", "num_begun"), [(120, 1), (123, 250), (126, 1200)])
async def test_what_is_computed_for_others_meanwhile_is_not_computed_again(
    served: Served, seed: int, num_begun: int
):
    shared = new_ids(seed, 3000)
    before = (await counts(served)).num_computed_tokens
    first, heard, num_done = await begun(served, [*shared, *new_ids(seed + 1, 600)], num_begun)
    urgent = await say(served, [*shared, *new_ids(seed + 2, 600)], 1, priority="interactive")
    # Where it cannot be cut, what is computed beyond the shared part shows a checkpoint before.
    num_had, most = use_of(urgent).num_tokens, 2048 if served.needs_state else 3000
    assert num_had >= min(num_done - num_done % BLOCK, most - most % BLOCK)
    slow = await answer(first, heard)
    num_reused = use_of(slow).num_tokens + num_had
    num_computed = (await counts(served)).num_computed_tokens - before
    num_slices = -(-(3600 - num_had) // SLICE)
    in_turn = (num_slices // 8 + 1) * SLICE  # of nine slices one is for whom the others pass
    left = (3000 - num_had) % 2048 if served.needs_state else NOT_WORTH_A_COPY
    assert num_computed <= 3000 + 2 * 600 + in_turn + left
    assert num_reused + num_computed == pytest.approx(2 * 3600, abs=8)


async def test_an_answer_cut_off_by_its_deadline_is_gone_on_from(served: Served):
    prompt = new_ids(8, 40)
    how: dict[str, Any] = {"max_tokens": 4000, "ignore_eos": True, "top_logprobs": 0}
    said = await ask_for_a_while(served.supervisor, tokens(prompt), **how)
    assert said.finished.reason == "length"
    whole = [*prompt, *spoken(served, said)]
    assert 40 < len(whole) == 40 + said.finished.usage.num_output_tokens
    assert reused(await say(served, [*whole, 11, 12])) == (len(whole), "first_seen", len(whole))


async def test_different_conversations_at_once_do_not_mix(served: Served):
    async def converse(seed: int) -> None:
        prompt = new_ids(seed, 30 + seed)
        for _ in range(3):
            said = await say(served, prompt, 6)
            alone = await say(served, prompt, 6, cache=OFF)
            assert spoken(served, said) == spoken(served, alone)
            known = use_of(said).num_tokens
            assert known == (0 if len(prompt) == 30 + seed else len(prompt) - 21)
            prompt = [*prompt, *spoken(served, said), *new_ids(seed, 21)]

    await asyncio.gather(*(converse(seed) for seed in range(20, 25)))


async def test_prefix_mode_keeps_the_system_prompt_only(served: Served):
    system = "the lazy dog answers while rain falls on the hearth and a kettle hums " * 3
    num_system = num_system_tokens(served, system)
    first = await say(served, chat("let me see", system=system), cache=PREFIX)
    again = await say(served, chat("let me see", system=system), cache=PREFIX)
    full = await say(served, chat("let me see", system=system))
    assert reused(first)[0] <= OPENING_TOKENS
    assert reused(again)[0] == reused(full)[0] == num_system
    assert first.text == again.text == full.text
    assert reused(await say(served, chat("let me see", system=system)))[1] is None


async def test_off_neither_reads_nor_keeps(served: Served):
    await say(served, new_ids(9, 60), cache=OFF)
    assert reused(await say(served, new_ids(9, 60))) == (0, "first_seen", 0)
    assert reused(await say(served, new_ids(9, 60), cache=OFF)) == (0, "off", 0)


async def test_a_common_prefix_is_held_and_computed_once(dense: Served):
    before = await counts(dense)
    shared = new_ids(30, 400)
    for number in range(3):
        await say(dense, [*shared, *new_ids(310 + number, 20)], 1)
    after = await counts(dense)
    assert after.hot_bytes - before.hot_bytes == (400 + 3 * 21) * TOKEN_BYTES
    assert after.num_reused_tokens - before.num_reused_tokens == 2 * 400
    assert after.num_computed_tokens - before.num_computed_tokens == 419 + 2 * 19
    assert after.num_pieces > before.num_pieces
    await say(dense, [*shared, *new_ids(310, 20)], 1)
    again = await counts(dense)
    assert again.hot_bytes == after.hot_bytes
    never = (again.exact_key_rejected_by_model_lcp, again.vlm_retreat)
    assert never == (0, 0)


async def test_what_does_not_fit_is_evicted_and_computed_again(small: Served):
    prompts = [new_ids(seed, 150) for seed in range(40, 46)]
    first = [await say(small, prompt) for prompt in prompts]
    assert [reused(one)[0] for one in first] == [0] * 6
    held = await counts(small)
    assert held.num_evicted >= 4
    assert held.hot_bytes <= 400 * TOKEN_BYTES
    again = [await say(small, prompt) for prompt in prompts]
    assert [one.text for one in again] == [one.text for one in first]
    reasons = {(use_of(one).num_tokens == 149, use_of(one).reason) for one in again}
    assert reasons <= {(True, None), (False, "evicted")}
    assert sum(use_of(one).reason == "evicted" for one in again) >= 3
    assert reused(await say(small, prompts[-1])) == (149, None, 149)


async def test_a_prompt_larger_than_the_memory_for_kv_is_answered(small: Served):
    prompt = new_ids(50, 1500)
    first = await say(small, prompt)
    assert first.text == (await say(small, prompt, cache=OFF)).text
    assert (await say(small, prompt)).text == first.text
    assert (await counts(small)).hot_bytes <= 1600 * TOKEN_BYTES
