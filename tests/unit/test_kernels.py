"""Kernels are compiled again unless a model of the same shape was warmed to the end."""

from pathlib import Path

import mlx.nn as nn

from runtime.worker.kernels import CompiledKernels

ALSO = (32, False, None)


def test_what_was_compiled_is_remembered_by_shape_and_by_what_is_warmed(tmp_path: Path) -> None:
    folder = tmp_path / "ptx"
    kernels = CompiledKernels(nn.Linear(4, 8), ALSO, folder)
    assert not kernels.are_there
    kernels.note()
    assert kernels.are_there
    assert CompiledKernels(nn.Linear(4, 8), ALSO, folder).are_there, "other weights"
    assert not CompiledKernels(nn.Linear(4, 16), ALSO, folder).are_there
    assert not CompiledKernels(nn.Linear(4, 8), (8, False, None), folder).are_there


def test_they_are_compiled_again_when_the_folder_of_mlx_is_gone(tmp_path: Path) -> None:
    CompiledKernels(nn.Linear(4, 8), ALSO, tmp_path / "ptx").note()
    assert not CompiledKernels(nn.Linear(4, 8), ALSO, tmp_path / "other").are_there
    nowhere = CompiledKernels(nn.Linear(4, 8), ALSO, None)
    nowhere.note()
    assert not nowhere.are_there


def test_what_cannot_be_noted_is_compiled_again(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    kernels = CompiledKernels(nn.Linear(4, 8), ALSO, tmp_path / "file")
    kernels.note()
    assert not kernels.are_there
