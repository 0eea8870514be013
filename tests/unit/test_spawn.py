"""What a worker's process gets, and whether there can be one at all."""

import sys
import tomllib
from importlib.machinery import ModuleSpec
from pathlib import Path

from runtime.environment import worker_environment
from runtime.supervisor.spawned import MLX, why_no_mlx

ROOT = Path(__file__).parents[2]


def found_at(folder: Path) -> ModuleSpec:
    spec = ModuleSpec("mlx", None, is_package=True)
    spec.submodule_search_locations = [str(folder)]
    return spec


def test_an_mlx_without_its_library_is_refused_with_the_line_to_type(tmp_path: Path):
    trouble = why_no_mlx(lambda _: found_at(tmp_path))
    assert trouble is not None
    assert trouble.startswith(f"mlx has no backend: type {sys.executable} -m pip install ")
    assert f"=={MLX}'" in trouble


def test_no_mlx_at_all_is_refused_too():
    trouble = why_no_mlx(lambda _: None)
    assert trouble is not None
    assert trouble.startswith("mlx is not installed: type ")


def test_a_whole_mlx_is_taken(tmp_path: Path):
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "libmlx.dylib").touch()
    assert why_no_mlx(lambda _: found_at(tmp_path)) is None
    assert why_no_mlx() is None, "this environment's"


def test_the_release_that_is_named_is_the_one_that_is_pinned():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert f"mlx=={MLX}" in project["dependencies"]


def test_our_packages_come_before_others_of_their_names_in_a_worker():
    assert worker_environment("off")["PYTHONPATH"].split(":")[0] == str(ROOT)
