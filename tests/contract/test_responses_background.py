"""Responses that are made in the background, and their events, through OpenAI's own client."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import openai
import pytest
from openai import OpenAI

from tests.contract.test_responses_sdk import ask


@pytest.fixture
def model(calm: Path) -> Path:
    return calm


@pytest.fixture
def client(calm_client: OpenAI) -> OpenAI:
    return calm_client


def test_a_response_is_made_in_the_background(client: OpenAI, model: Path) -> None:
    made = ask(client, model, "let me see", background=True)
    assert made.status == "queued"
    while made.status in ("queued", "in_progress"):
        made = client.responses.retrieve(made.id)
    assert (made.status, made.output_text) == ("completed", "let me see"), made.error


def test_a_response_in_the_background_is_streamed_and_taken_up_again(
    client: OpenAI, model: Path
) -> None:
    stream: Any = ask(client, model, "let me see", background=True, stream=True)
    first = [next(stream) for _ in range(3)]
    stream.close()
    assert first[0].type == "response.created"
    made = first[0].response.id
    rest = list(client.responses.retrieve(made, stream=True, starting_after=2))
    assert [event.sequence_number for event in (*first, *rest)] == list(range(3 + len(rest)))
    last = rest[-1]
    assert last.type == "response.completed"
    assert last.response.output_text == "let me see"
    with client.responses.stream(response_id=made) as again:
        assert again.get_final_response().output_text == "let me see"
    assert list(client.responses.retrieve(made, stream=True, starting_after=10**6)) == []
    after = ask(client, model, "let me see", previous_response_id=made)
    assert after.output_text == "let me see"


def test_of_a_response_that_was_not_in_the_background_the_end_is_streamed(
    client: OpenAI, model: Path
) -> None:
    made = ask(client, model, "let me see")
    with client.responses.stream(response_id=made.id) as stream:
        assert stream.get_final_response().output_text == made.output_text
    (last,) = client.responses.retrieve(made.id, stream=True, starting_after=4)
    assert (last.type, last.sequence_number) == ("response.completed", 5)


def test_leaving_a_stream_of_a_response_in_the_background_ends_nothing(client: OpenAI) -> None:
    endless: Any = {"model": "calm", "input": "x", "extra_body": {"ignore_eos": True}}
    stream = client.responses.create(**endless, background=True, stream=True)
    first = next(stream)
    assert first.type == "response.created"
    stream.close()
    made = first.response.id
    assert client.responses.retrieve(made).status == "in_progress"
    assert client.responses.cancel(made).status == "cancelled"
    last = list(client.responses.retrieve(made, stream=True))[-1]
    assert last.type == "response.failed"
    assert last.response.status == "cancelled"


def test_a_response_in_the_background_is_cancelled(client: OpenAI) -> None:
    endless: Any = {"model": "calm", "input": "x", "extra_body": {"ignore_eos": True}}
    made = client.responses.create(**endless, background=True)
    cancelled = client.responses.cancel(made.id)
    assert cancelled.status == "cancelled"
    assert client.responses.retrieve(made.id).status == "cancelled"
    assert client.responses.cancel(made.id).status == "cancelled"


def test_what_is_still_being_made_cannot_be_gone_on_from_and_can_be_deleted(
    client: OpenAI,
) -> None:
    endless: Any = {"model": "calm", "input": "x", "extra_body": {"ignore_eos": True}}
    made = client.responses.create(**endless, background=True)
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(model="calm", input="y", previous_response_id=made.id)
    assert caught.value.param == "previous_response_id"
    client.responses.delete(made.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(made.id)
