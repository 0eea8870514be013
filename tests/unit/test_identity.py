"""What the model hash stands for, and what it does not see."""

import json
import os
import random
import shutil
import time
from collections.abc import Callable, Sequence
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path

import pytest

from runtime.models import identity
from runtime.models.files import fingerprint
from runtime.models.identity import ModelFiles, NoMemo, NotIdentified, Stopped, look, read_digests
from runtime.ranks import KvForm
from store.types import FileStamp
from tests.model_folders import make_model
from tests.waiting import until

CONFIG = {
    "model_type": "qwen3",
    "rope_theta": 10000.0,
    "quantization": {"bits": 4, "group_size": 64},
    "eos_token_id": 2,
    "_name_or_path": "somebody/something",
    "text_config": {"num_hidden_layers": 2, "bos_token_id": 1},
}
MANY = 40 << 20
"""More than is read at a time, and less than what was sampled once."""


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_model(tmp_path / "m", CONFIG, tokenizer={"a": 1})


def configure(model: Path, **changes: object) -> None:
    (model / "config.json").write_text(json.dumps(CONFIG | changes))


class Memo:
    def __init__(self) -> None:
        self.known: dict[FileStamp, bytes] = {}
        self.num_asked = 0

    def get(self, stamp: FileStamp) -> bytes | None:
        self.num_asked += 1
        return self.known.get(stamp)

    def put(self, stamp: FileStamp, digest: bytes) -> None:
        self.known[stamp] = digest

    def has_other(self, stamp: FileStamp) -> bool:
        return any(one != stamp and one[:2] == stamp[:2] for one in self.known)


def model_hash(
    model: Path,
    *,
    form: KvForm | None = None,
    adapters: Sequence[Path] = (),
    package: str = "mlx-lm",
    memo: identity.DigestMemo | None = None,
    hub: Path | None = None,
    clock: Callable[[], float] = time.time,
) -> bytes:
    files = look(model, adapters)
    digests = read_digests(files, memo or NoMemo(), hub_cache=hub, clock=clock)
    return identity.model_hash(files, digests, form=form or KvForm(), package=package)


def much_later() -> float:
    """As if nothing had been written to any file for long."""
    return time.time() + 3600


def test_copies_and_links_share(model: Path, tmp_path: Path):
    shutil.copytree(model, tmp_path / "copy")
    (tmp_path / "link").symlink_to(model)
    hashes = {model_hash(folder) for folder in (model, tmp_path / "copy", tmp_path / "link")}
    assert len(hashes) == 1
    assert len(hashes.pop()) == 32


@pytest.mark.parametrize("size", [1, 8 << 20, MANY, (65 << 20) + 3])
def test_every_byte_counts_however_large_a_file_is(model: Path, size: int):
    weights = model / "model.safetensors"
    with weights.open("wb") as file:
        file.truncate(size)
    seen = {model_hash(model)}
    places = {0, size // 2, size - 1, *(random.Random(size).randrange(size) for _ in range(3))}
    for place in sorted(places):
        with weights.open("r+b") as file:
            file.seek(place)
            file.write(b"\1")
        seen.add(model_hash(model))
    assert len(seen) == len(places) + 1


def test_it_is_the_digest_that_the_package_makes_of_the_whole_file(model: Path):
    from blake3 import blake3

    content = random.Random(1).randbytes(MANY + 1)
    (model / "model.safetensors").write_bytes(content)
    assert read_digests(look(model), NoMemo()) == [blake3(content).digest()]


def test_which_file_has_which_weights_counts(model: Path):
    one, other = model / "model.safetensors", model / "other.safetensors"
    other.write_bytes(b"\1" * 8)
    before = model_hash(model)
    other.rename(model / "a.safetensors")
    other, third = model / "a.safetensors", model / "model.safetensors.tmp"
    assert model_hash(model) != before
    one.rename(third)
    other.rename(one)
    third.rename(other)
    assert model_hash(model) != before


def test_weights_that_an_index_names_count_and_must_lie_with_the_model(model: Path):
    before = model_hash(model)
    (model / "part").mkdir()
    (model / "part" / "x.safetensors").write_bytes(b"\0" * 8)
    assert model_hash(model) == before
    index = model / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "part/x.safetensors"}}))
    named = model_hash(model)
    (model / "part" / "x.safetensors").write_bytes(b"\1" * 8)
    assert len({before, named, model_hash(model)}) == 3
    index.write_text(json.dumps({"weight_map": {"a": "../x.safetensors"}}))
    with pytest.raises(NotIdentified, match="elsewhere"):
        model_hash(model)


