"""Where mlx computes on an NVIDIA GPU is known without importing it."""

from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from runtime import nvidia


@pytest.mark.parametrize(
    ("driver", "package", "expected"),
    [
        (True, "mlx_cuda_13-0.32.4.dist-info", True),
        (True, "mlx_cuda_12-0.32.4.dist-info", True),
        (True, "mlx_cpu-0.32.4.dist-info", False),
        (False, "mlx_cuda_13-0.32.4.dist-info", False),
    ],
)
def test_it_takes_the_package_of_the_backend_and_the_driver(
    tmp_path: Path, driver: bool, package: str, expected: bool
) -> None:
    control = tmp_path / "nvidiactl"
    if driver:
        control.touch()
    (tmp_path / package).mkdir()
    found = ModuleSpec("mlx", None)
    found.submodule_search_locations = [str(tmp_path / "mlx")]
    assert nvidia.is_used(lambda _: found, control) is expected


def test_without_mlx_nothing_computes(tmp_path: Path) -> None:
    (tmp_path / "nvidiactl").touch()
    assert not nvidia.is_used(lambda _: None, tmp_path / "nvidiactl")


@pytest.mark.parametrize(
    ("does", "expected"),
    [
        ("echo 24564; echo 81559", 24564 << 20),
        ("echo '[N/A]'", None),
        ("exit 9", None),
        ("true", None),
    ],
)
def test_the_first_gpu_says_how_much_memory_it_has(
    tmp_path: Path, does: str, expected: int | None
) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{does}\n")
    program.chmod(0o700)
    assert nvidia.memory_bytes(str(program)) == expected


def test_nobody_says_it_where_there_is_no_such_program(tmp_path: Path) -> None:
    assert nvidia.memory_bytes(str(tmp_path / "absent")) is None
