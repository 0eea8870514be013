"""What a model's directory says: its context and its makers' sampling."""

import json
from pathlib import Path

import pytest

from runtime.config.settings import ModelSettings, SamplingSettings
from runtime.models.files import read_spec
from runtime.models.folder import BrokenModel, ModelFolder
from runtime.types import SamplingParams
from tests.model_folders import CONFIG, make_model

NO_SETTINGS = ModelSettings()


@pytest.mark.parametrize(
    ("config", "tokenizer", "context"),
    [
        ({"max_position_embeddings": 40960}, {}, 40960),
        ({"text_config": {"max_position_embeddings": 8192}}, {}, 8192),
        ({"max_position_embeddings": 4000, "text_config": {}}, {"model_max_length": 2000}, 2000),
        ({"max_position_embeddings": 4000}, {"model_max_length": 8000}, 4000),
        ({"max_position_embeddings": 4000}, {"model_max_length": 10**30}, 4000),
        ({"max_position_embeddings": 4000}, {"model_max_length": 1e30}, 4000),
        ({"max_position_embeddings": 4000}, {"model_max_length": 1}, 4000),
        ({}, {"model_max_length": 10**30}, 4096),
        ({"max_position_embeddings": None, "text_config": None}, {}, 4096),
    ],
)
def test_the_context_is_the_smallest_sane_limit(
    tmp_path: Path, config: dict[str, object], tokenizer: object, context: int
):
    path = make_model(tmp_path / "a", {"model_type": "qwen3"} | config, tokenizer_config=tokenizer)
    assert read_spec("a", path, NO_SETTINGS).context == context
    assert read_spec("a", path, ModelSettings(context=100)).context == 100


SHAPE = {"num_hidden_layers": 10, "num_attention_heads": 8, "hidden_size": 1024}


@pytest.mark.parametrize(
    ("config", "kv_bits", "expected"),
    [
        (SHAPE, None, 10 * 2 * 8 * 128 * 2),
        (SHAPE | {"num_key_value_heads": 2}, None, 10 * 2 * 2 * 128 * 2),
        (SHAPE | {"num_key_value_heads": 2, "head_dim": 64}, None, 10 * 2 * 2 * 64 * 2),
        (SHAPE | {"torch_dtype": "float32"}, None, 10 * 2 * 8 * 128 * 4),
        (SHAPE, 8, 10 * 2 * 8 * 128 * 17 // 16),
        ({"text_config": SHAPE}, None, 10 * 2 * 8 * 128 * 2),
        (SHAPE | {"kv_lora_rank": 512, "qk_rope_head_dim": 64}, None, 10 * (512 + 64) * 2),
        (SHAPE | {"hidden_size": None}, None, None),
        ({}, None, None),
    ],
)
def test_what_a_token_takes_is_told_by_the_shape(
    tmp_path: Path, config: dict[str, object], kv_bits: int | None, expected: int | None
):
    path = make_model(tmp_path / "a", {"model_type": "qwen3"} | config)
    assert read_spec("a", path, ModelSettings(kv_bits=kv_bits)).kv_bytes_per_token == expected


@pytest.mark.parametrize(
    ("context", "start", "plain_tokens"),
    [(1000, 0, 0), (1000, 200, 0), (1000, 800, 800), (500, 800, 500)],
)
def test_with_a_start_the_most_of_one_conversation_is_told(
    tmp_path: Path, context: int, start: int, plain_tokens: int
):
    path = make_model(tmp_path / "a", {"model_type": "qwen3"} | SHAPE)
    settings = ModelSettings(context=context, kv_bits=8, quantized_kv_start=start)
    plain = 10 * 2 * 8 * 128 * 2
    most = max(plain * plain_tokens // context, plain * 17 // 32)
    assert read_spec("a", path, settings).kv_bytes_per_token == most


def test_sampling_comes_from_the_makers_unless_configured(tmp_path: Path):
    given = {
        "do_sample": True,
        "temperature": 0.6,
        "top_p": 0.95,
        "top_k": 20,
        "min_p": 0,
        "repetition_penalty": 1.05,
        "eos_token_id": [1, 2],
    }
    path = make_model(tmp_path / "a", CONFIG, generation_config=given)
    made = SamplingParams(temperature=0.6, top_p=0.95, top_k=20, min_p=0.0, repetition_penalty=1.05)
    assert read_spec("a", path, NO_SETTINGS).sampling == made
    settings = ModelSettings(sampling=SamplingSettings(temperature=0.1, seed=7))
    assert read_spec("a", path, settings).sampling == SamplingParams(
        temperature=0.1, seed=7, top_p=0.95, top_k=20, min_p=0.0, repetition_penalty=1.05
    )


@pytest.mark.parametrize(
    ("given", "sampling"),
    [
        ({"do_sample": False, "temperature": 0.6}, SamplingParams(temperature=0.0)),
        (
            {"temperature": "hot", "top_p": 7, "top_k": None, "repetition_penalty": 1.1},
            SamplingParams(repetition_penalty=1.1),
        ),
    ],
)
def test_makers_who_do_not_sample_mean_temperature_zero_and_nonsense_is_left_out(
    tmp_path: Path, given: object, sampling: SamplingParams
):
    path = make_model(tmp_path / "a", CONFIG, generation_config=given)
    assert read_spec("a", path, NO_SETTINGS).sampling == sampling


def test_a_consolidated_copy_of_the_weights_is_not_counted(tmp_path: Path):
    path = make_model(tmp_path / "a")
    (path / "consolidated.safetensors").write_bytes(bytes(100))
    (path / "original").mkdir()
    (path / "original" / "model.safetensors").write_bytes(bytes(100))
    assert read_spec("a", path, NO_SETTINGS).nbytes == 8


def test_weights_that_the_index_does_not_name_are_neither_counted_nor_loaded(tmp_path: Path):
    path = make_model(tmp_path / "a")
    shards = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    for shard in shards:
        (path / shard).write_bytes(bytes(5))
    index = {"weight_map": {"a": shards[0], "b": shards[1], "c": shards[1]}}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert read_spec("a", path, NO_SETTINGS).nbytes == 10
    assert sorted(ModelFolder.read(path).weights) == shards
    (path / shards[1]).unlink()
    with pytest.raises(BrokenModel, match=f"lacks {shards[1]}"):
        read_spec("a", path, NO_SETTINGS)


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json"])
def test_a_pointer_of_git_lfs_is_told_with_its_remedy(tmp_path: Path, name: str):
    path = make_model(tmp_path / "a")
    (path / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    with pytest.raises(BrokenModel, match=rf"{name} is a pointer of Git LFS.*git lfs pull"):
        read_spec("a", path, NO_SETTINGS)
