"""Conversations travel to stock mlx-lm and back, as files that either of them wrote."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.generate import maybe_quantize_kv_cache
from mlx_lm.models.cache import make_prompt_cache, save_prompt_cache
from mlx_lm.utils import load

from runtime.kv.mlx_lm_file import read
from tests.disk_observer import Observer
from tests.running_server import COMPLETIONS, RunningServer, hearth, running
from tests.tiny_models import TEXT, write_model
from tests.tiny_vlms import write_vlm

FAMILIES = ("qwen3", "lfm2")
PROMPT = " ".join([TEXT] * 8)
MORE = " the kettle hums on and the rain falls"


def cache(home: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """`hearth cache …`."""
    return hearth("cache", *arguments, "--json", HEARTH_HOME=str(home), **variables)


def done(home: Path, *arguments: str, **variables: str) -> Any:
    outcome = cache(home, *arguments, **variables)
    assert outcome.returncode == 0, outcome.stderr
    return json.loads(outcome.stdout)


def complete(server: RunningServer, prompt: str | list[int], model: str) -> Any:
    body = {"model": model, "prompt": prompt, "max_tokens": 8, "temperature": 0}
    response = server.post(COMPLETIONS, body | {"session_id": f"of {model}"})
    assert response.status_code == 200, response.text
    return response.json()


@pytest.fixture(scope="module")
def models_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("families")
    for family in FAMILIES:
        write_model(folder / family, family)
    return folder


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory, models_dir: Path) -> Path:
    """Every family has answered and saved one prompt."""
    home = tmp_path_factory.mktemp("home")
    config = f'models_dir = "{models_dir}"\ndefault_model = "qwen3"\npreload = []\n'
    with running(home, config=config) as server:
        for family in FAMILIES:
            complete(server, PROMPT, family)
    return home


def logits(model: Any, token_ids: list[int], kv: list[Any]) -> mx.array:
    out = model(mx.array(token_ids)[None], cache=kv)[:, -1]
    mx.eval(out)
    return out


def test_we_continue_what_mlx_lm_wrote(models_dir: Path, tmp_path: Path):
    """Its `cache_prompt` says no tokens, so the prompt's text is given."""
    file, text = tmp_path / "theirs.safetensors", tmp_path / "prompt.txt"
    text.write_text(PROMPT)
    flags = ("--model", str(models_dir / "qwen3"), "--prompt", PROMPT)
    subprocess.run(
        [sys.executable, "-m", "mlx_lm", "cache_prompt", *flags, "--prompt-cache-file", str(file)],
        check=True,
        capture_output=True,
        env=os.environ | {"HF_HUB_OFFLINE": "1"},
    )
    config = f'models_dir = "{models_dir}"\ndefault_model = "qwen3"\npreload = []\n'
    home = tmp_path / "home"
    with running(home, config=config) as server:
        port = {"HEARTH_PORT": str(server.port)}
        server.wait_for_the_store()
        given = ("import", str(file), "--model", "qwen3")
        refused = cache(home, *given, **port)
        assert refused.returncode == 1
        assert "--prompt-file" in refused.stderr
        num_tokens = done(home, *given, "--prompt-file", str(text), **port)["num_tokens"]
        messages = [{"role": "user", "content": PROMPT + MORE}]
        body = {"model": "qwen3", "messages": messages, "max_tokens": 4}
        answer = server.post("/v1/chat/completions", body).json()["hearth"]["cache"]
        assert num_tokens - 4 <= answer["cached_tokens"] <= num_tokens


def test_a_conversation_that_was_quantised_on_its_way_is_exported_as_mlx_lm_has_it(tmp_path: Path):
    path, file = write_model(tmp_path / "models" / "m", head_dim=64), tmp_path / "cache.safetensors"
    config = f'models_dir = "{path.parent}"\nblock_size = 16\nkv_bits = 8\n'
    with running(tmp_path / "home", config=f"{config}quantized_kv_start = 64\n") as server:
        complete(server, PROMPT, "m")
    num_tokens = done(tmp_path / "home", "export", "of m", str(file))["num_tokens"]
    stock = read(file)
    token_ids, kv = stock.token_ids, stock.kv
    assert token_ids is not None
    assert {(type(one).__name__, one.offset) for one in kv} == {("QuantizedKVCache", num_tokens)}
    model, *_ = load(str(path))
    fresh = make_prompt_cache(model)
    for start in range(0, num_tokens, 64):
        logits(model, token_ids[start : start + 64], fresh)
        maybe_quantize_kv_cache(fresh, 64, 64, 8)
    for more in ([7, 8, 9], [10]):
        ours, theirs = logits(model, more, kv), logits(model, more, fresh)
        assert mx.allclose(ours, theirs, rtol=1e-2, atol=1e-2).item()
    outcome = cache(tmp_path / "home", "import", str(file), "--model", "m")
    assert "its layer caches are not those of m" in outcome.stderr
    plain, tokens = tmp_path / "plain.safetensors", tmp_path / "tokens.json"
    for held, is_taken in ((64, True), (65, False)):
        one = make_prompt_cache(model)
        logits(model, token_ids[:held], one)
        save_prompt_cache(str(plain), one)
        tokens.write_text(json.dumps(token_ids[:held]))
        given = ("import", str(plain), "--model", "m", "--tokens", str(tokens))
        outcome = cache(tmp_path / "home", *given)
        assert (outcome.returncode == 0) is is_taken, outcome.stderr
        assert is_taken or "cache fewer tokens, or leave quantized_kv_start out" in outcome.stderr


