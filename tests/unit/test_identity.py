"""What the model hash stands for, and what it does not see."""

import json
import os
import shutil
from pathlib import Path

import pytest

from runtime.identity import model_hash
from runtime.ranks import KvForm
from store.types import FileStamp
from tests.model_folders import make_model

CONFIG = {
    "model_type": "qwen3",
    "rope_theta": 10000.0,
    "quantization": {"bits": 4, "group_size": 64},
    "eos_token_id": 2,
    "_name_or_path": "somebody/something",
    "text_config": {"num_hidden_layers": 2, "bos_token_id": 1},
}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_model(tmp_path / "m", CONFIG, tokenizer={"a": 1})


def configure(model: Path, **changes: object) -> None:
    (model / "config.json").write_text(json.dumps(CONFIG | changes))


class Memo:
    def __init__(self) -> None:
        self.known: dict[FileStamp, bytes] = {}

    def get(self, stamp: FileStamp) -> bytes | None:
        return self.known.get(stamp)

    def put(self, stamp: FileStamp, digest: bytes) -> None:
        self.known[stamp] = digest


def test_copies_and_links_share(model: Path, tmp_path: Path):
    shutil.copytree(model, tmp_path / "copy")
    (tmp_path / "link").symlink_to(model)
    hashes = {model_hash(folder) for folder in (model, tmp_path / "copy", tmp_path / "link")}
    assert len(hashes) == 1
    assert len(hashes.pop()) == 32


def test_weights_replaced_in_place_do_not(model: Path):
    before = model_hash(model)
    weights = model / "model.safetensors"
    status = weights.stat()
    weights.write_bytes(b"\1" * status.st_size)
    assert model_hash(model) != before


def test_a_memo_spares_reading_what_has_settled(model: Path):
    weights, memo = model / "model.safetensors", Memo()
    modified_s = weights.stat().st_mtime
    first = model_hash(model, memo=memo, clock=lambda: modified_s + 1)
    assert not memo.known
    assert model_hash(model, memo=memo, clock=lambda: modified_s + 3) == first
    assert len(memo.known) == 1
    memo.known = dict.fromkeys(memo.known, b"other")
    assert model_hash(model, memo=memo) != first
    os.utime(weights, (modified_s + 1, modified_s + 1))
    assert model_hash(model, memo=memo) == first


@pytest.mark.parametrize("where", ["beginning", "middle", "end"])
def test_large_files_are_sampled(model: Path, where: str):
    weights = model / "model.safetensors"
    size = 65 << 20
    with weights.open("wb") as file:
        file.write((1000).to_bytes(8, "little"))
        file.truncate(size)
    before = model_hash(model)
    with weights.open("r+b") as file:
        file.seek({"beginning": 500, "middle": 2000, "end": size - 1}[where])
        file.write(b"\1")
    assert model_hash(model) != before


def test_the_hub_names_its_files_by_digest(tmp_path: Path):
    hashes: list[bytes] = []
    for repo, digest in (("a", "1" * 64), ("b", "1" * 64), ("c", "2" * 64)):
        blob = tmp_path / repo / "blobs" / digest
        blob.parent.mkdir(parents=True)
        blob.write_text(f"never read: {repo}")
        snapshot = make_model(tmp_path / repo / "snapshots" / "1", CONFIG)
        (snapshot / "model.safetensors").unlink()
        (snapshot / "model.safetensors").symlink_to(blob)
        hashes.append(model_hash(snapshot))
    assert hashes[0] == hashes[1] != hashes[2]


def test_tokenizer_template_and_names_are_not_part_of_it(model: Path):
    before = model_hash(model)
    (model / "tokenizer.json").write_text("{}")
    (model / "chat_template.jinja").write_text("other")
    configure(model, eos_token_id=[2, 3], _name_or_path="else", transformers_version="9")
    assert model_hash(model) == before


@pytest.mark.parametrize(
    "changes", [{"rope_theta": 5e5}, {"quantization": {"bits": 8}}, {"text_config": {}}]
)
def test_configuration_is(model: Path, changes: dict[str, object]):
    before = model_hash(model)
    configure(model, **changes)
    assert model_hash(model) != before


def test_whose_code_computes_it_is(model: Path):
    pytest.importorskip("mlx_vlm")
    assert model_hash(model, package="mlx-vlm") != model_hash(model, package="mlx-lm")
    assert model_hash(model, package="mlx-lm") == model_hash(model)


def test_kv_bits_and_adapters_in_order_are(model: Path, tmp_path: Path):
    one = make_model(tmp_path / "one", adapter_config={"rank": 8})
    two = make_model(tmp_path / "two", adapter_config={"rank": 16})
    hashes = {
        model_hash(model),
        model_hash(model, form=KvForm(kv_bits=8)),
        model_hash(model, form=KvForm(kv_bits=4)),
        model_hash(model, adapters=[one]),
        model_hash(model, adapters=[one, two]),
        model_hash(model, adapters=[two, one]),
    }
    assert len(hashes) == 6


def test_ranks_and_what_they_share_out_are(model: Path):
    forms = (KvForm(), KvForm(num_ranks=2), KvForm(num_ranks=3), KvForm(None, 2, "pipeline"))
    assert len({model_hash(model, form=form) for form in forms}) == len(forms)
    assert model_hash(model, form=KvForm()) == model_hash(model)
