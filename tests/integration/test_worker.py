"""What a real worker answers: text, stops, limits, log probabilities, reasoning, tool calls."""

from collections.abc import AsyncGenerator
from contextlib import suppress
from math import exp
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from tokenizers import Tokenizer

from runtime.config.settings import ModelSettings
from runtime.errors import ContextTooLong, InvalidRequest
from runtime.supervisor.supervisor import Supervisor
from runtime.types import (
    CacheParams,
    ChatPrompt,
    Message,
    PrefillProgress,
    Prompt,
    SamplingParams,
    TextPrompt,
    Thinking,
    TokenPrompt,
    Tool,
)
from runtime.worker.output.detokenizer import token_bytes
from tests.asking import GREEDY, answer, ask, request, script, supervising, worker_of
from tests.tiny_models import TOOL_CALL, write_model

pytestmark = pytest.mark.asyncio(loop_scope="module")

CONTEXT = 512
EOS = "<|im_end|>"
SEEDED = SamplingParams(temperature=0.9, top_p=0.95, seed=11)
HELLO = (Message(role="user", text="the quick brown fox"),)
LOOK = Tool(name="look", parameters='{"type": "object"}')


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("home")
    write_model(home / "models" / "m")
    return home


@pytest.fixture(scope="module")
def tokenizer(home: Path) -> Tokenizer:
    return Tokenizer.from_file(str(home / "models" / "m" / "tokenizer.json"))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def supervisor(home: Path) -> AsyncGenerator[Supervisor]:
    models = {"m": ModelSettings(context=CONTEXT)}
    async with supervising(home, models=models, prefill_slice=64) as supervisor:
        yield supervisor


def saying(tokenizer: Tokenizer, text: str) -> SamplingParams:
    return script(tokenizer.encode(text, add_special_tokens=False).ids)


def piece_bytes(tokenizer: Tokenizer, token_id: int) -> bytes:
    return token_bytes(tokenizer.id_to_token(token_id) or "", is_byte_level=True)


async def test_the_same_request_gives_the_same_answer_again(supervisor: Supervisor):
    first = await ask(supervisor, "the quick brown", max_tokens=30)
    again = await ask(supervisor, "the quick brown", max_tokens=30)
    other = await ask(supervisor, "a kettle hums", max_tokens=30)
    assert first.text == again.text != other.text
    assert len(first.pieces) > 5


async def test_usage_counts_the_tokens_of_prompt_and_answer(
    supervisor: Supervisor, tokenizer: Tokenizer
):
    said = await ask(supervisor, "the quick brown", max_tokens=7, ignore_eos=True)
    assert said.finished.reason == "length"
    assert said.finished.usage.num_prompt_tokens == len(tokenizer.encode("the quick brown").ids)
    assert said.finished.usage.num_output_tokens == 7
    assert said.finished.usage.num_cached_tokens < said.finished.usage.num_prompt_tokens
    assert said.finished.usage.prefill_ms > 0
    assert said.finished.usage.decode_ms > 0


async def test_counting_says_what_a_request_would_cost_and_computes_nothing(
    supervisor: Supervisor,
):
    prompt = TokenPrompt(token_ids=(61, 62, 63, 64, 65))
    counted = await ask(supervisor, prompt, work="count")
    said = await ask(supervisor, prompt, max_tokens=1)
    usage = counted.finished.usage
    assert usage.num_prompt_tokens == said.finished.usage.num_prompt_tokens > 3
    assert (counted.text, usage.num_output_tokens, usage.prefill_ms) == ("", 0, 0.0)
    assert said.finished.usage.num_cached_tokens == 0


async def test_what_was_only_prefilled_is_there_when_it_is_asked_for(supervisor: Supervisor):
    prompt = TokenPrompt(token_ids=tuple(range(20, 60)))
    prefilled = await ask(supervisor, prompt, work="prefill")
    said = await ask(supervisor, prompt, max_tokens=2, ignore_eos=True)
    assert prefilled.text == ""
    assert prefilled.finished.usage.prefill_ms > 0
    assert said.finished.usage.num_cached_tokens == 39