def test_a_model_that_sees_is_refused_with_what_to_do_instead(home: Path, tmp_path: Path):
    vlm = write_vlm(tmp_path / "models" / "qwen3_vl", "qwen3_vl")
    own, file = tmp_path / "own", tmp_path / "cache.safetensors"
    config = f'models_dir = "{vlm.parent}"\ndefault_model = "qwen3_vl"\npreload = []\n'
    with running(own, config=config) as server:
        complete(server, PROMPT, "qwen3_vl")
    outcome = cache(own, "export", "of qwen3_vl", str(file))
    assert outcome.returncode == 1
    assert "qwen3_vl sees and mlx-vlm computes its KV" in outcome.stderr
    assert "vision = false" in outcome.stderr
    assert not file.exists()
    done(home, "export", "of qwen3", str(file))
    outcome = cache(own, "import", str(file), "--model", "qwen3_vl")
    assert outcome.returncode == 1
    assert "qwen3_vl sees and mlx-vlm computes its KV" in outcome.stderr


def test_kv_of_another_model_or_prompt_never_gets_in(models_dir: Path, home: Path, tmp_path: Path):
    file = tmp_path / "theirs.safetensors"
    model, tokenizer, *_ = load(str(models_dir / "qwen3"))
    token_ids = tokenizer.encode(PROMPT)
    kv = make_prompt_cache(model)
    logits(model, token_ids, kv)
    save_prompt_cache(str(file), kv)
    wrong = tmp_path / "tokens.json"
    wrong.write_text(json.dumps(token_ids[::-1]))
    outcome = cache(home, "import", str(file), "--model", "qwen3", "--tokens", str(wrong))
    assert "not what this model computes" in outcome.stderr
    wrong.write_text(json.dumps(token_ids[:-1]))
    outcome = cache(home, "import", str(file), "--model", "qwen3", "--tokens", str(wrong))
    assert f"holds {len(token_ids)} tokens" in outcome.stderr
    wrong.write_text(json.dumps(token_ids))
    outcome = cache(home, "import", str(file), "--model", "lfm2", "--tokens", str(wrong))
    assert "layer caches are not those" in outcome.stderr
    assert done(home, "import", str(file), "--model", "qwen3", "--tokens", str(wrong))


def test_a_pipe_is_not_waited_for(home: Path, tmp_path: Path):
    pipe = tmp_path / "pipe.safetensors"
    os.mkfifo(pipe)
    outcome = cache(home, "import", str(pipe), "--model", "qwen3")
    assert (outcome.returncode, "no regular file" in outcome.stderr) == (1, True), outcome.stderr


def test_an_import_makes_room_first_and_is_refused_where_there_is_none(
    home: Path, models_dir: Path, tmp_path: Path
):
    """The disk never holds more than its cap, and nothing leaves for what has no room anyway."""
    file, large, tokens = (tmp_path / name for name in ("a.safetensors", "b.safetensors", "c.json"))
    done(home, "export", "of qwen3", str(file))
    model, tokenizer, *_ = load(str(models_dir / "qwen3"))
    token_ids = tokenizer.encode(PROMPT) * 9
    tokens.write_text(json.dumps(token_ids))
    kv = make_prompt_cache(model)
    logits(model, token_ids, kv)
    save_prompt_cache(str(large), kv)
    other, cap_bytes = tmp_path / "other", 1_900_000
    config = f'models_dir = "{models_dir}"\ndefault_model = "qwen3"\npreload = []\n'
    config += f"cache_max_bytes = {cap_bytes}\n"
    with running(other, config=config) as server, Observer(other / "kv") as observer:
        port = {"HEARTH_PORT": str(server.port)}
        for number in range(6):
            complete(server, f"{number} {PROMPT}", "qwen3")
        before = slots(other, **port)
        into_qwen3 = ("--model", "qwen3", "--tokens", str(tokens))
        refused = cache(other, "import", str(large), *into_qwen3, **port)
        assert refused.returncode == 1
        assert "exceed the cap" in refused.stderr
        assert slots(other, **port) >= before
        said = done(other, "import", str(file), "--model", "qwen3", **port)
        assert said["num_new_slots"] == 1
        token_ids = read(file).token_ids
        assert token_ids is not None
        answer = complete(server, [*token_ids, 7, 8, 9], "qwen3")["hearth"]["cache"]
        assert answer["cached_tokens"] == len(token_ids)
    assert observer.num_looks > 10
    assert observer.most_bytes <= cap_bytes


def slots(home: Path, **variables: str) -> int:
    return sum(one["num_slots"] for one in done(home, "stats", **variables)["tiers"])