def test_weights_that_are_read_while_the_model_runs_are_not_known(model: Path):
    configure(model, model_type="qwen4_exp")
    with pytest.raises(NotIdentified, match="read while it runs"):
        model_hash(model)


async def test_a_memo_spares_reading_what_has_settled(model: Path):
    weights, memo = model / "model.safetensors", Memo()
    changed_s = weights.stat().st_ctime
    first = model_hash(model, memo=memo, clock=lambda: changed_s + 30)
    assert not memo.known, "a page of it may still be written to without a trace"
    assert model_hash(model, memo=memo, clock=much_later) == first
    assert len(memo.known) == 1
    memo.known = dict.fromkeys(memo.known, b"other")
    assert model_hash(model, memo=memo) != first
    await until(lambda: not look(model).settles_in_s(time.time()), "a tick of the clock")
    os.utime(weights, ns=(weights.stat().st_atime_ns, weights.stat().st_mtime_ns))
    assert model_hash(model, memo=memo) == first, "its time of change is another"


async def test_what_was_written_just_now_is_waited_for(model: Path):
    weights = model / "model.safetensors"
    weights.touch()
    now_s = weights.stat().st_ctime_ns / 1e9
    files = look(model)
    assert 0 < files.settles_in_s(now_s) <= 2
    assert files.settles_in_s(now_s + 2.01) == 0
    assert files.settles_in_s(now_s - 2.01) == 0, "a clock that was wrong holds nobody up"
    coarse = FileStamp(1, 1, 1, 1, 1_000_000_000_000_000_000)
    old = ModelFiles((files.weights[0]._replace(stamp=coarse),), (), ())
    assert old.settles_in_s(1e9 + 1.5) == pytest.approx(0.5)


def replaced(model: Path) -> None:
    copy = model / "copy"
    copy.write_bytes(b"\1" * 8)
    copy.replace(model / "model.safetensors")


def flipped(model: Path) -> None:
    status = (model / "model.safetensors").stat()
    with (model / "model.safetensors").open("r+b") as file:
        file.write(b"\1")
    os.utime(model / "model.safetensors", ns=(status.st_atime_ns, status.st_mtime_ns))


def cut(model: Path) -> None:
    os.truncate(model / "model.safetensors", 4)


@pytest.mark.parametrize("change", [replaced, flipped, cut, configure])
async def test_a_change_after_the_look_is_noticed(model: Path, change: Callable[[Path], None]):
    await until(lambda: not look(model).settles_in_s(time.time()), "a tick of the clock")
    files, before, memo = look(model), fingerprint(str(model)), Memo()
    assert files.is_unchanged()
    change(model)
    assert not files.is_unchanged()
    assert fingerprint(str(model)) != before
    if change is not configure:
        with pytest.raises(NotIdentified, match="changed"):
            read_digests(files, memo, clock=much_later)
        assert not memo.known


