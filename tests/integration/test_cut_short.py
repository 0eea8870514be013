"""An answer that the server cut says by what, in every protocol, whole and streamed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.running_server import RunningServer, running

TEXT = "the quick brown fox " * 200
TALK = [{"role": "user", "content": TEXT}]
PATHS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": TALK, "max_tokens": 9},
    "/v1/completions": {"prompt": TEXT, "max_tokens": 9},
    "/v1/messages": {"messages": TALK, "max_tokens": 9},
    "/v1/responses": {"input": TEXT, "max_output_tokens": 16},
    "/api/chat": {"messages": TALK, "options": {"num_predict": 9}},
    "/api/generate": {"prompt": TEXT, "options": {"num_predict": 9}},
    "/v1/agents/ann/generate": {"messages": TALK, "max_tokens": 9},
}


@pytest.fixture(scope="module")
def hasty(tmp_path_factory: pytest.TempPathFactory, models_dir: Path) -> Iterator[RunningServer]:
    """No prompt of these lengths is read within its deadline."""
    config = f'models_dir = "{models_dir}"\ndefault_model = "tiny"\nrequest_deadline_s = 0.005\n'
    with running(tmp_path_factory.mktemp("home"), config=config) as server:
        assert server.post("/v1/agents", {"id": "ann", "model": "tiny"}).status_code < 300
        yield server


def hearths(body: str) -> list[dict[str, Any]]:
    """Every object named `hearth`, wherever it is in an answer or in the events of one."""
    found: list[dict[str, Any]] = []

    def look(value: Any) -> None:
        if isinstance(value, dict):
            found.extend(one for name, one in value.items() if name == "hearth" and one)
            for one in value.values():
                look(one)

    for line in body.splitlines():
        text = line.removeprefix("data: ")
        if text.startswith("{"):
            look(json.loads(text))
    return found


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", PATHS)
def test_an_answer_that_its_deadline_cut_says_so(hasty: RunningServer, path: str, stream: bool):
    answer = hasty.post(path, {"model": "tiny", "stream": stream} | PATHS[path])
    assert answer.status_code == 200, answer.text
    told = hearths(answer.text)
    assert told, answer.text[-400:]
    assert told[-1]["notes"] == ["deadline_exceeded"]


def test_an_answer_that_reached_its_own_limit_says_nothing_of_a_deadline(server: RunningServer):
    body = {"model": "tiny", "prompt": "fox", "max_tokens": 2, "ignore_eos": True}
    answer = server.post("/v1/completions", body).json()
    assert answer["choices"][0]["finish_reason"] == "length"
    assert "notes" not in answer["hearth"]


@pytest.fixture(scope="module")
def patient(tmp_path_factory: pytest.TempPathFactory, models_dir: Path) -> Iterator[RunningServer]:
    """One that sets no deadline."""
    config = f'models_dir = "{models_dir}"\ndefault_model = "tiny"\nrequest_deadline_s = 0\n'
    with running(tmp_path_factory.mktemp("patient"), config=config) as server:
        assert server.post("/v1/agents", {"id": "ann", "model": "tiny"}).status_code < 300
        yield server


@pytest.mark.parametrize("path", [*PATHS, "/tokenize"])
def test_without_a_deadline_every_protocol_answers_whole(patient: RunningServer, path: str):
    body = PATHS.get(path) or {"prompt": TEXT}
    answer = patient.post(path, {"model": "tiny", "stream": False} | body)
    assert answer.status_code == 200, answer.text
    assert not any("notes" in told for told in hearths(answer.text))
    assert patient.request("POST", "/admin/models/tiny/unload").status_code == 200
