"""Answers that the client began: Responses and agents go on with them, and remember them whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI
from openai.types.responses import Response

from tests.calm_model import END, saying
from tests.running_server import RunningServer

QUESTION = {"role": "user", "content": "Rain?"}
BEGUN = {"role": "assistant", "content": "while"}
WHOLE = {"role": "assistant", "content": "while rain falls"}
NEXT = {"role": "user", "content": "And now?"}


def responded(
    client: OpenAI, model: Path, items: Any, text: str = " rain falls", **own: Any
) -> Response:
    create: Any = client.responses.create
    return create(model="calm", input=items, extra_body=saying(model, text + END), **own)


def count(client: OpenAI, items: Any, **more: Any) -> int:
    counted = client.responses.input_tokens.count(model="calm", input=items, extra_body=more)
    return counted.input_tokens


def test_a_response_goes_on_with_the_last_message_and_the_next_finds_one_turn(
    calm_client: OpenAI, calm: Path
) -> None:
    made = responded(calm_client, calm, [QUESTION, BEGUN])
    assert made.output_text == " rain falls"
    items = calm_client.responses.input_items.list(made.id, order="asc").data
    assert [item.to_dict()["status"] for item in items] == ["completed", "incomplete"]
    after = responded(calm_client, calm, [NEXT], previous_response_id=made.id)
    assert made.usage is not None
    assert after.usage is not None
    assert after.usage.input_tokens == count(calm_client, [QUESTION, WHOLE, NEXT])
    known = made.usage.input_tokens + made.usage.output_tokens
    assert after.usage.input_tokens_details.cached_tokens >= known - 1


def test_a_response_that_was_cut_off_is_gone_on_with(calm_client: OpenAI, calm: Path) -> None:
    cut = responded(calm_client, calm, [QUESTION], "while rain falls", max_output_tokens=1)
    assert cut.status == "incomplete"
    rest: Any = saying(calm, f" rain falls{END}")
    create: Any = calm_client.responses.create
    made = create(model="calm", previous_response_id=cut.id, extra_body=rest)
    assert made.output_text == " rain falls"
    whole = {"role": "assistant", "content": cut.output_text + made.output_text}
    after = responded(calm_client, calm, [NEXT], previous_response_id=made.id)
    assert cut.usage is not None
    assert made.usage is not None
    assert after.usage is not None
    assert made.usage.input_tokens == cut.usage.total_tokens
    assert after.usage.input_tokens == count(calm_client, [QUESTION, whole, NEXT])


def test_a_complete_message_is_answered_and_so_is_any_on_demand(calm_client: OpenAI) -> None:
    begun = [QUESTION, BEGUN]
    answered = count(calm_client, [QUESTION, BEGUN | {"status": "completed"}])
    assert answered > count(calm_client, begun)
    for wish in ({"continue_final_message": False}, {"add_generation_prompt": True}):
        assert count(calm_client, begun, **wish) == answered


@pytest.mark.parametrize("stream", [False, True])
def test_an_agent_goes_on_with_the_last_message_and_remembers_one(
    calm_server: RunningServer, calm: Path, stream: bool
) -> None:
    agent = calm_server.post("/v1/agents", {"model": "calm"}).json()["id"]
    path = f"/v1/agents/{agent}"
    body = {"messages": [QUESTION, BEGUN], "stream": stream} | saying(calm, f" rain falls{END}")
    first = calm_server.post(f"{path}/generate", body)
    assert first.status_code == 200, first.text
    assert "while" not in first.text
    (turn,) = calm_server.get(f"{path}/history").json()["data"]
    assert [(one["role"], one["content"]) for one in turn["messages"]] == [
        ("user", "Rain?"),
        ("assistant", "while rain falls"),
    ]
    usage = calm_server.post(f"{path}/generate", {"messages": [NEXT], "max_tokens": 1}).json()[
        "usage"
    ]
    before = turn["usage"]
    known = before["prompt_tokens"] + before["completion_tokens"]
    assert usage["prompt_tokens_details"]["cached_tokens"] >= known - 1
