"""Which BLAS a worker preloads."""

import sys
from pathlib import Path

import pytest

from runtime.blas import blas_environment, find_blas


def test_off_is_none():
    assert find_blas("off") is None


def test_a_path_is_taken_as_it_is(tmp_path: Path):
    library = tmp_path / "libopenblas.so.0"
    library.touch()
    assert find_blas(str(library)) == library


@pytest.mark.parametrize("name", ["missing.so", "."])
def test_a_path_without_a_file_is_an_error_that_names_it(tmp_path: Path, name: str):
    with pytest.raises(FileNotFoundError, match=str(tmp_path / name)):
        find_blas(str(tmp_path / name))


def test_auto_finds_an_openblas_of_the_system_or_nothing():
    found = find_blas("auto")
    assert found is None or (sys.platform == "linux" and "openblas" in found.name)


def test_a_library_is_preloaded_before_what_is_preloaded_already(tmp_path: Path):
    library = tmp_path / "libblas.so"
    library.touch()
    changes = blas_environment(str(library), {"LD_PRELOAD": "/other.so"})
    assert changes["LD_PRELOAD"] == f"{library}:/other.so"


def test_the_number_of_threads_is_the_users_where_the_user_says(tmp_path: Path):
    library = tmp_path / "libblas.so"
    library.touch()
    assert blas_environment(str(library), {})["OPENBLAS_NUM_THREADS"] == "2"
    given = {"OPENBLAS_NUM_THREADS": "7"}
    assert blas_environment(str(library), given)["OPENBLAS_NUM_THREADS"] == "7"


def test_without_a_library_nothing_changes():
    assert blas_environment("off", {"LD_PRELOAD": "/other.so"}) == {}
