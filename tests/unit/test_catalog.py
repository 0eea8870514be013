"""Names to models, over real directories; the hub's cache is laid out as the hub lays it out."""

import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from runtime.config.settings import ModelSettings, Settings
from runtime.embedded import HEARTH_TINY
from runtime.errors import UnknownModel
from runtime.models.catalog import Catalog
from runtime.types import ModelSpec
from tests.model_folders import make_model

REPO = "mlx-community/Qwen3-4B-4bit"
COMMIT = "0123456789abcdef"


class Clock:
    """Time that the test sets."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def open_catalog(tmp_path: Path, clock: Clock) -> Callable[..., Catalog]:
    def open_catalog(**settings: object) -> Catalog:
        return Catalog(
            Settings(home=tmp_path / "home", **settings),  # pyright: ignore[reportArgumentType]
            hub_cache=tmp_path / "hub",
            clock=clock,
        )

    return open_catalog


Open = Callable[..., Catalog]


def make_snapshot(tmp_path: Path, repo: str = REPO, commit: str = COMMIT) -> Path:
    """A cached snapshot: links into the blobs, as downloads make them."""
    folder = tmp_path / "hub" / f"models--{repo.replace('/', '--')}"
    snapshot = make_model(folder / "snapshots" / commit)
    (folder / "blobs").mkdir(exist_ok=True)
    for file in snapshot.iterdir():
        blob = folder / "blobs" / f"{commit}-{file.name}"
        file.rename(blob)
        file.symlink_to(os.path.relpath(blob, snapshot))
    (folder / "refs").mkdir(exist_ok=True)
    (folder / "refs" / "main").write_text(commit)
    return snapshot


def ids(catalog: Catalog) -> list[str]:
    return [spec.id for spec in catalog.models()]


def reasons(logs: Sequence[Mapping[str, object]]) -> list[tuple[object, object]]:
    return [(log["model"], log["reason"]) for log in logs if log["event"] == "model left out"]


def test_without_any_model_the_embedded_one_is_the_default(open_catalog: Open):
    catalog = open_catalog()
    assert ids(catalog) == ["hearth-tiny"]
    assert catalog.default() is catalog.resolve("hearth-tiny")
    assert catalog.default().path == str(HEARTH_TINY)


def test_a_directory_is_a_model_named_after_it(open_catalog: Open, tmp_path: Path):
    path = make_model(tmp_path / "home" / "models" / "Small.1")
    os.utime(path / "config.json", (1_700_000_000.9, 1_700_000_000.9))
    (tmp_path / "home" / "models" / "notes").mkdir()
    catalog = open_catalog()
    assert ids(catalog) == ["Small.1", "hearth-tiny"]
    assert catalog.resolve("Small.1") == ModelSpec(
        id="Small.1",
        path=str(path),
        context=2048,
        model_type="qwen3",
        nbytes=8,
        created_s=1_700_000_000,
    )
    assert catalog.default().id == "hearth-tiny"


def test_models_dir_can_be_elsewhere(open_catalog: Open, tmp_path: Path):
    make_model(tmp_path / "home" / "models" / "unseen")
    make_model(tmp_path / "elsewhere" / "seen")
    assert ids(open_catalog(models_dir=tmp_path / "elsewhere")) == ["seen", "hearth-tiny"]


def test_a_models_dir_that_is_missing_is_reported_only_when_configured(
    open_catalog: Open, tmp_path: Path
):
    with capture_logs() as logs:
        open_catalog()
        assert reasons(logs) == []
        open_catalog(models_dir=tmp_path / "none")
    reason = f"{tmp_path / 'none'} cannot be listed: No such file or directory"
    assert reasons(logs) == [("models_dir", reason)]


def test_a_cached_repository_is_a_model(open_catalog: Open, tmp_path: Path):
    snapshot = make_snapshot(tmp_path)
    make_snapshot(tmp_path, "gpt2")
    catalog = open_catalog()
    assert ids(catalog) == ["gpt2", REPO, "hearth-tiny"]
    assert catalog.resolve(REPO).path == str(snapshot)
    assert catalog.resolve(REPO).nbytes == 8


def test_the_snapshot_of_main_is_taken_or_else_the_newest_whole_one(
    open_catalog: Open, tmp_path: Path
):
    old = make_snapshot(tmp_path, commit="old")
    new = make_snapshot(tmp_path, commit="new")
    os.utime(old, (1, 1))
    main = new.parents[1] / "refs" / "main"
    assert open_catalog().resolve(REPO).path == str(new)
    main.write_text("old")
    assert open_catalog().resolve(REPO).path == str(old)
    main.unlink()
    assert open_catalog().resolve(REPO).path == str(new)
    (new / "model.safetensors").resolve().unlink()
    assert open_catalog().resolve(REPO).path == str(old)


@pytest.mark.parametrize("damage", ["config.json", "model.safetensors"])
def test_a_snapshot_that_is_not_whole_is_no_model(open_catalog: Open, tmp_path: Path, damage: str):
    (make_snapshot(tmp_path) / damage).unlink()
    assert ids(open_catalog()) == ["hearth-tiny"]


def test_a_snapshot_without_one_of_its_shards_is_no_model(open_catalog: Open, tmp_path: Path):
    snapshot = make_snapshot(tmp_path)
    weight_map = {"a": "model.safetensors", "b": "model-2.safetensors"}
    (snapshot / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert ids(open_catalog()) == ["hearth-tiny"]
    (snapshot / "model-2.safetensors").write_bytes(b"\0" * 4)
    assert open_catalog().resolve(REPO).nbytes == 12


def test_shards_are_counted_by_their_names_when_there_is_no_index(
    open_catalog: Open, tmp_path: Path
):
    path = make_model(tmp_path / "home" / "models" / "a")
    (path / "model.safetensors").rename(path / "model-00001-of-00002.safetensors")
    with capture_logs() as logs:
        assert ids(open_catalog()) == ["hearth-tiny"]
    missing = "model-00002-of-00002.safetensors (1 of its weight files missing)"
    assert reasons(logs) == [("a", f"{path} lacks {missing}")]
    (path / "model-00002-of-00002.safetensors").write_bytes(b"\0")
    assert open_catalog().resolve("a").nbytes == 9


def test_configured_models_come_first_and_the_first_is_the_default(
    open_catalog: Open, tmp_path: Path
):
    path = make_model(tmp_path / "anywhere")
    make_model(tmp_path / "home" / "models" / "local")
    catalog = open_catalog(
        models={
            "here": ModelSettings(path=path),
            "local": ModelSettings(context=512),
            "hearth-tiny": ModelSettings(context=1024),
        }
    )
    assert ids(catalog) == ["here", "local", "hearth-tiny"]
    assert catalog.default().id == "here"
    assert [spec.context for spec in catalog.models()] == [2048, 512, 1024]


def test_a_context_for_all_models_lengthens_none(open_catalog: Open, tmp_path: Path):
    make_model(tmp_path / "home" / "models" / "found")
    path = make_model(tmp_path / "anywhere")
    models = {"plain": ModelSettings(path=path), "own": ModelSettings(path=path, context=4096)}
    for most, contexts in (
        (512, {"plain": 512, "own": 4096, "found": 512}),
        (1 << 20, {"plain": 2048, "own": 4096, "found": 2048}),
    ):
        catalog = open_catalog(models={"*": ModelSettings(context=most)} | models)
        assert {name: catalog.resolve(name).context for name in contexts} == contexts
        assert catalog.left_out == {}


def test_default_model_is_any_name(open_catalog: Open, tmp_path: Path):
    make_model(tmp_path / "home" / "models" / "local")
    assert open_catalog(default_model="local").default().id == "local"
    assert open_catalog(default_model="l", aliases={"l": "local"}).default().id == "local"
    with pytest.raises(UnknownModel):
        open_catalog(default_model="gone").default()


def test_two_names_of_the_same_files_are_one_model(open_catalog: Open, tmp_path: Path):
    make_snapshot(tmp_path)
    make_model(tmp_path / "home" / "models" / "local")
    catalog = open_catalog(
        models={
            "big": ModelSettings(repo=REPO, aliases=("b",)),
            "small": ModelSettings(path=tmp_path / "home" / "models" / "local"),
        },
        aliases={"gpt-4": "b", "s": "local"},
    )
    assert ids(catalog) == ["big", "small", "hearth-tiny"]
    assert {name: catalog.resolve(name).id for name in (REPO, "b", "gpt-4", "local", "s")} == {
        REPO: "big",
        "b": "big",
        "gpt-4": "big",
        "local": "small",
        "s": "small",
    }
    assert catalog.resolve("big").aliases == ("b", "gpt-4", REPO)


def test_an_alias_goes_before_a_name(open_catalog: Open, tmp_path: Path):
    make_model(tmp_path / "home" / "models" / "local")
    assert open_catalog(aliases={"hearth-tiny": "local"}).resolve("hearth-tiny").id == "local"


def test_a_configured_name_goes_before_a_directory_and_that_before_the_cache(
    open_catalog: Open, tmp_path: Path
):
    make_snapshot(tmp_path, "gpt2")
    directory = make_model(tmp_path / "home" / "models" / "gpt2")
    path = make_model(tmp_path / "anywhere")
    assert open_catalog().resolve("gpt2").path == str(directory)
    assert open_catalog(models={"gpt2": ModelSettings(path=path)}).resolve("gpt2").path == str(path)


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (
            ModelSettings(path=Path("/nowhere/at/all")),
            "its path /nowhere/at/all does not exist: correct path, or put it there",
        ),
        (ModelSettings(repo="org/gone"), "org/gone is not in {hub}: hearth pull org/gone"),
        (ModelSettings(), "it is neither in {home}/models nor in {hub}: give a path"),
    ],
)
def test_a_configured_model_that_is_not_there_is_reported(
    open_catalog: Open, tmp_path: Path, model: ModelSettings, reason: str
):
    with capture_logs() as logs:
        catalog = open_catalog(models={"a": model})
        catalog.refresh()
    expected = reason.format(home=tmp_path / "home", hub=tmp_path / "hub")
    assert reasons(logs) == [("a", expected)]
    assert ids(catalog) == ["hearth-tiny"]
    assert catalog.default().id == "hearth-tiny"


def test_what_the_settings_name_in_vain_is_told_apart(open_catalog: Open, tmp_path: Path):
    (tmp_path / "file").touch()
    (tmp_path / "home" / "models" / "found").mkdir(parents=True)
    (tmp_path / "home" / "models" / "found" / "config.json").write_text("{}")
    models = {
        "gone": ModelSettings(path=tmp_path / "gone"),
        "file": ModelSettings(path=tmp_path / "file"),
        "later": ModelSettings(repo="org/later", aliases=("l",)),
    }
    catalog = open_catalog(models=models, aliases={"g": "gone"})
    assert set(catalog.left_out) == {"gone", "file", "later", "l", "g", "found"}
    assert set(catalog.misnamed) == {"gone", "file", "later", "l", "g"}
    assert set(catalog.unusable) == set(models)
    assert "file is no directory" in catalog.unusable["file"]
    catalog = open_catalog(models=models, aliases={"g": "gone"}, allow_download=True)
    assert set(catalog.misnamed) == {"gone", "file", "g"}


def test_a_model_knows_its_draft_model_by_name_or_alias(open_catalog: Open, tmp_path: Path):
    for name in ("target", "small"):
        make_model(tmp_path / "home" / "models" / name)
    models = {
        "target": ModelSettings(draft="s"),
        "same": ModelSettings(path=tmp_path / "home" / "models" / "target"),
    }
    catalog = open_catalog(models=models, aliases={"s": "small"})
    target, same = catalog.resolve("target"), catalog.resolve("same")
    assert target.draft is not None
    assert (target.draft.id, target.draft.nbytes) == ("small", 8)
    assert same.draft is None
    assert target.shared is None, "with a draft it is loaded in another way"


@pytest.mark.parametrize(("draft", "why"), [("gone", "no model"), ("target", "the model itself")])
def test_a_model_whose_draft_cannot_be_had_is_left_out(
    open_catalog: Open, tmp_path: Path, draft: str, why: str
):
    make_model(tmp_path / "home" / "models" / "target")
    catalog = open_catalog(models={"target": ModelSettings(draft=draft)})
    assert why in catalog.unusable["target"]
    with pytest.raises(UnknownModel, match=why):
        catalog.resolve("target")


def test_a_found_model_whose_name_is_an_alias_is_told(open_catalog: Open, tmp_path: Path):
    make_model(tmp_path / "home" / "models" / "local")
    make_model(tmp_path / "home" / "models" / "other")
    catalog = open_catalog(aliases={"local": "other"})
    assert ids(catalog) == ["other", "hearth-tiny"]
    assert catalog.resolve("local").id == "other"
    assert catalog.left_out == {"local": "its name is an alias of other: give other another alias"}
    assert catalog.misnamed == ("local",)


def test_an_alias_of_nothing_is_reported_and_unknown(open_catalog: Open):
    with capture_logs() as logs:
        catalog = open_catalog(aliases={"a": "gone"})
    assert reasons(logs) == [("a", "it is an alias of gone, which is not there")]
    with pytest.raises(UnknownModel):
        catalog.resolve("a")


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (b"{", "is not valid JSON: "),
        (b"\xff", "is not valid JSON: "),
        (b"[" * 100_000, "is not valid JSON: "),
        (b"[]", "holds no JSON object"),
        (b"{}", "names no model_type"),
        (b'{"model_type": 3}', "names no model_type"),
    ],
)
def test_a_broken_directory_is_left_out_with_a_warning(
    open_catalog: Open, tmp_path: Path, config: bytes, reason: str
):
    good = make_model(tmp_path / "home" / "models" / "good")
    broken = make_model(tmp_path / "home" / "models" / "broken")
    (broken / "config.json").write_bytes(config)
    with capture_logs() as logs:
        assert ids(open_catalog()) == [good.name, "hearth-tiny"]
    [(model, said)] = reasons(logs)
    assert model == "broken"
    assert str(said).startswith(f"{broken / 'config.json'} {reason}")


def test_who_names_a_model_that_is_half_there_is_told_what_it_lacks(
    open_catalog: Open, tmp_path: Path, clock: Clock
):
    path = make_model(tmp_path / "home" / "models" / "half")
    whole = path / "model.safetensors"
    whole.rename(path / "model-00001-of-00002.safetensors")
    catalog = open_catalog()
    with pytest.raises(UnknownModel, match=r"'half' cannot be used: .* lacks model-00002-of-00002"):
        catalog.resolve("half")
    (path / "model-00001-of-00002.safetensors").rename(whole)
    clock.now_s += 2
    assert catalog.resolve("half").id == "half"


def test_a_directory_without_weights_is_left_out(open_catalog: Open, tmp_path: Path):
    path = make_model(tmp_path / "home" / "models" / "a")
    (path / "model.safetensors").unlink()
    with capture_logs() as logs:
        assert ids(open_catalog()) == ["hearth-tiny"]
    assert reasons(logs) == [("a", f"{path} has no weights (*.safetensors)")]


@pytest.mark.parametrize(
    "name",
    ["", ".", "..", "../a", "/etc", "a/../a", "a/", " a", "A", "a\0", "a\n", "\ud800", "models--a"],
)
def test_only_listed_names_are_models(open_catalog: Open, tmp_path: Path, name: str):
    make_model(tmp_path / "home" / "models" / "a")
    with pytest.raises(UnknownModel) as caught:
        open_catalog().resolve(name)
    assert caught.value.param == "model"
    assert set(caught.value.nearest) == {"a", "hearth-tiny"}


def test_an_absolute_path_of_a_model_is_no_name(open_catalog: Open, tmp_path: Path):
    path = make_model(tmp_path / "home" / "models" / "a")
    for name in (str(path), f"models/{path.name}", str(HEARTH_TINY)):
        with pytest.raises(UnknownModel):
            open_catalog().resolve(name)


def test_an_over_long_name_is_shortened_in_the_message(open_catalog: Open):
    with pytest.raises(UnknownModel) as caught:
        open_catalog().resolve("x" * 1_000_000)
    assert caught.value.message == (
        f"The model '{'x' * 79}…' does not exist here. Did you mean hearth-tiny?"
    )


def test_the_nearest_names_are_offered_best_first(open_catalog: Open, tmp_path: Path):
    for name in ("qwen3-4b", "qwen3-8b", "llama-8b", "other"):
        make_model(tmp_path / "home" / "models" / name)
    with pytest.raises(UnknownModel) as caught:
        open_catalog().resolve("Qwen3-8B")
    assert caught.value.nearest == ("qwen3-8b", "qwen3-4b", "llama-8b")


def test_a_new_directory_is_found_on_a_miss_at_most_once_a_second(
    open_catalog: Open, tmp_path: Path, clock: Clock
):
    catalog = open_catalog()
    make_model(tmp_path / "home" / "models" / "new")
    clock.now_s += 0.9
    with pytest.raises(UnknownModel):
        catalog.resolve("new")
    clock.now_s += 0.1
    assert catalog.resolve("new").id == "new"
    assert ids(catalog) == ["new", "hearth-tiny"]


def test_a_name_that_cannot_be_a_model_does_not_look_at_the_disk(
    open_catalog: Open, tmp_path: Path, clock: Clock
):
    catalog = open_catalog()
    make_model(tmp_path / "home" / "models" / "new")
    clock.now_s += 10
    for name in ("a\0b", "x" * 257):
        with pytest.raises(UnknownModel):
            catalog.resolve(name)
    assert ids(catalog) == ["hearth-tiny"]


def test_a_model_that_is_removed_is_gone_after_a_refresh(open_catalog: Open, tmp_path: Path):
    path = make_model(tmp_path / "home" / "models" / "a")
    catalog = open_catalog()
    (path / "config.json").unlink()
    catalog.refresh()
    assert ids(catalog) == ["hearth-tiny"]


def test_folders_of_publishers_and_of_several_places_are_read(open_catalog: Open, tmp_path: Path):
    lm_studio, own = tmp_path / "lmstudio", tmp_path / "own"
    qwen = make_model(lm_studio / "mlx-community" / "Qwen3-4B-4bit")
    make_model(lm_studio / "mlx-community" / "twice")
    make_model(lm_studio / "lmstudio-community" / "twice")
    plain = make_model(own / "plain")
    make_model(lm_studio / "plain")
    catalog = open_catalog(models_dir=own, models_dirs=(lm_studio,))
    names = {spec.id for spec in catalog.models()}
    twice = {"mlx-community/twice", "lmstudio-community/twice"}
    assert names == {"plain", "mlx-community/Qwen3-4B-4bit", *twice, HEARTH_TINY.name}
    assert catalog.resolve("Qwen3-4B-4bit").id == "mlx-community/Qwen3-4B-4bit"
    assert catalog.resolve("Qwen3-4B-4bit").path == str(qwen)
    assert catalog.resolve("plain").path == str(plain)
    with pytest.raises(UnknownModel):
        catalog.resolve("twice")


def test_a_directory_of_several_that_cannot_be_listed_is_named(open_catalog: Open, tmp_path: Path):
    own = make_model(tmp_path / "own" / "a").parent
    catalog = open_catalog(models_dir=own, models_dirs=(tmp_path / "gone",))
    assert str(tmp_path / "gone") in catalog.left_out["models_dir"]
    assert catalog.resolve("a").path == str(own / "a")
