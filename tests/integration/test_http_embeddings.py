"""Embeddings and tokens over HTTP; a tiny random embedding model beside the embedded one."""

from __future__ import annotations

import base64
import json
import struct
from collections.abc import Generator
from pathlib import Path
from typing import Any

import mlx.core as mx
import openai
import pytest
from mlx_lm.utils import load
from openai.types import CreateEmbeddingResponse

from tests.contract.test_openai_envelopes import check
from tests.running_server import RunningServer, running
from tests.tiny_models import write_model

TEXTS = ["the quick brown fox", "a kettle hums on the hearth", "the quick brown fox"]


@pytest.fixture(scope="module")
def models_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for name, mode in (("mean", "mean_tokens"), ("last", "lasttoken")):
        path = write_model(folder / name, seed=3)
        write_pooling(path, {f"pooling_mode_{mode}": True}, is_normalised=name == "last")
    return folder


def write_pooling(path: Path, config: dict[str, bool], *, is_normalised: bool) -> None:
    kinds = ["Transformer", "Pooling", *(["Normalize"] if is_normalised else [])]
    modules = [
        {"idx": i, "path": f"{i}_{kind}", "type": f"sentence_transformers.models.{kind}"}
        for i, kind in enumerate(kinds)
    ]
    (path / "modules.json").write_text(json.dumps(modules))
    (path / "1_Pooling").mkdir()
    (path / "1_Pooling" / "config.json").write_text(json.dumps(config))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, models_dir: Path) -> Generator[RunningServer]:
    with running(tmp_path_factory.mktemp("home"), HEARTH_MODELS_DIR=str(models_dir)) as server:
        yield server


def embedded(server: RunningServer, **body: Any) -> list[list[float]]:
    answer = server.post("/v1/embeddings", body)
    assert answer.status_code == 200, answer.text
    return [one["embedding"] for one in answer.json()["data"]]


def expected(path: Path, text: str, kind: str) -> list[float]:
    """Computed here, without the server."""
    loaded: Any = load(str(path))
    model, tokenizer = loaded[:2]
    hidden = model.model(mx.array(tokenizer.encode(text))[None])[0].astype(mx.float32)
    vector = hidden.mean(axis=0) if kind == "mean" else hidden[-1] / mx.linalg.norm(hidden[-1])
    return vector.tolist()


@pytest.mark.parametrize("name", ["mean", "last"])
def test_a_vector_is_what_the_models_card_says(server: RunningServer, models_dir: Path, name: str):
    vectors = embedded(server, model=name, input=TEXTS)
    assert vectors[0] == vectors[2] != vectors[1]
    assert vectors[0] == pytest.approx(expected(models_dir / name, TEXTS[0], name), abs=1e-4)


def test_a_vector_can_be_shorter_and_written_in_base64(server: RunningServer):
    (whole,) = embedded(server, model="last", input=TEXTS[0])
    (short,) = embedded(server, model="last", input=TEXTS[0], dimensions=8)
    scale = sum(value * value for value in whole[:8]) ** 0.5
    assert short == pytest.approx([value / scale for value in whole[:8]], abs=1e-5)
    body = {"model": "last", "input": TEXTS[0], "encoding_format": "base64"}
    data = server.post("/v1/embeddings", body).json()["data"][0]["embedding"]
    assert list(struct.unpack(f"<{len(whole)}f", base64.b64decode(data))) == whole


def test_openais_own_client_reads_the_vectors(server: RunningServer):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
        answer = client.embeddings.create(model="last", input=TEXTS)
    assert [one.index for one in answer.data] == [0, 1, 2]
    assert answer.data[0].embedding == pytest.approx(embedded(server, model="last", input=TEXTS)[0])
    assert answer.usage.prompt_tokens > 10


def test_token_ids_are_embedded_like_their_text(server: RunningServer):
    tokens = server.post("/tokenize", {"model": "mean", "prompt": TEXTS[0]}).json()["tokens"]
    assert embedded(server, model="mean", input=tokens) == embedded(
        server, model="mean", input=TEXTS[0]
    )


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"model": "hearth-tiny", "input": "x"}, "model"),
        ({"model": "last", "input": []}, "input"),
        ({"model": "last", "input": ["x", ""]}, "input[1]"),
        ({"model": "last", "input": "x", "dimensions": 4096}, "dimensions"),
        ({"model": "last", "input": ["x"] * 2049}, "input"),
        ({"model": "last", "input": "x", "encoding_format": "hex"}, "encoding_format"),
    ],
)
def test_what_cannot_be_embedded_is_refused_by_name(
    server: RunningServer, body: dict[str, Any], param: str
):
    answer = server.post("/v1/embeddings", body)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param


def test_text_becomes_tokens_and_tokens_text(server: RunningServer):
    text = "Hello, naïve café 😀!"
    tokens = server.post("/tokenize", {"prompt": text}).json()
    assert tokens["count"] == len(tokens["tokens"]) > 3
    assert tokens["max_model_len"] > 1000
    assert server.post("/detokenize", {"tokens": tokens["tokens"]}).json() == {"prompt": text}
    assert server.post("/detokenize", {"tokens": []}).json() == {"prompt": ""}


def test_messages_become_the_tokens_that_a_chat_is_charged_for(server: RunningServer):
    messages = [{"role": "user", "content": "Hello!"}]
    count = server.post("/tokenize", {"messages": messages}).json()["count"]
    body = {"messages": messages, "max_tokens": 1}
    answer = server.post("/v1/chat/completions", body).json()
    assert answer["usage"]["prompt_tokens"] == count


def test_tokens_that_are_none_are_refused(server: RunningServer):
    for path, body, param in (
        ("/tokenize", {}, "prompt"),
        ("/detokenize", {"tokens": [-1]}, "tokens[0]"),
        ("/detokenize", {"tokens": [10**8]}, "prompt"),
    ):
        answer = server.post(path, body)
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["param"] == param


def test_an_answer_is_what_openais_client_types_to_the_last_field(server: RunningServer) -> None:
    answer = server.post("/v1/embeddings", {"model": "mean", "input": TEXTS})
    checked = check(CreateEmbeddingResponse, answer.json())
    assert [one.index for one in checked.data] == [0, 1, 2]
