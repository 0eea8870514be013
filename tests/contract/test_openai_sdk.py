"""What OpenAI's own Python client sees of a running server."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI, OpenAI
from tokenizers import Tokenizer

from tests.running_server import RunningServer

QUESTION: Any = [{"role": "user", "content": "Where does the kettle hum? 😀"}]
RENDERED = "<|im_start|>user\nWhere does the kettle hum? 😀<|im_end|>\n<|im_start|>assistant\n"
LIVELY: Any = {"temperature": 1.0, "seed": 7, "max_tokens": 40}
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather in a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        "strict": True,
    },
}


@pytest.fixture
def client(server: RunningServer) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0) as client:
        yield client


@pytest.fixture
async def async_client(server: RunningServer) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def tokenizer(models_dir: Path) -> Tokenizer:
    return Tokenizer.from_file(str(models_dir / "tiny" / "tokenizer.json"))


def streamed(client: OpenAI, **kwargs: Any) -> tuple[list[Any], dict[int, str]]:
    """The chunks of a chat stream and the text of each choice."""
    chunks = list(client.chat.completions.create(stream=True, **kwargs))
    texts: dict[int, str] = {}
    for chunk in chunks:
        for choice in chunk.choices:
            texts[choice.index] = texts.get(choice.index, "") + (choice.delta.content or "")
    return chunks, texts


# Chat


def test_a_chat_answer_has_everything_a_client_reads(client: OpenAI) -> None:
    answer = client.chat.completions.create(model="tiny", messages=QUESTION, **LIVELY)
    assert answer.id.startswith("chatcmpl-")
    assert (answer.object, answer.model) == ("chat.completion", "tiny")
    (choice,) = answer.choices
    assert (choice.index, choice.message.role) == (0, "assistant")
    assert choice.message.content
    assert choice.finish_reason in ("stop", "length")


def test_usage_counts_are_the_tokenizers_own(client: OpenAI, tokenizer: Tokenizer) -> None:
    answer = client.chat.completions.create(
        model="tiny", messages=QUESTION, max_tokens=9, extra_body={"ignore_eos": True}
    )
    usage = answer.usage
    assert usage is not None
    num_prompt = len(tokenizer.encode(RENDERED, add_special_tokens=False).ids)
    assert (usage.prompt_tokens, usage.completion_tokens) == (num_prompt, 9)
    assert usage.total_tokens == num_prompt + 9
    assert usage.prompt_tokens_details is not None
    assert usage.prompt_tokens_details.cached_tokens in range(num_prompt)
    assert usage.completion_tokens_details is not None
    assert usage.completion_tokens_details.reasoning_tokens == 0


@pytest.mark.parametrize("seed", range(4))
def test_streamed_text_joined_is_the_text_that_is_not_streamed(client: OpenAI, seed: int) -> None:
    request: Any = {"model": "tiny", "messages": QUESTION, "n": 2} | LIVELY | {"seed": seed}
    whole = client.chat.completions.create(**request)
    _, texts = streamed(client, **request)
    expected = {choice.index: (choice.message.content or "").encode() for choice in whole.choices}
    assert {index: text.encode() for index, text in texts.items()} == expected


def test_characters_of_several_tokens_arrive_whole(client: OpenAI, tokenizer: Tokenizer) -> None:
    first, second = (tokenizer.token_to_id(piece) for piece in ("Ã", "§"))  # the bytes of ç
    request: Any = {"model": "tiny", "messages": QUESTION, "temperature": 1, "seed": 1}
    request |= {"max_tokens": 120, "logit_bias": {str(first): 100, str(second): 100}}
    whole = client.chat.completions.create(**request).choices[0].message.content
    chunks, texts = streamed(client, **request)
    pieces = [c.choices[0].delta.content or "" for c in chunks if c.choices]
    assert texts[0] == whole
    assert whole is not None
    assert whole.count("ç") > 10
    assert sum("ç" in piece for piece in pieces) > 10


def test_a_stream_with_ids_is_read_as_one_without(client: OpenAI) -> None:
    request = {"model": "tiny", "messages": QUESTION, "max_tokens": 20, **LIVELY, "seed": 3}
    _, plain = streamed(client, **request)
    _, numbered = streamed(client, extra_headers={"Hearth-Resume": "true"}, **request)
    assert numbered == plain


def test_a_stream_begins_with_the_role_and_ends_with_one_reason_for_each_choice(
    client: OpenAI,
) -> None:
    chunks, _ = streamed(client, model="tiny", messages=QUESTION, n=3, **LIVELY)
    assert [c.choices[0].delta.role for c in chunks[:3]] == ["assistant"] * 3
    assert {c.choices[0].index for c in chunks[:3]} == {0, 1, 2}
    reasons = [c.choices[0] for c in chunks if c.choices and c.choices[0].finish_reason]
    assert sorted(choice.index for choice in reasons) == [0, 1, 2]
    assert len({(c.id, c.created, c.model, c.object) for c in chunks}) == 1
    assert all(c.usage is None for c in chunks)


def test_usage_comes_last_in_a_stream_that_asks_for_it(client: OpenAI) -> None:
    request: Any = {"model": "tiny", "messages": QUESTION, "n": 2} | LIVELY
    client.chat.completions.create(**request)  # from now on as much of it is cached each time
    chunks, _ = streamed(client, stream_options={"include_usage": True}, **request)
    assert chunks[-1].choices == []
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert chunks[-1].usage == client.chat.completions.create(**request).usage


def test_logprobs_belong_to_the_text_and_stay_in_order(client: OpenAI) -> None:
    request: Any = {"model": "tiny", "messages": QUESTION, "logprobs": True, "top_logprobs": 5}
    request |= {"max_tokens": 12, "extra_body": {"ignore_eos": True}}
    choice = client.chat.completions.create(**request).choices[0]
    assert choice.logprobs is not None
    entries = choice.logprobs.content or []
    assert len(entries) == 12
    spoken = b"".join(bytes(entry.bytes or ()) for entry in entries).decode(errors="replace")
    assert spoken == choice.message.content
    for entry in entries:
        ranked = [other.logprob for other in entry.top_logprobs]
        assert len(ranked) == 5
        assert ranked == sorted(ranked, reverse=True)
        assert entry.logprob == ranked[0] <= 0  # greedy takes the likeliest
        assert sum(math.exp(one) for one in ranked) <= 1 + 1e-5
    chunks, _ = streamed(client, **request)
    logprobs = [c.choices[0].logprobs for c in chunks if c.choices]
    assert [e for one in logprobs if one for e in one.content or []] == entries


def test_logprobs_without_alternatives_and_no_logprobs(client: OpenAI) -> None:
    request: Any = {"model": "tiny", "messages": QUESTION, "max_tokens": 3}
    with_them = client.chat.completions.create(logprobs=True, **request).choices[0].logprobs
    assert with_them is not None
    assert [entry.top_logprobs for entry in with_them.content or []] == [[], [], []]
    said = client.chat.completions.create(**request).choices[0]
    assert said.logprobs is None
    first = (said.message.content or "")[:1]
    nothing = client.chat.completions.create(logprobs=True, stop=first, **request).choices[0]
    assert (nothing.message.content, nothing.logprobs and nothing.logprobs.content) == ("", [])


def test_a_stop_string_ends_the_answer_and_is_not_part_of_it(client: OpenAI) -> None:
    request: Any = {"model": "tiny", "messages": QUESTION} | LIVELY
    text = client.chat.completions.create(**request).choices[0].message.content or ""
    stop = text[10:13]
    for given in (stop, ["never to be seen", stop]):
        choice = client.chat.completions.create(stop=given, **request).choices[0]
        assert choice.message.content == text[: text.index(stop)]
        assert choice.finish_reason == "stop"
        assert streamed(client, stop=given, **request)[1][0] == text[: text.index(stop)]


def test_a_seed_repeats_an_answer_and_another_seed_does_not(client: OpenAI) -> None:
    request: Any = {"model": "tiny", "messages": QUESTION, "temperature": 1.0, "max_tokens": 40}
    texts = [
        client.chat.completions.create(seed=seed, **request).choices[0].message.content
        for seed in (1, 1, 2)
    ]
    assert texts[0] == texts[1] != texts[2]


def test_choices_of_one_request_differ_and_are_numbered(client: OpenAI) -> None:
    answer = client.chat.completions.create(model="tiny", messages=QUESTION, n=4, **LIVELY)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert len({choice.message.content for choice in answer.choices}) == 4


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_both_names_of_the_token_limit_count(client: OpenAI, name: str) -> None:
    request: Any = {"messages": QUESTION, "extra_body": {"ignore_eos": True}, name: 5}
    answer = client.chat.completions.create(model="tiny", **request)
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 5
    assert answer.choices[0].finish_reason == "length"


def test_a_conversation_as_agents_send_it_is_accepted(client: OpenAI) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
    messages: Any = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Weather?"}]},
        {"role": "user", "content": "In Bern."},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "Rain"}]},
        {"role": "system", "content": "It is late."},
    ]
    extra: Any = {"store": False, "metadata": {"a": "b"}, "parallel_tool_calls": True, "user": "me"}
    answer = client.chat.completions.create(
        model="tiny", messages=messages, tools=[WEATHER], tool_choice="auto", max_tokens=4, **extra
    )
    assert answer.usage is not None
    without = client.chat.completions.create(model="tiny", messages=messages, max_tokens=4)
    assert without.usage is not None
    assert answer.usage.prompt_tokens > without.usage.prompt_tokens + 50  # the tool is shown


def test_an_alias_serves_and_is_answered_under_its_own_name(client: OpenAI) -> None:
    answer = client.chat.completions.create(model="little", messages=QUESTION, max_tokens=2)
    assert answer.model == "little"


async def test_the_async_client_streams_many_answers_at_once(async_client: AsyncOpenAI) -> None:
    async def text(seed: int) -> str:
        stream = await async_client.chat.completions.create(
            model="tiny", messages=QUESTION, stream=True, **LIVELY | {"seed": seed}
        )
        return "".join([c.choices[0].delta.content or "" async for c in stream])

    together = await asyncio.gather(*(text(seed) for seed in range(6)))
    alone = [await text(seed) for seed in range(6)]
    assert together == alone
    assert len(set(together)) == 6


# Completions


def test_a_text_is_continued_and_echoed_on_request(client: OpenAI, tokenizer: Tokenizer) -> None:
    prompt = "the quick brown 狐"
    request: Any = {"model": "tiny", "prompt": prompt, "max_tokens": 6, "seed": 3}
    plain = client.completions.create(**request)
    echoed = client.completions.create(echo=True, **request)
    assert plain.object == "text_completion"
    assert plain.usage is not None
    assert plain.usage.prompt_tokens == len(tokenizer.encode(prompt).ids)
    assert echoed.choices[0].text == prompt + plain.choices[0].text
    pieces = [c.choices[0].text for c in client.completions.create(stream=True, **request)]
    assert "".join(pieces) == plain.choices[0].text


def test_a_text_and_its_token_ids_are_continued_alike(client: OpenAI, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("rain falls").ids
    prompts: Any = ["rain falls", ids, [ids], ["rain falls"]]
    answers = [
        client.completions.create(model="tiny", prompt=prompt, max_tokens=8) for prompt in prompts
    ]
    assert len({answer.choices[0].text for answer in answers}) == 1
    assert {answer.usage.prompt_tokens for answer in answers if answer.usage} == {len(ids)}


def test_several_prompts_with_several_choices_come_back_in_order(client: OpenAI) -> None:
    prompts = ["the fox", "the dog", "a kettle"]
    request: Any = {"model": "tiny", "temperature": 1.0, "seed": 5, "max_tokens": 8, "n": 2}
    answer = client.completions.create(prompt=prompts, **request)
    singles = [client.completions.create(prompt=prompt, **request) for prompt in prompts]
    assert [choice.index for choice in answer.choices] == list(range(6))
    expected = [choice.text for single in singles for choice in single.choices]
    assert [choice.text for choice in answer.choices] == expected
    assert answer.usage is not None
    counts = [one.usage for one in singles if one.usage]
    assert answer.usage.prompt_tokens == sum(one.prompt_tokens for one in counts)
    assert answer.usage.completion_tokens == sum(one.completion_tokens for one in counts)


def test_completion_logprobs_are_parallel_lists(client: OpenAI) -> None:
    answer = client.completions.create(
        model="tiny", prompt="naïve", logprobs=2, max_tokens=5, extra_body={"ignore_eos": True}
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert len(logprobs.tokens or []) == len(logprobs.token_logprobs or []) == 5
    assert len(logprobs.text_offset or []) == 5
    for token, tops in zip(logprobs.tokens or [], logprobs.top_logprobs or [], strict=True):
        assert token in tops
        assert 1 <= len(tops) <= 3


# Models


def test_models_are_listed_and_found_by_name_and_alias(client: OpenAI) -> None:
    listed = {model.id: model for model in client.models.list()}
    assert {"tiny", "hearth-tiny", "broken"} <= listed.keys()
    assert "little" not in listed
    for name in ("tiny", "little"):
        model = client.models.retrieve(name)
        assert (model.id, model.object, model.owned_by) == ("tiny", "model", "hearth")
        assert model.to_dict()["context"] == 4096


# Errors


def chat(client: OpenAI, **changes: Any) -> Any:
    request: Any = {"model": "tiny", "messages": QUESTION} | changes
    return client.chat.completions.create(**request)


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"messages": []}, "messages"),
        ({"temperature": 3}, "temperature"),
        ({"n": 1000}, "n"),
        ({"top_logprobs": 3}, "top_logprobs"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
            "response_format",
        ),
        ({"tool_choice": "required"}, "tool_choice"),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "schema": {"not": {}}},
                }
            },
            "response_format",
        ),
    ],
)
def test_what_cannot_be_served_is_a_bad_request_that_names_its_field(
    client: OpenAI, changes: Any, param: str
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        chat(client, **changes)
    assert caught.value.param == param
    assert caught.value.type == "invalid_request_error"
    assert param in caught.value.message


def test_a_text_response_format_is_accepted(client: OpenAI) -> None:
    assert chat(client, response_format={"type": "text"}, max_tokens=2).choices


def test_an_unknown_model_is_not_found(client: OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        chat(client, model="tinny")
    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")
    assert "tiny" in caught.value.message
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("tinny")


def test_a_prompt_beyond_the_context_has_the_code_that_agents_compact_on(client: OpenAI) -> None:
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError) as caught:
            chat(client, messages=[{"role": "user", "content": "fox " * 5000}], stream=stream)
        assert caught.value.code == "context_length_exceeded"


@pytest.fixture
def narrow_client(narrow_server: RunningServer) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{narrow_server.url}/v1", api_key="unused", max_retries=0) as client:
        yield client


def test_a_full_queue_is_a_rate_limit_and_keeps_nothing(narrow_client: OpenAI) -> None:
    request: Any = {"model": "tiny", "max_tokens": 3000, "extra_body": {"ignore_eos": True}}
    with narrow_client.completions.create(prompt=["a"] * 3, stream=True, **request):
        with pytest.raises(openai.RateLimitError) as caught:
            narrow_client.completions.create(prompt=["b"] * 2, **request)
        assert caught.value.code == "overloaded"
        assert int(caught.value.response.headers["retry-after"]) >= 1
        with narrow_client.completions.create(prompt="b", stream=True, **request):
            pass  # the place that the refused request had for a moment is free again


def test_a_model_that_cannot_be_loaded_is_the_servers_error(narrow_client: OpenAI) -> None:
    deadline_s = time.monotonic() + 20
    while True:  # the places of those who left before are free within a step
        with pytest.raises(openai.APIStatusError) as caught:
            chat(narrow_client, model="broken")
        if caught.value.status_code != 429 or time.monotonic() > deadline_s:
            break
    assert isinstance(caught.value, openai.InternalServerError)
    assert (caught.value.status_code, caught.value.code) == (503, "model_load_failed")
    assert "Traceback" not in caught.value.message
