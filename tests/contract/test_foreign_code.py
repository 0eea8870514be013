"""No file of a model makes a worker run, import or open code that comes with it."""

from __future__ import annotations

import json
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

from runtime.models.files import checked_folder
from runtime.models.folder import NeedsOwnCode
from runtime.models.vision_files import BLIND_TYPES, VLM_TYPES
from tests.canaries import KEYS, Change, Loader, asking, loader, names, plant, tables_in
from tests.tiny_models import write_model
from tests.tiny_tried_vlms import KINDS, write_tried
from tests.tiny_vlms import VISION_FAMILIES, write_vlm

pytest.importorskip("mlx_vlm")

MODULES = [
    {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
    {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
]
REFUSED = {"model_file", "tool_parser_type", "chat_template_type"}
"""Keys for which a directory is refused at once, so that all others must be tried without them."""

SEEING = sorted({*VISION_FAMILIES, *KINDS})


@pytest.fixture(scope="module")
def process(tmp_path_factory: pytest.TempPathFactory) -> Generator[Loader]:
    with loader(tmp_path_factory.mktemp("loader") / "home") as found:
        yield found


def made(path: Path, family: str) -> Path:
    """A tiny model with a canary in its directory, and every file of settings that upstream has."""
    if family in VISION_FAMILIES:
        write_vlm(path, family)
    elif family in KINDS:
        write_tried(path, family)
    else:
        write_model(path)
        (path / "1_Pooling").mkdir()
        (path / "1_Pooling" / "config.json").write_text('{"pooling_mode_mean_tokens": true}')
        (path / "modules.json").write_text(json.dumps(MODULES))
    for name in ("special_tokens_map", "added_tokens", "video_preprocessor_config"):
        (path / f"{name}.json").write_text("{}")
    processor = path / "processor_config.json"
    if not processor.exists():
        # Gemma 4 reads this file only; of an empty one it would make pictures that are huge.
        images = path / "preprocessor_config.json"
        processor.write_text(images.read_text() if family == "gemma4" else "{}")
    return plant(path)


def settings_of(path: Path) -> dict[str, object]:
    """Every JSON file but what is no setting: the vocabulary."""
    files = [*path.glob("*.json"), *path.glob("1_Pooling/*.json")]
    return {
        str(file.relative_to(path)): json.loads(file.read_text())
        for file in files
        if file.name not in ("tokenizer.json", "added_tokens.json")
    }


def every_table_asks(path: Path) -> list[Change]:
    """All keys that name code, in all tables of all files, that do not change what it is."""
    asked = asking(path)
    return [
        Change(name, (*at, key), asked[key])
        for name, whole in settings_of(path).items()
        for at, table in tables_in(whole)
        for key in KEYS
        if key not in table
    ]


def one_by_one(path: Path) -> Iterator[list[Change]]:
    """Every key that there is, alone; every key that names code; every table, in all its keys."""
    said = names(path)
    tables = [
        (name, at, table)
        for name, whole in settings_of(path).items()
        for at, table in tables_in(whole)
    ]
    places = [(name, (*at, key)) for name, at, table in tables for key in table]
    for number, (name, at) in enumerate(places):
        yield [Change(name, at, said[number % len(said)])]
    asked = asking(path)
    for key in KEYS:
        yield [Change(name, (*at, key), asked[key]) for name, at, _ in tables]
    for number, (name, at, _) in enumerate(tables):
        keys = [key for key in KEYS if key not in REFUSED]
        yield [Change(name, (*at, key), asked[key]) for key in keys]
        yield [Change(name, (*at, key), said[number % len(said)]) for key in keys]


def test_a_loader_without_a_door_runs_the_code_of_a_model(process: Loader, tmp_path: Path):
    """Else nothing here would show anything."""
    path = made(tmp_path / "a", "llava")
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"model_file": "canary.py"}))
    reached = process.load(path, is_vision=True, way="mlx_vlm")
    assert reached.ran == [str(path / "canary.ran")]
    assert any(event.startswith("exec") for event in reached.events)


def test_transformers_has_no_place_for_code_in_a_worker(process: Loader, tmp_path: Path):
    path = made(tmp_path / "a", "text")
    for name in ("config.json", "tokenizer_config.json"):
        table = json.loads((path / name).read_text()) | {"auto_map": asking(path)["auto_map"]}
        table |= {"model_type": "canary", "tokenizer_class": "Canary"}
        (path / name).write_text(json.dumps(table))
    reached = process.load(path, is_vision=False, way="tokenizer")
    assert "/dev/null" in str(reached.error)
    assert any(event.startswith("open") for event in reached.events)
    assert reached.ran == []


def test_what_the_attack_asked_for_is_not_run(process: Loader, tmp_path: Path):
    path = plant(tmp_path)
    config = {"model_type": "llava", "model_file": "canary.py"}
    (path / "config.json").write_text(json.dumps(config | {"vision_config": {}, "text_config": {}}))
    (path / "preprocessor_config.json").write_text("{}")
    made(tmp_path / "other", "text")
    (tmp_path / "other" / "model.safetensors").rename(path / "model.safetensors")
    with pytest.raises(NeedsOwnCode, match=r"code of its own, 'canary\.py'"):
        checked_folder(path)
    reached = process.load(path, is_vision=True)
    assert (reached.events, reached.ran) == ([], [])
    assert str(reached.error).startswith("NeedsOwnCode: its config.json has it computed by code")


FEW = ("text", "qwen2_vl", "llava")


@pytest.mark.parametrize("family", FEW)
def test_a_model_all_of_whose_settings_name_code_is_refused_or_loads_without(
    process: Loader, tmp_path: Path, family: str
):
    path = made(tmp_path / "a", family)
    changes = every_table_asks(path)
    for is_vision in {False, family != "text"}:
        for kept in (changes, [one for one in changes if one.at[-1] not in REFUSED]):
            reached = process.load_changed(path, kept, is_vision=is_vision)
            assert (reached.events, reached.ran) == ([], [])
        if is_vision or family in ("text", "qwen2_vl"):
            assert reached.error is None


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("family", ["text", *SEEING])
def test_no_setting_of_a_model_names_code_that_is_run(process: Loader, tmp_path: Path, family: str):
    path = made(tmp_path / "a", family)
    num_loaded = 0
    for is_vision in {False, family != "text"}:
        for changes in [every_table_asks(path), *one_by_one(path)]:
            reached = process.load_changed(path, changes, is_vision=is_vision)
            assert (reached.events, reached.ran) == ([], []), changes
            num_loaded += reached.error is None
    assert num_loaded > 20, "what is refused at once reaches for nothing"


@pytest.mark.soak
@pytest.mark.parametrize("family", sorted({*VLM_TYPES, *BLIND_TYPES} - {*SEEING}))
def test_no_kind_of_model_reaches_for_code_where_it_has_no_weights_here(
    process: Loader, tmp_path: Path, family: str
):
    path = made(tmp_path / "a", "llava")
    config = json.loads((path / "config.json").read_text()) | {"model_type": family}
    (path / "config.json").write_text(json.dumps(config))
    for changes in ([], every_table_asks(path)):
        for kept in (changes, [one for one in changes if one.at[-1] not in REFUSED]):
            reached = process.load_changed(path, kept, is_vision=True)
            assert (reached.events, reached.ran) == ([], [])