async def test_a_longer_prompt_takes_up_of_what_was_prefilled_only_what_was_computed(
    supervisor: Supervisor,
):
    shorter = tuple(range(80, 120))
    longer = TokenPrompt(token_ids=(*shorter, *range(300, 330)))
    how: dict[str, Any] = {"max_tokens": 3, "ignore_eos": True, "top_logprobs": 0}
    alone = await ask(supervisor, longer, cache=CacheParams(mode="off"), **how)
    await ask(supervisor, TokenPrompt(token_ids=shorter), work="prefill")
    said = await ask(supervisor, longer, **how)
    assert said.finished.usage.num_cached_tokens == 39
    assert [one.chosen.logprob for one in said.logprobs] == pytest.approx(
        [one.chosen.logprob for one in alone.logprobs], abs=1e-4
    )


async def test_a_prompt_of_one_token_is_answered(supervisor: Supervisor):
    said = await ask(supervisor, TokenPrompt(token_ids=(9,)), max_tokens=5, ignore_eos=True)
    assert said.finished.usage.num_output_tokens == 5


async def test_one_token_can_be_asked_for(supervisor: Supervisor):
    whole = await ask(supervisor, "a kettle hums", max_tokens=9, ignore_eos=True, top_logprobs=0)
    first = await ask(supervisor, "a kettle hums", max_tokens=1, ignore_eos=True, top_logprobs=0)
    assert first.finished.usage.num_output_tokens == 1
    assert first.logprobs == whole.logprobs[:1]


async def test_the_end_token_ends_the_answer_and_is_not_said(
    supervisor: Supervisor, tokenizer: Tokenizer
):
    said = await ask(supervisor, "a", sampling=saying(tokenizer, f"let me{EOS} see"))
    assert (said.text, said.finished.reason) == ("let me", "stop")
    assert said.finished.usage.num_output_tokens == 4


async def test_the_end_token_can_be_ignored(supervisor: Supervisor, tokenizer: Tokenizer):
    sampling = saying(tokenizer, f"let{EOS} me")
    said = await ask(supervisor, "a", sampling=sampling, max_tokens=4, ignore_eos=True)
    assert (said.text, said.finished.reason) == (f"let{EOS} me", "length")


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED])
async def test_a_stop_string_ends_the_answer_wherever_the_tokens_are_cut(
    supervisor: Supervisor, sampling: SamplingParams
):
    fields: dict[str, Any] = {"sampling": sampling, "max_tokens": 30, "ignore_eos": True}
    whole = await ask(supervisor, "the lazy dog", **fields)
    cuts = [(start, start + length) for start in range(4, 24, 5) for length in (1, 3, 7)]
    stops = [whole.text[start:end] for start, end in cuts]
    generations = [
        supervisor.submit(request("the lazy dog", stop=("never", stop), **fields)) for stop in stops
    ]
    for stop, generation in zip(stops, generations, strict=True):
        said = await answer(generation)
        assert said.text == whole.text[: whole.text.index(stop)]
        assert said.finished.reason == "stop"
        assert said.finished.usage.num_output_tokens <= 30


async def test_the_beginning_of_a_stop_string_that_does_not_come_is_said(
    supervisor: Supervisor, tokenizer: Tokenizer
):
    sampling = saying(tokenizer, "let me see")
    said = await ask(supervisor, "a", sampling=sampling, max_tokens=4, stop=("see you",))
    assert (said.text, said.finished.reason) == ("let me see", "length")


async def test_a_character_of_several_tokens_comes_whole(
    supervisor: Supervisor, tokenizer: Tokenizer
):
    token_ids = tokenizer.encode("let🦊").ids
    assert len(token_ids) == 5
    sampling = script([*token_ids, 2])
    said = await ask(supervisor, "a", sampling=sampling)
    assert said.text == "let🦊"
    assert "🦊" in said.pieces


async def test_a_character_that_is_cut_off_ends_as_a_replacement_character(
    supervisor: Supervisor, tokenizer: Tokenizer
):
    sampling = saying(tokenizer, "let🦊")
    said = await ask(supervisor, "a", sampling=sampling, max_tokens=4)
    assert said.text == "let\ufffd"


async def test_log_probabilities_come_for_every_token_best_first(
    supervisor: Supervisor, tokenizer: Tokenizer
):
    fields = {"max_tokens": 12, "ignore_eos": True, "top_logprobs": 5}
    said = await ask(supervisor, "the quick brown", **fields)
    assert len(said.logprobs) == 12
    for one in said.logprobs:
        values = [candidate.logprob for candidate in one.top]
        assert len(values) == 5
        assert values == sorted(values, reverse=True)
        assert one.chosen == one.top[0]
        assert sum(exp(value) for value in values) <= 1 + 1e-5
    raw = b"".join(one.chosen.token_bytes for one in said.logprobs)
    assert raw.decode(errors="replace").startswith(said.text[:8])
    plain = await ask(supervisor, "the quick brown", **(fields | {"top_logprobs": None}))
    assert plain.text == said.text
    assert plain.logprobs == []


