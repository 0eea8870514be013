"""Which BLAS a worker preloads."""

import ctypes
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from runtime.environment import blas_environment, find_blas

needs_linux = pytest.mark.skipif(sys.platform != "linux", reason="mlx's BLAS is its own elsewhere")


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


@needs_linux
def test_auto_always_finds_an_openblas():
    found = find_blas("auto")
    assert found is not None
    assert "openblas" in found.name


@needs_linux
def test_the_packages_blas_multiplies_under_the_plain_name(home: Path):
    library = packaged(home)
    assert library.is_relative_to(home)
    assert library.stat().st_mode & 0o777 == 0o500
    two, product = (ctypes.c_float * 1)(3.0), (ctypes.c_float * 1)()
    one = ctypes.c_float(1.0)
    row_major, plain = 101, 111
    ctypes.CDLL(str(library)).cblas_sgemm(
        *(row_major, plain, plain, 1, 1, 1, one, two, 1, two, 1, ctypes.c_float(0.0), product, 1)
    )
    assert product[0] == 9.0


@needs_linux
def test_the_packages_blas_has_every_symbol_that_mlx_asks_for(home: Path):
    code = "import mlx.core as mx; print(mx.linalg.cholesky(mx.eye(2), stream=mx.cpu).sum().item())"
    strict = {"LD_PRELOAD": str(packaged(home)), "LD_BIND_NOW": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=strict, capture_output=True, check=True)
    assert done.stdout == b"2.0\n"


@needs_linux
def test_a_library_that_others_can_write_is_not_loaded(home: Path):
    packaged(home).chmod(0o722)
    with pytest.raises(subprocess.CalledProcessError):
        packaged(home)


@needs_linux
def test_all_installations_of_a_version_have_one_copy(home: Path):
    files = metadata.files("scipy-openblas32") or []
    digest = next(one.hash for one in files if one.name == "libscipy_openblas.so")
    assert digest is not None
    version = metadata.version("scipy-openblas32")
    assert packaged(home).name == f"libopenblas-{version}-{digest.value}.so"


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path


def packaged(home: Path) -> Path:
    """What a process of a user with this home gets."""
    code = "from runtime.environment import packaged_blas; print(packaged_blas())"
    environment = {"HOME": str(home), "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, check=True, text=True
    )
    return Path(done.stdout.strip())


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