async def test_a_change_while_it_is_read_is_noticed(model: Path):
    weights, memo = model / "model.safetensors", Memo()
    with weights.open("wb") as file:
        file.truncate(MANY)
    await until(lambda: not look(model).settles_in_s(time.time()), "a tick of the clock")

    def meddle() -> bool:
        if (model / "model.safetensors").stat().st_size == MANY:
            with weights.open("r+b") as file:
                file.write(b"\1")
        return False

    with pytest.raises(NotIdentified, match="while it was read"):
        read_digests(look(model), memo, clock=much_later, should_stop=meddle)

    def shorten() -> bool:
        os.truncate(weights, MANY // 2)
        return False

    with pytest.raises(NotIdentified, match="cut"):
        read_digests(look(model), memo, clock=much_later, should_stop=shorten)
    with pytest.raises(Stopped):
        read_digests(look(model), memo, clock=much_later, should_stop=lambda: True)
    assert not memo.known


def test_a_pipe_is_no_weights(model: Path):
    (model / "model.safetensors").unlink()
    os.mkfifo(model / "model.safetensors")
    with pytest.raises(OSError, match="not a regular file"):
        look(model)


def snapshot_of(hub: Path, repo: str, name: str, content: bytes = b"never read") -> Path:
    blob = hub / f"models--{repo}" / "blobs" / name
    blob.parent.mkdir(parents=True)
    blob.write_bytes(content)
    snapshot = make_model(hub / f"models--{repo}" / "snapshots" / "1", CONFIG)
    (snapshot / "model.safetensors").unlink()
    (snapshot / "model.safetensors").symlink_to(blob)
    return snapshot


def test_the_hub_names_its_files_by_digest(tmp_path: Path):
    memo = Memo()
    hashes = [
        model_hash(snapshot_of(tmp_path, repo, name, repo.encode()), memo=memo, hub=tmp_path)
        for repo, name in (("a", "1" * 64), ("b", "1" * 64), ("c", "2" * 64))
    ]
    assert hashes[0] == hashes[1] != hashes[2]
    for repo, place in (("d", tmp_path / "elsewhere"), ("e", tmp_path / "blobs")):
        model = snapshot_of(place, repo, "1" * 64, repo.encode())
        assert model_hash(model, memo=memo, hub=tmp_path) not in hashes, "anybody can name a file"


async def test_a_file_of_the_hub_that_has_changed_is_read(tmp_path: Path):
    name, memo = sha256(b"as it came").hexdigest(), Memo()
    model = snapshot_of(tmp_path, "a", name, b"as it came")
    before = model_hash(model, memo=memo, hub=tmp_path)
    weights = model / "model.safetensors"
    await until(lambda: not look(model).settles_in_s(time.time()), "a tick of the clock")
    weights.resolve().chmod(0o600)
    assert model_hash(model, memo=memo, hub=tmp_path) == before
    await until(lambda: not look(model).settles_in_s(time.time()), "a tick of the clock")
    weights.write_bytes(b"as it came!")  # through the link, as a program that saves does
    assert model_hash(model, memo=memo, hub=tmp_path) != before


def test_tokenizer_template_and_names_are_not_part_of_it(model: Path):
    before = model_hash(model)
    (model / "tokenizer.json").write_text("{}")
    (model / "chat_template.jinja").write_text("other")
    configure(model, eos_token_id=[2, 3], _name_or_path="else", transformers_version="9")
    assert model_hash(model) == before


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_theta": 5e5},
        {"quantization": {"bits": 8}},
        {"text_config": {}},
        {"image_token_id": 7},
    ],
)
def test_configuration_is(model: Path, changes: dict[str, object]):
    before = model_hash(model)
    configure(model, **changes)
    assert model_hash(model) != before


def test_whose_code_computes_it_is(model: Path):
    if find_spec("mlx_vlm") is None:
        pytest.skip("mlx-vlm is not installed")
    assert model_hash(model, package="mlx-vlm") != model_hash(model, package="mlx-lm")
    assert model_hash(model, package="mlx-lm") == model_hash(model)