async def test_log_probabilities_without_alternatives(supervisor: Supervisor):
    said = await ask(supervisor, "a", max_tokens=3, ignore_eos=True, top_logprobs=0)
    assert [one.top for one in said.logprobs] == [(), (), ()]


async def test_a_bias_forces_and_forbids_tokens(supervisor: Supervisor, tokenizer: Tokenizer):
    (token_id,) = tokenizer.encode(" kettle").ids
    force = SamplingParams(temperature=1.0, logit_bias=((token_id, 1000.0),))
    said = await ask(supervisor, "a", sampling=force, max_tokens=3)
    assert said.text == " kettle" * 3
    first = await ask(supervisor, "a", max_tokens=1, top_logprobs=0)
    best = first.logprobs[0].chosen
    (banned,) = [i for i in range(409) if piece_bytes(tokenizer, i) == best.token_bytes]
    forbid = SamplingParams(temperature=0.0, logit_bias=((banned, -1000.0),))
    other = await ask(supervisor, "a", sampling=forbid, max_tokens=1, top_logprobs=0)
    assert other.logprobs[0].chosen.token_bytes != best.token_bytes


async def test_a_prompt_of_several_slices_reports_its_progress(supervisor: Supervisor):
    said = await ask(supervisor, TokenPrompt(token_ids=(9,) * 200), max_tokens=1)
    progress = [c for c in said.chunks if isinstance(c, PrefillProgress)]
    assert [(p.num_done, p.num_total) for p in progress] == [(64, 199), (128, 199), (192, 199)]


async def test_the_slices_of_a_prompt_do_not_change_its_answer(
    supervisor: Supervisor, home: Path, tokenizer: Tokenizer
):
    prompt = TokenPrompt(token_ids=tuple(range(10, 210)))
    sliced = await ask(supervisor, prompt, ignore_eos=True, top_logprobs=0)
    async with supervising(home, prefill_slice=4096) as other:
        whole = await ask(other, prompt, ignore_eos=True, top_logprobs=0)
    assert whole.text == sliced.text
    assert [one.chosen.logprob for one in whole.logprobs] == pytest.approx(
        [one.chosen.logprob for one in sliced.logprobs], abs=1e-4
    )


@pytest.mark.parametrize("num_tokens", [CONTEXT, CONTEXT + 1, 40 * CONTEXT])
async def test_a_prompt_longer_than_the_context_is_refused_with_both_numbers(
    supervisor: Supervisor, num_tokens: int
):
    generation = supervisor.submit(request(TokenPrompt(token_ids=(9,) * num_tokens)))
    with pytest.raises(ContextTooLong) as caught:
        await answer(generation)
    assert (caught.value.num_tokens, caught.value.context) == (num_tokens, CONTEXT)
    assert caught.value.param == "prompt"
    assert worker_of(supervisor).num_running == 0


async def test_an_answer_ends_where_the_context_ends(supervisor: Supervisor):
    prompt = TokenPrompt(token_ids=(9,) * (CONTEXT - 3))
    said = await ask(supervisor, prompt, max_tokens=None, ignore_eos=True)
    assert said.finished.reason == "length"
    assert said.finished.usage.num_output_tokens == 3


async def test_choices_share_a_prompt_and_differ(supervisor: Supervisor):
    said = await ask(supervisor, "a kettle", sampling=SEEDED, num_choices=3, ignore_eos=True)
    texts = [said.choice(index).text for index in range(3)]
    assert len(set(texts)) == 3
    alone = await ask(supervisor, "a kettle", sampling=SEEDED, ignore_eos=True)
    assert alone.text == texts[0]
    assert [said.choice(i).finished.usage.num_output_tokens for i in range(3)] == [40] * 3


async def test_reasoning_is_told_apart_from_the_answer(
    supervisor: Supervisor, tokenizer: Tokenizer
):
    prompt = ChatPrompt(messages=HELLO)
    sampling = saying(tokenizer, f"<think>\nlet me</think> see{EOS}")
    said = await ask(supervisor, prompt, sampling=sampling)
    assert (said.reasoning, said.text) == ("let me", "see")
    assert said.finished.usage.num_reasoning_tokens == 5


