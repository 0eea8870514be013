"""Rows 17 and 20: KV matches for what it was computed, and what is said does not depend on it."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Collection
from pathlib import Path
from random import Random
from typing import Any

import pytest
from safetensors.numpy import load as read_safetensors
from safetensors.numpy import save as safetensors_of

from store.block_names import BLOCK_TOKENS
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


def in_shards(model: Path, num_shards: int) -> list[Path]:
    """The same weights in several files, in no order."""
    whole = model / "model.safetensors"
    tensors = sorted(read_safetensors(whole.read_bytes()).items())
    whole.unlink()
    shards = [
        model / f"model-{number + 1}-of-{num_shards}.safetensors" for number in range(num_shards)
    ]
    for number, path in enumerate(shards):
        path.write_bytes(safetensors_of(dict(tensors[number::num_shards])))
    return shards


def spoil(path: Path, chance: Random) -> None:
    """Turn the signs of some numbers of one tensor, in place."""
    data = bytearray(path.read_bytes())
    length = 8 + int.from_bytes(data[:8], "little")
    entries = [one for name, one in json.loads(data[8:length]).items() if name != "__metadata__"]
    start, end = chance.choice(entries)["data_offsets"]
    with path.open("r+b") as file:
        for place in range(length + start + 3, length + end, 4 * chance.choice((1, 3))):
            file.seek(place)
            file.write(bytes([data[place] ^ 0x80]))


def spoil_and_set_back(path: Path, chance: Random) -> None:
    status = path.stat()
    spoil(path, chance)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def spoil_by_another_name(path: Path, chance: Random) -> None:
    other = path.with_name("other")
    other.hardlink_to(path)
    spoil_and_set_back(other, chance)
    other.unlink()


def replace_by_a_spoilt_copy(path: Path, chance: Random) -> None:
    copy = path.with_name("copy")
    shutil.copy2(path, copy)
    spoil_and_set_back(copy, chance)
    copy.replace(path)


def replace_by_the_same(path: Path, chance: Random) -> None:
    del chance
    copy = path.with_name("copy")
    shutil.copy2(path, copy)
    copy.replace(path)


def touch(path: Path, chance: Random) -> None:
    os.utime(path, (0, chance.randrange(10**9)))


SPOILING = (
    spoil,
    spoil_and_set_back,
    spoil_by_another_name,
    replace_by_a_spoilt_copy,
)
SPARING = (replace_by_the_same, touch)


def test_whatever_is_done_to_the_weights_no_kv_of_others_is_used(tmp_path: Path):
    """Against what is computed without any KV."""
    chance = Random(12)
    shards = in_shards(write_model(tmp_path / "models" / "m"), 3)
    config = f'models_dir = "{tmp_path / "models"}"\ndefault_model = "m"\nprewarm_share = 0'
    said: list[str] = []
    reused: list[int] = []
    for changes in ((SPOILING[0],), (SPARING[0], *SPOILING[1:]), (SPARING[1],)):
        with running(tmp_path, config=config) as server:
            for change in (None, *changes):
                if change is not None:
                    change(chance.choice(shards), chance)
                    server.forgive("m")
                for _ in range(2):
                    answer = ask(server, "m")
                    said.append(answer["choices"][0]["message"]["content"])
                    reused.append(answer["hearth"]["cache"]["cached_tokens"])
                anew = ask(server, "m", cache_mode="off")
                assert anew["choices"][0]["message"]["content"] == said[-1] == said[-2]
    assert len(set(said)) == 1 + len(SPOILING), "others say something else"
    num_spoilt = sum(first == 0 for first in reused[::2])
    assert num_spoilt == 1 + len(SPOILING), reused
    assert all(reused[1::2])


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
                    whole = num_tokens - 1
                    blocks = whole - whole % BLOCK_TOKENS  # states within a block are not on disk
                    least = {"none": 0, "hot": whole, "warm": blocks}[tier]
                    assert least <= cache["cached_tokens"] <= (whole if least else 0)
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