def test_the_version_of_what_computes_it_is(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    hashes = {model_hash(model)}
    for package in ("mlx", "mlx_lm"):
        installed = tmp_path / package / f"{package}-99.0.dist-info"
        installed.mkdir(parents=True)
        name = package.replace("_", "-")
        (installed / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 99.0\n")
        monkeypatch.syspath_prepend(str(installed.parent))
        hashes.add(model_hash(model))
    assert len(hashes) == 3


def test_kv_bits_and_adapters_in_order_are(model: Path, tmp_path: Path):
    one = make_model(tmp_path / "one", adapter_config={"rank": 8})
    two = make_model(tmp_path / "two", adapter_config={"rank": 16})
    hashes = {
        model_hash(model),
        model_hash(model, form=KvForm(kv_bits=8)),
        model_hash(model, form=KvForm(kv_bits=4)),
        model_hash(model, form=KvForm(kv_bits=4, kv_start=512)),
        model_hash(model, form=KvForm(kv_bits=4, kv_start=1024)),
        model_hash(model, adapters=[one]),
        model_hash(model, adapters=[one, two]),
        model_hash(model, adapters=[two, one]),
    }
    assert len(hashes) == 8


def test_ranks_and_what_they_share_out_are(model: Path):
    forms = (KvForm(), KvForm(num_ranks=2), KvForm(num_ranks=3), KvForm(None, 2, "pipeline"))
    assert len({model_hash(model, form=form) for form in forms}) == len(forms)
    assert model_hash(model, form=KvForm()) == model_hash(model)


Change = Callable[[Path, random.Random], object]


def _flip(path: Path, rng: random.Random) -> None:
    with path.open("r+b") as file:
        file.seek(place := rng.randrange(path.stat().st_size))
        byte = file.read(1)[0]
        file.seek(place)
        file.write(bytes([byte ^ (1 << rng.randrange(8))]))


def _flip_and_set_back(path: Path, rng: random.Random) -> None:
    status = path.stat()
    _flip(path, rng)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def _rename_over(path: Path, rng: random.Random) -> None:
    status, copy = path.stat(), path.with_suffix(".new")
    shutil.copy2(path, copy)
    _flip(copy, rng)
    os.utime(copy, ns=(status.st_atime_ns, status.st_mtime_ns))
    copy.replace(path)


def _through_a_second_name(path: Path, rng: random.Random) -> None:
    other = path.with_suffix(".second")
    other.hardlink_to(path)
    _flip_and_set_back(other, rng)
    other.unlink()


def _copy_back(path: Path, rng: random.Random) -> None:
    del rng
    copy = path.with_suffix(".copy")
    shutil.copy2(path, copy)
    copy.replace(path)


def _exchange(path: Path, rng: random.Random) -> None:
    others = sorted(set(path.parent.glob("*.safetensors")) - {path})
    other, between = rng.choice(others), path.with_suffix(".between")
    path.rename(between)
    other.rename(path)
    between.rename(other)


def _touch_back(path: Path, rng: random.Random) -> None:
    os.utime(path, (0, rng.randrange(10**9)))


CHANGES: tuple[Change, ...] = (
    _flip,
    _flip_and_set_back,
    _rename_over,
    _through_a_second_name,
    _copy_back,
    _exchange,
    _touch_back,
)


@pytest.mark.parametrize("seed", range(4))
async def test_the_hash_stands_for_the_bytes_whatever_is_done_to_the_files(
    tmp_path: Path, seed: int
):
    rng, memo = random.Random(seed), Memo()
    model = make_model(tmp_path / "m", CONFIG)
    for number in range(3):
        (model / f"model-{number}.safetensors").write_bytes(rng.randbytes(200))
    by_content: dict[bytes, bytes] = {}
    for _ in range(25):
        files = sorted(model.glob("*.safetensors"))
        for _ in range(rng.randrange(3)):
            rng.choice(CHANGES)(rng.choice(files), rng)
        await until(lambda: not look(model).settles_in_s(time.time()), "a tick of the clock")
        content = b"".join(path.read_bytes() for path in files)
        found = model_hash(model, memo=memo, clock=much_later)
        assert by_content.setdefault(content, found) == found, "copies share"
    assert len(set(by_content.values())) == len(by_content) > 5