async def test_a_prompt_that_opens_the_thinking_starts_in_reasoning(
    supervisor: Supervisor, tokenizer: Tokenizer
):
    prompt = ChatPrompt(messages=HELLO, thinking=Thinking(is_enabled=True))
    said = await ask(supervisor, prompt, sampling=saying(tokenizer, f"let me</think> see{EOS}"))
    assert (said.reasoning, said.text) == ("let me", "see")


async def test_a_tool_call_is_taken_apart(supervisor: Supervisor, tokenizer: Tokenizer):
    prompt = ChatPrompt(messages=HELLO, tools=(LOOK,))
    sampling = saying(tokenizer, f"let me see<tool_call>{TOOL_CALL}</tool_call>{EOS}")
    said = await ask(supervisor, prompt, sampling=sampling)
    (call,) = said.calls
    assert (call.name, call.arguments) == ("look", '{"at":7}')
    assert call.id.startswith("call_")
    assert said.text == "let me see"
    assert said.finished.reason == "tool_calls"


async def test_a_call_of_an_unknown_tool_is_text(supervisor: Supervisor, tokenizer: Tokenizer):
    prompt = ChatPrompt(messages=HELLO, tools=(Tool(name="other"),))
    sampling = saying(tokenizer, f"<tool_call>{TOOL_CALL}</tool_call>{EOS}")
    said = await ask(supervisor, prompt, sampling=sampling)
    assert said.calls == []
    assert said.text == f"<tool_call>{TOOL_CALL}</tool_call>"
    assert said.finished.reason == "stop"
    assert said.finished.notes == ("unknown_tool",)


async def test_a_plain_completion_is_not_taken_apart(supervisor: Supervisor, tokenizer: Tokenizer):
    text = f"<think>let me</think><tool_call>{TOOL_CALL}</tool_call>"
    said = await ask(supervisor, "a", sampling=saying(tokenizer, text + EOS))
    assert said.text == text


@pytest.mark.parametrize(
    ("prompt", "sampling", "param"),
    [
        (TokenPrompt(token_ids=(9, 409)), GREEDY, "prompt"),
        (TokenPrompt(token_ids=(-1,)), GREEDY, "prompt"),
        (TokenPrompt(token_ids=()), GREEDY, "prompt"),
        (TextPrompt(text=""), GREEDY, "prompt"),
        (TextPrompt(text="a"), SamplingParams(logit_bias=((409, 1.0),)), "logit_bias"),
        (TextPrompt(text="a"), SamplingParams(logit_bias=((-1, 1.0),)), "logit_bias"),
    ],
)
async def test_what_cannot_be_served_is_refused_with_the_field_named(
    supervisor: Supervisor, prompt: Prompt, sampling: SamplingParams, param: str
):
    with pytest.raises(InvalidRequest) as caught:
        await ask(supervisor, prompt, sampling=sampling)
    assert caught.value.param == param


@pytest.mark.parametrize(
    "kwargs",
    ["[]", "null", '{"padding": "x"}', '{"return_dict": true}', '{"messages": 1}', '{"tools": 1}'],
)
async def test_odd_arguments_of_the_template_harm_no_other_request(
    supervisor: Supervisor, kwargs: str
):
    prompt = ChatPrompt(messages=HELLO, template_kwargs=kwargs)
    with suppress(InvalidRequest):
        await ask(supervisor, prompt, max_tokens=1)
    assert (await ask(supervisor, "a", max_tokens=1)).finished.usage.num_output_tokens == 1


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(top_k=-1),
        SamplingParams(top_k=0),
        SamplingParams(top_k=10**6),
        SamplingParams(top_p=0.0),
        SamplingParams(top_p=1e-9),
        SamplingParams(min_p=1.0),
        SamplingParams(temperature=1e-40),
        SamplingParams(seed=-(2**63)),
        SamplingParams(seed=2**63 - 1, repetition_penalty=100.0, presence_penalty=-2.0),
    ],
)
async def test_sampling_at_the_limits_of_its_values_is_served(
    supervisor: Supervisor, sampling: SamplingParams
):
    generations = [
        supervisor.submit(request("a kettle", sampling=one, max_tokens=20, ignore_eos=True))
        for one in (sampling, GREEDY)
    ]
    said = [await answer(generation) for generation in generations]
    assert [one.finished.usage.num_output_tokens for one in said] == [20, 20]
    alone = await ask(supervisor, "a kettle", max_tokens=20, ignore_eos=True)
    assert said[1].text == alone.text
