"""Rows 17 and 20: KV matches for what it was computed, and what is said does not depend on it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest

from tests.crash.server_store import check_store
from tests.running_server import CHAT, RunningServer, running
from tests.tiny_models import CHAT_TEMPLATE, TEXT, write_model

MESSAGES = [
    {"role": "user", "content": " ".join([TEXT] * 6)},
    {"role": "assistant", "content": "the quick brown fox"},
    {"role": "user", "content": "let me see"},
]
CLASSES: dict[str, dict[str, Any]] = {
    "gemma3_text": {},
    "qwen3": {},
    "qwen3-8-bits": {"head_dim": 64},
    "lfm2": {},
    "qwen3_next": {},
    "falcon_h1": {},
    "jamba": {},
    "gpt_oss": {},
    "deepseek_v3": {},
}
"""Sliding window, plain, quantised, convolution, state, latent attention, and mixtures."""


def ask(server: RunningServer, model: str, **changes: Any) -> dict[str, Any]:
    body = {"model": model, "messages": MESSAGES, "temperature": 0, "max_tokens": 24} | changes
    response = server.post(CHAT, body)
    assert response.status_code == 200, response.text
    return response.json()


def cache_of(server: RunningServer, model: str) -> tuple[int, int, str | None]:
    """Prompt tokens, how many were not computed, and why no more."""
    answer = ask(server, model)
    cache = answer["hearth"]["cache"]
    return answer["usage"]["prompt_tokens"], cache["cached_tokens"], cache["reason"]


def copy_of(model: Path, name: str, **files: str) -> None:
    shutil.copytree(model, model.parent / name)
    for file, text in files.items():
        path = next((model.parent / name).glob(f"{file}.*"))
        path.write_text(text)


def other_weights(model: Path) -> None:
    """The same size, times and header."""
    file = model / "model.safetensors"
    status = file.stat()
    data = bytearray(file.read_bytes())
    data[-2] ^= 0x55
    copy = model / "copy"
    copy.write_bytes(data)
    copy.replace(file)
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))


def test_only_what_changes_kv_or_tokens_makes_a_miss(tmp_path: Path):
    model = write_model(tmp_path / "models" / "m", "qwen3", head_dim=64)
    for name in ("narrow", "bits"):
        copy_of(model, name)
    template = CHAT_TEMPLATE.replace("<|im_start|>assistant\n", "<|im_start|>assistant:\n")
    copy_of(model, "template", chat_template=template)
    config = f"""
models_dir = "{model.parent}"
default_model = "m"
max_loaded_models = 1
[aliases]
other = "m"
[models.narrow]
context = 2048
[models.bits]
kv_bits = 8
"""
    with running(tmp_path, config=config) as server:
        num_tokens, num_cached, reason = cache_of(server, "m")
        assert (num_cached, reason) == (0, "first_seen")
        whole = (num_tokens, num_tokens - 1, None)
        assert cache_of(server, "other") == whole
        assert cache_of(server, "narrow") == whole
        assert cache_of(server, "bits") == (num_tokens, 0, "first_seen")
        longer, num_same, _ = cache_of(server, "template")
        assert longer > num_tokens
        assert num_tokens - 5 < num_same < num_tokens
        other_weights(model)
        assert cache_of(server, "m") == (num_tokens, 0, "first_seen")


def configured(home: Path, names: Collection[str]) -> str:
    """The configuration of a model of each class."""
    lines = ["preload = []", "prewarm_share = 0", f'default_model = "{next(iter(names))}"']
    for name in names:
        path = write_model(home / "models" / name, name.partition("-")[0], **CLASSES[name])
        lines += [f"[models.{name}]", f'path = "{path}"']
        lines += ["kv_bits = 8"] if name.endswith("bits") else []
    return "\n".join(lines)


def check_same(home: Path, names: Collection[str]) -> None:
    config = configured(home, names)
    said: dict[str, list[Any]] = {name: [] for name in names}
    for tiers in (("none", "hot"), ("warm",)):
        with running(home, config=config) as server:
            for name in names:
                for tier in tiers:
                    answer = ask(server, name)
                    cache = answer["hearth"]["cache"]
                    assert cache["tier"] == tier, (name, cache)
                    num_tokens = answer["usage"]["prompt_tokens"]
                    assert cache["cached_tokens"] == (0 if tier == "none" else num_tokens - 1)
                    said[name].append(answer["choices"][0]["message"]["content"])
    for name, texts in said.items():
        assert len(texts[0]) > 8, name
        assert texts == [texts[0]] * 3, name
    assert len({texts[0] for texts in said.values()}) > 1
    assert check_store(home / "kv") > 0


def test_the_same_is_said_hot_restored_and_restarted(tmp_path: Path):
    check_same(tmp_path, ("gemma3_text", "lfm2"))


@pytest.mark.soak
def test_the_same_is_said_with_every_class(tmp_path: Path):
    check_same(tmp_path, CLASSES)
