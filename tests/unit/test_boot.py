"""What is loaded when the server starts."""

from pathlib import Path

from runtime.config.settings import ModelSettings, Settings
from runtime.models.arrivals import Arrivals
from runtime.models.catalog import Catalog
from runtime.supervisor.boot import models_at_boot, names_at_boot
from tests.model_folders import make_model


def at_boot(home: Path, **own: object) -> tuple[list[str], list[str]]:
    settings = Settings(home=home, **own)  # pyright: ignore[reportArgumentType]
    catalog = Catalog(settings, Arrivals(), hub_cache=home / "hub")
    names = names_at_boot(settings, catalog)
    return names, [spec.id for spec in models_at_boot(names, catalog)]


def test_without_settings_it_is_the_default_model(tmp_path: Path):
    assert at_boot(tmp_path) == (["hearth-tiny"], ["hearth-tiny"])


def test_nothing_is_loaded_where_that_is_asked_for(tmp_path: Path):
    assert at_boot(tmp_path, preload=()) == ([], [])


def test_it_is_what_is_named_and_pinned_once_for_each_process(tmp_path: Path):
    one, other = (make_model(tmp_path / "models" / name) for name in ("one", "other"))
    models = {
        "a": ModelSettings(path=one, pinned=True),
        "b": ModelSettings(path=one, pinned=True),
        "c": ModelSettings(path=other, aliases=("see",)),
        "far": ModelSettings(repo="org/far", pinned=True),
    }
    asked = at_boot(tmp_path, models=models, preload=("see",), allow_download=True)
    assert asked == (["see", "a", "b", "far"], ["c", "a"])
    assert at_boot(tmp_path, models=models) == (["a", "a", "b"], ["a"])
