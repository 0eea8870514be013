"""What clients see of speculation: the same answers, counts, and errors that name the field."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.running_server import CHAT, RunningServer, running
from tests.tiny_models import write_model

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


SAMPLINGS = pytest.mark.parametrize(
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


@SAMPLINGS
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
            "prediction.content[0]",
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


@pytest.fixture(scope="module")
def drafting(tmp_path_factory: pytest.TempPathFactory, models_dir: Path) -> Iterator[RunningServer]:
    """`tiny` has the draft `small`, `bare` is the same without, and that of `twin` does not fit."""
    folder = tmp_path_factory.mktemp("drafts")
    small = write_model(folder / "small", "llama", num_hidden_layers=1)
    shutil.copytree(small, folder / "alien")
    found = json.loads((folder / "alien" / "tokenizer.json").read_text())
    vocab = found["model"]["vocab"]
    one, other = list(vocab)[20:22]
    vocab[one], vocab[other] = vocab[other], vocab[one]
    (folder / "alien" / "tokenizer.json").write_text(json.dumps(found))
    config = f"""models_dir = "{folder}"
        [models.tiny]
        path = "{models_dir / "tiny"}"
        draft = "small"
        [models.bare]
        path = "{models_dir / "tiny"}"
        [models.twin]
        path = "{models_dir / "twin"}"
        draft = "alien"
        """
    with running(folder / "home", config=config) as server:
        yield server


@SAMPLINGS
def test_a_draft_model_changes_nothing_of_the_answer(
    drafting: RunningServer, sampling: dict[str, Any]
) -> None:
    body = BODY | sampling
    plain = drafting.post(CHAT, body | {"model": "bare"}).json()
    answer = drafting.post(CHAT, body).json()
    assert answer["choices"][0]["message"] == plain["choices"][0]["message"]
    assert answer["choices"][0]["finish_reason"] == plain["choices"][0]["finish_reason"]


def test_a_draft_model_is_counted_with_its_target(
    drafting: RunningServer,
) -> None:
    for name in ("tiny", "bare"):
        assert drafting.post(CHAT, BODY | {"model": name}).status_code == 200
    shown = {one["id"]: one for one in drafting.get("/running").json()["models"]}
    assert shown["tiny"]["reserved_bytes"] > shown["bare"]["reserved_bytes"]


def test_a_draft_model_with_another_tokenizer_fails_the_load_and_says_why(
    drafting: RunningServer,
) -> None:
    response = drafting.post(CHAT, BODY | {"model": "twin"})
    assert response.status_code == 503
    assert "alien cannot be its draft: its tokenizer is another" in response.text
