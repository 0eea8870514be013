"""Clients that come from PyPI, each in an environment of its own."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.documents import ROOT

INSTALL_S = 900.0


def environment_with(folder: Path, *packages: str) -> Path:
    """The `bin` of a new environment in which these packages are installed.

    Skips the test where they cannot be had.
    """
    # As in the Makefile: the uv that is there already, or the one that was fetched into .venv.
    uv = shutil.which("uv") or str(ROOT / ".venv" / "uv" / "bin" / "uv")
    python = folder / "bin" / "python"
    for command in (
        [uv, "venv", "--quiet", "--python", sys.executable, folder],
        [uv, "pip", "install", "--quiet", "--python", python, *packages],
    ):
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=INSTALL_S, check=False
        )
        if done.returncode:
            pytest.skip(f"{packages[0]} cannot be installed: {done.stderr[-300:]}")
    return python.parent
