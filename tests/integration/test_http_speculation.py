"""What clients see of speculation: the same answers, counts, and errors that name the field."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.running_server import CHAT, RunningServer, running

BODY: dict[str, Any] = {
    "model": "tiny",
    "messages": [{"role": "user", "content": "the fox and the kettle"}],
    "max_tokens": 80,
    "ignore_eos": True,
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, models_dir: Path) -> Iterator[RunningServer]:
    config = f'models_dir = "{models_dir}"\n[models."*"]\nspeculation = "auto"\n'
    with running(tmp_path_factory.mktemp("speculating"), config=config) as server:
        yield server


def predicting(body: dict[str, Any], content: object) -> dict[str, Any]:
    return body | {"prediction": {"type": "content", "content": content}}


def parts(text: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text}]


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 0},
        {"temperature": 1, "seed": 4},
        {"temperature": 0.8, "seed": 4, "frequency_penalty": 0.5, "logprobs": True},
        {"temperature": 0, "stop": ["e"]},
        {"temperature": 0, "response_format": {"type": "json_object"}, "ignore_eos": False},
    ],
    ids=["greedy", "seed", "penalty", "stop", "json"],
)
def test_a_prediction_changes_nothing_of_the_answer(
    server: RunningServer, sampling: dict[str, Any]
) -> None:
    body = BODY | sampling
    plain = server.post(CHAT, body).json()
    text = plain["choices"][0]["message"]["content"]
    for content in (text, parts(text), text[5:] + "!" + text, "never said"):
        answer = server.post(CHAT, predicting(body, content)).json()
        assert answer["choices"][0]["message"] == plain["choices"][0]["message"]
        assert answer["choices"][0]["finish_reason"] == plain["choices"][0]["finish_reason"]
        assert answer["usage"]["completion_tokens"] == plain["usage"]["completion_tokens"]
        counts = answer["usage"]["completion_tokens_details"]
        num_accepted = counts["accepted_prediction_tokens"]
        assert 0 <= num_accepted <= answer["usage"]["completion_tokens"]
        assert counts["rejected_prediction_tokens"] >= 0
        assert "ignored" not in answer["hearth"]


@pytest.mark.parametrize(
    ("prediction", "param"),
    [
        ({"type": "patch", "content": "a"}, "prediction.type"),
        (
            {"content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,"}}]},
            "prediction.content",
        ),
        ({"content": [{"type": "sound"}]}, "prediction.content[0]"),
    ],
)
def test_what_is_no_prediction_is_refused_by_name(
    server: RunningServer, prediction: dict[str, object], param: str
) -> None:
    response = server.post(CHAT, BODY | {"prediction": prediction})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param


def test_unless_it_is_switched_on_nothing_is_guessed_and_the_field_is_named(
    tmp_path: Path, models_dir: Path
) -> None:
    config = f'models_dir = "{models_dir}"\n'
    with running(tmp_path, config=config) as server:
        plain = server.post(CHAT, BODY | {"temperature": 0}).json()
        text = plain["choices"][0]["message"]["content"]
        answer = server.post(CHAT, predicting(BODY | {"temperature": 0}, text)).json()
    assert answer["choices"][0]["message"]["content"] == text
    assert answer["hearth"]["ignored"] == ["prediction"]
    counts = answer["usage"]["completion_tokens_details"]
    assert counts["accepted_prediction_tokens"] == counts["rejected_prediction_tokens"] == 0
